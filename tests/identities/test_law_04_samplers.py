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

SAMPLES = 24
STEPS = 14  # 6 in an epoch
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


def build(data: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "loss": loss,
        "train_data": data,
        "optimizer": sf.optim.sgd(lr=0.1),
        "length": f"{STEPS} steps",
        "console": False,
        "report": False,
    }
    return sf.Run(**settings | changes)


def sample_ids_of(step: sf.Step) -> list[int]:
    """As the data set gave them."""
    batches = [part.batch[2] for part in step.micro_batches if part.count]
    read: list[int] = torch.cat(batches).tolist()
    listed: list[int] = []
    for part in step.micro_batches:
        listed += part.sample_ids.tolist()
    assert read == listed
    return read


def train(
    kind: str, run_dir: Path | None, *, workers: int = 0, exchanged: bool = True, **changes: Any
) -> tuple[list[list[int]], Tensor]:
    """The samples of each step as they were read, and the weights. Where what the body writes is
    not `exchanged`, it depends on what this rank has read.
    """
    sampler = KINDS[kind]()
    loader: Any
    if kind == "batch sampler":
        loader = DataLoader(Rows(), num_workers=workers, batch_sampler=sampler)  # type: ignore[arg-type]
    else:
        loader = DataLoader(Rows(), num_workers=workers, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    run = build(loader, run_dir=run_dir, **changes)
    if kind != "plain state":
        run.register_state("sampler", sampler)
    ids_by_step = []
    with run:
        for step in run:
            ids = sample_ids_of(step)
            ids_by_step.append(ids)
            sampler.turn += 1
            if kind != "plain state":
                written = step.index % SAMPLES if exchanged else ids[0]
                sampler.hardness[written] += 1.0
    return ids_by_step, run.state.model.weight.detach().clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_with_state_of_its_own_resumes_with_the_list_of_its_epoch(
    kind: str, workers: int, tmp_path: Path
) -> None:
    whole, weights = train(kind, None)
    assert whole[:6] != whole[6:12]
    for stop in (6, 9):  # between two epochs, in an epoch
        run_dir = tmp_path / str(stop)
        before, _ = train(kind, run_dir, workers=workers, stop_after=f"{stop} steps")
        after, resumed_weights = train(kind, run_dir, workers=2 - workers)
        assert before + after == whole
        assert torch.equal(resumed_weights, weights)


def test_workers_read_the_lists_of_many_short_epochs_as_the_loop_changes_the_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HardBatches, "__iter__", list_one_batch)
    alone, _ = train("batch sampler", None)
    assert len(set(map(tuple, alone))) > 4

    with_worker, _ = train("batch sampler", None, workers=1)

    assert with_worker == alone


def list_one_batch(sampler: HardFirst) -> Iterator[list[int]]:
    return iter([torch.arange(SAMPLES).roll(sampler.turn)[:4].tolist()])


def test_a_list_too_long_for_a_checkpoint_is_compared_by_its_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("surefoot.data.batch_lists.MAX_SAVED", SAMPLES - 1)
    train("sampler", tmp_path / "run", stop_after="3 steps")
    with refused("sampler-lists-otherwise", sf.CheckpointError, epoch=0):
        train("sampler", tmp_path / "run")


def test_between_two_epochs_a_run_goes_on_without_a_list_in_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("surefoot.data.batch_lists.MAX_SAVED", SAMPLES - 1)
    whole, _ = train("sampler", None)
    before, _ = train("sampler", tmp_path / "run", stop_after="6 steps")
    after, _ = train("sampler", tmp_path / "run")
    assert before + after == whole


def test_trial_steps_leave_the_list_of_the_epoch_as_it_is() -> None:
    from surefoot.run.run import trial_steps

    whole, _ = train("sampler", None)
    sampler = HardFirst()
    ids_by_step = []
    with build(DataLoader(Rows(), batch_size=4, sampler=sampler)) as run:  # type: ignore[arg-type]
        for step in run:
            ids_by_step.append(sample_ids_of(step))
            sampler.turn += 1
            sampler.hardness[step.index % SAMPLES] += 1.0
            if step.index == 8:
                with trial_steps(run) as parts:
                    feed = parts.pipeline.feed(workers=0)
                    for trial in range(12):
                        feed.start(trial)
                        feed.micro_batches(trial)

    assert ids_by_step == whole


# --- two ranks ------------------------------------------------------------------------------------


def train_on_rank(
    run_dir: str, stop_after: str | None = None, exchanged: bool = True
) -> list[list[int]]:
    ids_by_step, _ = train(
        "sampler",
        Path(run_dir),
        exchanged=exchanged,
        micro_batch_size=2,
        stop_after=stop_after,
    )
    return ids_by_step


def test_ranks_resume_with_the_list_of_the_epoch(ranks: Ranks, tmp_path: Path) -> None:
    whole, _ = train("sampler", None, micro_batch_size=2)
    run_dir = str(tmp_path / "run")

    before_on_0, before_on_1 = ranks(2, train_on_rank, run_dir=run_dir, stop_after="9 steps")
    after_on_0, after_on_1 = ranks(2, train_on_rank, run_dir=run_dir)

    on_0 = before_on_0 + after_on_0
    on_1 = before_on_1 + after_on_1
    assert [ids + ids_of_1 for ids, ids_of_1 in zip(on_0, on_1, strict=True)] == whole


def test_ranks_whose_samplers_differ_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    start = ranks.start(2, train_on_rank, run_dir=str(tmp_path / "run"), exchanged=False)
    outcomes = ranks.outcomes(start)
    assert [outcome.status for outcome in outcomes] != [0, 0]
    assert any("sampler-differs-on-ranks" in outcome.text for outcome in outcomes)
