"""A run that was trained is proved, and whatever is planted in it is named: by hashes, by its
records, or by steps made again; 8 s.

One run for all: dropout, three random generators, batch statistics, two micro-batches a step, an
average of the weights, early stopping; records every 3 steps, checkpoints every 4. Each test plants
something in a copy of its directory.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import forged
import small_runs
import surefoot as sf
from recorded import training_records
from refused import refused
from stated import numbers_in
from surefoot.errors import CheckpointError
from surefoot.run.components import RunComponents
from surefoot.tools.report.series import read_reported_run
from surefoot.tools.verify.compare import TOLERANCE
from surefoot.tools.verify.files import check_files
from surefoot.tools.verify.verdict import Problem, Verdict

STEPS = 26


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {"keep_last": 99, "clip": "norm 1.0"}
    return small_runs.build(run_dir, **(settings | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "a"
    build(run_dir).train()
    return run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "a"))


def verify(run_dir: Path, steps: Any = "all", **options: Any) -> Verdict:
    return sf.load(build(run_dir)).verify(steps=steps, **options)


def the_problem(verdict: Verdict) -> Problem:
    assert len(verdict.problems) == 1, str(verdict)
    return verdict.problems[0]


def saved_steps(run_dir: Path) -> list[int]:
    names = [place.name for place in (run_dir / "checkpoints").iterdir()]
    return sorted(int(name.removeprefix("step-")) for name in names)


def contents_of(run_dir: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}


def unproved_beside_the_log(verdict: Verdict) -> list[str]:
    """What is not proved beside the records after the newest checkpoint."""
    return [line for line in verdict.not_proved if not line.startswith("metrics.jsonl")]


# --- nothing planted ------------------------------------------------------------------------------


def test_a_run_that_nobody_touched_is_proved_bit_for_bit(trained: Path) -> None:
    verdict = verify(trained)

    assert verdict.problems == [], str(verdict)
    assert verdict.exit_status == 0
    assert verdict.whole
    (outcome,) = verdict.outcomes
    assert outcome.exact
    assert outcome.records == [*range(3, 25, 3), 26]
    _, *after_start = saved_steps(trained)
    assert outcome.checkpoints == after_start


def test_what_could_not_be_compared_is_not_said_to_be_proved(run: Path) -> None:
    forged.record_changed(run, lambda record: record.update(grad_norm=1.0), step=26, hashes=False)
    proved = verify(run, windows=0, steps=1).proved
    count = len(saved_steps(run)) - 1  # that of step 0 has no records before it
    assert [count - 1, count] in [numbers_in(fact) for fact in proved]


def test_nothing_in_the_directory_changes(run: Path) -> None:
    before = contents_of(run)
    verify(run)
    assert contents_of(run) == before


def test_a_run_that_is_verified_comes_out_as_it_went_in(run: Path) -> None:
    opened = build(run)
    with opened:
        pass  # stands where its newest checkpoint is
    before = opened.parts.packed()

    verdict = sf.load(opened).verify(steps=4, windows=1, seed=1)

    assert verdict.sound, str(verdict)
    assert verdict.outcomes[-1].window.stop < STEPS
    after = opened.parts.packed()
    assert before.step == STEPS
    assert after.step == STEPS
    for file in before.files:
        torch.testing.assert_close(
            after.tensors(file), before.tensors(file), rtol=0, atol=0, equal_nan=True
        )


def test_windows_tell_which_steps_they_do_not_prove_and_what_those_cost(run: Path) -> None:
    for step in (4, 5, 8, 10, 12, 16):
        shutil.rmtree(forged.checkpoint(run, step), ignore_errors=True)
    messages: list[str] = []

    verdict = verify(run, steps=6, windows=2, say=messages.append)

    windows = [outcome.window for outcome in verdict.outcomes]
    assert [(window.start, window.stop) for window in windows] == [(0, 6), (20, 26)]
    assert all(outcome.exact for outcome in verdict.outcomes)
    assert not verdict.whole
    of_windows, _, of_all = messages[0].partition("--all")
    assert numbers_in(of_windows)[:3] == [12, 26, 2]
    assert STEPS in numbers_in(of_all)
    assert [6, 20, 20, 20, 0] in [numbers_in(line)[:5] for line in verdict.not_proved]


def test_all_steps_are_made_where_that_is_soon_done(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.tools.verify.verify.STEPS", 3)
    assert sf.load(build(run)).verify().whole


def test_windows_are_made_where_all_steps_are_not_soon_done(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.tools.verify.verify.STEPS", 3)
    monkeypatch.setattr("surefoot.tools.verify.verify._SOON_S", 0.0)
    outcomes = sf.load(build(run)).verify().outcomes
    assert len(outcomes) == 5
    assert max(outcome.window.steps for outcome in outcomes) <= 3


def test_with_no_windows_files_alone_are_checked(trained: Path) -> None:
    verdict = verify(trained, steps=5, windows=0)
    assert verdict.outcomes == []
    assert verdict.sound


def test_a_run_that_goes_on_is_verified_up_to_what_is_committed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_every": "8 steps", "evaluate_every": "8 steps"}
    live = build(tmp_path / "a", **settings)
    with live:
        for step in live:
            if step.index == 13:
                live.parts.checkpointing.writer.wait()  # type: ignore[union-attr]
                verdict = sf.load(build(tmp_path / "a", **settings)).verify(steps="all")
                break

    assert verdict.sound, str(verdict)
    (outcome,) = verdict.outcomes
    assert outcome.checkpoints == [8]
    assert outcome.records == [3, 6, 9, 12]
    assert any("metrics.jsonl" in line for line in verdict.not_proved)  # after the newest
    assert [8] in [numbers_in(line) for line in verdict.not_proved]  # weights after that step


# --- files that are not what was saved ------------------------------------------------------------


@pytest.mark.fast("model.safetensors", "manifest.json")
@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_a_flipped_byte_is_named_and_the_rest_is_proved(run: Path, file: str) -> None:
    place = forged.checkpoint(run, 12) / file
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)

    verdict = verify(run)

    problem = the_problem(verdict)
    assert problem.kind == "damaged"
    assert problem.step == 12
    assert problem.file == file
    assert verdict.exit_status == 4
    assert 16 in verdict.outcomes[0].checkpoints


def test_a_checkpoint_without_one_of_its_files_is_named(run: Path) -> None:
    (forged.checkpoint(run, 12) / "ema.safetensors").unlink()
    problem = the_problem(verify(run))
    assert problem.kind == "damaged"
    assert problem.step == 12
    assert problem.file == "ema.safetensors"


def test_an_edited_loss_is_named_by_what_checkpoints_have_noted(run: Path) -> None:
    line = forged.record_changed(run, lambda record: record.update(loss=1.0), step=18, hashes=False)

    verdict = verify(run)

    damage, difference = verdict.problems
    assert damage.kind == "damaged"
    assert damage.file == "metrics.jsonl"
    assert verdict.exit_status == 4
    _, before, after, first_line, last_line, *_ = numbers_in(damage.text)
    assert before == 16
    assert after == 20
    assert first_line <= line <= last_line
    assert difference.kind == "differs"
    assert difference.step == 18
    assert difference.quantity == "loss"
    assert difference.saved == "1.0"


def test_the_records_between_two_checkpoints_are_named(run: Path) -> None:
    forged.record_changed(run, lambda record: record.update(grad_norm=1.0), step=6, hashes=False)
    (damaged, _) = verify(run).problems
    _, before, after, *steps = numbers_in(damaged.text)
    assert (before, after) == (5, 8)
    assert 6 in steps


def test_missing_records_are_named(run: Path) -> None:
    data = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(data[: len(data) // 2])

    verdict = verify(run, steps=3, windows=1)

    problem, *_ = verdict.problems
    size, *_ = numbers_in(problem.text)
    assert size == len(data) // 2, str(verdict)
    assert problem.kind == "damaged"
    assert verdict.exit_status == 4


def test_records_after_the_newest_checkpoint_are_said_not_to_be_covered(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "step": 26, "event": "finished"}) + "\n")
    verdict = verify(run, steps=3, windows=1)
    assert verdict.sound
    lines = len((run / "metrics.jsonl").read_text().splitlines())
    (after,) = [line for line in verdict.not_proved if line.startswith("metrics.jsonl")]
    assert numbers_in(after)[-1] == lines


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with refused("run-without-checkpoint", CheckpointError, path=tmp_path / "a"):
        check_files(tmp_path / "a")


# --- files that contradict each other -------------------------------------------------------------


def change_rate_of_state(run: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["identity"]["optimizer"]["lr"] = 0.5

    forged.state_changed(forged.checkpoint(run, 8), change)


def change_best_of_state(run: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["stopping"][0]["value"] = "0.25"

    forged.state_changed(forged.checkpoint(run, 8), change)


def change_time_of_record(run: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["training_s"] += 1.0
        record["targets_per_s"] = record["targets"] / (record["training_s"] + record["data_wait_s"])

    forged.record_changed(run, change, step=9)


def change_speed_of_record(run: Path) -> None:
    forged.record_changed(run, lambda record: record.update(targets_per_s=99.0), step=9)


def change_step_of_record(run: Path) -> None:
    forged.record_changed(run, lambda record: record.update(step=3), step=9)


def change_machine_of_session(run: Path) -> None:
    forged.environment_changed(run, lambda session: session["machine"].update(hardware="other"))


def change_data_of_session(run: Path) -> None:
    forged.environment_changed(run, lambda session: session["data"].update(samples=53))


def write_list_as_environment(run: Path) -> None:
    (run / "environment.json").write_text("[]")


def change_setting_of_config(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace("0.05", "0.5"))


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """What is planted, and what the problem says of it."""

    plant: Callable[[Path], None]
    kind: str = "inconsistent"
    names: tuple[str, ...]
    numbers: tuple[float, ...] = ()

    def is_stated_by(self, problem: Problem) -> bool:
        text = f"{problem.file}: {problem.text}"
        return (
            problem.kind == self.kind
            and all(name in text for name in self.names)
            and set(self.numbers) <= set(numbers_in(problem.text))
        )


CONTRADICTIONS = [
    Contradiction(
        plant=change_rate_of_state, names=("step-00000008", "optimizer.lr"), numbers=(0.5, 0.01)
    ),
    Contradiction(plant=change_best_of_state, names=("step-00000008", "val/loss"), numbers=(0.25,)),
    Contradiction(plant=change_time_of_record, names=("step-00000010", "training")),
    Contradiction(
        plant=change_speed_of_record, names=("metrics.jsonl", "targets_per_s"), numbers=(9, 99.0)
    ),
    Contradiction(plant=change_step_of_record, names=("metrics.jsonl", "train"), numbers=(3, 6)),
    Contradiction(plant=change_machine_of_session, names=("environment.json", "step-00000000")),
    Contradiction(plant=change_data_of_session, names=("environment.json", "step-00000000")),
    Contradiction(plant=write_list_as_environment, kind="damaged", names=("environment.json",)),
    Contradiction(
        plant=change_setting_of_config,
        names=("config.toml", "optimizer.weight_decay"),
        numbers=(0.5, 0.05),
    ),
]


@pytest.mark.parametrize("planted", CONTRADICTIONS, ids=lambda planted: planted.plant.__name__)
def test_what_contradicts_another_file_is_named(run: Path, planted: Contradiction) -> None:
    planted.plant(run)
    verdict = verify(run, steps=1, windows=1)
    assert any(planted.is_stated_by(problem) for problem in verdict.problems), str(verdict)
    assert verdict.exit_status == 4


# --- other data, another run ----------------------------------------------------------------------


def test_other_training_data_are_named_before_any_step_is_made(run: Path) -> None:
    data = small_runs.Augmented()
    other = torch.utils.data.TensorDataset(data.inputs, data.labels)
    messages: list[str] = []

    verdict = sf.load(build(run, train_data=other)).verify(say=messages.append)

    problem = the_problem(verdict)
    assert problem.kind == "data"
    for name in ("data.type", "'Augmented'", "'TensorDataset'"):
        assert name in problem.text
    assert verdict.exit_status == 3
    assert verdict.outcomes == []
    assert messages == []
    assert len(unproved_beside_the_log(verdict)) == 1  # that no step was repeated


def other_split() -> dict[str, sf.Split]:
    data = small_runs.Augmented()
    return {"val": sf.Split((data.inputs + 1, data.labels), metrics=sf.metrics.accuracy)}


def other_optimizer() -> Any:
    return sf.optim.adamw(lr=0.5, weight_decay=0.05)


def test_other_data_of_a_split_are_named_and_steps_are_made_all_the_same(run: Path) -> None:
    verdict = sf.load(build(run, splits=other_split())).verify(steps=3, windows=1)
    problem = the_problem(verdict)
    assert problem.kind == "data"
    for name in ("val", "sha256"):
        assert name in problem.text
    assert verdict.exit_status == 3
    assert len(verdict.outcomes) == 1


def test_a_split_whose_data_were_exchanged_in_a_session_is_noted_once(run: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["splits"]["val"]["sha256"] = "0"

    for step in (4, 8):
        forged.state_changed(forged.checkpoint(run, step), change)
    (note,) = check_files(run).notes
    assert " val " in note
    assert numbers_in(note) == [4]


def test_another_setting_is_named_and_no_step_is_made(run: Path) -> None:
    verdict = sf.load(build(run, optimizer=other_optimizer())).verify()
    problem = the_problem(verdict)
    assert problem.kind == "inconsistent"
    assert "optimizer.lr" in problem.text
    assert numbers_in(problem.text)[-2:] == [0.01, 0.5]
    assert verdict.exit_status == 4
    assert verdict.outcomes == []
    assert len(unproved_beside_the_log(verdict)) == 1


def other_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 3))


class Unprinted(torch.nn.Module):
    """Of two sizes that print themselves alike."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.mean() * self.weight


