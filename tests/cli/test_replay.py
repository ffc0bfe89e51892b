"""`surefoot replay` as a user types it: what it prints, what it compares with, what it refuses;
about 3 s.
"""

from __future__ import annotations

import json
import shutil
import sys
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import faulty_runs
import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.config.parallel import FSDPSettings
from surefoot.program import for_one_process
from surefoot.recipes.images.config import Config
from surefoot.tools.replay.replay import report_cost
from surefoot.tracking.jsonl import records


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its status, and what it printed."""

    status: int
    output: str
    errors: str


Command = Callable[..., Ended]
FILE = Path(faulty_runs.__file__)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """`surefoot` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> Ended:
        status = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
        output, errors = capsys.readouterr()
        return Ended(status, output, errors)

    return run_command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 steps, a checkpoint every 4 and a record every 3."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    main(["train", f"{FILE}:build", "--run-dir", str(run_dir), "--log-every", "3 steps"])
    return run_dir


def replay_as_json(command: Command, run: str, step: int, samples: int = 0) -> dict[str, Any]:
    flags = ["--step", str(step), "--samples", str(samples), "--json"]
    return dict(json.loads(command("replay", run, *flags).output))


def test_the_page_says_from_where_a_step_was_repeated(trained: Path, command: Command) -> None:
    ended = command("replay", str(trained), "--step", "5", "--samples", "2")
    assert ended.status == 0
    assert ended.errors.startswith("from step-00000004: 2 steps ")
    title, _, _, repeated, *_ = ended.output.splitlines()
    assert title == f"{trained}, step 5 of 24"
    origin, compared = repeated.split("; ")
    assert "step-00000004" in origin
    assert numbers_in(origin) == [2]  # steps
    assert {"loss", "grad_norm"} <= set(compared.split())


def test_the_page_shows_samples_and_layers_of_the_step(trained: Path, command: Command) -> None:
    page = command("replay", str(trained), "--step", "5", "--samples", "2").output
    for micro_batch in faulty_runs.build(faulty_runs.Config()).parts.pipeline.samples(5):
        for sample in micro_batch:
            assert f" {sample}" in page
    assert page.count("    batch[0]  (6)") == 2
    for name in ("blocks.1.up ", "blocks.1.up.weight", "norm.bias"):
        assert f"\n{name}" in page
    lines = [line for line in page.splitlines() if str(trained) not in line]
    assert max(len(line) for line in lines) <= 100


def test_a_step_without_a_fault_is_finite(trained: Path, command: Command) -> None:
    replay = replay_as_json(command, str(trained), 5)
    assert replay["finite"]
    assert replay["first"] is None


@pytest.mark.parametrize(
    ("step", "where"), [(5, "the record"), (6, "step-00000008"), (23, "the record")]
)
def test_a_step_is_compared_with_what_the_run_has_noted_of_it(
    step: int, where: str, trained: Path, command: Command
) -> None:
    logged = replay_as_json(command, str(trained), step)["logged"]
    assert logged["where"] == where
    assert logged["equal"]


@pytest.mark.parametrize("step", [0, 4])
def test_a_step_of_which_nothing_is_noted_is_compared_with_nothing(
    step: int, trained: Path, command: Command
) -> None:
    assert replay_as_json(command, str(trained), step)["logged"] is None


def test_a_record_that_was_changed_is_named(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "edited")
    file = tmp_path / "edited" / "metrics.jsonl"
    training = [record for record in records(file) if record["kind"] == "train"]
    (loss,) = [record["loss"] for record in training if record["step"] == 6]
    changed_loss = loss + 1e-9
    file.write_text(file.read_text().replace(repr(loss), repr(changed_loss)))

    page = command("replay", "edited", "--step", "5").output
    assert f": loss {changed_loss!r}, now {loss!r}" in " ".join(page.split())
    logged = replay_as_json(command, "edited", 5)["logged"]
    assert not logged["equal"]
    assert logged["then"]["loss"] == changed_loss
    assert logged["now"]["loss"] == loss


def test_nothing_is_written_into_the_run(trained: Path, command: Command) -> None:
    def write_times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in trained.rglob("*")}

    times = write_times()
    command("replay", str(trained), "--step", "9")
    assert write_times() == times


def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "damaged")
    file = tmp_path / "damaged" / "checkpoints" / "step-00000008" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    ended = command("replay", "damaged", "--step", "9", "--samples", "0")
    assert ended.status == 0
    assert "step-00000008 is damaged" in ended.errors
    assert "repeated from step-00000004, 6 steps" in ended.output


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["--step", "24"], 2, "[step-not-in-run]"),
        (["--step", "-1"], 2, "[setting-out-of-range]"),
        ([], 2, "[step-or-search]"),
        (["--step", "3", "--bisect-nan"], 2, "[step-or-search]"),
        (["--step", "3", "--nproc", "2"], 2, "[one-process-only]"),
        (["--step", "3", "--batch-size", "4"], 4, "[settings-changed]"),
        (["--step", "3", "--sampels", "4"], 2, "[setting-unknown]"),
        (["--stp", "3"], 2, "[setting-unknown]"),
    ],
)
def test_what_cannot_be_replayed_is_one_clear_error(
    arguments: list[str], status: int, code: str, trained: Path, command: Command
) -> None:
    ended = command("replay", str(trained), *arguments)
    assert ended.status == status
    assert ended.output == ""
    assert code in ended.errors
    lines = [line for line in ended.errors.splitlines() if not line.startswith("from step-")]
    assert len(lines) <= 5


