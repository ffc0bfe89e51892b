"""`surefoot report`: which runs, where to, as what; 3 seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import error_of, output_of
from surefoot.cli.main import main
from surefoot.tools.report.figures import RASTERIZER
from surefoot.tracking.panels import ConfusionMatrix
from surefoot.tracking.panels_file import Panels
from written_runs import falling, written


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two runs below runs/."""
    monkeypatch.chdir(tmp_path)
    for name, lr in (("a", 1e-3), ("b", 3e-3)):
        config = f'[optimizer]\nlr = {lr} # flag\n[program]\nkind = "script"\n'
        written(tmp_path / "runs" / name, falling(100), config=config)
    return tmp_path


@pytest.mark.parametrize("run", ["a", "runs/a"])
def test_the_page_lies_in_the_runs_directory(
    here: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", run])
    assert capsys.readouterr().out == "written: runs/a/report.html\n"
    assert (here / "runs" / "a" / "report.html").is_file()


def test_several_runs_are_one_page_here_or_where_it_is_wished(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", "a", "b"])
    main(["report", "a", "latest", "--out", "deep/both.html"])
    assert capsys.readouterr().out == "written: report.html\nwritten: deep/both.html\n"
    assert "<th>a</th><th>b</th>" in (here / "report.html").read_text()


def test_the_picture_lies_beside_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(RASTERIZER)
    main(["report", "a", "--png"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "written: runs/a/report.png",
        "written: runs/a/report.svg",
    ]
    assert (here / "runs" / "a" / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def without_panels(here: Path) -> Path:
    """A run with a checkpoint that has left no panels."""
    run = here / "runs" / "a"
    (run / "checkpoints" / "step-00000000").mkdir(parents=True)
    return run


def set_program_kind(run: Path, kind: str) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace('kind = "script"', f'kind = "{kind}"'))


def test_no_panels_are_missed_of_a_run_that_a_script_made(
    without_panels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can build it again."""
    assert "note" not in output_of(capsys, "report", "a")


def test_the_command_that_makes_the_panels_of_a_recipe_is_named(
    without_panels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_program_kind(without_panels, "recipe")
    assert ": surefoot evaluate runs/a --panels" in output_of(capsys, "report", "a")


def test_panels_that_a_run_has_left_are_on_its_page(
    without_panels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_program_kind(without_panels, "recipe")
    matrix = ConfusionMatrix(title="cats and dogs", classes=("cat",), counts=((4,),))
    (without_panels / "panels.json").write_text(Panels(step=100, panels=(matrix,)).to_json())
    assert "note" not in output_of(capsys, "report", "a")
    assert "cats and dogs" in (without_panels / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("", "[argument-missing]"),
        ("a c", "no run c"),
        ("a --pdf", "[setting-unknown]"),
        ("a --port 80", "[option-missing]"),
        ("a --watch --out x.html", "[option-excluded]"),
        ("a --watch --port x", "[flags-not-understood]"),
    ],
)
def test_what_is_not_understood_is_refused(
    arguments: str, reason: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in error_of(capsys, "report", *arguments.split())


def test_a_page_is_made_without_torch(here: Path) -> None:
    program = """
import sys
from surefoot.cli.main import main
main(["report", "a"])
print("torch" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert process.stdout == "written: runs/a/report.html\nFalse\n"
