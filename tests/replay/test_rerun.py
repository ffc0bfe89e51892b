"""Steps made again from a checkpoint are those of the run, bit for bit; about 1 s."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
import surefoot as sf
from refused import refused
from surefoot.checkpoint import Checkpoint, Store
from surefoot.tools.replay.findings import Look
from surefoot.tools.replay.replay import Logged, Replay
from surefoot.tools.replay.rerun import FinishedStep, execution, nearest_checkpoint
from surefoot.tracking.jsonl import records

PLATEAU = sf.ReduceLROnPlateau(
    "min val/loss", patience=1, min_delta=1.0
)  # lowered at every evaluation


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


def made_again(
    run_dir: Path, start: int, until: int, *, with_records: bool = True, **changes: Any
) -> tuple[list[FinishedStep], Checkpoint]:
    told = records(run_dir / "metrics.jsonl") if with_records else []
    with execution(
        build(run_dir, **changes).parts, Store(run_dir / "checkpoints").at(start), records=told
    ) as again:
        made = list(again.steps(until))
        assert not again.notes
        return made, again.parts.packed()


def tensors(contents: Checkpoint) -> dict[str, torch.Tensor]:
    return {
        f"{file}/{name}": held
        for file, named in contents.files.items()
        for name, held in named.items()
    }


@pytest.mark.parametrize(("start", "until"), [(0, 26), (4, 8), (16, 24)])
def test_steps_made_again_come_to_the_checkpoint_that_follows_them(
    trained: Path, start: int, until: int
) -> None:
    _, contents = made_again(trained, start, until)
    expected = tensors(Store(trained / "checkpoints").at(until))
    found = tensors(contents)
    assert found.keys() == expected.keys()
    for name, held in expected.items():
        torch.testing.assert_close(found[name], held, rtol=0, atol=0, equal_nan=True, msg=name)


def test_windows_are_the_records_of_training(trained: Path) -> None:
    made, _ = made_again(trained, 4, 20)
    written = {
        record["step"]: record
        for record in records(trained / "metrics.jsonl")
        if record["kind"] == "train"
    }
    windows = {each.index + 1: each.window for each in made if each.window is not None}
    assert list(windows) == [6, 9, 12, 15, 18]
    for step, window in windows.items():
        assert window == {name: written[step][name] for name in window}
        assert {"loss", "grad_norm", "grad_norm_max", "targets", "skipped"} <= window.keys()


def test_workers_change_no_step(trained: Path) -> None:
    with execution(build(trained, workers=1).parts, Store(trained / "checkpoints").at(8)) as again:
        with_workers = [each.numbers() for each in again.steps(11)]
    made, _ = made_again(trained, 8, 11)
    assert with_workers == [each.numbers() for each in made]


def test_the_rate_that_a_plateau_lowered_is_taken_from_the_records(trained: Path) -> None:
    made, _ = made_again(trained, 4, 12)
    assert made[-1].step.state.lr_factor < 1
    _, without = made_again(trained, 4, 12, with_records=False)
    expected = tensors(Store(trained / "checkpoints").at(12))
    assert not torch.equal(tensors(without)["model/0.weight"], expected["model/0.weight"])


def test_numbers_are_those_of_the_step(trained: Path) -> None:
    made, contents = made_again(trained, 0, 2)
    rows = contents.files["state"]["meter/rows"]
    assert [(row[1], row[3], bool(row[5])) for row in rows.tolist()] == [
        (held.loss, held.norm, held.skipped) for held in (each.numbers() for each in made)
    ]


def test_nothing_in_the_directory_is_touched(trained: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in trained.rglob("*")}
    made_again(trained, 0, 3)
    assert before == {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in trained.rglob("*")
    }


def test_generators_and_threads_are_as_before(trained: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    made_again(trained, 0, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_the_nearest_intact_checkpoint_is_taken_and_damaged_ones_are_named(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    store = Store(tmp_path / "checkpoints")
    assert nearest_checkpoint(store, 9)[0].step == 8
    file = store.path(8) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    found, damaged = nearest_checkpoint(store, 9)
    assert (found.step, [damage.path.name for damage in damaged]) == (
        5,
        ["step-00000008"],
    )  # of the best score, as 10 is
    shutil.rmtree(store.path(0))
    with refused("no-earlier-checkpoint", sf.CheckpointError, step=3, available=store.steps()):
        nearest_checkpoint(store, 3)


def test_steps_of_the_users_own_are_refused(trained: Path) -> None:
    with (
        refused("steps-of-own-loop", step=4),
        execution(build(trained, loss=None).parts, Store(trained / "checkpoints").at(4)),
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


def test_another_machine_is_named(trained: Path) -> None:
    found = Store(trained / "checkpoints").at(4)
    found.state["machine"] |= {"hardware": "abacus", "ranks": 2, "parallel": "ddp"}
    with execution(build(trained).parts, found) as again:
        hardware = f"hardware was 'abacus', now {again.parts.machine()['hardware']!r}"
        assert [note.partition(": ")[0] for note in again.notes] == [hardware]
    found.state["machine"].pop("exact")  # as 0.1.0
    with execution(build(trained).parts, found) as again:
        ((ranks, of_hardware),) = [note.split("; ") for note in again.notes]
        assert "2 ranks (ddp)" in ranks
        assert of_hardware.partition(": ")[0] == hardware


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
    settings = {**changes, "length": "9 steps", "early_stopping": None, "splits": {}}

    def built() -> sf.Run:
        return small_runs.build(tmp_path / "run", keep_last=9, **settings)

    built().train()
    store = Store(tmp_path / "run" / "checkpoints")
    with execution(
        built().parts, store.at(4), records=records(tmp_path / "run" / "metrics.jsonl")
    ) as again:
        assert [each.index for each in again.steps(9)] == [4, 5, 6, 7, 8]
        found = tensors(again.parts.packed())
    for name, held in tensors(store.at(9)).items():
        torch.testing.assert_close(found[name], held, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_run_is_made_again_compiled_and_looked_at_uncompiled(tmp_path: Path) -> None:
    def built() -> sf.Run:
        return small_runs.build(
            tmp_path / "run", keep_last=9, compile=True, length="6 steps", log_every="1 steps"
        )

    built().train()
    again = sf.load(built()).replay(step=4)
    assert again.logged is not None
    assert again.logged.equal
    assert any("without torch.compile" in note for note in again.notes)
    assert again.look.loss == pytest.approx(again.logged.then["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("notes", "now", "said"),
    [
        ((), 2.0000001, "NOT equal to the record"),
        (
            ("2 processes, now 1: equal up to rounding, not bit for bit",),
            2.0000001,
            "equal to the record up to rounding",
        ),
        (
            ("2 processes, now 1: equal up to rounding, not bit for bit",),
            2.1,
            "NOT equal to the record",
        ),
        (("the run itself has completed 3 steps",), 2.0000001, "NOT equal to the record"),
    ],
)
def test_a_difference_in_the_last_digits_is_rounding_only_if_a_note_says_so(
    notes: tuple[str, ...], now: float, said: str
) -> None:
    logged = Logged("the record", ("loss",), False, {"loss": 2.0}, {"loss": now})
    look = Look(step=3, loss=now, norm=1.0, first=None)
    text = str(Replay("runs/a", look, 10, 0, logged, notes, 0.1, 8))
    assert f"4 steps; {said}" in " ".join(text.split())
