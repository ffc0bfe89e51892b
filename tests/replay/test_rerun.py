"""Steps made again from a checkpoint are those of the run, bit for bit; about 1 s."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
import surefoot as sf
from recorded import training_records
from refused import refused
from surefoot.checkpoint import Checkpoint, Store
from surefoot.tools.replay.findings import Look
from surefoot.tools.replay.replay import Logged, Replay
from surefoot.tools.replay.rerun import FinishedStep, execution, nearest_checkpoint
from surefoot.tracking.jsonl import records

# lowered at every evaluation
PLATEAU = sf.ReduceLROnPlateau("min val/loss", patience=1, min_delta=1.0)


def build(run_dir: Path, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, keep_last=100, plateau=PLATEAU, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dropout, augmentation, batch norm, EMA, two micro-batches a step, a plateau, records every 3
    steps.
    """
    run_dir = tmp_path_factory.mktemp("runs") / "a"
    build(run_dir).train()
    return run_dir


def store_of(run_dir: Path) -> Store:
    return Store(run_dir / "checkpoints")


def rerun(
    run_dir: Path, start: int, until: int, *, with_records: bool = True
) -> tuple[list[FinishedStep], Checkpoint]:
    """The steps from one checkpoint on, and what would be saved after them."""
    known_records = records(run_dir / "metrics.jsonl") if with_records else []
    parts = build(run_dir).parts
    with execution(parts, store_of(run_dir).at(start), records=known_records) as again:
        steps = list(again.steps(until))
        assert not again.notes
        return steps, again.parts.packed()