def test_another_model_is_named_with_all_that_is_known_of_the_files(run: Path) -> None:
    verdict = sf.load(build(run, model=other_model)).verify()
    problem = the_problem(verdict)
    assert problem.kind == "inconsistent"
    for name in ("step-00000026", " Net ", " Sequential"):
        assert name in problem.text
    assert verdict.exit_status == 4
    assert verdict.outcomes == []
    _, of_log, _ = verdict.proved  # files, metrics.jsonl, records
    assert of_log.startswith("metrics.jsonl: ")
    assert numbers_in(of_log)[-1] == 26


def test_a_model_of_another_size_is_named_by_its_tensor(tmp_path: Path) -> None:
    def build_of_size(size: int) -> sf.Run:
        return sf.Run(
            model=lambda: Unprinted(size),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            train_data=(torch.ones(4, 2),),
            batch_size=2,
            length="2 steps",
            optimizer=sf.optim.sgd(lr=0.1),
            run_dir=tmp_path / "b",
            console=False,
        )

    build_of_size(3).train()

    verdict = sf.load(build_of_size(2)).verify()

    problem = the_problem(verdict)
    assert problem.kind == "inconsistent"
    for name in ("step-00000000", "weight", "[3]", "[2]"):
        assert name in problem.text
    assert verdict.exit_status == 4
    assert verdict.outcomes == []