def test_the_error_of_another_run_does_not_say_how_to_resume_it(
    trained: Path, command: Command
) -> None:
    ended = command("replay", str(trained), "--step", "3", "--batch-size", "4", "--json")
    *_, last_line = ended.errors.splitlines()
    error = json.loads(last_line)
    assert error["code"] == "settings-changed"
    assert "resume" not in error["message"]
    (remedy,) = error["remedies"]
    assert list(remedy) == ["text"]
    assert "--run-dir" not in ended.errors


def test_one_process_has_a_run_whole_whatever_shared_it() -> None:
    config = Config(parallel="fsdp", fsdp=FSDPSettings(replicas=2, gather_dtype="bf16"))
    whole = for_one_process(config, Path("runs/a"), sharded=False)
    assert whole.parallel == "none"
    assert whole.fsdp == FSDPSettings()
    assert whole.run_dir == "runs/a"
    assert for_one_process(None, Path("runs/a")) is None


def test_one_process_shards_a_run_that_was_sharded_and_has_no_replicas() -> None:
    config = Config(parallel="fsdp", fsdp=FSDPSettings(replicas=2, gather_dtype="bf16"))
    sharded = for_one_process(config, Path("runs/a"), sharded=True)
    assert sharded.parallel == "fsdp"
    assert sharded.fsdp == FSDPSettings(gather_dtype="bf16")


def test_a_run_without_checkpoints_is_refused(
    trained: Path, command: Command, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "checkpoints")
    ended = command("replay", "bare", "--step", "3")
    assert ended.status == 4
    assert "[run-without-checkpoint]" in ended.errors


def build(run_dir: str) -> sf.Run:
    return faulty_runs.build(faulty_runs.Config(run_dir=run_dir, length="4 steps"))


def test_the_command_line_names_the_function_that_replays_the_run_of_a_script(
    command: Command,
) -> None:
    build("script").train()
    ended = command("replay", "script", "--step", "2")
    assert ended.status == 2
    assert "sf.load(run) has evaluate(), replay(step)" in ended.errors


def test_the_run_of_a_script_is_replayed_in_that_script(command: Command) -> None:
    build("script").train()
    replay = sf.load(build("script")).replay(step=2)
    assert replay.logged is not None
    assert replay.logged.equal
    assert str(replay).startswith(f"{Path('script').absolute()}, step 2 of 4\n")


def test_a_run_without_a_directory_is_not_replayed() -> None:
    with refused("run-without-directory"):
        sf.load(faulty_runs.build(faulty_runs.Config())).replay(step=2)


def test_steps_of_a_loop_of_ones_own_are_refused_with_what_to_do(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch, surefoot as sf\n"
        "def build():\n"
        "    return sf.Run(model=lambda: torch.nn.Linear(4, 1), train_data=(torch.ones(9, 4),), batch_size=3, length='3 steps',\n"
        "        optimizer=sf.optim.sgd(lr=0.1), run_dir='own', device='cpu', console=False)\n"
    )
    # it has no loss; what was begun is there
    assert command("train", "own.py:build").status == 2
    ended = command("replay", "own", "--step", "0")
    assert ended.status == 2
    assert "[steps-of-own-loop]" in ended.errors


def test_a_body_of_the_users_is_said_not_to_be_repeated(command: Command) -> None:
    with build("body") as run:
        for step in run:
            assert step.loss is not None
    build("bare").train()
    assert len(sf.load(build("body")).replay(step=2).notes) == 1
    assert len(sf.load(build("bare")).replay(step=2).notes) == 0


def test_a_text_is_shown_as_text(command: Command, tmp_path: Path) -> None:
    sentence = "the cat sat on a mat while birds sang\n"
    (tmp_path / "text.txt").write_text(sentence * 60)
    flags = [
        "--run-dir=texts",
        "--data.path=text.txt",
        "--data.tokenizer=characters",
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=16",
        "--length=4 steps",
        "--cloze-questions=0",
        "--sample-tokens=0",
    ]
    assert command("train", "gpt", *flags).status == 0
    sample, *_ = replay_as_json(command, "texts", 1, samples=1)["samples"]
    text = literal_eval(sample["shown"])
    assert len(text) == 17  # what the model sees, and the last target
    assert text in sentence * 3


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([], "from step-00000004: 6 steps to repeat"),
        (
            [{"kind": "train", "step": 20, "training_s": 190.0, "data_wait_s": 10.0}],
            "from step-00000004: 6 steps to repeat, about 1m00s at the recorded speed",
        ),
    ],
)
def test_the_cost_is_estimated_from_the_time_of_the_steps_on_record(
    known: list[dict[str, float | str]], expected: str
) -> None:
    lines: list[str] = []
    report_cost(4, 10, [], known, lines.append)
    assert lines == [expected]
