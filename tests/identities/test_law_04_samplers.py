"""Law 4 for samplers: the list of an epoch is the same before and after a kill, also if it depends
on state of the sampler that changes within the epoch. (5 s)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import surefoot as sf
from rank_processes import Ranks
from refused import refused

SAMPLES, STEPS = 24, 14  # 6 steps in an epoch
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return X[index], Y[index], index


class HardFirst:
    """Lists the samples by what the loop has written into `hardness`; ties are drawn."""

    def __init__(self, epochs: int = 1) -> None:
        self.hardness = torch.zeros(SAMPLES)
        self.turn = 0  # a plain value

    def __iter__(self) -> Iterator[int]:
        ties = torch.rand(SAMPLES)  # of torch's global generator
        return iter((self.hardness + 0.1 * ties).roll(self.turn).argsort().tolist())

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, Any]:
        return {"hardness": self.hardness.clone(), "turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hardness = state["hardness"].clone()
        self.turn = state["turn"]


class HardBatches(HardFirst):
    """The same, as a batch sampler with an epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = (self.hardness + self.epoch).roll(self.turn + self.epoch).argsort(stable=True)
        return iter(order.reshape(-1, 4).tolist())

    def __len__(self) -> int:
        return SAMPLES // 4


class Turning(HardFirst):
    """One whose state is a number, which needs no register_state."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.arange(SAMPLES).roll(self.turn).tolist())


KINDS = {"sampler": HardFirst, "batch sampler": HardBatches, "plain state": Turning}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def session(
    kind: str, run_dir: Path | None, *, workers: int = 0, exchanged: bool = True, **changes: Any
) -> tuple[list[list[int]], Tensor]:
    """The samples of each step as they were read, and the weights."""
    sampler = KINDS[kind]()
    how: dict[str, Any] = {"batch_size": 4, "sampler": sampler}
    if kind == "batch sampler":
        how = {"batch_sampler": sampler}
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "loss": loss,
        "train_data": DataLoader(Rows(), num_workers=workers, **how),  # type: ignore[arg-type]
        "optimizer": sf.optim.sgd(lr=0.1),
        "length": f"{STEPS} steps",
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    run = sf.Run(**settings | changes)
    if kind != "plain state":
        run.register_state("sampler", sampler)
    read = []
    with run:
        for step in run:
            batches = [part.batch[2] for part in step.micro_batches if part.count]
            ids = torch.cat(batches).tolist()
            assert ids == [int(i) for part in step.micro_batches for i in part.sample_ids]
            read.append(ids)
            sampler.turn += 1
            if kind == "plain state":
                continue
            if exchanged:
                sampler.hardness[step.index % SAMPLES] += 1.0
            else:
                sampler.hardness[ids[0]] += 1.0
    return read, run.state.model.weight.detach().clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_with_state_of_its_own_resumes_with_the_list_of_its_epoch(
    kind: str, workers: int, tmp_path: Path
) -> None:
    whole, weights = session(kind, None)
    assert whole[:6] != whole[6:12]
    for stop in (6, 9):  # between two epochs, in an epoch
        run_dir = tmp_path / str(stop)
        first, _ = session(kind, run_dir, workers=workers, stop_after=f"{stop} steps")
        second, resumed = session(kind, run_dir, workers=2 - workers)
        assert first + second == whole
        assert torch.equal(resumed, weights)


def test_workers_read_the_lists_of_many_short_epochs_as_the_loop_changes_the_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HardBatches, "__iter__", _one_batch)
    alone, _ = session("batch sampler", None)
    assert len(set(map(tuple, alone))) > 4
    assert session("batch sampler", None, workers=1)[0] == alone


def _one_batch(sampler: HardFirst) -> Iterator[list[int]]:
    return iter([torch.arange(SAMPLES).roll(sampler.turn)[:4].tolist()])


def test_a_list_too_long_for_a_checkpoint_is_compared_by_its_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("surefoot.data.batch_lists.MAX_SAVED", SAMPLES - 1)
    session("sampler", tmp_path / "in", stop_after="3 steps")
    with refused("sampler-lists-otherwise", sf.CheckpointError, epoch=0):
        session("sampler", tmp_path / "in")
    whole, _ = session("sampler", None)
    first, _ = session("sampler", tmp_path / "between", stop_after="6 steps")
    assert first + session("sampler", tmp_path / "between")[0] == whole


def test_trial_steps_leave_the_list_of_the_epoch_as_it_is() -> None:
    from surefoot.run.run import trial_steps

    whole, _ = session("sampler", None)
    sampler = HardFirst()
    run = sf.Run(
        model=lambda: nn.Linear(4, 3),
        loss=loss,
        train_data=DataLoader(Rows(), batch_size=4, sampler=sampler),  # type: ignore[arg-type]
        optimizer=sf.optim.sgd(lr=0.1),
        length=f"{STEPS} steps",
        console=False,
    )
    read = []
    with run:
        for step in run:
            read.append([int(i) for part in step.micro_batches for i in part.sample_ids])
            sampler.turn += 1
            sampler.hardness[step.index % SAMPLES] += 1.0
            if step.index == 8:
                with trial_steps(run) as parts:
                    feed = parts.pipeline.feed(workers=0)
                    for trial in range(12):
                        feed.start(trial)
                        feed.micro_batches(trial)
    assert read == whole


# --- two ranks ------------------------------------------------------------------------------------


def on_ranks(run_dir: str, stop_after: str | None, exchanged: bool) -> list[list[int]]:
    changes = {} if stop_after is None else {"stop_after": stop_after}
    return session("sampler", Path(run_dir), exchanged=exchanged, micro_batch_size=2, **changes)[0]


def test_ranks_resume_with_the_list_of_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    whole, _ = session("sampler", None, micro_batch_size=2)
    arguments = {"run_dir": str(tmp_path / "run"), "exchanged": True}
    before = ranks(2, on_ranks, stop_after="9 steps", **arguments)
    after = ranks(2, on_ranks, stop_after=None, **arguments)
    both = [first + second for first, second in zip(before, after, strict=True)]
    read = [one + other for one, other in zip(*both, strict=True)]
    assert read == whole


def test_ranks_whose_samplers_differ_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    start = ranks.start(
        2, on_ranks, run_dir=str(tmp_path / "run"), stop_after=None, exchanged=False
    )
    outcomes = ranks.outcomes(start)
    assert [outcome.status for outcome in outcomes] != [0, 0]
    assert any("sampler-differs-on-ranks" in outcome.text for outcome in outcomes)