def test_another_setting_is_named_beside_other_data_of_a_split(run: Path) -> None:
    other_run = build(run, splits=other_split(), optimizer=other_optimizer())
    verdict = sf.load(other_run).verify()
    of_data, of_setting = verdict.problems
    assert of_data.kind == "data"
    assert of_setting.kind == "inconsistent"
    assert "optimizer.lr" in of_setting.text
    assert numbers_in(of_setting.text)[-2:] == [0.01, 0.5]
    assert verdict.outcomes == []


# --- what only steps that are made again can tell -------------------------------------------------


def change_number(
    run: Path,
    step: int,
    name: str,
    place: tuple[int, ...],
    *,
    by: float = 0.125,
    file: str = "model",
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][place] += by

    forged.tensors_changed(forged.checkpoint(run, step), change, file=file)


@pytest.mark.fast("weight", "optimizer")
@pytest.mark.parametrize(
    ("file", "name", "place"),
    [
        ("model", "0.weight", (3, 2)),
        ("model", "1.running_mean", (5,)),
        ("ema", "4.bias", (1,)),
        ("optimizer", "4.weight/exp_avg_sq", (2, 0)),
    ],
    ids=["weight", "statistics", "average", "optimizer"],
)
def test_one_changed_number_of_a_checkpoint_is_named(
    run: Path, file: str, name: str, place: tuple[int, ...]
) -> None:
    change_number(run, 16, name, place, file=file)

    verdict = verify(run)

    problem = the_problem(verdict)
    index = ", ".join(map(str, place))
    assert problem.kind == "differs"
    assert problem.step == 16
    assert problem.file == f"step-00000016/{file}.safetensors"
    assert problem.quantity == f"{name}[{index}]"
    assert float(problem.saved or 0) - float(problem.computed or 0) == pytest.approx(0.125)
    assert verdict.exit_status == 8
    values = load_file(forged.checkpoint(run, 16) / f"{file}.safetensors")[name].numel()
    assert numbers_in(problem.text)[-2:] == [1, values]
    assert [numbers_in(hint) for hint in verdict.hints] == [[16]]


