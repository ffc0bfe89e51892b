"""The output of a comparison: text, Markdown, tab-separated values, JSON, and a figure with all
curves.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from surefoot.errors import visible
from surefoot.tools.compare.results import INSIDE_NOISE, ONE_SEED, Comparison
from surefoot.tools.compare.trained import Compared, Row
from surefoot.tools.compare.variants import flags, short_names
from surefoot.tools.report.charts import Chart, Line
from surefoot.tracking.format import as_typed, duration, in_line, number, shortened, text_table

Point = tuple[int, float]  # step, value
_POINTS = 200  # maximum points of a curve; longer curves are averaged to reduce noise
_SHOWN = 12  # maximum names in the legend
_HEAD = 0.05  # fraction of a run whose steep initial losses may leave the axes
_FAR = 3.0  # times the range of the narrower variants: variants further out would flatten them
_LONGEST = 90  # characters of a name in the legend
_ALIKE = 4  # maximum number of named variants that tie, or are as good as the best


def text(comparison: Comparison) -> str:
    """Return a comparison as a table for the terminal."""
    cells = _cells(comparison)
    return visible(
        "\n".join(
            [
                _title(comparison),
                *text_table(cells, left=(0, len(cells[0]) - 1)),
                *_below(comparison),
            ]
        )
    )


def markdown(comparison: Comparison) -> str:
    """Return a comparison as a table in Markdown."""
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in _cells(comparison)]
    table = [
        f"| {' | '.join(line)} |"
        for line in (head, ["---", *["---:"] * (len(head) - 2), "---"], *rows)
    ]
    return (
        "\n".join(
            [_title(comparison), "", *table, "", *(f"* {note}" for note in _below(comparison))]
        )
        + "\n"
    )


def tsv(comparison: Comparison) -> str:
    """Format all values with full precision as tab-separated values, one line per group of
    repeats.
    """
    settings = sorted({name for row in comparison.rows for name in row.varied})
    rows = [
        {**{name: row.varied.get(name) for name in settings}, **_values(row)}
        for row in comparison.rows
    ]
    lines = [
        ["" if value is None else in_line(as_typed(value)) for value in row.values()]
        for row in rows
    ]
    return "".join("\t".join(line) + "\n" for line in [*map(list, rows[:1]), *lines])


def as_json(comparison: Comparison) -> str:
    """Format the comparison as JSON, with each run of every variant; NaN becomes null."""
    runs = [
        {
            "name": run.variant.name,
            "variant": run.variant.group,
            "settings": dict(run.variant.settings),
            "status": run.status,
            "said": run.said,
            **dict(zip(("best_step", "best"), run.trained.best or (None, None), strict=True)),
            **{
                name: getattr(run.trained, name)
                for name in ("final", "training_s", "targets_per_s", "scores")
            },
        }
        for run in comparison.runs
    ]
    document = {
        "score": comparison.score,
        "direction": comparison.direction,
        "target": comparison.target,
        "variants": [{"settings": dict(row.varied), **_values(row)} for row in comparison.rows],
        "runs": runs,
        "notes": list(comparison.notes),
    }
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _best_settings(comparison: Comparison) -> list[str]:
    best = comparison.rows[0] if comparison.rows else None
    if best is None or best.best is None:
        return []
    equal = [row for row in comparison.rows if row.best == best.best]
    if len(equal) > 1:
        labels = _some([row.label for row in equal])
        return [f"tie: {labels} have the same {comparison.score}, so none of them is the best"]
    if not best.varied:
        return []
    fixed = {
        name: value
        for name, value in comparison.settled.items()
        if best.varied.get(name) in (None, "auto")
    }
    notes = []
    no_better = {INSIDE_NOISE: "baseline", "best": INSIDE_NOISE}.get(best.verdict)
    tied = [row.label for row in comparison.rows if row.verdict == no_better]
    if tied:
        notes.append(f"not significantly better on this data than {_some(tied)}")
    if any(row.verdict == ONE_SEED for row in comparison.rows):
        notes.append(ONE_SEED)
    note = f" ({'; '.join(notes)})" if notes else ""
    return [f"best settings: {flags({**best.varied, **fixed})}{note}"]


def _some(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _ALIKE} more" if len(labels) > _ALIKE else ""
    return ", ".join(map(in_line, labels[:_ALIKE])) + more


def _title(comparison: Comparison) -> str:
    title = (
        f"{comparison.score}: {'lower' if comparison.direction == 'min' else 'higher'} is better"
    )
    return (
        "no metric is monitored: the table shows training only, and nothing is compared"
        if comparison.score is None
        else title
    )


def _below(comparison: Comparison) -> list[str]:
    return [
        *(f"{in_line(row.label)}: {in_line(row.said)}" for row in comparison.rows if row.said),
        *comparison.notes,
        *_best_settings(comparison),
    ]


def _cells(comparison: Comparison) -> list[list[str]]:
    untold = dict.fromkeys(
        name for row in comparison.rows for name in row.varied if "=" not in row.name
    )
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("variant", lambda row: in_line(row.label)),
        *((title, partial(_setting, name)) for name, title in short_names(untold).items()),
        ("best", lambda row: _with_error(row.best, row.best_error)),
        ("at step", lambda row: "" if row.best_step is None else f"{row.best_step:,.0f}"),
        ("final", lambda row: _with_error(row.final, row.final_error)),
        ("to target", _to_target),
        ("trained", lambda row: "" if row.training_s is None else duration(row.training_s)),
        ("targets/s", lambda row: "" if row.targets_per_s is None else f"{row.targets_per_s:,.0f}"),
        ("difference", _of_difference),
        (
            "",
            lambda row: ", ".join(
                part for part in (row.status, row.verdict) if part not in ("", "finished")
            ),
        ),
    ]
    filled = [[title, *map(cell, comparison.rows)] for title, cell in columns]
    nonempty = [cells for cells in filled if cells in (filled[0], filled[-1]) or any(cells[1:])]
    return [list(row) for row in zip(*nonempty, strict=True)]


def _setting(name: str, row: Row) -> str:
    return in_line(as_typed(row.varied.get(name), digits=4))


def _with_error(value: float | None, error: float | None) -> str:
    short = "" if value is None else number(value)
    return _to_digits(value, error) if value is not None and error else short


def _to_target(row: Row) -> str:
    if row.target_step is not None and row.target_s is not None:
        return f"{row.target_step:,.0f} steps, {duration(row.target_s)}"
    if row.best is None:
        return ""
    return "never" if row.repeats == 1 or not row.reached else f"{row.reached} of {row.repeats}"


def _of_difference(row: Row) -> str:
    if row.difference is None:
        return ""
    mean, error = row.difference.mean, row.difference.standard_error
    return (
        f"{mean:+.4g}" if math.isnan(error) or error == 0.0 else _to_digits(mean, error, sign="+")
    )


def _to_digits(value: float, error: float, *, sign: str = "") -> str:
    """Format a value and its error so that two digits of the error are visible.

    >>> _to_digits(1.23456, 0.0101), _to_digits(-7.0, 3.0), _to_digits(1234.5, 250.0, sign="+")
    ('1.235 ± 0.010', '-7.0 ± 3.0', '+1234 ± 250')
    """
    digits = min(12, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


def _values(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {"variant": row.name, "label": row.label}
    for name, value in vars(row).items():
        if name == "difference":
            of_difference = (
                (None, None, None)
                if value is None
                else (value.mean, value.standard_error, value.pairs)
            )
            values |= zip(("difference", "difference_error", "pairs"), of_difference, strict=True)
        elif name in ("best_step", "target_step") and value is not None and value.is_integer():
            values[name] = int(value)
        elif name not in ("name", "label", "varied", "reached"):
            values[name] = value
    return values


def charts(comparison: Comparison) -> list[Chart]:
    """Return training losses as lines and the monitored score as points, one color per variant,
    best first.

    A metric that is not a loss gets a second chart. Repeats share the color of their variant.
    Values that would flatten the other variants are off the scale, and the legend marks their
    variants.
    """
    groups = {
        row.name: [run for run in comparison.runs if run.variant.group == row.name]
        for row in comparison.rows
    }
    loss = "training loss" if any(run.trained.loss for run in comparison.runs) else ""
    score = comparison.score or ""
    if score and not score.endswith("loss"):
        fields = [(loss, True, False), (score, False, True)]
    else:
        fields = [
            (f"{loss} (lines), {score} (points)" if loss and score else loss or score, True, True)
        ]
    bounds = [
        _bounds({name: _visible_points(runs, *field[1:]) for name, runs in groups.items()})
        for field in fields
    ]
    beyond = {name: note for _, off in bounds for name, note in off.items()}
    varied = dict.fromkeys(setting for row in comparison.rows for setting in row.varied)
    unlike = [
        name for name in varied if len({repr(row.varied.get(name)) for row in comparison.rows}) > 1
    ]
    names = [
        _legend_name(row, unlike or list(varied), off=beyond.get(row.name))
        for row in comparison.rows
    ]
    chart_list = []
    for (title, losses, scores), (within, _) in zip(fields, bounds, strict=True):
        lines = []
        for series, (name, runs) in enumerate(zip(names, groups.values(), strict=True)):
            for run in runs:
                if losses:
                    lines.append(Line(name, tuple(_smoothed(run)), series, faint=True, named=False))
                if scores:
                    named = series < _SHOWN and run is runs[-1]
                    lines.append(
                        Line(
                            name, tuple(_finite(run.trained.scores)), series, dots=True, named=named
                        )
                    )
        more = f"{len(names) - _SHOWN} more, not named" if scores and len(names) > _SHOWN else ""
        chart_list.append(Chart(title, title, tuple(lines), note=more, wide=True, within=within))
    return chart_list


def _legend_name(row: Row, settings: Sequence[str], *, off: str | None) -> str:
    name = in_line(row.label)
    if row.varied and "=" not in row.name:
        short = short_names(settings)
        own = [setting for setting in settings if setting in row.varied]
        name += ": " + ", ".join(
            f"{short[each]}={in_line(as_typed(row.varied[each], digits=3))}" for each in own
        )
    notes = [row.status] * (row.status != "finished") + ([] if off is None else [off])
    return shortened(name, _LONGEST, keep="both") + (f" ({', '.join(notes)})" if notes else "")


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _smoothed(run: Compared) -> list[Point]:
    points = _finite(run.trained.loss)
    size = -(-len(points) // _POINTS) or 1
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(piece[-1][0], math.fsum(loss for _, loss in piece) / len(piece)) for piece in pieces]


def _visible_points(runs: Sequence[Compared], losses: bool, scores: bool) -> list[float]:
    points: list[float] = []
    for run in runs:
        last = run.trained.loss[-1][0] if run.trained.loss else 0
        points += [loss for step, loss in _smoothed(run) if step >= _HEAD * last] if losses else []
        points += [score for _, score in _finite(run.trained.scores)] if scores else []
    return points


def _bounds(
    points: Mapping[str, Sequence[float]],
) -> tuple[tuple[float, float] | None, dict[str, str]]:
    known = {name: values for name, values in points.items() if values}
    if not known:
        return None, {}
    third = (
        len(known) - 1
    ) // 3  # bounds of the inner 33% of variants, because most may have diverged
    high = sorted(max(values) for values in known.values())[third]
    low = min(high, sorted((min(values) for values in known.values()), reverse=True)[third])
    room = _FAR * max(
        high - low, sorted(max(values) - min(values) for values in known.values())[third], abs(high)
    )
    inside = {
        name: [value for value in values if low - room <= value <= high + room]
        for name, values in known.items()
    }
    bottom, top = (
        min(map(min, filter(None, inside.values()))),
        max(map(max, filter(None, inside.values()))),
    )
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.05
    return (bottom - margin, top + margin), {
        name: "partly off the scale" if inside[name] else "off the scale"
        for name, values in known.items()
        if len(inside[name]) < len(values)
    }
