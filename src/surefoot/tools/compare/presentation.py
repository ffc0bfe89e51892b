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
from surefoot.tools.compare.trained import Compared, VariantRow
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
    table = text_table(cells, left=(0, len(cells[0]) - 1))
    return visible("\n".join([_title(comparison), *table, *_below(comparison)]))


def markdown(comparison: Comparison) -> str:
    """Return a comparison as a table in Markdown."""
    head, *rows = _cells(comparison)
    rule = ["---", *["---:"] * (len(head) - 2), "---"]
    lines = [_title(comparison), ""]
    for row in (head, rule, *rows):
        escaped = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(escaped)} |")
    lines.append("")
    lines += [f"* {note}" for note in _below(comparison)]
    return "\n".join(lines) + "\n"


def tsv(comparison: Comparison) -> str:
    """Format all values with full precision as tab-separated values, one line per group of
    repeats.
    """
    settings: set[str] = set()
    for row in comparison.rows:
        settings.update(row.varied)
    lines: list[list[str]] = []
    for row in comparison.rows:
        values = {name: row.varied.get(name) for name in sorted(settings)} | _values(row)
        if not lines:
            lines.append(list(values))
        lines.append([_in_cell(value) for value in values.values()])
    return "".join("\t".join(line) + "\n" for line in lines)


def _in_cell(value: Any) -> str:
    return "" if value is None else in_line(as_typed(value))