def test_a_changed_row_of_the_meter_is_named(run: Path) -> None:
    change_number(run, 16, "meter/rows", (0, 1), file="state")
    problem = the_problem(verify(run))
    assert problem.file == "step-00000016/state.safetensors"
    assert problem.quantity == "meter/rows[0, 1]"


def test_a_changed_weight_of_the_first_checkpoint_is_named_by_the_seed(run: Path) -> None:
    change_number(run, 0, "4.weight", (0, 0))
    verdict = verify(run, steps=3, windows=1, seed=1)
    problem, *_ = verdict.problems
    assert problem.file == "step-00000000/model.safetensors"
    assert problem.quantity == "4.weight[0, 0]"
    assert verdict.exit_status == 8


def test_an_edited_loss_that_every_hash_agrees_with_is_named(run: Path) -> None:
    (record,) = [record for record in training_records(run) if record["step"] == 18]
    before = record["loss"]
    changed = math.nextafter(before, 2.0)
    line = forged.record_changed(run, lambda record: record.update(loss=changed), step=18)

    verdict = verify(run)

    problem = the_problem(verdict)
    assert numbers_in(problem.text) == [18, changed, before, 3, line]
    assert problem.step == 18
    assert problem.quantity == "loss"
    assert problem.saved == repr(changed)
    assert problem.computed == repr(before)
    assert verdict.exit_status == 8
    assert verdict.outcomes[0].records == [3, 6, 9, 12, 15, 21, 24, 26]
    assert [numbers_in(hint) for hint in verdict.hints] == [[]]  # no checkpoint is named


