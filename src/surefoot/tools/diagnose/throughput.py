"""Checks of time: waiting for data, evaluation, checkpoints, and a throughput that falls or
varies.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.config.durations import seconds
from surefoot.errors import ConfigError
from surefoot.tools.diagnose.finding import Severity, Verdict, check, need, well, wrong
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.statistics import first_and_last_third, level, noise, trend
from surefoot.tracking.format import three_digits
from surefoot.tracking.record import Record

FEWEST = 12
"""Minimum number of throughput records: thirds of four."""
LEAST_S = 1.0
"""Minimum total time. In a shorter run, no overhead matters."""
WORTH_S = 60.0
"""Total time from which long evaluations or saves are a warning. A shorter run is a trial."""
LONG_ENOUGH_S = 3.0
"""Minimum time of all steps for a verdict on speed. Other processes come and go within seconds."""
WAITING = 0.1
"""Minimum fraction of step time spent waiting for data. Less is noise of a shared machine."""
MUCH_WAITING = 0.3
"""Fraction of step time spent waiting for data that is a warning."""
EVALUATING = 0.25
"""Maximum fraction of total time for evaluation. Validation usually takes a few percent."""
SAVING = 0.1
"""Maximum fraction of total time for saves. Saves run in the background, and training waits only
for copies.
"""
WANTED = 0.05
"""Target fraction of total time for evaluations or saves after the suggested change."""
FELL = 0.8
"""Ratio of the last third to the first third. Other load on the machine rarely costs a fifth for a
third of a run.
"""
SURE = 3.0
"""Minimum significance of a trend in standard deviations. One run in a thousand exceeds 3 by
chance.
"""
UNEVEN = 0.25
"""Ratio of the deviation between adjacent records to the level. Batches of different lengths cause
about a tenth.
"""

_WORK = {
    "data_wait": "for its data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
}
# the largest ratio of a slow rank that is printed: the median of a wait for data can be 0
_BEYOND = 100.0
_OTHERS = 4  # slow ranks in the evidence, besides the newest


@check("data-bound")
def data_bound(history: History) -> Verdict:
    """Measure the fraction of step time spent waiting for data, without the first record, in which
    workers start.
    """
    described = history.described
    waited_s = _total_after_first(history, "data_wait_s")
    user_s = _total_after_first(history, "user_s")
    # samples are loaded while a loop's body runs, too
    trained_s = _total_after_first(history, "training_s") + user_s
    count = max(0, len(history.column("data_wait_s")) - 1)
    need(
        count >= FEWEST // 4 and waited_s + trained_s >= LEAST_S,
        f"{count} records with {waited_s + trained_s:.1f} s of training are too few",
    )
    share = waited_s / (waited_s + trained_s)
    severity: Severity = "warning" if share >= MUCH_WAITING else "note"
    well(share < WAITING, f"steps spend {share:.1%} of their time waiting for data")
    data = described.identity.get("data")
    if isinstance(data, dict) and data.get("type") == "Tape":
        return wrong(
            severity,
            f"Steps spend {share:.0%} of their time waiting for the rows of the stream.",
            (f"{waited_s:.1f} s of waiting, {trained_s:.1f} s of training",),
            causes=(
                "one process reads the source, more slowly than the model trains",
                "rows are decoded in the training process",
            ),
            try_=("a source that gives rows faster; workers do not read a source",),
            numbers={"share": share},
        )
    workers = workers_needed(waited_s, trained_s, workers=described.workers)
    processors = described.processors or workers
    remedies = []
    if described.workers < processors:
        remedies.append(described.typed("workers", min(workers, processors)))
    if workers > processors:
        remedies.append(
            f"{workers} workers would be needed, but this machine has {processors} processors: also make samples cheaper to load"
        )
    remedies.append("smaller or preprocessed files, less augmentation, data in memory as tensors")
    and_loop = " and of the loop" if user_s else ""
    return wrong(
        severity,
        f"Steps spend {share:.0%} of their time waiting for data.",
        (
            f"{waited_s:.1f} s of waiting, {trained_s:.1f} s of training{and_loop}, "
            f"with {described.workers} workers",
        ),
        causes=(
            "samples load more slowly than the model trains on them: decoding, augmentation, many small files, a slow disk",
        ),
        try_=remedies,
        numbers={"share": share, "workers": workers},
    )


def _total_after_first(history: History, name: str) -> float:
    """Return the sum of a time over all records but the first, in which workers start."""
    spent_s = history.column(name).value[1:]
    return float(spent_s[np.isfinite(spent_s)].sum())


def workers_needed(waited_s: float, trained_s: float, *, workers: int) -> int:
    """Return the number of workers that can load a step's data within its training time, at least
    one more than now.

    Without workers, the wait is the loading time of one process. With workers, each worker loads
    for the complete step time.

    >>> workers_needed(3.0, 1.0, workers=0), workers_needed(1.0, 1.0, workers=2)
    (3, 4)
    """
    reading_s = workers * (waited_s + trained_s) if workers else waited_s
    return max(workers + 1, math.ceil(reading_s / max(trained_s, 1e-9) - 1e-9))


@check("evaluating-too-long")
def evaluating_too_long(history: History) -> Verdict:
    """Measure the fraction of time spent on evaluations and samples."""
    return _overhead(
        history, "evaluating_s", EVALUATING, doing="Evaluating", setting="evaluate_every"
    )


@check("saving-too-long")
def saving_too_long(history: History) -> Verdict:
    """Measure the fraction of time spent waiting for checkpoints."""
    return _overhead(history, "saving_s", SAVING, doing="Saving", setting="save_every")


def _speeds(history: History) -> Series:
    """Return the speeds since the last change of what a step computes, without the first one."""
    speed = history.column("targets_per_s").finite.since(history.described.steps_changed_at)
    return speed.where(np.arange(len(speed)) > 0)


def _enough_speeds(history: History) -> None:
    count = len(_speeds(history))
    trained_s = history.total("training_s")
    need(
        count >= FEWEST and trained_s + history.total("data_wait_s") >= LONG_ENOUGH_S,
        f"{count} throughput records, or {trained_s:.1f} s of training, are too few",
    )


@check("falling-throughput", needs=_enough_speeds)
def falling_throughput(history: History) -> Verdict:
    """Compare targets per second in the first and last third of the run."""
    speed = _speeds(history)
    before, now = first_and_last_third(speed.value)
    sure = -trend(speed.value)
    frozen = history.column("frozen_tensors")
    is_same = len(frozen) in (0, history.train_count) and len(set(frozen.value)) <= 1
    well(
        not is_same,
        "parameters were frozen or unfrozen during the run, which changes the time of a step",
    )
    well(
        now > FELL * before or sure < SURE,
        f"{three_digits(before)} targets/s at first, {three_digits(now)} now",
    )
    since = history.described.steps_changed_at
    waits = _growth(history.column("data_wait_s").since(since).value)
    trains = _growth(history.column("training_s").since(since).value)
    causes = [
        "something that grows with the steps: a list in the loss or the loop, hooks that are added repeatedly, a stored history",
        "the machine: other processes, heat, swapped memory",
    ]
    if waits > trains:
        causes.insert(0, "loading the data: waiting has grown more than training")
    return wrong(
        # a healthy run beside eight busy processes fell from 1,740 to 1,320 tokens/s in 160 steps
        "note",
        f"Throughput falls: from {three_digits(before)} to {three_digits(now)} targets per second.",
        (
            f"medians of the first and last third of {len(speed)} records; the trend is {sure:.1f} standard deviations",
            f"in the last third, training took {trains:.2g}x as long as in the first, waiting {waits:.2g}x",
        ),
        causes=causes,
        try_=(
            history.described.profile(),
            "check the memory use, and which objects your own code keeps",
        ),
        step=int(speed.step[len(speed) // 3]),
        numbers={"before": before, "now": now},
    )


@check("jittering-throughput", needs=_enough_speeds)
def jittering_throughput(history: History) -> Verdict:
    """Measure the variation of targets per second between adjacent records."""
    speed = _speeds(history).value
    middle = level(speed)
    share = noise(speed) / middle if middle > 0 else 0.0
    well(
        share < UNEVEN,
        f"neighboring records differ by {share:.0%} of {three_digits(middle)} targets/s",
    )
    remedies = [f"no change if the machine is shared; otherwise, {history.described.profile()}"]
    if history.windows.value[-1] < 50:
        remedies.append(history.described.typed("log_every", "50 steps"))
    return wrong(
        "note",
        f"Throughput jitters: neighboring records differ by {share:.0%} of {three_digits(middle)} targets per second.",
        (f"slowest record {three_digits(speed.min())}, fastest {three_digits(speed.max())}",),
        causes=(
            "other processes on this machine",
            "samples of very different length or cost",
            "records of few steps, in which one slow step shows",
        ),
        try_=remedies,
        numbers={"share": share},
    )


@check("slow-rank")
def slow_rank(history: History) -> Verdict:
    """Report the ranks that rank 0 recorded as slower than the others (`run/rank_checks.py`)."""
    slow = _slow_ranks(history)
    well(not slow, "no slow rank is recorded")
    slow_now = [rank for rank in slow if rank.end is None]
    newest = (slow_now or slow)[-1]
    record = newest.record
    host = record.get("host")
    if newest.end is None:
        severity: Severity = "warning"
        takes = "takes"
    else:
        severity = "note"
        takes = "took"
    ratio = _BEYOND
    times = f"over {_BEYOND:.3g}x"
    if record["own_s"] < _BEYOND * record["median_s"]:
        ratio = record["own_s"] / record["median_s"]
        times = f"{ratio:.3g}x"
    if record["work"] == "data_wait":
        cause = "a slow disk or network of its machine, or fewer processors for its workers"
    else:
        cause = "other processes on its machine, heat, a slower processor, or fewer threads"
    others = [rank for rank in slow if rank is not newest]
    latest_first = others[::-1][:_OTHERS]
    return wrong(
        severity,
        f"Rank {record['rank']} {takes} {times} as long as the median {newest.in_work},"
        f" {newest.steps}.",
        [rank.in_words for rank in (newest, *latest_first)],
        causes=(
            cause,
            "code that only this rank runs, or samples that cost more than those of other ranks",
        ),
        try_=(f"check the load and the temperature of {host}, and its disks",),
        step=record["since_step"],
        numbers={"rank": record["rank"], "times": ratio, "share": record["share"]},
    )


@dataclass(frozen=True)
class _SlowRank:
    record: Record
    end: int | None  # the step from which on the rank is no longer slow

    @property
    def in_work(self) -> str:
        return _WORK[self.record["work"]]

    @property
    def steps(self) -> str:
        since = self.record["since_step"]
        return (
            f"since step {since:,}" if self.end is None else f"from step {since:,} to {self.end:,}"
        )

    @property
    def in_words(self) -> str:
        record = self.record
        own_ms = 1e3 * record["own_s"]
        median_ms = 1e3 * record["median_s"]
        return (
            f"rank {record['rank']} on {record.get('host')}, {self.steps}: {own_ms:.3g} ms per step"
            f" {self.in_work}, {median_ms:.3g} ms in the median; the difference is"
            f" {record['share']:.0%} of a step"
        )


def _slow_ranks(history: History) -> list[_SlowRank]:
    newest = {}  # a later record of the same rank replaces the earlier one
    for record in history.records.slow_ranks:
        if _is_slow_rank(record):
            newest[record["rank"], record["since_step"]] = record
    slow = []
    for record in newest.values():
        end = record.get("until_step")
        if end is None:  # a resume begins with other processes
            end = next((step for step in history.resumed if step >= record["step"]), None)
        slow.append(_SlowRank(record, end))
    return slow


def _is_slow_rank(record: Record) -> bool:
    if str(record.get("work")) not in _WORK:
        return False
    numbers = [record.get(name) for name in ("rank", "since_step", "own_s", "median_s", "share")]
    numbers.append(record.get("until_step", 0))  # absent while the rank is slow
    return all(isinstance(number, int | float) for number in numbers)


def _overhead(history: History, column: str, limit: float, *, doing: str, setting: str) -> Verdict:
    spent_s = history.total(column)
    phases = ("training_s", "data_wait_s", "evaluating_s", "saving_s")
    all_s = sum(history.total(phase) for phase in phases)
    need(
        all_s >= LEAST_S and history.train_count >= 2,
        f"{all_s:.1f} s in {history.train_count} records are too few",
    )
    share = spent_s / all_s
    well(share < limit, f"{doing.lower()} takes {share:.1%} of the time")
    cause = f"{doing.lower()} too often: {setting}"
    interval = history.described.present(setting)
    if interval is not None:
        cause += f" is {interval}"
    times = share * (1 - WANTED) / (WANTED * (1 - share))  # longer intervals, to reach WANTED
    if column == "evaluating_s":
        remedy = "a smaller part of the split during training, all of it at the end (Split(at_end=True)); a larger Split(batch_size=...)"
    else:
        remedy = "fewer evaluations, if a best checkpoint is kept: each evaluation that improves the metric saves one"
    return wrong(
        "warning" if all_s >= WORTH_S else "note",
        f"{doing} takes {share:.0%} of the time.",
        (f"{spent_s:.1f} s of {all_s:.1f} s",),
        causes=(cause,),
        try_=(_more_seldom(history, setting, times), remedy),
        numbers={"share": share},
    )


def _more_seldom(history: History, setting: str, times: float) -> str:
    if setting == "save_every":
        interval = str(history.described.present(setting))
        if interval == "auto":
            return history.described.typed(setting, "15 min")
        if _is_time(interval):
            return ""  # other saves are the cause, such as those of best checkpoints
        return history.described.typed(setting, "auto")
    evaluated_at = history.records.scores.steps
    between = float(history.step)
    if len(evaluated_at) > 1:
        between = float(np.median(np.diff(evaluated_at)))
    wanted = min(math.ceil(between * times), history.described.steps or history.step)
    return history.described.typed(setting, f"{wanted} steps")


def _growth(values: NDArray[np.float64]) -> float:
    """Return the ratio of the last third to the first, without the first record."""
    third = max(1, (len(values) - 1) // 3)
    before = level(values[1 : 1 + third])
    now = level(values[-third:])
    return now / before if before > 0 else 1.0


def _is_time(interval: str) -> bool:
    try:
        seconds(interval)
    except ConfigError:
        return False
    return True
