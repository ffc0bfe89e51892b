"""The results of a comparison: a row per variant, differences between variants, and notes on their
meaning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from surefoot.errors import ConfigError, Setting
from surefoot.tools.compare.statistics import (
    LEVEL,
    Difference,
    holm,
    mean_and_error,
    paired_difference,
    unpaired_difference,
    with_split,
)
from surefoot.tools.compare.trained import Compared, Row, same_bits
from surefoot.tools.compare.variants import Direction, group_labels, refuse_baseline
from surefoot.tracking.format import as_typed, counted

ONE_SEED = "not tested: one seed"
NO_SPREAD = "not tested: no spread over seeds"
INSIDE_NOISE = "inside the noise"
EQUAL_BITS = "equal bits"
TIES = ("tie", EQUAL_BITS)
_FEWEST_PAIRS = 5  # of shared seeds: fewer pairs lose more degrees of freedom than they gain


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
            "runs-ranked-by-different-scores",
            problem=f"the runs are ranked by different scores: {listed}",
            remedy=Setting("metric", "min SPLIT/METRIC"),
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
    finished = {name: list(filter(_is_finished, groups[name])) for name in rows}
    pairs = [
        pair
        for pair in combinations([name for name in rows if finished[name]], 2)
        if chosen or standard.name in pair
    ]
    measured = [_measured(finished[one], finished[other], rows) for one, other in pairs]
    p_values = holm([each.p_value for each in measured])
    done = dict(rows)
    for (one, other), each, p in zip(pairs, measured, p_values, strict=True):
        if standard.name not in (one, other):
            continue
        name = other if one == standard.name else one
        difference = each.difference
        if difference is not None and one == standard.name:
            difference = replace(difference, mean=0.0 - difference.mean)  # 0, not -0
        verdict = _verdict(difference, p, sign) if each.is_tested else ONE_SEED
        if rows[name].best == standard.best:
            verdict = "tie"
        if _have_equal_bits(finished[name], finished[standard.name]):
            verdict = EQUAL_BITS
        known = None if math.isnan(p) else p
        done[name] = replace(rows[name], difference=difference, p=known, verdict=verdict)
    own = "best" if chosen else "baseline"
    if chosen and any(row.verdict in TIES for row in done.values()):
        own = "tie"
    done[standard.name] = replace(rows[standard.name], verdict=own)
    notes = _of_differences(
        [each for pair, each in zip(pairs, measured, strict=True) if standard.name in pair],
        counts=_counts_of_all(finished),
        comparisons=sum(not math.isnan(p) for p in p_values),
        chosen=chosen,
    )
    uneven = [row.label for row in rows.values() if row.repeats > 1 and row.status != "finished"]
    if uneven and measured:
        notes.append(
            f"not all seeds of {', '.join(uneven)} finished: the finished ones may be the easier ones"
        )
    return done, notes


@dataclass(frozen=True)
class _Measured:
    """The difference of two variants. `why` says why its error does not cover the evaluation data.
    It `is_tested` if both variants finished with two or more seeds, which are `paired` if the
    variants share enough of them.
    """

    difference: Difference | None
    is_tested: bool
    why: str = ""
    paired: bool = True

    @property
    def p_value(self) -> float:
        if not self.is_tested or self.difference is None:
            return math.nan
        return self.difference.p_value


def _measured(
    first: Sequence[Compared], second: Sequence[Compared], rows: Mapping[str, Row]
) -> _Measured:
    of_split = None
    why = ""
    split = _over_split(first, second, rows)
    if isinstance(split, str):
        why = split
    else:
        of_split = split
    if min(len(first), len(second)) < 2:
        return _Measured(of_split, is_tested=False, why=why)
    scores = _scores_by_seed(first)
    others = _scores_by_seed(second)
    shared = [seed for seed in scores if seed in others]
    if len(shared) < _FEWEST_PAIRS:
        seeds = unpaired_difference(list(scores.values()), list(others.values()))
    else:
        seeds = paired_difference(
            [scores[seed] for seed in shared],
            [others[seed] for seed in shared],
            counts=[1.0] * len(shared),
        )
    difference = seeds if of_split is None else with_split(seeds, of_split)
    return _Measured(difference, is_tested=True, why=why, paired=len(shared) >= _FEWEST_PAIRS)


def _is_finished(run: Compared) -> bool:
    return run.status == "finished" and run.trained.best is not None


def _seed(run: Compared) -> Any:
    return run.variant.settings.get("seed")


def _best_score(run: Compared) -> float:
    assert run.trained.best is not None  # only runs that finished are compared
    return run.trained.best[1]


def _scores_by_seed(runs: Sequence[Compared]) -> dict[Any, float]:
    return {_seed(run): _best_score(run) for run in runs}


def _over_split(
    first: Sequence[Compared], second: Sequence[Compared], rows: Mapping[str, Row]
) -> Difference | str:
    """Return the difference of the mean scores of two variants over the same evaluation data, or
    why there is none.
    """
    for run in [*first, *second]:
        if (run.batches or {}).get("best") is None:
            why = (
                "has no checkpoint of its best step" if run.batches else "has no metrics per batch"
            )
            return str((run.batches or {}).get("why", f"{rows[run.variant.group].label} {why}"))
    evaluated = [run.batches or {} for run in [*first, *second]]
    split, counts, best = (evaluated[0][name] for name in ("split", "counts", "best"))
    kind = "means" if "means" in best else "resampled"
    for each in evaluated:
        if each["split"] != split or each["counts"] != counts or kind not in each["best"]:
            return "the variants are not evaluated on the same batches"
    if len(counts) < 2:
        return "the split is too small to be cut into batches"
    values = np.array([each["best"][kind] for each in evaluated])
    if not np.isfinite(values).all():
        return "the scores of some batches are not finite"
    ours, theirs = values[: len(first)].mean(axis=0), values[len(first) :].mean(axis=0)
    if kind == "means":
        return paired_difference(ours.tolist(), theirs.tolist(), counts=counts)
    mean = fmean(map(_best_score, first)) - fmean(map(_best_score, second))
    error = float(np.std(ours - theirs, ddof=1))
    return Difference(mean, error, len(counts), len(counts) - 1)


def _have_equal_bits(runs: Sequence[Compared], others: Sequence[Compared]) -> bool:
    """Return True if the runs of two variants computed the same, seed by seed."""
    in_order = [sorted(each, key=lambda run: str(_seed(run))) for each in (runs, others)]
    if len(runs) > 1 and [*map(_seed, in_order[0])] != [*map(_seed, in_order[1])]:
        return False
    return len(runs) == len(others) and all(
        same_bits(run.trained, other.trained) for run, other in zip(*in_order, strict=True)
    )


def _verdict(difference: Difference | None, p: float, sign: int) -> str:
    if difference is None or math.isnan(p):
        return NO_SPREAD
    if p >= LEVEL:
        return INSIDE_NOISE
    return "worse" if sign * difference.mean > 0 else "better"


def _of_target(target: float | None, first: Row, *, is_first: bool) -> str:
    if target is not None:
        return f"target: {as_typed(target)}, as specified; reached at the first evaluation that is at least as good"
    assert first.best is not None
    which = f"{first.label}, the first variant{'' if is_first else ' with a metric'}"
    return f"target: {first.best:.5g}, the best metric of {which}; reached at the first evaluation that is at least as good"


def _of_differences(
    measured: Sequence[_Measured], *, counts: Sequence[float], comparisons: int, chosen: bool
) -> list[str]:
    notes = []
    untested = {
        each.difference.pairs for each in measured if not each.is_tested and each.difference
    }
    if untested:
        batches = " to ".join(map(str, sorted(untested)))
        notes.append(
            f"difference: best weights, paired over {batches} {_kind_of_pairs(counts)};"
            " the standard error covers the evaluation data only"
        )
    tested = [each for each in measured if each.is_tested and each.difference is not None]
    if tested:
        seeds = sorted({each.difference.pairs for each in tested if each.difference})
        pairs = "paired by seed" if all(each.paired for each in tested) else "not paired"
        covers = "seeds" if any(each.why for each in tested) else "seeds and evaluation data"
        notes.append(
            f"difference: best scores of {' to '.join(map(str, seeds))} seeds, {pairs};"
            f" the standard error covers {covers}"
        )
        why = " (all pairs, because the best is chosen from the same metrics)"
        of_all = why if chosen and comparisons > 1 else ""
        notes.append(
            f"{INSIDE_NOISE}: not significant in a t test at {LEVEL:.0%}, with Holm's correction for"
            f" {counted(comparisons, 'comparison')}{of_all}"
        )
    if not all(each.is_tested for each in measured):
        notes.append(
            f"{ONE_SEED}: another seed may change a score by more than this; compare several seeds"
        )
    for each in measured:
        kind = "the standard error covers seeds only" if each.is_tested else "no paired difference"
        note = f"{kind}: {each.why}"
        if each.why and note not in notes:
            notes.append(note)
    return notes


def _counts_of_all(groups: Mapping[str, Sequence[Compared]]) -> list[float]:
    """Return the targets of each evaluation batch if all runs have the same batches, else []."""
    batches = [run.batches for runs in groups.values() for run in runs if run.batches is not None]
    known = [each["counts"] for each in batches if "counts" in each]
    return known[0] if known and all(each == known[0] for each in known) else []


def _kind_of_pairs(counts: Sequence[float]) -> str:
    """Name what was evaluated in each pair: a held-out sample, or a batch of so many targets."""
    if not counts:
        return "shared evaluation batches"
    min_count, max_count = int(min(counts)), int(max(counts))
    if max_count == 1:
        return "held-out samples"
    each = f"{min_count:,}" if min_count == max_count else f"{min_count:,} to {max_count:,}"
    return f"shared evaluation batches of {each} targets, {int(sum(counts)):,} in all"


def _models_that_differ(runs: Sequence[Compared]) -> list[str]:
    """Return a line with the sizes of the runs' models, or nothing if all sizes are equal."""
    sizes: dict[int, str] = {}
    for run in runs:
        if run.trained.order is not None and "model_bytes" in run.trained.order:
            sizes.setdefault(run.trained.order["model_bytes"], run.variant.name)
    if len(sizes) < 2:
        return []
    examples = ", ".join(f"{size:,} bytes of {name}" for size, name in sizes.items())
    return [f"not shared: the model, whose file at step 0 has {examples}"]


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
    unknown = [*_models_that_differ(runs), *unknown]
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