@pytest.mark.fast("grad_norm-0.5", "skipped-1")
@pytest.mark.parametrize(
    ("name", "value"),
    [("grad_norm", 0.5), ("grad_norm_max", 9.0), ("clip_fraction", 0.0), ("skipped", 1)],
)
def test_every_number_that_a_step_makes_is_compared(run: Path, name: str, value: float) -> None:
    forged.record_changed(run, lambda record: record.update({name: value}), step=18)
    problem = the_problem(verify(run, steps=6, windows=9))
    assert problem.step == 18
    assert problem.quantity == name
    assert problem.saved == repr(value)


def test_an_edited_learning_rate_is_named_by_the_schedule(run: Path) -> None:
    forged.record_changed(run, lambda record: record.update(lr=0.5), step=18)
    verdict = verify(run, steps=1, windows=1)
    problem = the_problem(verdict)
    assert problem.step == 18
    assert problem.quantity == "lr"
    assert problem.saved == "0.5"
    assert float(problem.computed or 1) < 0.01
    assert verdict.exit_status == 8


def test_edited_targets_are_named_outside_of_windows_too(run: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["targets"] = 25.0
        record["targets_per_s"] = 25.0 / (record["training_s"] + record["data_wait_s"])

    forged.record_changed(run, change, step=9)
    problem = the_problem(verify(run, steps=1, windows=1))
    assert problem.step == 9
    assert problem.quantity == "targets"
    assert numbers_in(problem.text)[-4:] == [25, 3, 8, 24]


def test_a_record_that_was_taken_out_is_missed(run: Path) -> None:
    data = (run / "metrics.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    ends = [len(b"".join(lines[:count])) for count in range(len(lines) + 1)]
    without_record = [b"" if b'"train", "step": 18,' in line else line for line in lines]
    assert without_record.count(b"") == 1
    (run / "metrics.jsonl").write_bytes(b"".join(without_record))
    forged.noted_anew(run, ends, without_record)

    verdict = verify(run)

    steps = {problem.step for problem in verdict.problems if problem.kind == "differs"}
    assert steps == {20, 21}


# --- runs of other kinds --------------------------------------------------------------------------


def train_until_pass(run_dir: Path, last: int) -> None:
    """A run that is interrupted in this pass, so that records are superseded."""
    passes = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal passes
        passes += model.training
        if passes == last:
            raise KeyboardInterrupt
        return small_runs.loss(model, batch)

    with pytest.raises(KeyboardInterrupt):
        build(run_dir, loss=loss, check_state=False).train()


@pytest.fixture(scope="module")
def resumed_twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("resumed") / "a"
    train_until_pass(run_dir, 15)
    train_until_pass(run_dir, 11)
    build(run_dir).train()
    assert (run_dir / "metrics.jsonl").read_text().count('"resume"') == 2
    return run_dir


def test_a_run_that_went_on_several_times_is_proved(resumed_twice: Path) -> None:
    verdict = verify(resumed_twice)
    assert verdict.whole, str(verdict)
    assert verdict.sound, str(verdict)


def test_a_session_that_is_missing_is_named(resumed_twice: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(resumed_twice, tmp_path / "a"))
    environment = json.loads((run / "environment.json").read_text())
    resumed_at = environment["sessions"].pop(1)["step"]
    (run / "environment.json").write_text(json.dumps(environment))

    problem = the_problem(verify(run, steps=1, windows=0))

    assert problem.kind == "inconsistent"
    assert problem.file == "environment.json"
    assert numbers_in(problem.text) == [resumed_at]


@pytest.mark.fast("loss scale and quantile")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "plateau": sf.ReduceLROnPlateau("min val/loss", patience=1, min_delta=0.5),
                "early_stopping": None,
                "optimizer": sf.optim.muon(lr=0.01),
                "workers": 1,
            },
            id="plateau and muon",
        ),
        pytest.param(
            {"precision": "fp16", "clip": "auto 0.9", "log_every": "7 steps"},
            id="loss scale and quantile",
        ),
        pytest.param(
            {
                "ema": None,
                "optimizer": sf.optim.schedule_free(lr=0.01),
                "schedule": None,
                "early_stopping": None,
            },
            id="schedule_free",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"early_stopping": sf.EarlyStopping("min val/loss", patience=1, min_delta=0.5)},
            id="stopped early",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_runs_of_other_kinds_are_proved(tmp_path: Path, changes: dict[str, Any]) -> None:
    build(tmp_path / "a", **changes).train()
    verdict = sf.load(build(tmp_path / "a", **changes)).verify(steps="all")
    assert verdict.sound, str(verdict)
    assert verdict.whole


