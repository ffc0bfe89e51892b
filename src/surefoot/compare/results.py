"""Variants side by side: one row each, the differences between them, and in words what they do and do not say.

How differences and their noise are computed is in `statistics.py`, what is said of them in `notes.py`, how rows are printed in
`tables.py`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from surefoot.compare.notes import of_differences, of_target, of_what_is_shared
from surefoot.compare.statistics import LEVEL, Difference, holm, mean_and_error, paired_difference
from surefoot.compare.trained import Compared, Row
from surefoot.compare.variants import Direction, group_labels, refuse_reference
from surefoot.errors import ConfigError


@dataclass(frozen=True)
class Comparison:
    """The rows, best first, and what must be said with them. `settled` are settings that were found once for all of the runs."""

    score: str | None
    direction: Direction
    target: float | None
    rows: Sequence[Row]
    notes: Sequence[str]
    runs: Sequence[Compared]
    settled: Mapping[str, Any] = field(default_factory=dict)


def compared(
    runs: Sequence[Compared],
    *,
    target: float | None = None,
    reference: str = "best",
    settled: Mapping[str, Any] | None = None,
) -> Comparison:
    """Put runs side by side. `reference` is the variant to which differences are taken: "best", "first", or a name.

    Without a target it is the best score of the first variant that has one. `ConfigError` where the runs are judged by
    different scores, or no variant is called as the reference is.
    """
    watches = {run.trained.watch for run in runs if run.trained.watch is not None}
    if len(watches) > 1:
        listed = ", ".join(sorted(" ".join(watch) for watch in watches))
        raise ConfigError(f"the runs are judged by different scores: {listed}\n  choose one: --score 'min SPLIT/SCORE'")
    watch = next(iter(watches), None)
    direction, score = watch or ("min", None)
    groups: dict[str, list[Compared]] = {}
    for run in runs:
        groups.setdefault(run.variant.group, []).append(run)
    shown = group_labels([run.variant for run in runs])
    rows = {name: _row(name, held, shown[name]) for name, held in groups.items()}
    first = next((row for row in rows.values() if row.best is not None), None)
    notes = [] if first is None else [of_target(target, first, is_first=first is next(iter(rows.values())))]
    if target is None and first is not None:
        target = first.best
    if target is not None:
        rows = {name: _timed(row, groups[name], target) for name, row in rows.items()}
    sign = 1 if direction == "min" else -1
    ranked = sorted(rows.values(), key=lambda row: (row.best is None, sign * (row.best or 0.0)))
    if first is not None:
        refuse_reference(reference, {row.name: row.label for row in ranked})
        named = {row.label: row for row in ranked} | rows | {"best": ranked[0], "first": first}
        rows, more = _with_differences(rows, groups, named[reference], sign=sign, chosen=reference == "best")
        notes += more
    notes += of_what_is_shared(runs)
    ranked = [rows[row.name] for row in ranked]
    return Comparison(score, direction, target, ranked, notes, runs, settled or {})


def _row(name: str, runs: Sequence[Compared], label: str) -> Row:
    """A variant's row without target and difference."""
    unlike = [run for run in runs if run.status != "finished"]
    counted = [run for run in runs if run.status == "finished"] or runs  # half a run is no repeat of a whole one
    best = [found for run in counted if (found := run.trained.best) is not None]
    some = f"{len(unlike)} of {len(runs)} " if len(runs) > 1 else ""
    status = f"{some}{unlike[0].status} at step {unlike[0].trained.last_step}" if unlike else "finished"
    best_score, best_error = _mean([score for _, score in best])
    final_score, final_error = _mean([run.trained.final for run in counted])
    return Row(
        name=name,
        varied=runs[0].variant.varied,
        status=status,
        said=unlike[0].said if unlike else "",
        repeats=len(runs),
        label=label,
        best=best_score,
        best_error=best_error,
        best_step=_mean([step for step, _ in best])[0],
        final=final_score,
        final_error=final_error,
        training_s=_mean([run.trained.training_s for run in counted if run.trained.times])[0],
        targets_per_s=_mean([run.trained.targets_per_s for run in counted])[0],
    )


