"""`surefoot diagnose`: what it prints, in 80 columns, as JSON, and how it leaves; 2 seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diagnose.histories import scores, train
from stated import numbers_by_line
from surefoot.cli.main import main
from surefoot.tools.diagnose.finding import Check
from surefoot.tracking.jsonl import line
from surefoot.tracking.record import Record

CONFIG = 'workers = 0\n[program]\nkind = "recipe"\nrecipe = "gpt"\n'
BLOCK = """
WARNING  data-bound
  Steps spend 53% of their time waiting for data.
  evidence 53.1 s of waiting, 47.2 s of training, with 0 workers
  causes   samples load more slowly than the model trains on them: decoding,
             augmentation, many small files, a slow disk
  try      --workers 2 (now 0)
"""


def made(place: Path, records: list[Record]) -> Path:
    place.mkdir(parents=True)
    (place / "config.toml").write_text(CONFIG)
    (place / "metrics.jsonl").write_text("".join(f"{line(record)}\n" for record in records))
    return place


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    main(["diagnose", *arguments])
    return capsys.readouterr().out


def test_a_finding_is_a_block_of_name_sentence_evidence_causes_and_what_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", train(data_wait_s=lambda _: 0.9))
    shown = said(capsys, str(run))
    assert shown.startswith(f"{run}: 600 steps, not finished\n1 warning\n")
    assert BLOCK in shown
    assert all(len(text) <= 80 for text in shown.splitlines()[1:])
    assert "\nhealthy\n" not in shown
    assert "\nhealthy\n  diverged  " in said(capsys, str(run), "--all")


def test_where_nothing_is_found_it_says_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, str(made(tmp_path / "run", [*train(), *scores([3.0, 2.0, 1.5, 1.4])])))
    described = json.loads(said(capsys, str(tmp_path / "run"), "--json"))
    assert described["findings"] == []
    healthy = described["healthy"].keys()
    unknown = described["unknown"].keys()
    assert "loss-not-falling" in healthy
    assert [len(unknown), len(unknown | healthy)] in numbers_by_line(shown)
    for name in unknown | healthy:
        assert f"\n  {name} " in shown
    assert all(len(text) <= 80 for text in shown.splitlines()[1:])


def test_json_holds_findings_and_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(said(capsys, str(made(tmp_path / "run", train(lambda place: 2.3))), "--json"))
    assert told["findings"][0]["name"] == "loss-not-falling"
    assert told["findings"][0]["try"]
    assert {"diverged"} <= told["healthy"].keys()
    assert {"never-updated"} <= told["unknown"].keys()


def test_only_strict_leaves_with_1_and_only_for_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = made(tmp_path / "broken", train(lambda place: 2.3))
    said(capsys, str(broken))
    said(capsys, str(made(tmp_path / "slow", train(data_wait_s=lambda _: 0.9))), "--strict")
    with pytest.raises(SystemExit) as end:
        main(["diagnose", str(broken), "--strict"])
    assert end.value.code == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_of_three_steps_or_none_is_answered(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, str(made(tmp_path / "run", train(count=count))))
    assert "\nno findings" in shown


def test_what_is_no_run_and_flags_that_are_none_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", train())
    for arguments in ([str(tmp_path)], [], [str(run), "--al"], [str(run), str(run)]):
        with pytest.raises(SystemExit) as end:
            main(["diagnose", *arguments])
        assert end.value.code == 2
        assert 1 <= len(capsys.readouterr().err.splitlines()) <= 5


def test_it_answers_without_torch_in_a_fraction_of_a_second(tmp_path: Path) -> None:
    run = made(tmp_path / "run", train(count=2000))
    code = "import sys; from surefoot.cli.main import main; main(['diagnose', sys.argv[1]]); assert 'torch' not in sys.modules"
    times = []
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)
        after = os.times()
        times.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    assert (
        min(times) < 1.0
    )  # processor time, not the clock: the machine may be busy; about a quarter of that


def test_a_finding_that_fails_is_named_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(
        "surefoot.tools.diagnose.checks.CHECKS", (Check("wrong", lambda _: None, wrong),)
    )
    main(["diagnose", str(made(tmp_path / "run", train()))])
    assert "warning: check wrong failed: ZeroDivisionError: of ours" in capsys.readouterr().err
