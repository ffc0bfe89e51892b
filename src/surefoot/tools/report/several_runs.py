"""The page of several runs: one color per run, overlaid curves, and the differing settings."""

import re
from collections.abc import Sequence
from typing import Any

from surefoot.tools.report import tables
from surefoot.tools.report.charts import Chart, Line, Mark, Points, format_value
from surefoot.tools.report.curves import Curve, smooth
from surefoot.tools.report.headline import direction_of, headline
from surefoot.tools.report.run_charts import points_of
from surefoot.tools.report.series import ReportedRun

_MOST_METRICS = 12
_DOTS = 60
_LONGEST_TITLE = 60  # characters
_MORE = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm, mean of each record",
    "targets_per_s": "Targets per second, mean of each record",
}


def page_values(runs: Sequence[ReportedRun], *, stretches: int) -> dict[str, Any]:
    """Return the template values for the page of several runs, in the order of `runs`."""
    names = list(dict.fromkeys(name for run in runs for name in run.scores))[:_MOST_METRICS]
    called = labels(runs)
    title = " · ".join(called)
    return {
        "title": title if len(title) <= _LONGEST_TITLE else f"{len(runs)} runs",
        "verdict": _verdict(called, runs),
        "runs": runs,
        "labels": called,
        "metric_names": names,
        "cells": list(zip(*(_cells(name, runs) for name in names), strict=True))
        or [()] * len(runs),
        "differing": tables.differing_settings(runs),
        "overlaid": overlaid_charts(called, runs, names, stretches),
    }


def labels(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a unique label per run: the directory's name, with parent directories if necessary."""
    parts = [run.files.path.resolve().parts for run in runs]
    for depth in range(1, max(len(path) for path in parts) + 1):
        names = ["/".join(path[-depth:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            return _without_common_begin(names)
    return [str(run.files.path) for run in runs]


def _without_common_begin(names: list[str]) -> list[str]:
    """Remove the common leading settings of all names.

    >>> (
    ...     _without_common_begin(["lr=0.1,width=8", "lr=0.1,width=16"]),
    ...     _without_common_begin(["a", "a,b"]),
    ... )
    (['width=8', 'width=16'], ['a', 'a,b'])
    """
    pieces = [re.split(r"(?<=[,/])", name) for name in names]
    shared = 0
    while all(len(parts) > shared + 1 and parts[shared] == pieces[0][shared] for parts in pieces):
        shared += 1
    return ["".join(parts[shared:]) for parts in pieces]


def overlaid_charts(
    labels: Sequence[str], runs: Sequence[ReportedRun], metric_names: Sequence[str], stretches: int
) -> list[Chart]:
    """Return charts of training loss, metrics, learning rate, gradient norm and speed, with one
    line per run.
    """
    trained = [run.train for run in runs]
    losses = [tuple(smooth(train.get("loss", Curve()))) for train in trained]
    charts = [Chart("loss", "Training loss, smoothed", _lines(labels, losses), wide=True)]
    for name in metric_names:
        curves = [run.scores.get(name, Curve()) for run in runs]
        dots = max(curve.count for curve in curves) < _DOTS
        lines = _lines(labels, [points_of(curve, stretches) for curve in curves], dots=dots)
        charts.append(
            Chart(f"metric-{name}", name, lines, _best_of_all(curves, direction_of(name)))
        )
    for key, title in _MORE.items():
        lines = _lines(labels, [points_of(train.get(key), stretches) for train in trained])
        charts.append(Chart(key, title, lines, zero=key != "grad_norm"))
    return [chart for chart in charts if chart.lines]


def _lines(
    labels: Sequence[str], curves: Sequence[Points], *, dots: bool = False
) -> tuple[Line, ...]:
    return tuple(
        Line(label, points, index, dots=dots)
        for index, (label, points) in enumerate(zip(labels, curves, strict=True))
        if points
    )


def _best_of_all(curves: Sequence[Curve], direction: str) -> tuple[Mark, ...]:
    bests = [(index, curve.best(direction)) for index, curve in enumerate(curves)]
    known = [(index, *best) for index, best in bests if best is not None]
    if not known:
        return ()
    index, step, value = (max if direction == "max" else min)(known, key=lambda each: each[2])
    return (Mark("best", step, value, f"best {format_value(value)}", index),)


def _cells(name: str, runs: Sequence[ReportedRun]) -> list[tuple[str, str, bool]]:
    direction = direction_of(name)
    curves = [run.scores.get(name, Curve()) for run in runs]
    bests = [curve.best(direction) for curve in curves]
    winner = (max if direction == "max" else min)(
        (best[1] for best in bests if best is not None), default=None
    )
    cells = []
    for curve, best in zip(curves, bests, strict=True):
        if best is None or curve.last is None:
            cells.append(("\u2013", "", False))
        else:
            when = "" if curve.last[1] == best[1] else f"at {best[0]:,}"
            cells.append((format_value(best[1]), when, best[1] == winner))
    return cells


def _verdict(labels: Sequence[str], runs: Sequence[ReportedRun]) -> str:
    heads = [headline(run) for run in runs]
    first = heads[0]
    if first is None:
        return f"{len(runs)} runs"
    known = [
        (head.best, label)
        for head, label in zip(heads, labels, strict=True)
        if head is not None and head.name == first.name
    ]
    value, label = (max if first.direction == "max" else min)(known, key=lambda pair: pair[0])
    rest = (
        "" if len(known) == len(runs) else f" ({len(known)} of {len(runs)} runs have this metric)"
    )
    return f"{label} has the best {first.name}, {format_value(value)}{rest}"
