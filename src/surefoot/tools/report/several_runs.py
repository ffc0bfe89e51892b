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
    names = metric_names(runs)
    run_labels = labels(runs)
    title = " · ".join(run_labels)
    if len(title) > _LONGEST_TITLE:
        title = f"{len(runs)} runs"
    cells: list[list[tuple[str, str, bool]]] = [[] for _ in runs]  # of each run, by metric
    for name in names:
        for of_run, cell in zip(cells, _cells(name, runs), strict=True):
            of_run.append(cell)
    return {
        "title": title,
        "verdict": _verdict(run_labels, runs),
        "runs": runs,
        "labels": run_labels,
        "metric_names": names,
        "cells": cells,
        "differing": tables.differing_settings(runs),
        "overlaid": overlaid_charts(run_labels, runs, stretches),
    }


def metric_names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of the metrics of all runs that the page shows."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.scores)
    return list(names)[:_MOST_METRICS]


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

    >>> _without_common_begin(["lr=0.1,width=8", "lr=0.1,width=16"])
    ['width=8', 'width=16']
    >>> _without_common_begin(["a", "a,b"])
    ['a', 'a,b']
    """
    all_pieces = [re.split(r"(?<=[,/])", name) for name in names]
    # the last piece of a name stays
    begins = [pieces[:-1] for pieces in all_pieces]
    shared = 0
    for column in zip(*begins, strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    return ["".join(pieces[shared:]) for pieces in all_pieces]


def overlaid_charts(
    labels: Sequence[str], runs: Sequence[ReportedRun], stretches: int
) -> list[Chart]:
    """Return charts of training loss, metrics, learning rate, gradient norm and speed, with one
    line per run.
    """
    trained = [run.train for run in runs]
    losses = [tuple(smooth(train.get("loss", Curve()))) for train in trained]
    charts = [Chart("loss", "Training loss, smoothed", _lines(labels, losses), wide=True)]
    for name in metric_names(runs):
        curves = [run.scores.get(name, Curve()) for run in runs]
        dots = max(curve.count for curve in curves) < _DOTS
        lines = _lines(labels, [points_of(curve, stretches) for curve in curves], dots=dots)
        marks = _best_of_all(curves, direction_of(name))
        charts.append(Chart(f"metric-{name}", name, lines, marks))
    for key, title in _MORE.items():
        lines = _lines(labels, [points_of(train.get(key), stretches) for train in trained])
        charts.append(Chart(key, title, lines, zero=key != "grad_norm"))
    return [chart for chart in charts if chart.lines]


def _lines(
    labels: Sequence[str], curves: Sequence[Points], *, dots: bool = False
) -> tuple[Line, ...]:
    lines = []
    for index, (label, points) in enumerate(zip(labels, curves, strict=True)):
        if points:
            lines.append(Line(label, points, index, dots=dots))
    return tuple(lines)


def _best_of_all(curves: Sequence[Curve], direction: str) -> tuple[Mark, ...]:
    """Return a mark at the best value of all curves, of the first one that has it."""
    winner = _winner(curves, direction)
    for index, curve in enumerate(curves):
        best = curve.best(direction)
        if best is not None and best[1] == winner:
            step, value = best
            return (Mark("best", step, value, f"best {format_value(value)}", index),)
    return ()


def _winner(curves: Sequence[Curve], direction: str) -> float | None:
    """Return the best value of all curves, or None without values."""
    bests = [curve.best(direction) for curve in curves]
    values = [best[1] for best in bests if best is not None]
    choose = max if direction == "max" else min
    return choose(values, default=None)


def _cells(name: str, runs: Sequence[ReportedRun]) -> list[tuple[str, str, bool]]:
    """Return each run's best value of a metric, its step if it is not the last, and whether no run
    has a better one.
    """
    direction = direction_of(name)
    curves = [run.scores.get(name, Curve()) for run in runs]
    winner = _winner(curves, direction)
    cells = []
    for curve in curves:
        best = curve.best(direction)
        if best is None or curve.last is None:
            cells.append(("\u2013", "", False))
            continue
        step, value = best
        when = "" if curve.last[1] == value else f"at {step:,}"
        cells.append((format_value(value), when, value == winner))
    return cells


def _verdict(labels: Sequence[str], runs: Sequence[ReportedRun]) -> str:
    headlines = [headline(run) for run in runs]
    first = headlines[0]
    if first is None:
        return f"{len(runs)} runs"
    bests = []
    for label, main in zip(labels, headlines, strict=True):
        if main is not None and main.name == first.name:
            bests.append((main.best, label))
    choose = max if first.direction == "max" else min
    value, winner = choose(bests, key=lambda best: best[0])
    verdict = f"{winner} has the best {first.name}, {format_value(value)}"
    if len(bests) < len(runs):
        verdict += f" ({len(bests)} of {len(runs)} runs have this metric)"
    return verdict