def as_json(comparison: Comparison) -> str:
    """Format the comparison as JSON, with each run of every variant; NaN becomes null."""
    document = {
        "score": comparison.score,
        "direction": comparison.direction,
        "target": comparison.target,
        "variants": [{"settings": dict(row.varied), **_values(row)} for row in comparison.rows],
        "runs": [_run_values(run) for run in comparison.runs],
        "notes": list(comparison.notes),
    }
    finite = json.loads(json.dumps(document), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _run_values(run: Compared) -> dict[str, Any]:
    trained = run.trained
    best_step, best = trained.best or (None, None)
    return {
        "name": run.variant.name,
        "variant": run.variant.group,
        "settings": dict(run.variant.settings),
        "status": run.status,
        "said": run.said,
        "best_step": best_step,
        "best": best,
        "final": trained.final,
        "training_s": trained.training_s,
        "targets_per_s": trained.targets_per_s,
        "scores": trained.scores,
    }


def _best_settings(comparison: Comparison) -> list[str]:
    """Return a line with the settings of the best variant and how certain that is, or nothing."""
    if not comparison.rows or comparison.rows[0].best is None:
        return []
    best = comparison.rows[0]
    equal = [row for row in comparison.rows if row.best == best.best]
    if len(equal) > 1:
        labels = _some([row.label for row in equal])
        return [f"tie: {labels} have the same {comparison.score}, so none of them is the best"]
    if not best.varied:
        return []
    settings = dict(best.varied)
    for name, value in comparison.settled.items():
        if settings.get(name) in (None, "auto"):
            settings[name] = value
    no_better = {INSIDE_NOISE: "baseline", "best": INSIDE_NOISE}.get(best.verdict)
    alike = [row.label for row in comparison.rows if row.verdict == no_better]
    notes = []
    if alike:
        notes.append(f"not significantly better on this data than {_some(alike)}")
    if any(row.verdict == ONE_SEED for row in comparison.rows):
        notes.append(ONE_SEED)
    line = f"best settings: {flags(settings)}"
    return [f"{line} ({'; '.join(notes)})" if notes else line]


def _some(labels: Sequence[str]) -> str:
    text = ", ".join(in_line(label) for label in labels[:_ALIKE])
    if len(labels) > _ALIKE:
        text += f" and {len(labels) - _ALIKE} more"
    return text


def _title(comparison: Comparison) -> str:
    if comparison.score is None:
        return "no metric is monitored: the table shows training only, and nothing is compared"
    better = "lower" if comparison.direction == "min" else "higher"
    return f"{comparison.score}: {better} is better"


def _below(comparison: Comparison) -> list[str]:
    said = [f"{in_line(row.label)}: {in_line(row.said)}" for row in comparison.rows if row.said]
    return [*said, *comparison.notes, *_best_settings(comparison)]


def _cells(comparison: Comparison) -> list[list[str]]:
    """Return the table with its head. Columns without values are left out."""
    names: dict[str, None] = {}  # of settings that the name of a variant does not list
    for row in comparison.rows:
        if "=" not in row.name:
            names |= dict.fromkeys(row.varied)
    columns: list[tuple[str, Callable[[VariantRow], str]]] = [
        *((title, partial(_setting, name)) for name, title in short_names(names).items()),
        ("best", lambda row: _with_error(row.best, row.best_error)),
        ("at step", lambda row: _whole(row.best_step)),
        ("final", lambda row: _with_error(row.final, row.final_error)),
        ("to target", _to_target),
        ("trained", lambda row: "" if row.training_s is None else duration(row.training_s)),
        ("targets/s", lambda row: _whole(row.targets_per_s)),
        ("difference", _of_difference),
    ]
    table = [["variant", *(in_line(row.label) for row in comparison.rows)]]
    for title, cell in columns:
        cells = [cell(row) for row in comparison.rows]
        if any(cells):
            table.append([title, *cells])
    table.append(["", *(_remark(row) for row in comparison.rows)])
    return [list(row) for row in zip(*table, strict=True)]


def _setting(name: str, row: VariantRow) -> str:
    return in_line(as_typed(row.varied.get(name), digits=4))


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return _to_digits(value, error) if error else number(value)


def _to_target(row: VariantRow) -> str:
    if row.target_step is not None and row.target_s is not None:
        return f"{row.target_step:,.0f} steps, {duration(row.target_s)}"
    if row.best is None:
        return ""
    return "never" if row.repeats == 1 or not row.reached else f"{row.reached} of {row.repeats}"


def _of_difference(row: VariantRow) -> str:
    if row.difference is None:
        return ""
    mean = row.difference.mean
    error = row.difference.standard_error
    if math.isnan(error) or error == 0.0:
        return f"{mean:+.4g}"
    return _to_digits(mean, error, sign="+")


def _remark(row: VariantRow) -> str:
    remarks = [row.verdict] if row.verdict else []
    if row.status not in ("", "finished"):
        remarks.insert(0, row.status)
    return ", ".join(remarks)


def _to_digits(value: float, error: float, *, sign: str = "") -> str:
    """Format a value and its error so that two digits of the error are visible.

    >>> _to_digits(1.23456, 0.0101), _to_digits(-7.0, 3.0), _to_digits(1234.5, 250.0, sign="+")
    ('1.235 ± 0.010', '-7.0 ± 3.0', '+1234 ± 250')
    """
    digits = min(12, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


def _values(row: VariantRow) -> dict[str, Any]:
    values: dict[str, Any] = {"variant": row.name, "label": row.label}
    for name, value in vars(row).items():
        if name == "difference":
            values["difference"] = None if value is None else value.mean
            values["difference_error"] = None if value is None else value.standard_error
            values["pairs"] = None if value is None else value.pairs
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
    groups: dict[str, list[Compared]] = {row.name: [] for row in comparison.rows}
    for run in comparison.runs:
        groups[run.variant.group].append(run)
    loss = "training loss" if any(run.trained.loss for run in comparison.runs) else ""
    score = comparison.score or ""
    if score and not score.endswith("loss"):
        fields = [
            _VariantChart(loss, groups, losses=True, scores=False),
            _VariantChart(score, groups, losses=False, scores=True),
        ]
    else:
        title = f"{loss} (lines), {score} (points)" if loss and score else loss or score
        fields = [_VariantChart(title, groups, losses=True, scores=True)]
    off_scale: dict[str, str] = {}
    for field in fields:
        off_scale |= field.off_scale
    unlike = _settings_that_differ(comparison.rows)
    names = []
    for row in comparison.rows:
        names.append(_legend_name(row, unlike, off_scale=off_scale.get(row.name)))
    return [field.chart(names) for field in fields]


def _settings_that_differ(rows: Sequence[VariantRow]) -> list[str]:
    """Return the settings that differ between rows, or all if none does."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.varied)
    unlike = []
    for name in names:
        values = {repr(row.varied.get(name)) for row in rows}
        if len(values) > 1:
            unlike.append(name)
    return unlike or list(names)


class _VariantChart:
    """A chart of the runs of each variant: their losses as lines, their scores as points, or
    both.
    """

    def __init__(
        self, title: str, groups: Mapping[str, Sequence[Compared]], *, losses: bool, scores: bool
    ) -> None:
        self.title = title
        self.groups = groups
        self.losses = losses
        self.scores = scores
        visible_points = {name: self._visible_points(runs) for name, runs in groups.items()}
        # the axis, and a note for each variant with values beyond it
        self.within, self.off_scale = _bounds(visible_points)

    def _visible_points(self, runs: Sequence[Compared]) -> list[float]:
        points: list[float] = []
        for run in runs:
            if self.losses and run.trained.loss:
                last_step, _ = run.trained.loss[-1]
                points += [loss for step, loss in _smoothed(run) if step >= _HEAD * last_step]
            if self.scores:
                points += [score for _, score in _finite(run.trained.scores)]
        return points

    def chart(self, names: Sequence[str]) -> Chart:
        """Return the chart; `names` are those of the variants in its legend."""
        lines = []
        for series, (name, runs) in enumerate(zip(names, self.groups.values(), strict=True)):
            for run in runs:
                if self.losses:
                    points = tuple(_smoothed(run))
                    lines.append(Line(name, points, series, faint=True, named=False))
                if self.scores:
                    points = tuple(_finite(run.trained.scores))
                    named = series < _SHOWN and run is runs[-1]
                    lines.append(Line(name, points, series, dots=True, named=named))
        note = ""
        if self.scores and len(names) > _SHOWN:
            note = f"{len(names) - _SHOWN} more, not named"
        return Chart(self.title, self.title, tuple(lines), note=note, wide=True, within=self.within)


def _legend_name(row: VariantRow, settings: Sequence[str], *, off_scale: str | None) -> str:
    name = in_line(row.label)
    if row.varied and "=" not in row.name:
        values = []
        for setting, short in short_names(settings).items():
            if setting in row.varied:
                values.append(f"{short}={in_line(as_typed(row.varied[setting], digits=3))}")
        name += f": {', '.join(values)}"
    name = shortened(name, _LONGEST, keep="both")
    notes = []
    if row.status != "finished":
        notes.append(row.status)
    if off_scale is not None:
        notes.append(off_scale)
    return f"{name} ({', '.join(notes)})" if notes else name


def _finite(points: Iterable[Point]) -> list[Point]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _smoothed(run: Compared) -> list[Point]:
    """Return the training loss as at most `_POINTS` means of adjacent records."""
    points = _finite(run.trained.loss)
    size = math.ceil(len(points) / _POINTS) or 1
    means = []
    for first in range(0, len(points), size):
        piece = points[first : first + size]
        last_step, _ = piece[-1]
        means.append((last_step, math.fsum(loss for _, loss in piece) / len(piece)))
    return means


def _bounds(
    points: Mapping[str, Sequence[float]],
) -> tuple[tuple[float, float] | None, dict[str, str]]:
    """Return the ends of an axis that shows the better variants, and a note for each variant with
    values beyond it.
    """
    known = {name: values for name, values in points.items() if values}
    if not known:
        return None, {}
    # bounds of the inner 33% of variants, because most may have diverged
    third = (len(known) - 1) // 3
    highest = sorted(max(values) for values in known.values())
    lowest = sorted((min(values) for values in known.values()), reverse=True)
    ranges = sorted(max(values) - min(values) for values in known.values())
    high = highest[third]
    low = min(high, lowest[third])
    room = _FAR * max(high - low, ranges[third], abs(high))
    inside: list[float] = []
    notes = {}
    for name, values in known.items():
        near = [value for value in values if low - room <= value <= high + room]
        inside += near
        if not near:
            notes[name] = "off the scale"
        elif len(near) < len(values):
            notes[name] = "partly off the scale"
    bottom = min(inside)
    top = max(inside)
    margin = 0.05 * (top - bottom) or 0.05 * abs(top) or 0.05
    return (bottom - margin, top + margin), notes
