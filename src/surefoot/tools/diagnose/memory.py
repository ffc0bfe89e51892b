"""A check for memory that grows throughout a run."""

import numpy as np

from surefoot.tools.diagnose.finding import Finding, Healthy, Verdict, check, need, wrong
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.statistics import first_and_last_third, level, slope, trend
from surefoot.tracking.format import with_unit

FEWEST = 12
"""Minimum number of records after the first quarter of a session, in which allocators, caches and
workers grow.
"""
STRETCHES = 6
"""Parts of a session that must all show growth. An evaluation or a longer batch adds memory in one
or two steps.
"""
STEADY = 0.3
"""Minimum growth in a part relative to the mean growth, since a leak may be logged or freed
unevenly.
"""
SURE = 4.0
"""Minimum significance of a trend in standard deviations. Large allocations rise in stairs, which
look like trends.
"""
LEAST_BYTES = 16e6
"""Minimum growth in bytes. Allocators vary by some megabytes."""
LEAST_SHARE = 0.02
"""Minimum growth relative to the used memory, because of fragmentation in large processes."""


@check("growing-memory")
def growing_memory(history: History) -> Verdict:
    """Measure the growth of memory per step, and the time until the machine's memory is full."""
    first_step = max(history.resumed, default=0)  # a resume starts a new process with new memory
    settled = first_step + (history.step - first_step) // 4
    names = ("host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes")
    series_of_all = ((name, history.column(name).finite.since(settled)) for name in names)
    columns = {name: series for name, series in series_of_all if len(series) >= FEWEST}
    need(columns, f"fewer than {FEWEST} memory records after the first quarter of the session")
    for name, series in columns.items():
        if (growth := _growth(series)) is not None:
            return _finding(history, series, growth, device=name.startswith("device"))
    first = next(iter(columns.values())).value
    before, now = (with_unit(level(part), "B") for part in (first[:4], first[-4:]))
    return Healthy(f"{before} after the first 25% of the session, {now} now")


def _growth(series: Series) -> float | None:
    before, now = first_and_last_third(series.value)
    sure = trend(series.value) >= SURE and trend(series.value[len(series) // 2 :]) >= SURE / 2
    if now - before < max(LEAST_BYTES, LEAST_SHARE * before) or not sure:
        return None
    rises = np.diff([level(stretch) for stretch in np.array_split(series.value, STRETCHES)])
    return (
        None
        if rises.min() < STEADY * rises.mean()
        else slope(series.step.astype(float), series.value)
    )


def _finding(history: History, series: Series, per_step: float, *, device: bool) -> Finding:
    described = history.described
    total, steps = described.memory_bytes, described.steps
    first_step, last_step, now = series.step[0], series.step[-1], float(series.value[-1])
    numbers = {"bytes_per_step": per_step, "bytes": now}
    serious, end = False, ""
    if not device and total is not None:
        full = int(last_step + max(total - now, 0.0) / per_step)
        numbers["full_at_step"] = full
        serious = steps is not None and full <= steps
        end = f"the {with_unit(total, 'B')} of this machine would be full at step {full:,}" + (
            f" of {steps:,}" if serious else ""
        )
    elif steps is not None:
        end = f"at this rate, it reaches {with_unit(now + per_step * max(0, steps - last_step), 'B')} after all {steps:,} steps"
    return wrong(
        "error"
        if serious
        # allocators and caches of healthy runs grow too, so a distant limit is only a note
        else "note",
        f"{'Device memory' if device else 'Memory'} grows by {with_unit(per_step, 'B')} per step.",
        (
            f"{with_unit(series.value[0], 'B')} at step {first_step:,}, {with_unit(now, 'B')} at step {last_step:,}",
            end,
        ),
        causes=(
            "a list that keeps losses or outputs together with their graphs: keep loss.detach(), or log it with step.log(...)",
            "a cache in the data set, copied to every worker",
        ),
        try_=(
            "check which lists and caches your loss, data set and loop extend",
            described.typed("save_every", "1 min")
            if serious
            else f"{described.go_on()}  # after an out-of-memory error: continues bit for bit",
        ),
        step=int(first_step),
        numbers=numbers,
    )