def assert_same_tensors(checkpoint: Checkpoint, expected: Checkpoint) -> None:
    """To the bit."""
    assert checkpoint.files.keys() == expected.files.keys()
    for file in expected.files:
        torch.testing.assert_close(
            checkpoint.tensors(file), expected.tensors(file), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize(("start", "until"), [(0, 26), (4, 8), (16, 24)])
def test_steps_made_again_come_to_the_checkpoint_that_follows_them(
    trained: Path, start: int, until: int
) -> None:
    _, checkpoint = rerun(trained, start, until)
    assert_same_tensors(checkpoint, store_of(trained).at(until))


def test_windows_are_the_records_of_training(trained: Path) -> None:
    written = {record["step"]: record for record in training_records(trained)}
    steps, _ = rerun(trained, 4, 20)
    windows = {step.index + 1: step.window for step in steps if step.window is not None}

    assert list(windows) == [6, 9, 12, 15, 18]
    for done, window in windows.items():
        assert {"loss", "grad_norm", "grad_norm_max", "targets", "skipped"} <= window.keys()
        for name, value in window.items():
            assert value == written[done][name]


def test_workers_change_no_step(trained: Path) -> None:
    with execution(build(trained, workers=1).parts, store_of(trained).at(8)) as again:
        numbers_with_worker = [step.numbers() for step in again.steps(11)]
    steps, _ = rerun(trained, 8, 11)
    assert numbers_with_worker == [step.numbers() for step in steps]


def test_the_rate_that_a_plateau_lowered_is_taken_from_the_records(trained: Path) -> None:
    steps, _ = rerun(trained, 4, 12)
    _, without_records = rerun(trained, 4, 12, with_records=False)

    assert steps[-1].step.state.lr_factor < 1
    weight = without_records.tensors("model")["0.weight"]
    expected = store_of(trained).at(12).tensors("model")["0.weight"]
    assert not torch.equal(weight, expected)


def test_numbers_are_those_of_the_step(trained: Path) -> None:
    steps, checkpoint = rerun(trained, 0, 2)
    rows = checkpoint.tensors("state")["meter/rows"].tolist()
    for step, row in zip(steps, rows, strict=True):
        _, loss, _, norm, _, skipped = row
        numbers = step.numbers()
        assert numbers.loss == loss
        assert numbers.norm == norm
        assert numbers.skipped == bool(skipped)


def test_nothing_in_the_directory_is_touched(trained: Path) -> None:
    def list_files() -> dict[Path, tuple[int, int]]:
        files = {}
        for path in trained.rglob("*"):
            stat = path.stat()
            files[path] = (stat.st_mtime_ns, stat.st_size)
        return files

    before = list_files()
    rerun(trained, 0, 3)
    assert list_files() == before


def test_generators_and_threads_are_as_before(trained: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()

    rerun(trained, 0, 2)

    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


@pytest.fixture
def store(trained: Path, tmp_path: Path) -> Store:
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    return store_of(tmp_path)


def test_the_nearest_checkpoint_is_taken(store: Store) -> None:
    nearest, damaged = nearest_checkpoint(store, 9)
    assert nearest.step == 8
    assert not damaged


def test_a_damaged_checkpoint_is_named_and_the_nearest_intact_one_is_taken(store: Store) -> None:
    file = store.path(8) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    nearest, damaged = nearest_checkpoint(store, 9)
    assert nearest.step == 5  # of the best score, as 10 is
    assert [damage.path for damage in damaged] == [store.path(8)]


def test_where_no_checkpoint_is_earlier_that_is_said(store: Store) -> None:
    shutil.rmtree(store.path(0))
    with refused("no-earlier-checkpoint", sf.CheckpointError, step=3, available=store.steps()):
        nearest_checkpoint(store, 3)


def test_steps_of_the_users_own_are_refused(trained: Path) -> None:
    with (
        refused("steps-of-own-loop", step=4),
        execution(build(trained, loss=None).parts, store_of(trained).at(4)),
    ):
        pass


def test_an_open_run_is_refused(tmp_path: Path) -> None:
    run = build(tmp_path / "b", length="4 steps")
    with (
        run,
        refused("run-is-open", path=tmp_path / "b"),
        execution(run.parts, run.parts.packed()),
    ):
        pass


def checkpoint_of_other_machine(run_dir: Path) -> Checkpoint:
    checkpoint = store_of(run_dir).at(4)
    checkpoint.state["machine"] |= {"hardware": "abacus", "ranks": 2, "parallel": "ddp"}
    return checkpoint


def test_another_machine_is_named(trained: Path) -> None:
    with execution(build(trained).parts, checkpoint_of_other_machine(trained)) as again:
        (note,) = again.notes
        hardware, _, _ = note.partition(": ")
        assert hardware == f"hardware was 'abacus', now {again.parts.machine()['hardware']!r}"


def test_other_ranks_are_named_where_sums_were_not_exact(trained: Path) -> None:
    """As a run of 0.1.0 has it."""
    checkpoint = checkpoint_of_other_machine(trained)
    del checkpoint.state["machine"]["exact"]
    with execution(build(trained).parts, checkpoint) as again:
        (note,) = again.notes
        ranks, hardware = note.split("; ")
        assert "2 ranks (ddp)" in ranks
        assert hardware.startswith("hardware was 'abacus'")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": sf.optim.muon(lr=0.02)}, marks=pytest.mark.slow),
        {"optimizer": sf.optim.schedule_free(lr=0.01), "ema": None, "schedule": None},
        pytest.param(
            {"optimizer": sf.optim.sgd(lr=0.05, momentum=0.9), "clip": "auto 0.9"},
            marks=pytest.mark.slow,
        ),
        {"precision": "fp16", "ema": None},
    ],
    ids=["muon", "schedule_free", "sgd", "fp16"],
)
def test_every_kind_of_state_is_gone_on_with(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {"length": "9 steps", "early_stopping": None, "splits": {}, "keep_last": 9}
    run_dir = tmp_path / "run"
    small_runs.build(run_dir, **changes, **settings).train()

    parts = small_runs.build(run_dir, **changes, **settings).parts
    known_records = records(run_dir / "metrics.jsonl")
    with execution(parts, store_of(run_dir).at(4), records=known_records) as again:
        assert [step.index for step in again.steps(9)] == [4, 5, 6, 7, 8]
        checkpoint = again.parts.packed()

    assert_same_tensors(checkpoint, store_of(run_dir).at(9))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_run_is_made_again_compiled_and_looked_at_uncompiled(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "keep_last": 9,
        "compile": True,
        "length": "6 steps",
        "log_every": "1 steps",
    }
    small_runs.build(tmp_path / "run", **settings).train()

    replay = sf.load(small_runs.build(tmp_path / "run", **settings)).replay(step=4)

    assert replay.logged is not None
    assert replay.logged.equal
    assert any("without torch.compile" in note for note in replay.notes)
    assert replay.look.loss == pytest.approx(replay.logged.then["loss"], rel=1e-5)


ROUNDING = "2 processes, now 1: equal up to rounding, not bit for bit"


@pytest.mark.parametrize(
    ("note", "loss_now", "verdict"),
    [
        (None, 2.0000001, "NOT equal to the record"),
        (ROUNDING, 2.0000001, "equal to the record up to rounding"),
        (ROUNDING, 2.1, "NOT equal to the record"),
        ("the run itself has completed 3 steps", 2.0000001, "NOT equal to the record"),
    ],
)
def test_a_difference_in_the_last_digits_is_rounding_only_if_a_note_says_so(
    note: str | None, loss_now: float, verdict: str
) -> None:
    notes = () if note is None else (note,)
    logged = Logged("the record", ("loss",), False, {"loss": 2.0}, {"loss": loss_now})
    look = Look(step=3, loss=loss_now, norm=1.0, first=None)
    text = str(Replay("runs/a", look, 10, 0, logged, notes, 0.1, 8))
    assert f"4 steps; {verdict}" in " ".join(text.split())
