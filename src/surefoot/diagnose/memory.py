"""A finding on memory that grows for as long as the run goes on."""

from __future__ import annotations

import numpy as np

from surefoot.diagnose.finding import Finding, Unclear, Verdict, Well
from surefoot.diagnose.history import History, Series
from surefoot.diagnose.statistics import level, slope, trend
from surefoot.tracking.format import with_unit

FEWEST = 12
"""Records after the first quarter of a sitting, in which allocators, caches and workers take what they need."""
STRETCHES = 6
"""What adds up rises in each of them; what an allocator takes for an evaluation or a longer batch comes in one or two steps up."""
STEADY = 0.3
"""Of the mean rise from stretch to stretch, the least one: what adds up may be logged or freed unevenly."""
SURE = 4.0
"""Standard deviations of a trend: memory that is given out in large pieces rises in stairs, and stairs look like trends."""
LEAST_BYTES = 16e6
"""Grown in all: allocators keep some megabytes more or less."""
LEAST_SHARE = 0.02
"""Grown in all, of what was used: fragments of a large process."""


def growing_memory(history: History) -> Verdict:
    """The slope of the process's memory over the steps, and when the machine's would be full."""
    name = "growing-memory"
    told = {
        column: history.column(column).finite
        for column in ("host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes")
    }
    begun = max(history.resumed, default=0)  # a process of its own, whose memory began anew
    told = {column: series.where(series.step > begun + (history.step - begun) // 4) for column, series in told.items()}
    told = {column: series for column, series in told.items() if len(series) >= FEWEST}
    if not told:
        return Unclear(name, f"fewer than {FEWEST} records of the memory after the first quarter of the sitting")
    for column, series in told.items():
        found = _growth(series)
        if found is not None:
            return _finding(history, name, column, series, found)
    series = next(iter(told.values()))
    return Well(
        name,
        f"{with_unit(level(series.value[:4]), 'B')} after a quarter of the run, {with_unit(level(series.value[-4:]), 'B')} at last",
    )


def _growth(series: Series) -> float | None:
    """Bytes a step, where they surely add up."""
    before, now = level(series.value[: len(series) // 3]), level(series.value[-(len(series) // 3) :])
    later = series.value[len(series) // 2 :]
    if now - before < max(LEAST_BYTES, LEAST_SHARE * before) or trend(series.value) < SURE or trend(later) < SURE / 2:
        return None
    levels = np.array([level(stretch) for stretch in np.array_split(series.value, STRETCHES)])
    rises = np.diff(levels)
    if rises.min() < STEADY * rises.mean():
        return None
    return slope(series.step.astype(float), series.value)


def _finding(history: History, name: str, column: str, series: Series, per_step: float) -> Finding:
    described = history.described
    device = column.startswith("device")
    now = float(series.value[-1])
    evidence = [
        f"{with_unit(series.value[0], 'B')} at step {series.step[0]:,}, {with_unit(now, 'B')} at step {series.step[-1]:,}"
    ]
    numbers = {"bytes_per_step": per_step, "bytes": now}
    total, steps = described.memory_bytes, described.steps
    serious = False
    if not device and total is not None:
        full = int(series.step[-1] + max(total - now, 0.0) / per_step)
        numbers["full_at_step"] = full
        within = steps is not None and full <= steps
        serious = within
        evidence.append(
            f"the {with_unit(total, 'B')} of this machine would be full at step {full:,}"
            + (f" of {steps:,}" if within and steps else "")
        )
    elif steps is not None:
        evidence.append(
            f"at that rate {with_unit(now + per_step * max(0, steps - series.step[-1]), 'B')} at the last step, {steps:,}"
        )
    return Finding(
        name,
        "error" if serious else "warning",
        f"Memory {'of the device ' if device else ''}grows by {with_unit(per_step, 'B')} a step.",
        evidence=tuple(evidence),
        causes=(
            "a list that keeps losses or outputs, with the graphs they came from: keep loss.detach(), or log it by step.log(...)",
            "a cache in the data set, copied in every worker",
        ),
        try_=(
            "look for what your loss, data set and loop append to",
            described.typed("save_every", "5 min")
            if serious
            else "surefoot resume goes on after an end by lack of memory, to the same bits",
        ),
        step=int(series.step[0]),
        numbers=numbers,
    )