def _timed(row: Row, runs: Sequence[Compared], target: float) -> Row:
    times = [found for run in runs if (found := run.trained.reached(target)) is not None]
    if not times or len(times) < len(runs):
        return replace(row, reached=len(times))
    steps, seconds = (_mean(values)[0] for values in zip(*times, strict=True))
    return replace(row, reached=len(times), target_step=steps, target_s=seconds)


def _mean(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """The mean over the repeats that have a value, and its standard error; None for what is not known."""
    known = [float(value) for value in values if value is not None]
    mean, error = mean_and_error(known) if known else (None, math.nan)
    return mean, _known(error)


def _with_differences(
    rows: dict[str, Row], groups: Mapping[str, Sequence[Compared]], standard: Row, *, sign: int, chosen: bool
) -> tuple[dict[str, Row], list[str]]:
    """The rows with the difference of each to the reference, and what is to be said of these.

    Where the reference was `chosen` because it is the best, all pairs are corrected for together: any of them might have
    been the one that was looked at.
    """
    called = {name: row.label for name, row in rows.items()}
    differences: dict[tuple[str, str], Difference] = {}
    whys: dict[str, None] = {}
    for pair in combinations([name for name, row in rows.items() if row.best is not None], 2):
        found = _difference(groups[pair[0]], groups[pair[1]], called) if chosen or standard.name in pair else ""
        if isinstance(found, Difference):
            differences[pair] = found
        elif standard.name in pair:
            whys[found] = None
    corrected = dict(zip(differences, holm([each.p_value for each in differences.values()]), strict=True))
    done = dict(rows)
    for (one, other), difference in differences.items():
        if standard.name in (one, other):
            name = other if one == standard.name else one
            facing = replace(difference, mean=-difference.mean) if one == standard.name else difference
            p = corrected[one, other]
            done[name] = replace(rows[name], difference=facing, p=_known(p), verdict=_verdict(facing, p, sign))
    done[standard.name] = replace(rows[standard.name], verdict="best" if chosen else "reference")
    notes = of_differences(differences, groups, chosen=chosen) if differences else []
    notes += [f"no paired difference: {why}" for why in whys]
    uneven = [row.label for row in rows.values() if row.repeats > 1 and row.status != "finished"]
    if uneven and differences:
        notes.append(f"not all seeds finished of {', '.join(uneven)}: the others may be the easier ones")
    return done, notes


def _difference(one: Sequence[Compared], other: Sequence[Compared], called: Mapping[str, str]) -> Difference | str:
    """The difference of the best scores of two variants, or why there is none that means anything."""
    if len(one) > 1 or len(other) > 1:
        seeds = [
            {run.variant.settings.get("seed"): run.trained.best for run in runs if run.status == "finished"}
            for runs in (one, other)
        ]
        both = [(seeds[0][seed], seeds[1][seed]) for seed in seeds[0] if seed in seeds[1]]
        scores = [(a[1], b[1]) for a, b in both if a is not None and b is not None]
        if len(scores) < 2:
            return "fewer than two seeds have been trained to the end by both"
        return paired_difference([a for a, _ in scores], [b for _, b in scores], counts=[1.0] * len(scores))
    for run in (one[0], other[0]):
        if (run.batches or {}).get("best") is None:
            why = "kept no checkpoint of its best step" if run.batches else "was not scored batch by batch"
            return str((run.batches or {}).get("why", f"{called[run.variant.group]} {why}"))
    first, second = one[0].batches or {}, other[0].batches or {}
    if first["split"] != second["split"] or first["counts"] != second["counts"]:
        return "the variants are not evaluated on the same batches"
    return paired_difference(first["best"]["means"], second["best"]["means"], counts=first["counts"])


def _verdict(difference: Difference, p: float, sign: int) -> str:
    if math.isnan(p) or p >= LEVEL:
        return "" if math.isnan(p) else "inside the noise"
    return "worse" if sign * difference.mean > 0 else "better"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
