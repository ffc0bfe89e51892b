"""`surefoot diagnose`: what it prints, in 80 columns, as JSON, and how it leaves; 2 seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import error_of, output_of
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


def write_run(place: Path, records: list[Record]) -> Path:
    place.mkdir(parents=True)
    (place / "config.toml").write_text(CONFIG)
    (place / "metrics.jsonl").write_text("".join(f"{line(record)}\n" for record in records))
    return place


def diagnose(capsys: pytest.CaptureFixture[str], run: Path, *flags: str) -> str:
    return output_of(capsys, "diagnose", str(run), *flags)


def assert_narrow(text: str) -> None:
    """All lines but the first, which has the path of a run, fit into 80 columns."""
    _, *lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80


def test_a_finding_is_a_block_of_name_sentence_evidence_causes_and_what_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train(data_wait_s=lambda _: 0.9))
    text = diagnose(capsys, run)
    assert text.startswith(f"{run}: 600 steps, not finished\n1 warning\n")
    assert BLOCK in text
    assert_narrow(text)


def test_what_is_healthy_is_named_with_all_beside_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train(data_wait_s=lambda _: 0.9))
    assert "\nhealthy\n" not in diagnose(capsys, run)
    assert "\nhealthy\n  diverged  " in diagnose(capsys, run, "--all")


def test_where_nothing_is_found_it_says_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [*train(), *scores([3.0, 2.0, 1.5, 1.4])])

    text = diagnose(capsys, run)

    described = json.loads(diagnose(capsys, run, "--json"))
    assert described["findings"] == []
    healthy = described["healthy"].keys()
    unknown = described["unknown"].keys()
    assert "loss-not-falling" in healthy
    assert [len(unknown), len(unknown | healthy)] in numbers_by_line(text)
    for name in unknown | healthy:
        assert f"\n  {name} " in text
    assert_narrow(text)


def test_json_holds_findings_and_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train(lambda place: 2.3))
    described = json.loads(diagnose(capsys, run, "--json"))
    finding, *_ = described["findings"]
    assert finding["name"] == "loss-not-falling"
    assert finding["try"]
    assert "diverged" in described["healthy"]
    assert "never-updated" in described["unknown"]


def test_an_error_ends_with_status_1_if_diagnose_is_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train(lambda place: 2.3))
    diagnose(capsys, run)
    error_of(capsys, "diagnose", str(run), "--strict", status=1)


def test_a_warning_ends_with_status_0_although_diagnose_is_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train(data_wait_s=lambda _: 0.9))
    diagnose(capsys, run, "--strict")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_of_three_steps_or_none_is_answered(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train(count=count))
    assert "\nno findings" in diagnose(capsys, run)


def test_what_is_no_run_and_flags_that_are_none_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", train())
    for arguments in ([str(tmp_path)], [], [str(run), "--al"], [str(run), str(run)]):
        message = error_of(capsys, "diagnose", *arguments)
        assert 1 <= len(message.splitlines()) <= 5


def test_it_answers_without_torch_in_a_fraction_of_a_second(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", train(count=2000))
    program = f"""
import sys
from surefoot.cli.main import main
main(["diagnose", {str(run)!r}])
assert "torch" not in sys.modules
"""
    first_s = processor_time_of(program)
    second_s = processor_time_of(program)
    assert min(first_s, second_s) < 1.0  # about a quarter of that


def processor_time_of(program: str) -> float:
    """In seconds, and not by the clock: the machine may be busy."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after = os.times()
    user_s = after.children_user - before.children_user
    system_s = after.children_system - before.children_system
    return user_s + system_s


def test_a_finding_that_fails_is_named_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("of ours")

    check = Check("wrong", lambda _: None, fail)
    monkeypatch.setattr("surefoot.tools.diagnose.checks.CHECKS", (check,))
    main(["diagnose", str(write_run(tmp_path / "run", train()))])
    assert "warning: check wrong failed: ZeroDivisionError: of ours" in capsys.readouterr().err
