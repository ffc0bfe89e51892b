"""The checks of several ranks at each training record: equal weights, and equal speed.

A slow rank is found by the times in which each rank works by itself, which heartbeats report
(`distributed/own_times.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import TYPE_CHECKING

from torch import nn

from surefoot.config.train_settings import Timetable
from surefoot.distributed.consistency import compare_when_due
from surefoot.distributed.liveness import Beat
from surefoot.distributed.own_times import Work
from surefoot.distributed.world import World

if TYPE_CHECKING:
    from surefoot.tracking.logger import Journal

WINDOW_S = 10.0
"""Minimum time of a window. Beats are a second old."""
STEPS = 10
"""Minimum number of steps in a window. One long step is no slow rank."""
WINDOWS = 6
"""Consecutive windows until a rank counts as slow, or as recovered. Chance makes a window in ten
slow, and six in a row never.
"""
TIMES = 1.2
"""Minimum ratio to the median. Equal processors differ by a few percent."""
SHARE = 0.05
"""Minimum fraction of a step's time that the rank adds. Less is not worth a look."""
_WORK: tuple[Work, ...] = ("data_wait", "forward", "backward")


@dataclass(frozen=True)
class SlowRank:
    """A rank that needs longer than the median of the ranks for a kind of work, in seconds per step
    of the largest share.
    """

    rank: int
    host: str
    work: Work
    since_step: int
    own_s: float
    median_s: float
    share: float  # of the step's time: the excess over the median
    until_step: int | None = None  # if the rank has recovered


class SlowRanks:
    """The ranks that are slower than the others in several consecutive windows. `micro_batches` has
    the number of each rank in a step.
    """

    def __init__(self, micro_batches: Sequence[int]) -> None:
        # from a rank's times to those of the largest share
        self.factors = [max(micro_batches) / count for count in micro_batches]
        # "backward" has only a part of a step's last pass, so times of unequal shares cannot be
        # compared
        has_equal_shares = len({*micro_batches}) == 1
        self.works = _WORK if has_equal_shares else _WORK[:2]
        self.before: dict[int, Beat] = {}  # at the start of the window
        # the kinds of work in which a rank was slow, by rank, of each latest window
        self.latest: dict[int, deque[dict[Work, SlowRank]]] = {}
        for rank in range(len(micro_batches)):
            self.latest[rank] = deque(maxlen=WINDOWS)
        # the first step of each latest window, by rank
        self.starts: deque[dict[int, int]] = deque(maxlen=WINDOWS)
        self.slow: dict[int, SlowRank] = {}

    def changes(self, beats: Mapping[int, Beat]) -> Iterator[SlowRank]:
        """Yield the ranks that have become slow or have recovered, given the latest beat of every
        rank.
        """
        beats = {
            rank: beats[rank]
            for rank in self.latest
            if rank in beats and beats[rank].stage == "running"
        }
        if len(beats) < len(self.latest) or not all(beat.spent for beat in beats.values()):
            return
        for rank, before in self.before.items():
            if beats[rank].spent["step"] < before.spent["step"]:
                self.before = {}  # they were beats of an earlier run of these processes
                break
        if not self.before:
            self.before = beats
        window = {rank: _since(self.before[rank], beat) for rank, beat in beats.items()}
        for spent in window.values():
            if spent["measured"] < STEPS or spent["at_s"] < WINDOW_S:
                return
        self.starts.append({rank: int(beat.spent["step"]) for rank, beat in self.before.items()})
        self.before = beats
        per_step = self._per_step(window)
        for rank, slow_work in _slow_work(beats, per_step, window):
            latest = self.latest[rank]
            latest.append(slow_work)
            if len(latest) < WINDOWS:
                continue
            since_step = self.starts[0][rank]
            if rank in self.slow:
                if not any(latest):
                    yield replace(self.slow.pop(rank), until_step=since_step)
                continue
            always_slow = set.intersection(*(set(works) for works in latest))
            if always_slow:
                worst = max((slow_work[work] for work in always_slow), key=lambda slow: slow.share)
                self.slow[rank] = replace(worst, since_step=since_step)
                yield self.slow[rank]

    def _per_step(self, window: Mapping[int, Mapping[str, float]]) -> dict[int, dict[Work, float]]:
        """Return the seconds per step of the largest share, by rank and kind of work."""
        per_step: dict[int, dict[Work, float]] = {}
        for rank, spent in window.items():
            factor = self.factors[rank]
            per_step[rank] = {work: spent[work] / spent["measured"] * factor for work in self.works}
        return per_step


def _since(before: Beat, beat: Beat) -> dict[str, float]:
    """Return what a rank has spent between two beats."""
    return {name: value - before.spent[name] for name, value in beat.spent.items()}


def _slow_work(
    beats: Mapping[int, Beat],
    per_step: Mapping[int, Mapping[Work, float]],
    window: Mapping[int, Mapping[str, float]],
) -> Iterator[tuple[int, dict[Work, SlowRank]]]:
    """Yield each rank with the kinds of work in which it was slow in one window, given its times
    per step and in all of the window.
    """
    # the lower median: of two ranks, the other one
    medians: dict[Work, float] = {}
    for work in per_step[0]:
        medians[work] = median_low(times[work] for times in per_step.values())
    median_of_all_s = median_low(sum(times.values()) for times in per_step.values())
    for rank, times in per_step.items():
        step_s = window[rank]["at_s"] / window[rank]["step"]
        if sum(times.values()) - median_of_all_s < SHARE * step_s:
            # a loss that waits for other ranks takes longer where data come sooner, and not because
            # of this rank
            yield rank, {}
            continue
        slow_work = {}
        for work, median_s in medians.items():
            excess_s = times[work] - median_s
            if times[work] >= TIMES * median_s and excess_s >= SHARE * step_s:
                slow_work[work] = SlowRank(
                    rank=rank,
                    host=beats[rank].host,
                    work=work,
                    since_step=-1,
                    own_s=times[work],
                    median_s=median_s,
                    share=excess_s / step_s,
                )
        yield rank, slow_work


class RankChecks:
    """The checks of one session of a run with several ranks."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        world: World,
        times: Timetable,
        *,
        micro_batches: Sequence[int],
        journal: "Journal",
        say: Callable[[str], None],
    ) -> None:
        self.models = models
        self.world = world
        self.times = times
        self.journal = journal
        self.say = say
        self.compared: int | None = None  # step of the last weight comparison
        self.slow_ranks = SlowRanks(micro_batches)

    def check(self, done: int) -> None:
        """Compare weights if this is due, and record on rank 0 which ranks are slow. Collective."""
        self.compared = compare_when_due(
            self.models,
            self.world,
            self.times.every["check_ranks_every"],
            compared=self.compared,
            done=done,
            last=self.times.length.steps,
        )
        if self.world.is_main:
            for slow in self.slow_ranks.changes(self.world.heartbeat.known_beats()):
                values = {name: value for name, value in asdict(slow).items() if value is not None}
                self.journal.write({"kind": "slow_rank", "step": done, **values})
                if slow.until_step is not None:
                    self.say(
                        f"rank {slow.rank} is as fast as the others again, since step {slow.until_step:,}"
                    )