class InfiniteLossAfter:
    """A loss that is not finite once so many steps have been made, and after that for ever."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        steps = model.get_buffer("1.num_batches_tracked")
        return small_runs.loss(model, batch) * torch.where(steps >= self.steps, math.inf, 1.0)


@pytest.mark.parametrize(
    ("save_every", "newest"),
    [pytest.param("4 steps", 26, marks=pytest.mark.slow), ("100 steps", 22)],
)
def test_a_run_that_diverged_is_proved_with_the_steps_that_were_not_applied(
    tmp_path: Path, save_every: str, newest: int
) -> None:
    """Its last checkpoint is of the last good step, or has its counts of bad steps cleared."""
    changes: dict[str, Any] = {
        "loss": InfiniteLossAfter(23),
        "early_stopping": None,
        "max_bad_steps": 3,
        "save_every": save_every,
    }
    with pytest.raises(sf.DivergedError):
        build(tmp_path / "a", **changes).train()

    verdict = sf.load(build(tmp_path / "a", **changes)).verify(steps="all")

    assert verdict.sound, str(verdict)
    (outcome,) = verdict.outcomes
    assert max(outcome.checkpoints) == newest
    assert outcome.records[-1] == 26
    if newest < STEPS:
        with pytest.raises(sf.DivergedError):  # goes on from there, to the same end
            build(tmp_path / "a", **changes).train()
        again = sf.load(build(tmp_path / "a", **changes)).verify(steps="all")
        assert again.sound, str(again)


# --- elsewhere, and what a loop's own body does ---------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is another one than before."""
    machine = RunComponents.machine

    def other_machine(parts: RunComponents) -> dict[str, Any]:
        return {**machine(parts), "hardware": "another"}

    monkeypatch.setattr(RunComponents, "machine", other_machine)


