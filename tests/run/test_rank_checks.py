"""Which rank is slow: by times made up here, and with real ranks of which one sleeps. (10 s)"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from rank_processes import Ranks
from stated import lines_naming
from surefoot.distributed.liveness import Beat
from surefoot.distributed.world import joined
from surefoot.run import rank_checks
from surefoot.run.rank_checks import WINDOWS, SlowRank, SlowRanks
from surefoot.tracking.jsonl import records

EVEN = {
    "data_wait": 0.01,
    "forward": 0.04,
    "backward": 0.02,
}  # seconds of each step, which takes 0.1 s in all
Work = Callable[[int, int], dict[str, float]]


def changes(
    work: Work,
    *,
    size: int = 4,
    windows: int = 24,
    steps: int = 100,
    shares: list[int] | None = None,
) -> list[tuple[int, SlowRank]]:
    """What is told at the end of which window, if `work(rank, window)` is what differs from
    `EVEN`.
    """
    watch = SlowRanks(shares or [1] * size)
    found = []
    spent = {
        rank: {"step": 0.0, "at_s": 0.0, "measured": 0.0, **dict.fromkeys(EVEN, 0.0)}
        for rank in range(size)
    }
    for window in range(windows + 1):
        beats = {
            rank: Beat(rank, f"node{rank}", 1, stage="running", spent=dict(own))
            for rank, own in spent.items()
        }
        found += [(window, slow) for slow in watch.changes(beats)]
        for rank, own in spent.items():
            passed = {**EVEN, "at_s": 0.1, "step": 1, "measured": 1, **work(rank, window)}
            for name, value in passed.items():
                own[name] += steps * value
    return found


def slow(work: str, own_s: float, *, rank: int = 2, start: int = 4, stop: int = 99) -> Work:
    return lambda which, window: {work: own_s} if which == rank and start <= window < stop else {}


@pytest.mark.parametrize(
    ("work", "own_s"), [("data_wait", 0.03), ("forward", 0.06), ("backward", 0.04)]
)
def test_a_slow_rank_is_named_after_six_windows_with_its_work_and_since_when(
    work: str, own_s: float
) -> None:
    ((window, found),) = changes(slow(work, own_s))
    assert window == 10
    assert (found.rank, found.host, found.work, found.since_step, found.until_step) == (
        2,
        "node2",
        work,
        400,
        None,
    )
    assert (found.own_s, found.median_s, found.share) == pytest.approx((own_s, EVEN[work], 0.2))


def test_a_rank_that_recovers_is_told_once_with_the_step() -> None:
    first, last = changes(slow("forward", 0.06, stop=13))
    assert first[1].until_step is None
    assert (last[0], last[1].since_step, last[1].until_step) == (19, 400, 1300)


def test_one_good_window_between_slow_ones_ends_nothing_and_one_slow_window_begins_nothing() -> (
    None
):
    assert (
        len(changes(lambda rank, window: {"forward": 0.06} if rank == 2 and window != 9 else {}))
        == 1
    )
    assert (
        changes(
            lambda rank, window: {"forward": 0.06} if rank == 2 and window % 6 else {}, windows=60
        )
        == []
    )


@pytest.mark.parametrize(
    ("work", "own_s"),
    [("forward", 0.0475), ("data_wait", 0.0149), ("backward", 0.0249)],
    ids=["a fifth less", "a twentieth of a step less", "another twentieth less"],
)
def test_just_below_a_threshold_no_rank_is_slow(work: str, own_s: float) -> None:
    assert changes(slow(work, own_s)) == []
    assert len(changes(slow(work, own_s + 0.001))) == 1


def test_of_two_and_of_three_ranks_the_slower_one_is_named() -> None:
    for size in (2, 3):
        ((_, found),) = changes(slow("forward", 0.06, rank=0), size=size)
        assert found.rank == 0


def test_two_slow_ranks_of_four_are_both_named() -> None:
    found = changes(lambda rank, window: {"forward": 0.06} if rank in (1, 2) else {})
    assert [each.rank for _, each in found] == [1, 2]


def test_a_rank_that_is_slow_in_two_works_is_named_with_the_one_that_costs_more() -> None:
    ((_, found),) = changes(
        lambda rank, window: {"data_wait": 0.05, "forward": 0.05} if rank == 3 else {}
    )
    assert found.work == "data_wait"


def test_a_rank_with_more_micro_batches_is_not_slow_but_one_that_takes_longer_for_each_is() -> None:
    def work(rank: int, _: int) -> dict[str, float]:
        passes = [1, 1, 2][rank]
        return {name: own_s * passes for name, own_s in EVEN.items()} | {
            "backward": 0.005 if passes == 1 else 0.05
        }

    assert changes(work, size=3, shares=[1, 1, 2]) == []
    both = changes(
        lambda rank, window: work(rank, window) | ({"forward": 0.09} if rank == 0 else {}),
        size=3,
        shares=[1, 1, 2],
    )
    assert [(slow.rank, slow.work) for _, slow in both] == [(0, "forward")]


def test_two_differences_that_each_cost_little_are_not_one_that_costs_enough() -> None:
    assert (
        changes(lambda rank, window: {"data_wait": 0.014, "backward": 0.024} if rank == 3 else {})
        == []
    )


def test_beats_of_an_earlier_run_of_the_same_processes_do_not_count() -> None:
    watch = SlowRanks([1] * 2)
    found = []
    for window in range(WINDOWS + 2):
        own = {
            "step": 100 * window,
            "at_s": 1e4 + 10 * window,
            "measured": 100 * window,
            **dict.fromkeys(EVEN, 0.0),
        }
        beats = {rank: Beat(rank, "here", 1, stage="running", spent=dict(own)) for rank in range(2)}
        beats[0].spent["forward"] = 5.0 * window
        if window == 0:  # rank 1 has not opened its run yet
            beats[1].spent = {"step": 9e5, "at_s": 9e3, "measured": 9e5, **dict.fromkeys(EVEN, 9e4)}
        found += [(window, slow.rank) for slow in watch.changes(beats)]
    assert found == [(WINDOWS + 1, 0)]


def test_who_waits_for_a_slow_rank_within_the_forward_pass_is_not_slow() -> None:
    """As with a loss over the features of all ranks: who has its data first is there longer."""
    assert (
        changes(lambda rank, window: {"data_wait": 0.04, "forward": 0.01} if rank == 1 else {})
        == []
    )
    assert (
        changes(
            lambda rank, window: {"data_wait": 0.04, "forward": 0.01} if rank == 1 else {}, size=2
        )
        == []
    )


def test_noise_is_no_slow_rank() -> None:
    """Each window of each rank is up to 15 % off, and every tenth is up to twice as long, in three
    hours.
    """
    draw = random.Random(1)

    def noisy(rank: int, window: int) -> dict[str, float]:
        factor = 1 + draw.random() if draw.random() < 0.1 else draw.uniform(0.85, 1.15)
        return {work: value * factor for work, value in EVEN.items()}

    for size in (2, 8):
        assert changes(noisy, size=size, windows=1080) == []


@pytest.mark.parametrize(
    ("step_s", "steps", "window"), [(60.0, 1, 60), (0.1, 10, 60), (0.001, 1000, 60)]
)
def test_a_window_lasts_ten_steps_and_ten_seconds(step_s: float, steps: int, window: int) -> None:
    def work(rank: int, _: int) -> dict[str, float]:
        return {"at_s": step_s, "forward": step_s * (0.6 if rank == 2 else 0.4)}

    assert [each[0] for each in changes(work, steps=steps, windows=310)] == [window]


@pytest.mark.parametrize("missing", ["no beat", "no step yet", "another stage"])
def test_without_a_rank_nothing_is_compared(missing: str) -> None:
    watch = SlowRanks([1] * 2)
    for window in range(9):
        own = {
            "step": 100 * window,
            "at_s": 10.0 * window,
            "measured": 100 * window,
            **dict.fromkeys(EVEN, 0.0),
        }
        beats = {rank: Beat(rank, "here", 1, stage="running", spent=dict(own)) for rank in range(2)}
        beats[0].spent["forward"] = 9.0 * window
        if missing == "no beat":
            del beats[1]
        elif missing == "no step yet":
            beats[1].spent = {}
        else:
            beats[1].stage = "building"
        assert list(watch.changes(beats)) == []


# --- real ranks -----------------------------------------------------------------------------------


class Slow:
    """A data set that sleeps."""

    def __init__(self, sleep: Callable[[str], None]) -> None:
        self.inputs = torch.randn(64, 4)
        self.sleep = sleep

    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample % 2:
            self.sleep("data_wait")
        return self.inputs[sample]


def trained(*, where: str, accumulate: int, strategy: str, run_dir: str) -> list[Any]:
    rank_checks.WINDOW_S = 0.1
    rank_checks.STEPS = 3
    # fewer, because ranks that sleep differ more than by chance
    rank_checks.WINDOWS = 6 if where == "everywhere" else 3
    world = joined("cpu")
    world.heartbeat.every_s = 0.05

    def sleep(work: str) -> None:
        is_over = where == "recovers" and world.heartbeat.beat.step >= 30
        begins = "forward" if where == "recovers" else where
        if world.heartbeat.beat.step >= 2 and (
            where == "everywhere" or (begins == work and (world.rank == 1 or is_over))
        ):
            time.sleep(0.05 if where == "everywhere" else 0.03)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        sleep("forward")
        outputs = model(batch)
        outputs.register_hook(lambda _: sleep("backward"))
        return outputs.square().mean()

    run = sf.Run(
        model=lambda: nn.Linear(4, 4),
        loss=loss,
        train_data=Slow(sleep),
        batch_size=2 * accumulate * world.size,
        micro_batch_size=2,
        length="70 steps" if where == "recovers" else "50 steps",
        log_every="1 steps",
        optimizer=sf.optim.sgd(lr=0.01),
        exact_sums=strategy == "exact",
        parallel="fsdp" if strategy == "fsdp" else "auto",
        device="cpu",
        precision="fp32",
        check_state=False,
        run_dir=run_dir,
        report=False,
    )
    with run:
        for step in run.steps():
            sleep("loop body")
            sf.forward_backward(step)
            sf.update(step)
    return [run.state.step]


@pytest.mark.fast("forward-2-1-exact")
@pytest.mark.parametrize(
    ("where", "size", "accumulate", "strategy"),
    [
        ("forward", 2, 1, "exact"),
        ("forward", 3, 1, "exact"),
        ("data_wait", 2, 1, "exact"),
        ("backward", 2, 1, "exact"),
        ("forward", 2, 2, "ddp"),
        ("backward", 2, 2, "ddp"),
        ("data_wait", 2, 1, "fsdp"),
        ("forward", 2, 1, "fsdp"),
        ("recovers", 2, 1, "exact"),
        ("loop body", 2, 1, "exact"),
        ("nowhere", 2, 1, "exact"),
        ("everywhere", 2, 1, "exact"),
    ],
)
def test_of_real_ranks_the_one_that_sleeps_is_named(
    ranks: Ranks, tmp_path: Path, where: str, size: int, accumulate: int, strategy: str
) -> None:
    """FSDP waits for other ranks within the forward pass, which is then not compared; the body of a
    loop is not, either.
    """
    place = ranks.start(
        size,
        trained,
        where=where,
        accumulate=accumulate,
        strategy=strategy,
        run_dir=str(tmp_path / "run"),
    )
    outcomes = ranks.outcomes(place)
    assert [outcome.status for outcome in outcomes] == [0] * size, outcomes[0].text
    named = {
        (each["rank"], each["work"])
        for each in records(tmp_path / "run/metrics.jsonl")
        if each["kind"] == "slow_rank"
    }
    findings = [each for each in sf.load(tmp_path / "run").diagnose() if each.name == "slow-rank"]
    is_compared = where == "data_wait" or (where in ("forward", "backward") and strategy != "fsdp")
    recovers = where == "recovers"
    assert named == ({(1, "forward" if recovers else where)} if is_compared or recovers else set())
    assert [each.severity for each in findings] == ["note" if recovers else "warning"] * len(named)
    (again, *_) = [*lines_naming(outcomes[0].text, "rank 1 ", "since step "), None]
    assert (again is not None) is recovers
    assert recovers or ("slow-rank" in outcomes[0].text) is bool(named)
