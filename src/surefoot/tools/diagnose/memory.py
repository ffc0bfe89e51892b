"""A check for memory that grows throughout a run."""

import numpy as np

from surefoot.tools.diagnose.finding import (
    Finding,
    Healthy,
    Severity,
    Verdict,
    check,
    need,
    wrong,
)
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
    columns = {}
    for name in ("host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes"):
        series = history.column(name).finite.since(settled)
        if len(series) >= FEWEST:
            columns[name] = series
    need(columns, f"fewer than {FEWEST} memory records after the first quarter of the session")
    for name, series in columns.items():
        if _grows(series):
            return _finding(history, series, device=name.startswith("device"))
    first = next(iter(columns.values())).value
    before = with_unit(level(first[:4]), "B")
    now = with_unit(level(first[-4:]), "B")
    return Healthy(f"{before} after the first 25% of the session, {now} now")


def _grows(series: Series) -> bool:
    before, now = first_and_last_third(series.value)
    if now - before < max(LEAST_BYTES, LEAST_SHARE * before):
        return False
    later_half = series.value[len(series) // 2 :]
    if trend(series.value) < SURE or trend(later_half) < SURE / 2:
        return False
    stretches = np.array_split(series.value, STRETCHES)
    rises = np.diff([level(stretch) for stretch in stretches])
    return bool(rises.min() >= STEADY * rises.mean())


def _finding(history: History, series: Series, *, device: bool) -> Finding:
    described = history.described
    total = described.memory_bytes
    steps = described.steps
    per_step = slope(series.step.astype(float), series.value)
    first_step, last_step = series.step[0], series.step[-1]
    at_first = with_unit(series.value[0], "B")
    now = float(series.value[-1])
    numbers = {"bytes_per_step": per_step, "bytes": now}
    # allocators and caches of healthy runs grow too, so a distant limit is only a note
    severity: Severity = "note"
    remedy = f"{described.go_on()}  # after an out-of-memory error: continues bit for bit"
    end = ""
    if not device and total is not None:
        full = int(last_step + max(total - now, 0.0) / per_step)
        numbers["full_at_step"] = full
        end = f"the {with_unit(total, 'B')} of this machine would be full at step {full:,}"
        if steps is not None and full <= steps:
            end += f" of {steps:,}"
            severity = "error"
            remedy = described.typed("save_every", "1 min")
    elif steps is not None:
        at_end = with_unit(now + per_step * max(0, steps - last_step), "B")
        end = f"at this rate, it reaches {at_end} after all {steps:,} steps"
    which = "Device memory" if device else "Memory"
    return wrong(
        severity,
        f"{which} grows by {with_unit(per_step, 'B')} per step.",
        (f"{at_first} at step {first_step:,}, {with_unit(now, 'B')} at step {last_step:,}", end),
        causes=(
            "a list that keeps losses or outputs together with their graphs: keep loss.detach(), or log it with step.log(...)",
            "a cache in the data set, copied to every worker",
        ),
        try_=(
            "check which lists and caches your loss, data set and loop extend",
            remedy,
        ),
        step=int(first_step),
        numbers=numbers,
    )