def scale_record(run: Path, name: str, factor: float) -> None:
    """One number of the record of step 18."""

    def change(record: dict[str, Any]) -> None:
        record[name] *= factor

    forged.record_changed(run, change, step=18)


def test_on_another_machine_rounding_is_measured_and_is_no_fault(
    run: Path, elsewhere: None
) -> None:
    change_number(run, 16, "0.weight", (3, 2), by=1e-5)
    scale_record(run, "loss", 1 + 1e-6)

    verdict = verify(run)

    assert verdict.sound, str(verdict)
    (outcome,) = verdict.outcomes
    assert not outcome.exact
    assert outcome.unlike == f"hardware was '{platform.machine()}', now 'another'"
    largest = outcome.largest["records"]
    assert numbers_in(largest.where) == [18]
    assert largest.where.split()[-1] == "loss"
    assert largest.relative == pytest.approx(1e-6, rel=1e-3)
    assert outcome.largest["tensors"].where == "step-00000016, model.safetensors, 0.weight[3, 2]"


def test_on_another_machine_what_rounding_does_not_explain_is_a_fault(
    run: Path, elsewhere: None
) -> None:
    change_number(run, 16, "0.weight", (3, 2))
    verdict = verify(run)
    assert the_problem(verdict).quantity == "0.weight[3, 2]"
    (outcome,) = verdict.outcomes
    assert any(outcome.unlike in hint for hint in verdict.hints)
    assert verify(run, tolerance=1.0).sound


@pytest.mark.parametrize(
    ("difference", "different_quantities"), [(0.009, []), (0.011, ["grad_norm"])]
)
def test_rounding_is_a_hundredth_at_most(
    run: Path, elsewhere: None, difference: float, different_quantities: list[str]
) -> None:
    assert TOLERANCE == 0.01
    scale_record(run, "grad_norm", 1 + difference)
    verdict = verify(run, steps=2, windows=99)
    quantities = [problem.quantity for problem in verdict.problems]
    assert quantities == different_quantities, str(verdict)


