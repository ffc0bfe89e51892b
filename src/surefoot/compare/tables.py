"""A comparison as text, Markdown, tab-separated values and JSON."""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from surefoot.compare.results import Comparison
from surefoot.compare.trained import Row
from surefoot.compare.variants import flags, short_names
from surefoot.tracking.format import as_typed, duration, in_line, number, text_table

_ALIKE = 4  # variants named that are no worse than the best


def text(comparison: Comparison) -> str:
    """The table for a person, with what is to be known of it below."""
    cells = _cells(comparison)
    return "\n".join([_title(comparison), *text_table(cells, left=(0, len(cells[0]) - 1)), *_below(comparison)])


def markdown(comparison: Comparison) -> str:
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in _cells(comparison)]
    lines = [head, ["---", *["---:"] * (len(head) - 2), "---"], *rows]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([_title(comparison), "", *table, "", *(f"* {note}" for note in _below(comparison))]) + "\n"


def tsv(comparison: Comparison) -> str:
    """All numbers whole, one run group a line."""
    settings = sorted({name for row in comparison.rows for name in row.varied})
    rows = [{**{name: row.varied.get(name) for name in settings}, **_values(row)} for row in comparison.rows]
    lines = [["" if value is None else in_line(as_typed(value)) for value in row.values()] for row in rows]
    return "".join("\t".join(line) + "\n" for line in [*map(list, rows[:1]), *lines])


def as_json(comparison: Comparison) -> str:
    """Everything, the runs of each variant one by one too; what is no number is null."""
    runs = [
        {
            "name": run.variant.name,
            "variant": run.variant.group,
            "settings": dict(run.variant.settings),
            "status": run.status,
            "said": run.said,
            **dict(zip(("best_step", "best"), run.trained.best or (None, None), strict=True)),
            **{name: getattr(run.trained, name) for name in ("final", "training_s", "targets_per_s", "scores")},
        }
        for run in comparison.runs
    ]
    whole = {
        "score": comparison.score,
        "direction": comparison.direction,
        "target": comparison.target,
        "variants": [{"settings": dict(row.varied), **_values(row)} for row in comparison.rows],
        "runs": runs,
        "notes": list(comparison.notes),
    }
    finite = json.loads(json.dumps(whole), parse_constant=lambda _: None)
    return json.dumps(finite, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _of_best(comparison: Comparison) -> list[str]:
    """The best settings as they are typed, and from which they could not be told apart; none where nothing was varied or scored.

    What was measured for all of them at the start (`settled`) is among them: it is part of what was compared.
    """
    best = comparison.rows[0] if comparison.rows else None
    if best is None or best.best is None or not best.varied:
        return []
    fixed = {name: value for name, value in comparison.settled.items() if best.varied.get(name) in (None, "auto")}
    no_better = {"inside the noise": "reference", "best": "inside the noise"}.get(best.verdict)
    alike = [in_line(row.label) for row in comparison.rows if row.verdict == no_better]
    more = f" and {len(alike) - _ALIKE} more" if len(alike) > _ALIKE else ""
    told = f" (by these data no better than {', '.join(alike[:_ALIKE])}{more})" if alike else ""
    return [f"best settings: {flags({**best.varied, **fixed})}{told}"]


def _title(comparison: Comparison) -> str:
    if comparison.score is None:
        return "no score is watched: training is told, and nothing compared"
    return f"{comparison.score}: {'lower' if comparison.direction == 'min' else 'higher'} is better"


def _below(comparison: Comparison) -> list[str]:
    said = [f"{in_line(row.label)}: {in_line(row.said)}" for row in comparison.rows if row.said]
    return [*said, *comparison.notes, *_of_best(comparison)]


def _cells(comparison: Comparison) -> list[list[str]]:
    """The table's head and rows, without columns that are empty."""
    untold = dict.fromkeys(name for row in comparison.rows for name in row.varied if "=" not in row.name)
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
        ("", lambda row: ", ".join(part for part in (row.status, row.verdict) if part not in ("", "finished"))),
    ]
    told = [[title, *map(cell, comparison.rows)] for title, cell in columns]
    kept = [cells for cells in told if cells in (told[0], told[-1]) or any(cells[1:])]
    return [list(row) for row in zip(*kept, strict=True)]


def _setting(name: str, row: Row) -> str:
    return in_line(as_typed(row.varied.get(name), digits=4))


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return number(value) if not error else _to_digits(value, error)


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
    return f"{mean:+.4g}" if math.isnan(error) or error == 0.0 else _to_digits(mean, error, sign="+")


def _to_digits(value: float, error: float, *, sign: str = "") -> str:
    """A value and its error, with as many digits as show the last two of the error.

    >>> _to_digits(1.23456, 0.0101), _to_digits(-7.0, 3.0), _to_digits(1234.5, 250.0, sign="+")
    ('1.235 ± 0.010', '-7.0 ± 3.0', '+1234 ± 250')
    """
    digits = min(12, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


def _values(row: Row) -> dict[str, Any]:
    """The numbers of a row by name, its difference taken apart, and steps as the whole numbers that they mostly are."""
    values: dict[str, Any] = {"variant": row.name, "label": row.label}
    for name, value in vars(row).items():
        if name == "difference":
            of_difference = (None, None, None) if value is None else (value.mean, value.standard_error, value.pairs)
            values |= zip(("difference", "difference_error", "pairs"), of_difference, strict=True)
        elif name in ("best_step", "target_step") and value is not None and value.is_integer():
            values[name] = int(value)
        elif name not in ("name", "label", "varied", "reached"):
            values[name] = value
    return values
