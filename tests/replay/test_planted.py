"""Faults planted in a run, found by step, sample and module: by the run itself, and by
`surefoot replay`; about 5 s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import faulty_runs
from faulty_runs import Config
from stated import lines_naming, numbers_in
from surefoot.cli.main import main

Ran = Callable[..., tuple[int, str, str]]
FILE = Path(faulty_runs.__file__)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    """`surefoot` with these arguments: its exit status, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["surefoot"])

    def ran(*arguments: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
        return (status, *capsys.readouterr())

    return ran


def trained(command: Ran, config: Config) -> tuple[int, str, str]:
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(config).items()
        if value != getattr(Config(), name)
    ]
    flags = [flag.replace("=True", "") for flag in flags]
    return command("train", f"{FILE}:build", *flags)


def crash_of(run_dir: Path) -> dict[str, Any]:
    (file,) = (run_dir / "crash").glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "what", "name"),
    [
        ("sample", "inputs", "batch[0]"),
        ("label", "inputs", "batch[2]"),
        ("magnitude", "output", "blocks.1.act"),
        ("flattened", "output", "blocks.1.act"),
        ("root", "gradient of output", "blocks.1.up"),
        ("loss", "loss", ""),
    ],
)
def test_a_fault_of_one_sample_is_named_by_the_run_and_by_replay(
    fault: faulty_runs.Fault, what: str, name: str, checkpointed: bool, command: Ran, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = Config(fault=fault, run_dir=str(run_dir), checkpointed=checkpointed)
    step, micro_batch = faulty_runs.first_step_of(replace(config, run_dir=None))
    status, _, said = trained(command, config)

    expected = {
        "what": what,
        "name": name,
        "micro_batch": micro_batch,
        "samples": [config.sample],
        "every_sample": False,
    }
    assert status == 5
    assert f"at step {step} " in said
    assert f"from sample {config.sample}" in said
    assert name in said
    assert f"surefoot replay {run_dir} --step {step}" in said
    assert said.splitlines()[-1].strip() == "[steps-not-finite]"
    found = crash_of(run_dir)
    assert found["step"] == step
    assert expected.items() <= found["seen"]["first"].items()
    assert (
        f"from sample {config.sample}" in (run_dir / "crash" / f"step-{step:08d}.txt").read_text()
    )

    status, page, _ = command("replay", str(run_dir), "--step", str(step), "--json")
    assert status == 0
    again = json.loads(page)
    assert expected.items() <= again["first"].items()
    assert again["logged"]["equal"]
    assert again["samples"][0]["id"] == config.sample


def test_what_goes_wrong_at_a_step_whatever_the_samples_is_said_of_each_of_them(
    command: Ran, tmp_path: Path
) -> None:
    config = Config(fault="step", run_dir=str(tmp_path / "run"), step=6)
    status, _, said = trained(command, config)
    assert status == 5
    assert "at step 6 " in said
    (line,) = lines_naming(said, "output of blocks.1.act (Act), ")
    assert 4 in numbers_in(line)  # samples
    crash = json.loads((tmp_path / "run" / "crash" / "step-00000006.json").read_text())
    _, page, _ = command("replay", str(tmp_path / "run"), "--step", "6", "--json")
    for first in (crash["seen"]["first"], json.loads(page)["first"]):
        assert (first["what"], first["name"], first["kind"]) == ("output", "blocks.1.act", "Act")
        assert (first["every_sample"], len(first["samples"]), first["micro_batch"]) == (True, 4, 0)
    _, page, _ = command("replay", str(tmp_path / "run"), "--step", "5", "--json")
    assert json.loads(page)["first"] is None


def test_a_record_over_more_steps_than_were_made_again_is_not_compared_with(
    command: Ran, tmp_path: Path
) -> None:
    """The state before the first bad step was saved after the record that tells of that step and of
    others.
    """
    run_dir = str(tmp_path / "run")
    assert (
        trained(
            command,
            Config(fault="sample", run_dir=run_dir, log_every="6 steps", save_every="24 steps"),
        )[0]
        == 5
    )
    for step in ("4", "5"):
        _, page, _ = command("replay", run_dir, "--step", step, "--json", "--samples", "0")
        found = json.loads(page)
        assert (found["from_checkpoint"], found["logged"]) == (4, None)


def test_a_norm_that_overflows_is_not_blamed_on_a_sample(command: Ran, tmp_path: Path) -> None:
    status, _, said = trained(command, Config(fault="norm", run_dir=str(tmp_path / "run")))
    assert status == 5
    assert "sample " not in said
    (crash,) = (tmp_path / "run" / "crash").glob("step-*.json")
    first = json.loads(crash.read_text())["seen"]["first"]
    assert (first["what"], first["samples"]) == ("norm", [])
    assert len(lines_naming(said, f"{first['name']}.grad")) == 1


def test_a_mask_of_minus_infinity_is_no_fault(command: Ran, tmp_path: Path) -> None:
    assert trained(command, Config(run_dir=str(tmp_path / "run"), length="4 steps"))[0] == 0
    _, page, _ = command("replay", str(tmp_path / "run"), "--step", "3", "--json")
    found = json.loads(page)
    mask = next(held for held in found["modules"] if held["name"] == "blocks.0.mask")
    assert mask["output"]["minus"] == 2 * faulty_runs.WIDTH / 4 * 4
    assert (found["finite"], found["first"]) == (True, None)


@pytest.mark.parametrize(
    ("config", "step"),
    [
        pytest.param(Config(fault="magnitude", max_bad_steps=9), None, marks=pytest.mark.slow),
        (Config(fault="magnitude", max_bad_steps=9, log_every="6 steps"), None),
        pytest.param(
            Config(fault="step", max_bad_steps=30, step=11, log_every="5 steps"),
            11,
            marks=pytest.mark.slow,
        ),
        (Config(fault="step", max_bad_steps=0, step=9), 9),
    ],
)
def test_bisecting_finds_the_first_bad_step(
    config: Config, step: int | None, command: Ran, tmp_path: Path
) -> None:
    config = replace(config, run_dir=str(tmp_path / "run"))
    trained(command, config)
    expected = faulty_runs.first_step_of(replace(config, run_dir=None))[0] if step is None else step
    status, page, _ = command("replay", str(tmp_path / "run"), "--bisect-nan")
    assert status == 0
    assert numbers_in(page.splitlines()[0])[0] == expected
    assert "output of blocks.1.act (Act), " in page


def test_bisecting_goes_by_checkpoints_where_there_are_no_records(
    command: Ran, tmp_path: Path
) -> None:
    trained(command, Config(fault="step", step=9, max_bad_steps=30, run_dir=str(tmp_path / "run")))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    _, page, _ = command("replay", str(tmp_path / "run"), "--bisect-nan")
    assert numbers_in(page.splitlines()[0])[0] == 9


def test_bisecting_finds_the_update_that_spoiled_a_weight(command: Ran, tmp_path: Path) -> None:
    trained(
        command,
        Config(
            fault="update", max_bad_steps=30, run_dir=str(tmp_path / "run"), save_every="1 steps"
        ),
    )
    _, page, _ = command("replay", str(tmp_path / "run"), "--bisect-nan")
    assert numbers_in(page.splitlines()[0])[0] == 0
    assert "step-00000001" in page.splitlines()[0]
    _, page, _ = command("replay", str(tmp_path / "run"), "--step", "1", "--json")
    first = json.loads(page)["first"]
    assert (first["what"], first["name"]) == ("weight", "first.weight")


def test_bisecting_says_so_where_there_is_no_bad_step(command: Ran, tmp_path: Path) -> None:
    trained(command, Config(run_dir=str(tmp_path / "run"), length="6 steps"))
    status, page, _ = command("replay", str(tmp_path / "run"), "--bisect-nan")
    assert status == 0
    assert numbers_in(page) == [0, 5]  # all steps, and no bad one
