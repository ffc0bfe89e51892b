"""`surefoot report`: which runs, where to, as what; 3 seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.cli.main import main
from surefoot.tools.report.figures import RASTERIZER
from surefoot.tracking.panels import ConfusionMatrix
from surefoot.tracking.panels_file import Panels
from written_runs import falling, written


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two runs below runs/."""
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", 1e-3), ("b", 3e-3)):
        written(
            tmp_path / "runs" / name,
            falling(100),
            config=f'[optimizer]\nlr = {rate} # flag\n[program]\nkind = "script"\n',
        )
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["report", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


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


def test_what_makes_the_panels_is_named_where_a_run_that_a_recipe_made_has_left_none(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "runs" / "a" / "checkpoints" / "step-00000000").mkdir(parents=True)
    main(["report", "a"])
    assert (
        "note" not in capsys.readouterr().out
    )  # a script made it, and nothing can build that again
    config = here / "runs" / "a" / "config.toml"
    config.write_text(config.read_text().replace("script", "recipe"))
    main(["report", "a"])
    assert ": surefoot evaluate runs/a --panels" in capsys.readouterr().out
    panels = Panels(
        step=100, panels=(ConfusionMatrix(title="cats and dogs", classes=("cat",), counts=((4,),)),)
    )
    (here / "runs" / "a" / "panels.json").write_text(panels.to_json())
    main(["report", "a"])
    assert "note" not in capsys.readouterr().out
    assert "cats and dogs" in (here / "runs" / "a" / "report.html").read_text()


def test_what_is_not_understood_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "[argument-missing]" in refused(capsys)
    assert "no run c" in refused(capsys, "a", "c")
    assert "[setting-unknown]" in refused(capsys, "a", "--pdf")
    assert "[option-missing]" in refused(capsys, "a", "--port", "80")
    assert "[option-excluded]" in refused(capsys, "a", "--watch", "--out", "x.html")
    assert "[flags-not-understood]" in refused(capsys, "a", "--watch", "--port", "x")


def test_a_page_is_made_without_torch(here: Path) -> None:
    code = "import sys; from surefoot.cli.main import main; main(['report', 'a']); print('torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said == "written: runs/a/report.html\nFalse\n"
