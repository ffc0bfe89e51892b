"""The results of a comparison: a row per variant, differences between variants, and notes on their
meaning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from surefoot.compare.statistics import LEVEL, Difference, holm, mean_and_error, paired_difference
from surefoot.compare.trained import Compared, Row
from surefoot.compare.variants import Direction, group_labels, refuse_baseline
from surefoot.errors import ConfigError
from surefoot.tracking.format import as_typed, counted


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, best first, with notes. `settled` holds the automatic choices that
    all runs share.
    """

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
    baseline: str = "best",
    settled: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare runs. Differences are relative to the `baseline`: "best", "first", or the name of a
    variant.

    `target` defaults to the best score of the first variant with a score. Raises `ConfigError` if
    the runs monitor different scores, or if the baseline is unknown.
    """
    watches = {run.trained.watch for run in runs if run.trained.watch is not None}
    if len(watches) > 1:
        listed = ", ".join(sorted(" ".join(watch) for watch in watches))
        raise ConfigError(
            f"the runs are ranked by different scores: {listed}\n  choose one: --metric 'min SPLIT/METRIC'"
        )
    watch = next(iter(watches), None)
    direction, score = watch or ("min", None)
    names = dict.fromkeys(run.variant.group for run in runs)
    groups = {name: [run for run in runs if run.variant.group == name] for name in names}
    rows = {
        name: _row(name, groups[name], label)
        for name, label in group_labels([run.variant for run in runs]).items()
    }
    first = next((row for row in rows.values() if row.best is not None), None)
    notes = (
        []
        if first is None
        else [_of_target(target, first, is_first=first is next(iter(rows.values())))]
    )
    target = first.best if target is None and first is not None else target
    if target is not None:
        rows = {name: _timed(row, groups[name], target) for name, row in rows.items()}
    sign = 1 if direction == "min" else -1
    ranked = sorted(rows.values(), key=lambda row: (row.best is None, sign * (row.best or 0.0)))
    if first is not None:
        refuse_baseline(baseline, {row.name: row.label for row in ranked})
        named = {row.label: row for row in ranked} | rows | {"best": ranked[0], "first": first}
        rows, more = _with_differences(
            rows, groups, named[baseline], sign=sign, chosen=baseline == "best"
        )
        notes += more
    notes += _of_what_is_shared(runs)
    return Comparison(
        score, direction, target, [rows[row.name] for row in ranked], notes, runs, settled or {}
    )


def _row(name: str, runs: Sequence[Compared], label: str) -> Row:
    unlike = [run for run in runs if run.status != "finished"]
    counted = [
        run for run in runs if run.status == "finished"
    ] or runs  # unfinished runs would bias the mean
    best = [point for run in counted if (point := run.trained.best) is not None]
    some = f"{len(unlike)} of {len(runs)} " if len(runs) > 1 else ""
    status = (
        f"{some}{unlike[0].status} at step {unlike[0].trained.last_step}" if unlike else "finished"
    )
    best_score, best_error = mean_and_error([score for _, score in best])
    final_score, final_error = mean_and_error([run.trained.final for run in counted])
    return Row(
        name=name,
        varied=runs[0].variant.varied,
        status=status,
        said=unlike[0].said if unlike else "",
        repeats=len(runs),
        label=label,
        best=best_score,
        best_error=best_error,
        best_step=mean_and_error([step for step, _ in best])[0],
        final=final_score,
        final_error=final_error,
        training_s=mean_and_error([run.trained.training_s for run in counted if run.trained.times])[
            0
        ],
        targets_per_s=mean_and_error([run.trained.targets_per_s for run in counted])[0],
    )


def _timed(row: Row, runs: Sequence[Compared], target: float) -> Row:
    times = [arrival for run in runs if (arrival := run.trained.reached(target)) is not None]
    if not times or len(times) < len(runs):
        return replace(row, reached=len(times))
    steps, seconds = (mean_and_error(values)[0] for values in zip(*times, strict=True))
    return replace(row, reached=len(times), target_step=steps, target_s=seconds)


def _with_differences(
    rows: dict[str, Row],
    groups: Mapping[str, Sequence[Compared]],
    standard: Row,
    *,
    sign: int,
    chosen: bool,
) -> tuple[dict[str, Row], list[str]]:
    # a baseline chosen as the best (`chosen`) needs a correction for all pairs
    pairs = combinations([name for name, row in rows.items() if row.best is not None], 2)
    differences_or_whys = {
        (one, other): _difference(groups[one], groups[other], rows)
        for one, other in pairs
        if chosen or standard.name in (one, other)
    }
    differences = {
        pair: each for pair, each in differences_or_whys.items() if isinstance(each, Difference)
    }
    whys = dict.fromkeys(
        why
        for pair, why in differences_or_whys.items()
        if standard.name in pair and isinstance(why, str)
    )
    done = dict(rows)
    p_values = holm([each.p_value for each in differences.values()])
    for ((one, other), difference), p in zip(differences.items(), p_values, strict=True):
        if standard.name in (one, other):
            name = other if one == standard.name else one
            facing = (
                replace(difference, mean=-difference.mean) if one == standard.name else difference
            )
            known, verdict = None if math.isnan(p) else p, _verdict(facing, p, sign)
            done[name] = replace(rows[name], difference=facing, p=known, verdict=verdict)
    done[standard.name] = replace(rows[standard.name], verdict="best" if chosen else "baseline")
    notes = _of_differences(differences, groups, chosen=chosen) if differences else []
    notes += [f"no paired difference: {why}" for why in whys]
    uneven = [row.label for row in rows.values() if row.repeats > 1 and row.status != "finished"]
    if uneven and differences:
        notes.append(
            f"not all seeds of {', '.join(uneven)} finished: the finished ones may be the easier ones"
        )
    return done, notes


def _difference(
    one: Sequence[Compared], other: Sequence[Compared], rows: Mapping[str, Row]
) -> Difference | str:
    if len(one) > 1 or len(other) > 1:
        seeds = [
            {
                run.variant.settings.get("seed"): run.trained.best
                for run in runs
                if run.status == "finished"
            }
            for runs in (one, other)
        ]
        both = [(seeds[0][seed], seeds[1][seed]) for seed in seeds[0] if seed in seeds[1]]
        scores = [(a[1], b[1]) for a, b in both if a is not None and b is not None]
        if len(scores) < 2:
            return "fewer than two seeds finished in both variants"
        return paired_difference(
            [a for a, _ in scores], [b for _, b in scores], counts=[1.0] * len(scores)
        )
    for run in (one[0], other[0]):
        if (run.batches or {}).get("best") is None:
            why = (
                "has no checkpoint of its best step" if run.batches else "has no metrics per batch"
            )
            return str((run.batches or {}).get("why", f"{rows[run.variant.group].label} {why}"))
    first, second = one[0].batches or {}, other[0].batches or {}
    if first["split"] != second["split"] or first["counts"] != second["counts"]:
        return "the variants are not evaluated on the same batches"
    return paired_difference(
        first["best"]["means"], second["best"]["means"], counts=first["counts"]
    )


def _verdict(difference: Difference, p: float, sign: int) -> str:
    if p < LEVEL:
        return "worse" if sign * difference.mean > 0 else "better"
    return "" if math.isnan(p) else "inside the noise"


def _of_target(target: float | None, first: Row, *, is_first: bool) -> str:
    if target is not None:
        return f"target: {as_typed(target)}, as specified; reached at the first evaluation that is at least as good"
    assert first.best is not None
    which = f"{first.label}, the first variant{'' if is_first else ' with a metric'}"
    return f"target: {first.best:.5g}, the best metric of {which}; reached at the first evaluation that is at least as good"


def _of_differences(
    differences: Mapping[tuple[str, str], Difference],
    groups: Mapping[str, Sequence[Compared]],
    *,
    chosen: bool,
) -> list[str]:
    why = (
        " (all pairs, because the best is chosen from the same metrics)"
        if chosen and len(differences) > 1
        else ""
    )
    together = f"{counted(len(differences), 'comparison')}{why}"
    sizes = sorted({difference.pairs for difference in differences.values()})
    pairs = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    if any(len(runs) > 1 for runs in groups.values()):
        what = f"best scores, paired by seed ({pairs} seeds); the standard error is over seeds"
    else:
        what = (
            f"best weights, paired over {pairs} shared evaluation batches{_of_sizes(differences, groups)};"
            " the standard error covers the evaluation data only. Another seed may change more: --seeds 3"
        )
    return [
        f"difference: {what}",
        f"inside the noise: not significant in a t test at {LEVEL:.0%}, with Holm's correction for {together}",
    ]


def _of_sizes(
    differences: Mapping[tuple[str, str], Difference], groups: Mapping[str, Sequence[Compared]]
) -> str:
    counts = [
        batches["counts"]
        for pair in differences
        if (batches := groups[pair[0]][0].batches) is not None
    ]
    if not counts or any(each != counts[0] for each in counts):
        return ""
    min_count, max_count = int(min(counts[0])), int(max(counts[0]))
    each = f"{min_count:,}" if min_count == max_count else f"{min_count:,} to {max_count:,}"
    return f" of {each} target{'s' if max_count != 1 else ''}" + (
        f", {int(sum(counts[0])):,} in all" if max_count > 1 else ""
    )


def _of_what_is_shared(runs: Sequence[Compared]) -> list[str]:
    unknown = [
        f"unknown: the initial weights and sample order of {run.variant.name}, whose checkpoint at step 0 is missing"
        for run in runs
        if run.trained.order is None and run.trained.scores
    ]
    repeated = len({run.variant.group for run in runs}) < len(runs)
    orders = [
        (run.trained.order.get("seed") if repeated else None, run.trained.order)
        for run in runs
        if run.trained.order is not None
    ]
    if len({seed for seed, _ in orders}) == len(orders):
        return unknown

    def differs(name: str) -> bool:
        return len({(seed, repr(order.get(name))) for seed, order in orders}) > len(
            {seed for seed, _ in orders}
        )

    weights = not differs("weights")
    other = [name for name in ("seed", "batch_size", "data") if differs(name)]
    rounded = ["not shared: the precision"] if differs("precision") else []
    seeds = ", seed by seed" if repeated else ""
    if weights and not other:
        return [f"shared: the initial weights and the sample order{seeds}", *rounded, *unknown]
    lines = [*rounded, *unknown, *([] if weights else [f"not shared: the initial weights{seeds}"])]
    if other:
        lines.append(
            f"not shared: the sample order{seeds}, because of different {', '.join(other)}"
        )
    shared = ["the sample order"] * (not other) + ["the initial weights"] * weights
    return [*lines, *(f"shared: {what}{seeds}" for what in shared)]
