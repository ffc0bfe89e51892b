"""Checks of time: waiting for data, evaluation, checkpoints, and a throughput that falls or
varies.
"""

import math
from contextlib import suppress

import numpy as np

from surefoot.config.durations import seconds
from surefoot.errors import ConfigError
from surefoot.tools.diagnose.finding import Verdict, check, need, well, wrong
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
    waiting, training, user = (
        history.column(f"{phase}_s").value[1:] for phase in ("data_wait", "training", "user")
    )
    waited_s, trained_s, user_s = (
        float(spent[np.isfinite(spent)].sum()) for spent in (waiting, training, user)
    )
    trained_s += user_s  # samples are loaded while a loop's body runs, too
    need(
        len(waiting) >= FEWEST // 4 and waited_s + trained_s >= LEAST_S,
        f"{len(waiting)} records with {waited_s + trained_s:.1f} s of training are too few",
    )
    share = waited_s / (waited_s + trained_s)
    well(share < WAITING, f"steps spend {share:.1%} of their time waiting for data")
    data = described.identity.get("data")
    if isinstance(data, dict) and data.get("type") == "Tape":
        return wrong(
            "warning" if share >= MUCH_WAITING else "note",
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
    return wrong(
        "warning" if share >= MUCH_WAITING else "note",
        f"Steps spend {share:.0%} of their time waiting for data.",
        (
            f"{waited_s:.1f} s of waiting, {trained_s:.1f} s of training{' and of the loop' if user_s else ''}, "
            f"with {described.workers} workers",
        ),
        causes=(
            "samples load more slowly than the model trains on them: decoding, augmentation, many small files, a slow disk",
        ),
        try_=(
            described.typed("workers", min(workers, processors))
            if described.workers < processors
            else "",
            f"{workers} workers would be needed, but this machine has {processors} processors: also make samples cheaper to load"
            if workers > processors
            else "",
            "smaller or preprocessed files, less augmentation, data in memory as tensors",
        ),
        numbers={"share": share, "workers": workers},
    )


def workers_needed(waited_s: float, trained_s: float, *, workers: int) -> int:
    """Return the number of workers that can load a step's data within its training time, at least
    one more than now.

    Without workers, the wait is the loading time of one process. With workers, each worker loads
    for the complete step time.

    >>> workers_needed(3.0, 1.0, workers=0), workers_needed(1.0, 1.0, workers=2)
    (3, 4)
    """
    reading = (workers * (waited_s + trained_s) if workers else waited_s) / max(trained_s, 1e-9)
    return max(workers + 1, math.ceil(reading - 1e-9))


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
    speed = history.column("targets_per_s").finite
    return speed.where(np.arange(len(speed)) > 0)


def _enough_speeds(history: History) -> None:
    count, trained_s = len(_speeds(history)), history.total("training_s")
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
    waits, trains = (
        _grew(history.column(column).value) for column in ("data_wait_s", "training_s")
    )
    return wrong(
        # a healthy run beside eight busy processes fell from 1,740 to 1,320 tokens/s in 160 steps
        "note",
        f"Throughput falls: from {three_digits(before)} to {three_digits(now)} targets per second.",
        (
            f"medians of the first and last third of {len(speed)} records; the trend is {sure:.1f} standard deviations",
            f"in the last third, training took {trains:.2g}x as long as in the first, waiting {waits:.2g}x",
        ),
        causes=(
            "loading the data: waiting has grown more than training" if waits > trains else "",
            "something that grows with the steps: a list in the loss or the loop, hooks that are added repeatedly, a stored history",
            "the machine: other processes, heat, swapped memory",
        ),
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
    return wrong(
        "note",
        f"Throughput jitters: neighboring records differ by {share:.0%} of {three_digits(middle)} targets per second.",
        (f"slowest record {three_digits(speed.min())}, fastest {three_digits(speed.max())}",),
        causes=(
            "other processes on this machine",
            "samples of very different length or cost",
            "records of few steps, in which one slow step shows",
        ),
        try_=(
            f"no change if the machine is shared; otherwise, {history.described.profile()}",
            history.described.typed("log_every", "50 steps")
            if history.windows.value[-1] < 50
            else "",
        ),
        numbers={"share": share},
    )


@check("slow-rank")
def slow_rank(history: History) -> Verdict:
    """Report the ranks that rank 0 recorded as slower than the others (`run/rank_checks.py`)."""
    slow = [
        *{
            (each["rank"], each["since_step"]): each
            for each in filter(_is_slow_rank, history.records.slow_ranks)
        }.values()
    ]
    well(not slow, "no slow rank is recorded")
    # a resume begins with other processes
    ends = [
        each.get(
            "until_step", next((step for step in history.resumed if step >= each["step"]), None)
        )
        for each in slow
    ]
    number = max((index for index, end in enumerate(ends) if end is None), default=len(slow) - 1)
    newest, is_slow_now = slow[number], ends[number] is None
    ratio = (
        min(newest["own_s"] / newest["median_s"], _BEYOND) if newest["median_s"] > 0 else _BEYOND
    )
    steps = [
        f"since step {each['since_step']:,}"
        if end is None
        else f"from step {each['since_step']:,} to {end:,}"
        for each, end in zip(slow, ends, strict=True)
    ]
    lines = [
        f"rank {each['rank']} on {each.get('host')}, {when}: {1e3 * each['own_s']:.3g} ms per step {_WORK[each['work']]},"
        f" {1e3 * each['median_s']:.3g} ms in the median; the difference is {each['share']:.0%} of a step"
        for each, when in zip(slow, steps, strict=True)
    ]
    return wrong(
        "warning" if is_slow_now else "note",
        f"Rank {newest['rank']} {'takes' if is_slow_now else 'took'} {'over ' * (ratio == _BEYOND)}{ratio:.3g}x as long as the median"
        f" {_WORK[newest['work']]}, {steps[number]}.",
        [lines.pop(number), *lines[: -_OTHERS - 1 : -1]],
        causes=(
            "a slow disk or network of its machine, or fewer processors for its workers"
            if newest["work"] == "data_wait"
            else "other processes on its machine, heat, a slower processor, or fewer threads",
            "code that only this rank runs, or samples that cost more than those of other ranks",
        ),
        try_=(f"check the load and the temperature of {newest.get('host')}, and its disks",),
        step=newest["since_step"],
        numbers={"rank": newest["rank"], "times": ratio, "share": newest["share"]},
    )


def _is_slow_rank(record: Record) -> bool:
    numbers, record = (
        ("rank", "since_step", "own_s", "median_s", "share", "until_step"),
        {"until_step": 0, **record},
    )
    return str(record.get("work")) in _WORK and all(
        isinstance(record.get(name), int | float) for name in numbers
    )


def _overhead(history: History, column: str, limit: float, *, doing: str, setting: str) -> Verdict:
    spent_s = history.total(column)
    all_s = sum(
        history.total(each) for each in ("training_s", "data_wait_s", "evaluating_s", "saving_s")
    )
    need(
        all_s >= LEAST_S and history.train_count >= 2,
        f"{all_s:.1f} s in {history.train_count} records are too few",
    )
    share, interval = spent_s / all_s, history.described.present(setting)
    well(share < limit, f"{doing.lower()} takes {share:.1%} of the time")
    return wrong(
        "warning" if all_s >= WORTH_S else "note",
        f"{doing} takes {share:.0%} of the time.",
        (f"{spent_s:.1f} s of {all_s:.1f} s",),
        causes=(
            f"{doing.lower()} too often: {setting}{'' if interval is None else f' is {interval}'}",
        ),
        try_=(
            _more_seldom(
                history, setting, share * (1 - WANTED) / (WANTED * (1 - share))
            ),  # to reach WANTED
            "a smaller part of the split during training, all of it at the end (Split(at_end=True)); a larger Split(batch_size=...)"
            if column == "evaluating_s"
            else "fewer evaluations, if a best checkpoint is kept: each evaluation that improves the metric saves one",
        ),
        numbers={"share": share},
    )


def _more_seldom(history: History, setting: str, times: float) -> str:
    if setting == "save_every":
        interval = str(history.described.present(setting))
        with suppress(ConfigError):
            seconds(interval)
            return ""  # a time: other saves are the cause, such as those of best checkpoints
        return history.described.typed(setting, "15 min" if interval == "auto" else "auto")
    at = history.records.scores.steps
    between = float(np.median(np.diff(at))) if len(at) > 1 else history.step
    wanted = min(math.ceil(between * times), history.described.steps or history.step)
    return history.described.typed(setting, f"{wanted} steps")


def _grew(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    third = max(1, (len(values) - 1) // 3)
    before, now = level(values[1 : 1 + third]), level(values[-third:])
    return now / before if before > 0 else 1.0