def test_the_threads_of_the_run_are_taken(run: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        verdict = verify(run, steps=4, windows=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert verdict.outcomes[0].exact, verdict.outcomes[0].unlike


def train_with_body(run_dir: Path, *, changes_weights: bool) -> None:
    run = build(run_dir)
    counts = run.register_state("counts", {"steps": 0})
    with run:
        for step in run:
            counts["steps"] += 1
            step.log(seen=counts["steps"])
            if changes_weights and step.index == 12:
                with torch.no_grad():
                    run.state.parameters[0].mul_(0.5)


def test_what_a_loop_body_logs_and_keeps_is_said_not_to_be_proved(tmp_path: Path) -> None:
    train_with_body(tmp_path / "a", changes_weights=False)
    verdict = verify(tmp_path / "a")
    assert verdict.sound, str(verdict)
    assert verdict.outcomes[0].unknown == {"seen"}
    of_seen, of_state, _ = unproved_beside_the_log(verdict)  # and evaluations
    assert of_seen.startswith("seen ")
    assert "run.register_state" in of_state


@pytest.mark.parametrize("is_older", [False, True], ids=["now", "as 0.1.0 wrote it"])
def test_a_value_logged_under_the_name_of_a_rate_is_not_taken_for_it(
    tmp_path: Path, is_older: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"optimizer": sf.optim.sgd(lr=0.01, momentum=0.9), "console": True}
    run = build(tmp_path / "a", **changes)
    with run:
        for step in run:
            step.log(momentum=0.5, **{"lr/critic": 0.25})
    assert "momentum=0.5 lr/critic=0.25" in capsys.readouterr().out
    if is_older:
        for record in training_records(tmp_path / "a"):
            forged.record_changed(tmp_path / "a", remove_newer_fields, step=record["step"])
    verdict = sf.load(build(tmp_path / "a", **changes)).verify(steps=10, windows=1)
    assert verdict.sound, str(verdict)
    assert verdict.outcomes[0].unknown == {"momentum", "lr/critic"}
    if not is_older:
        curves = read_reported_run(tmp_path / "a")
        assert curves.users.keys() == {"momentum", "lr/critic"}


def remove_newer_fields(record: dict[str, Any]) -> None:
    record.pop("ms_per_step", None)
    record.pop("logged_rates", None)


def test_a_loop_body_that_changes_weights_is_seen_and_named_as_a_cause(tmp_path: Path) -> None:
    train_with_body(tmp_path / "a", changes_weights=True)

    verdict = verify(tmp_path / "a")

    assert verdict.exit_status == 8
    assert verdict.problems[0].step == 15
    first_hint, *_ = verdict.hints
    assert numbers_in(first_hint) == [0, 15]  # where the window begins, and the first difference
    # what follows from a saved checkpoint is judged by itself
    assert 24 in verdict.outcomes[0].checkpoints


def test_steps_of_a_users_own_are_not_made_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "loss": None,
        "splits": None,
        "early_stopping": None,
        "length": "3 steps",
    }
    with build(tmp_path / "a", **settings) as run:
        for step in run.steps():
            sf.forward_backward(step, small_runs.loss)
            sf.update(step)

    verdict = sf.load(build(tmp_path / "a", **settings)).verify()

    assert verdict.sound, str(verdict)
    assert verdict.outcomes == []
    assert len(unproved_beside_the_log(verdict)) == 1


def test_a_run_without_a_directory_is_refused() -> None:
    with refused("run-without-directory"):
        sf.load(build(None)).verify()


def test_an_open_run_is_refused(tmp_path: Path) -> None:
    run = build(tmp_path / "a", length="1 steps")
    with run, refused("run-is-open", path=tmp_path / "a"):
        sf.load(run).verify()
