"""Which rank is slow: by times made up here, and with real ranks of which one sleeps. (10 s)"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Container
from pathlib import Path

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

EVEN = {"data_wait": 0.01, "forward": 0.04, "backward": 0.02}  # seconds of a step of 0.1 s
STEPS = 100  # of a window
Work = Callable[[int, int], dict[str, float]]


def beat(rank: int, seconds: dict[str, float]) -> Beat:
    return Beat(rank, f"node{rank}", 1, stage="running", spent=dict(seconds))


def changes(
    work: Work,
    *,
    shares: list[int] | None = None,
    windows: int = 24,
    steps: int = STEPS,
) -> list[tuple[int, SlowRank]]:
    """What changes at the end of which window, if `work(rank, window)` is what differs from
    `EVEN`; `shares` are the micro-batches of each rank.
    """
    shares = shares or [1] * 4
    watch = SlowRanks(shares)
    nothing = dict.fromkeys(("step", "at_s", "measured", *EVEN), 0.0)
    spent = [dict(nothing) for _ in shares]
    found = []
    for window in range(windows + 1):
        beats = {rank: beat(rank, seconds) for rank, seconds in enumerate(spent)}
        for change in watch.changes(beats):
            found.append((window, change))
        for rank, seconds in enumerate(spent):
            of_a_step = {**EVEN, "at_s": 0.1, "step": 1, "measured": 1, **work(rank, window)}
            for name, value in of_a_step.items():
                seconds[name] += steps * value
    return found


def slow(
    seconds: dict[str, float],
    *,
    ranks: Container[int] = (2,),
    windows: Container[int] = range(10_000),
) -> Work:
    """These seconds of a step on some ranks in some windows, all else as in `EVEN`."""

    def differing(rank: int, window: int) -> dict[str, float]:
        if rank in ranks and window in windows:
            return seconds
        return {}

    return differing


@pytest.mark.parametrize(
    ("work", "own_s"), [("data_wait", 0.03), ("forward", 0.06), ("backward", 0.04)]
)
def test_a_slow_rank_is_named_after_six_windows_with_its_work_and_since_when(
    work: str, own_s: float
) -> None:
    ((window, rank),) = changes(slow({work: own_s}, windows=range(4, 99)))

    assert window == 4 + 6
    assert (rank.rank, rank.host, rank.work) == (2, "node2", work)
    assert (rank.since_step, rank.until_step) == (4 * STEPS, None)
    assert (rank.own_s, rank.median_s, rank.share) == pytest.approx((own_s, EVEN[work], 0.2))


def test_a_rank_that_recovers_is_told_once_with_the_step() -> None:
    first, last = changes(slow({"forward": 0.06}, windows=range(4, 13)))

    assert first[1].until_step is None
    assert (last[0], last[1].since_step, last[1].until_step) == (19, 4 * STEPS, 13 * STEPS)


def test_one_good_window_between_slow_ones_ends_nothing() -> None:
    all_but_one = set(range(99)) - {9}

    assert len(changes(slow({"forward": 0.06}, windows=all_but_one))) == 1


def test_five_slow_windows_in_a_row_begin_nothing() -> None:
    five_of_six = {window for window in range(99) if window % 6}

    assert changes(slow({"forward": 0.06}, windows=five_of_six), windows=60) == []


@pytest.mark.parametrize(
    ("work", "own_s"),
    [("forward", 0.0475), ("data_wait", 0.0149), ("backward", 0.0249)],
    ids=["a fifth less", "a twentieth of a step less", "another twentieth less"],
)
def test_just_below_a_threshold_no_rank_is_slow(work: str, own_s: float) -> None:
    assert changes(slow({work: own_s})) == []
    assert len(changes(slow({work: own_s + 0.001}))) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_of_two_and_of_three_ranks_the_slower_one_is_named(size: int) -> None:
    ((_, change),) = changes(slow({"forward": 0.06}, ranks=[0]), shares=[1] * size)

    assert change.rank == 0


def test_two_slow_ranks_of_four_are_both_named() -> None:
    found = changes(slow({"forward": 0.06}, ranks=[1, 2]))

    assert [change.rank for _, change in found] == [1, 2]


def test_a_rank_that_is_slow_in_two_works_is_named_with_the_one_that_costs_more() -> None:
    ((_, change),) = changes(slow({"data_wait": 0.05, "forward": 0.05}))

    assert change.work == "data_wait"


def test_two_differences_that_each_cost_little_are_not_one_that_costs_enough() -> None:
    assert changes(slow({"data_wait": 0.014, "backward": 0.024})) == []


SHARES = [1, 1, 2]


def work_by_share(rank: int, _: int) -> dict[str, float]:
    """Even times of each micro-batch; of the last backward pass of a step a rank notes only a
    part.
    """
    seconds = {name: own_s * SHARES[rank] for name, own_s in EVEN.items()}
    seconds["backward"] = [0.005, 0.005, 0.05][rank]
    return seconds


def test_a_rank_with_more_micro_batches_is_not_slow() -> None:
    assert changes(work_by_share, shares=SHARES) == []


def test_a_rank_that_takes_longer_for_each_micro_batch_is_slow() -> None:
    def work(rank: int, window: int) -> dict[str, float]:
        seconds = work_by_share(rank, window)
        if rank == 0:
            seconds["forward"] = 0.09
        return seconds

    found = changes(work, shares=SHARES)

    assert [(change.rank, change.work) for _, change in found] == [(0, "forward")]


@pytest.mark.parametrize("size", [2, 4])
def test_who_waits_for_a_slow_rank_within_the_forward_pass_is_not_slow(size: int) -> None:
    """As with a loss over the features of all ranks: who has its data first is there longer."""
    waits_for_data = slow({"data_wait": 0.04, "forward": 0.01}, ranks=[1])

    assert changes(waits_for_data, shares=[1] * size) == []


@pytest.mark.parametrize("size", [2, 8])
def test_noise_is_no_slow_rank(size: int) -> None:
    """Each window of each rank is up to 15 % off, and every tenth is up to twice as long, in three
    hours.
    """
    draw = random.Random(size)

    def noisy(rank: int, window: int) -> dict[str, float]:
        factor = draw.uniform(0.85, 1.15)
        if draw.random() < 0.1:
            factor = 1 + draw.random()
        return {work: own_s * factor for work, own_s in EVEN.items()}

    assert changes(noisy, shares=[1] * size, windows=1080) == []


@pytest.mark.parametrize(
    ("step_s", "steps", "window"), [(60.0, 1, 60), (0.1, 10, 60), (0.001, 1000, 60)]
)
def test_a_window_lasts_ten_steps_and_ten_seconds(step_s: float, steps: int, window: int) -> None:
    def work(rank: int, _: int) -> dict[str, float]:
        share = 0.6 if rank == 2 else 0.4
        return {"at_s": step_s, "forward": step_s * share}

    ((named_after, _),) = changes(work, steps=steps, windows=310)

    assert named_after == window


def beats_with_slow_rank_0(window: int) -> dict[int, Beat]:
    """Of two ranks, at the end of a window of steps of 0.1 s."""
    seconds = {
        "step": STEPS * window,
        "at_s": 1e4 + 10 * window,
        "measured": STEPS * window,
        **dict.fromkeys(EVEN, 0.0),
    }
    beats = {rank: beat(rank, seconds) for rank in range(2)}
    beats[0].spent["forward"] = 5.0 * window
    return beats


def test_beats_of_an_earlier_run_of_the_same_processes_do_not_count() -> None:
    watch = SlowRanks([1] * 2)
    earlier = {"step": 9e5, "at_s": 9e3, "measured": 9e5, **dict.fromkeys(EVEN, 9e4)}
    found = []
    for window in range(WINDOWS + 2):
        beats = beats_with_slow_rank_0(window)
        if window == 0:  # rank 1 has not opened its run yet
            beats[1].spent = earlier
        for change in watch.changes(beats):
            found.append((window, change.rank))

    assert found == [(WINDOWS + 1, 0)]


@pytest.mark.parametrize("missing", ["no beat", "no step yet", "another stage"])
def test_without_a_rank_nothing_is_compared(missing: str) -> None:
    watch = SlowRanks([1] * 2)
    for window in range(WINDOWS + 3):
        beats = beats_with_slow_rank_0(window)
        if missing == "no beat":
            del beats[1]
        elif missing == "no step yet":
            beats[1].spent = {}
        else:
            beats[1].stage = "building"

        assert list(watch.changes(beats)) == []


# --- real ranks -----------------------------------------------------------------------------------


class SleepingRows:
    """A data set that calls `sleep` at every second sample."""

    def __init__(self, sleep: Callable[[str], None]) -> None:
        self.inputs = torch.randn(64, 4)
        self.sleep = sleep

    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample % 2:
            self.sleep("data_wait")
        return self.inputs[sample]


def train_with_sleeps(*, where: str, accumulate: int, strategy: str, run_dir: str) -> list[int]:
    """Train where rank 1 sleeps in one kind of work, or "nowhere", or both ranks "everywhere"; or
    where it "recovers": from step 30 on its forward pass takes no longer than that of rank 0.
    """
    rank_checks.WINDOW_S = 0.1
    rank_checks.STEPS = 3
    # fewer, because ranks that sleep differ more than by chance
    rank_checks.WINDOWS = 6 if where == "everywhere" else 3
    world = joined("cpu")
    world.heartbeat.every_s = 0.05
    slow_work = "forward" if where == "recovers" else where

    def sleep(work: str) -> None:
        step = world.heartbeat.beat.step
        if step < 2:
            return
        if where == "everywhere":
            time.sleep(0.05)
            return
        both_sleep = where == "recovers" and step >= 30
        if work == slow_work and (world.rank == 1 or both_sleep):
            time.sleep(0.03)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        sleep("forward")
        outputs = model(batch)
        outputs.register_hook(lambda _: sleep("backward"))
        return outputs.square().mean()

    run = sf.Run(
        model=lambda: nn.Linear(4, 4),
        loss=loss,
        train_data=SleepingRows(sleep),
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
    started = ranks.start(
        size,
        train_with_sleeps,
        where=where,
        accumulate=accumulate,
        strategy=strategy,
        run_dir=str(tmp_path / "run"),
    )
    outcomes = ranks.outcomes(started)
    assert [outcome.status for outcome in outcomes] == [0] * size, outcomes[0].text

    named = set()
    for record in records(tmp_path / "run/metrics.jsonl"):
        if record["kind"] == "slow_rank":
            named.add((record["rank"], record["work"]))
    findings = sf.load(tmp_path / "run").diagnose()
    severities = [finding.severity for finding in findings if finding.name == "slow-rank"]
    printed = outcomes[0].text
    recovery_lines = lines_naming(printed, "rank 1 ", "since step ")

    is_compared = where == "data_wait" or (where in ("forward", "backward") and strategy != "fsdp")
    if where == "recovers":
        assert named == {(1, "forward")}
        assert severities == ["note"]
        assert recovery_lines
    elif is_compared:
        assert named == {(1, where)}
        assert severities == ["warning"]
        assert "slow-rank" in printed
        assert not recovery_lines
    else:
        assert named == set()
        assert severities == []
        assert "slow-rank" not in printed
        assert not recovery_lines
