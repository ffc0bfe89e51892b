"""Several runs on one page: one colour each, their curves over each other, and only the settings in which they differ."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.report import tables
from surefoot.report.charts import Chart, Line, Mark, Points, written
from surefoot.report.curves import Curve, smoothed
from surefoot.report.headline import State, direction_of, headline, words_of
from surefoot.report.run_charts import points_of
from surefoot.report.series import ReportedRun

_MOST_SCORES = 12
_DOTS = 60
_LONGEST_TITLE = 60  # letters
_MORE = {"learning_rate": "Learning rate", "norm": "Gradient norm, mean", "targets_per_s": "Targets a second"}


@dataclass(frozen=True)
class Named:
    """A run with a name that no other on the page has."""

    label: str
    run: ReportedRun


@dataclass(frozen=True)
class Cell:
    """The best value of one score in one run, its step where that was not the last, and whether no other run was better."""

    value: str
    step: str
    best: bool


@dataclass(frozen=True)
class RunRow:
    """One run in the table."""

    name: str
    state: str
    steps: str
    time: str
    colour: int
    dashes: int
    cells: list[Cell]


@dataclass(frozen=True)
class Overlaid:
    """What the page of several runs shows."""

    title: str
    verdict: str
    runs: list[Named]
    score_names: list[str]
    rows: list[RunRow]
    differing: list[tuple[str, list[str]]]
    overlaid: list[Chart]


def overlaid(runs: Sequence[ReportedRun], states: Sequence[State], *, stretches: int) -> Overlaid:
    """Runs next to each other, in the order in which they are given."""
    named = [Named(label, run) for label, run in zip(labels(runs), runs, strict=True)]
    names = list(dict.fromkeys(name for run in runs for name in run.recorded.scores))[:_MOST_SCORES]
    cells = [_cells(name, runs) for name in names]
    rows = [
        RunRow(
            name=one.label,
            state=words_of(state),
            steps=f"{one.run.recorded.last_step:,}",
            time=written(sum(one.run.recorded.spent_s.values()), "seconds"),
            colour=place % 7,
            dashes=place // 7 % 5,
            cells=[column[place] for column in cells],
        )
        for place, (one, state) in enumerate(zip(named, states, strict=True))
    ]
    return Overlaid(
        title=_title([one.label for one in named]),
        verdict=_verdict(named),
        runs=named,
        score_names=names,
        rows=rows,
        differing=tables.differing(runs),
        overlaid=overlaid_charts(named, names, stretches),
    )


def labels(runs: Sequence[ReportedRun]) -> list[str]:
    """The name of each run's directory, with as much of its path as tells it from the others."""
    parts = [run.files.path.resolve().parts for run in runs]
    for depth in range(1, max(len(path) for path in parts) + 1):
        found = ["/".join(path[-depth:]) for path in parts]
        if len(set(found)) == len(set(parts)):
            return _without_common_begin(found)
    return [str(run.files.path) for run in runs]


def _without_common_begin(names: list[str]) -> list[str]:
    """Names without the settings that all of them begin with, as a comparison has called them.

    >>> _without_common_begin(["lr=0.1,width=8", "lr=0.1,width=16"]), _without_common_begin(["a", "a,b"])
    (['width=8', 'width=16'], ['a', 'a,b'])
    """
    pieces = [re.split(r"(?<=[,/])", name) for name in names]
    alike = 0
    while all(len(held) > alike + 1 and held[alike] == pieces[0][alike] for held in pieces):
        alike += 1
    return ["".join(held[alike:]) for held in pieces]


def overlaid_charts(named: Sequence[Named], score_names: Sequence[str], stretches: int) -> list[Chart]:
    """Training loss, each score, learning rate, gradient norm and speed, one line a run."""
    trained = [one.run.recorded.train for one in named]
    labels = [one.label for one in named]
    losses = [tuple(smoothed(train.get("loss", Curve()))) for train in trained]
    found = [Chart("loss", "Training loss, smoothed", _lines(labels, losses), wide=True)]
    for name in score_names:
        curves = [one.run.recorded.scores.get(name) for one in named]
        points = [points_of(curve, stretches) for curve in curves]
        dots = max((curve.count for curve in curves if curve is not None), default=0) < _DOTS
        lines = _lines(labels, points, dots=dots)
        found.append(Chart(f"score-{name}", name, lines, _best_of_all(curves, direction_of(name))))
    for key, title in _MORE.items():
        lines = _lines(labels, [points_of(train.get(key), stretches) for train in trained])
        found.append(Chart(key, title, lines, zero=key != "norm"))
    return [chart for chart in found if chart.lines]


def _lines(labels: Sequence[str], curves: Sequence[Points], *, dots: bool = False) -> tuple[Line, ...]:
    """One line for each run that has the curve, in the run's colour."""
    return tuple(
        Line(label, points, place % 7, place // 7 % 5, dots=dots)
        for place, (label, points) in enumerate(zip(labels, curves, strict=True))
        if points
    )


def _best_of_all(curves: Sequence[Curve | None], direction: str) -> tuple[Mark, ...]:
    """The best value of any run."""
    ends = [(place, _best(curve, direction)) for place, curve in enumerate(curves)]
    known = [(place, *best) for place, best in ends if best is not None]
    if not known:
        return ()
    place, step, value = (max if direction == "max" else min)(known, key=lambda one: one[2])
    return (Mark("best", step, value, f"best {written(value)}", place % 7),)


def _best(curve: Curve | None, direction: str) -> tuple[int, float] | None:
    return None if curve is None else curve.largest if direction == "max" else curve.least


def _cells(name: str, runs: Sequence[ReportedRun]) -> list[Cell]:
    direction = direction_of(name)
    bests = [_best(run.recorded.scores.get(name), direction) for run in runs]
    known = [best[1] for best in bests if best is not None]
    winner = (max if direction == "max" else min)(known, default=None)
    cells = []
    for run, best in zip(runs, bests, strict=True):
        if best is None:
            cells.append(Cell("\u2013", "", best=False))
            continue
        last = run.recorded.scores[name].last
        at = "" if last is not None and last[1] == best[1] else f"at {best[0]:,}"
        cells.append(Cell(written(best[1]), at, best=best[1] == winner))
    return cells


def _title(names: Sequence[str]) -> str:
    """All names where that is short, else how many there are.

    >>> _title(["a", "b"]), _title(["x" * 50, "y" * 50])
    ('a · b', '2 runs')
    """
    title = " · ".join(names)
    return title if len(title) <= _LONGEST_TITLE else f"{len(names)} runs"


def _verdict(named: Sequence[Named]) -> str:
    """Which run is best by the score that the first is judged by."""
    heads = [(headline(one.run), one.label) for one in named]
    first = heads[0][0]
    if first is None:
        return f"{len(named)} runs"
    known = [(head.best, label) for head, label in heads if head is not None and head.name == first.name]
    value, label = (max if first.direction == "max" else min)(known, key=lambda pair: pair[0])
    rest = "" if len(known) == len(named) else f" ({len(known)} of {len(named)} runs have it)"
    return f"{label} has the best {first.name}, {written(value)}{rest}"
