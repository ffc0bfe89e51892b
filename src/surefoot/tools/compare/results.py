"""The results of a comparison: a row per variant, differences between variants, and notes on their
meaning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from statistics import fmean
from typing import Any

import numpy as np

from surefoot.errors import ConfigError, Setting
from surefoot.tools.compare.statistics import (
    LEVEL,
    ScoreDifference,
    holm,
    mean_and_error,
    paired_difference,
    unpaired_difference,
    with_split,
)
from surefoot.tools.compare.trained import Compared, VariantRow, same_bits
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
    rows: Sequence[VariantRow]
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
    direction: Direction = "min"
    score = None
    if watches:
        direction, score = watches.pop()
    sign = 1 if direction == "min" else -1
    labels = group_labels([run.variant for run in runs])
    groups: dict[str, list[Compared]] = {name: [] for name in labels}
    for run in runs:
        groups[run.variant.group].append(run)
    rows = {name: _row(name, groups[name], label) for name, label in labels.items()}
    scored = [row for row in rows.values() if row.best is not None]
    notes = []
    if scored:
        first = scored[0]
        has_others = first is not next(iter(rows.values()))
        notes.append(_of_target(target, first, has_others=has_others))
        target = first.best if target is None else target
    if target is not None:
        rows = {name: _timed(row, groups[name], target) for name, row in rows.items()}
    ranked = sorted(rows.values(), key=lambda row: (row.best is None, sign * (row.best or 0.0)))
    if scored:
        refuse_baseline(baseline, {row.name: row.label for row in ranked})
        standards = {row.label: row.name for row in ranked}
        standards |= {name: name for name in rows}
        standards |= {"best": ranked[0].name, "first": scored[0].name}
        is_best = baseline == "best"
        rows, of_differences = _with_differences(
            rows, groups, standards[baseline], sign=sign, chosen=is_best
        )
        notes += of_differences
    notes += _of_what_is_shared(runs)
    return Comparison(
        score, direction, target, [rows[row.name] for row in ranked], notes, runs, settled or {}
    )


def _row(name: str, runs: Sequence[Compared], label: str) -> VariantRow:
    finished = [run for run in runs if run.status == "finished"]
    unlike = [run for run in runs if run.status != "finished"]
    status = "finished"
    said = ""
    if unlike:
        status = f"{unlike[0].status} at step {unlike[0].trained.last_step}"
        said = unlike[0].said
        if len(runs) > 1:
            status = f"{len(unlike)} of {len(runs)} {status}"
    counted = finished or runs  # unfinished runs would bias the mean
    best_steps = []
    best_scores = []
    for run in counted:
        if run.trained.best is not None:
            step, score = run.trained.best
            best_steps.append(step)
            best_scores.append(score)
    best, best_error = mean_and_error(best_scores)
    best_step, _ = mean_and_error(best_steps)
    final, final_error = mean_and_error([run.trained.final for run in counted])
    training_s, _ = mean_and_error([run.trained.training_s for run in counted if run.trained.times])
    targets_per_s, _ = mean_and_error([run.trained.targets_per_s for run in counted])
    return VariantRow(
        name=name,
        varied=runs[0].variant.varied,
        status=status,
        said=said,
        repeats=len(runs),
        label=label,
        best=best,
        best_error=best_error,
        best_step=best_step,
        final=final,
        final_error=final_error,
        training_s=training_s,
        targets_per_s=targets_per_s,
    )


def _timed(row: VariantRow, runs: Sequence[Compared], target: float) -> VariantRow:
    """Return a row with how many of its runs reached the target and, if all did, when."""
    steps = []
    seconds = []
    for run in runs:
        arrival = run.trained.reached(target)
        if arrival is not None:
            step, training_s = arrival
            steps.append(step)
            seconds.append(training_s)
    if not steps or len(steps) < len(runs):
        return replace(row, reached=len(steps))
    target_step, _ = mean_and_error(steps)
    target_s, _ = mean_and_error(seconds)
    return replace(row, reached=len(steps), target_step=target_step, target_s=target_s)


def _with_differences(
    rows: Mapping[str, VariantRow],
    groups: Mapping[str, Sequence[Compared]],
    standard: str,
    *,
    sign: int,
    chosen: bool,
) -> tuple[dict[str, VariantRow], list[str]]:
    """Return the rows with their differences from the one named `standard`, and notes on them.

    A standard that was `chosen` as the best needs a correction for all pairs.
    """
    finished = {name: [run for run in groups[name] if _is_finished(run)] for name in rows}
    measured: dict[tuple[str, str], _Measured] = {}
    for one, other in combinations([name for name in rows if finished[name]], 2):
        if chosen or standard in (one, other):
            measured[one, other] = _measured(finished[one], finished[other], rows)
    corrected = holm([pair.p_value for pair in measured.values()])
    done = dict(rows)
    of_standard = []
    for ((one, other), pair), p in zip(measured.items(), corrected, strict=True):
        if standard not in (one, other):
            continue
        of_standard.append(pair)
        difference = pair.difference
        name = one
        if one == standard:
            name = other
            if difference is not None:
                difference = replace(difference, mean=0.0 - difference.mean)  # 0, not -0
        if _have_equal_bits(finished[name], finished[standard]):
            verdict = EQUAL_BITS
        elif rows[name].best == rows[standard].best:
            verdict = "tie"
        else:
            verdict = _verdict(difference, p, sign) if pair.is_tested else ONE_SEED
        known_p = None if math.isnan(p) else p
        done[name] = replace(rows[name], difference=difference, p=known_p, verdict=verdict)
    verdict = "baseline"
    if chosen:
        has_tie = any(row.verdict in TIES for row in done.values())
        verdict = "tie" if has_tie else "best"
    done[standard] = replace(rows[standard], verdict=verdict)
    notes = _of_differences(
        of_standard,
        counts=_counts_of_all(finished),
        comparisons=sum(not math.isnan(p) for p in corrected),
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

    difference: ScoreDifference | None
    is_tested: bool
    why: str = ""
    paired: bool = True

    @property
    def p_value(self) -> float:
        if not self.is_tested or self.difference is None:
            return math.nan
        return self.difference.p_value


def _measured(
    first: Sequence[Compared], second: Sequence[Compared], rows: Mapping[str, VariantRow]
) -> _Measured:
    over_split = _over_split(first, second, rows)
    if isinstance(over_split, str):
        why = over_split
        of_split = None
    else:
        why = ""
        of_split = over_split
    if min(len(first), len(second)) < 2:
        return _Measured(of_split, is_tested=False, why=why)
    scores = _scores_by_seed(first)
    others = _scores_by_seed(second)
    shared = [seed for seed in scores if seed in others]
    paired = len(shared) >= _FEWEST_PAIRS
    if paired:
        difference = paired_difference(
            [scores[seed] for seed in shared],
            [others[seed] for seed in shared],
            counts=[1.0] * len(shared),
        )
    else:
        difference = unpaired_difference(list(scores.values()), list(others.values()))
    if of_split is not None:
        difference = with_split(difference, of_split)
    return _Measured(difference, is_tested=True, why=why, paired=paired)


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
    first: Sequence[Compared], second: Sequence[Compared], rows: Mapping[str, VariantRow]
) -> ScoreDifference | str:
    """Return the difference of the mean scores of two variants over the same evaluation data, or
    why there is none.
    """
    for run in [*first, *second]:
        batches = run.batches or {}
        if batches.get("best") is None and "why" in batches:
            return str(batches["why"])
        if batches.get("best") is None:
            label = rows[run.variant.group].label
            if batches:
                return f"{label} has no checkpoint of its best step"
            return f"{label} has no metrics per batch"
    evaluations = [run.batches or {} for run in [*first, *second]]
    split = evaluations[0]["split"]
    counts = evaluations[0]["counts"]
    kind = "means" if "means" in evaluations[0]["best"] else "resampled"
    for evaluation in evaluations:
        is_same = evaluation["split"] == split and evaluation["counts"] == counts
        if not is_same or kind not in evaluation["best"]:
            return "the variants are not evaluated on the same batches"
    if len(counts) < 2:
        return "the split is too small to be cut into batches"
    values = np.array([evaluation["best"][kind] for evaluation in evaluations])
    if not np.isfinite(values).all():
        return "the scores of some batches are not finite"
    of_first = values[: len(first)].mean(axis=0)
    of_second = values[len(first) :].mean(axis=0)
    if kind == "means":
        return paired_difference(of_first.tolist(), of_second.tolist(), counts=counts)
    mean = fmean(map(_best_score, first)) - fmean(map(_best_score, second))
    error = float(np.std(of_first - of_second, ddof=1))
    return ScoreDifference(mean, error, len(counts), len(counts) - 1)


def _have_equal_bits(runs: Sequence[Compared], others: Sequence[Compared]) -> bool:
    """Return True if the runs of two variants computed the same, seed by seed."""
    if len(runs) != len(others):
        return False
    runs = sorted(runs, key=lambda run: str(_seed(run)))
    others = sorted(others, key=lambda run: str(_seed(run)))
    for run, other in zip(runs, others, strict=True):
        if len(runs) > 1 and _seed(run) != _seed(other):
            return False
        if not same_bits(run.trained, other.trained):
            return False
    return True


def _verdict(difference: ScoreDifference | None, p: float, sign: int) -> str:
    if difference is None or math.isnan(p):
        return NO_SPREAD
    if p >= LEVEL:
        return INSIDE_NOISE
    return "worse" if sign * difference.mean > 0 else "better"


def _of_target(target: float | None, first: VariantRow, *, has_others: bool) -> str:
    """Say the target, which is the best score of the `first` variant with a score by default."""
    if target is not None:
        what = f"{as_typed(target)}, as specified"
    else:
        which = "the first variant with a metric" if has_others else "the first variant"
        what = f"{first.best:.5g}, the best metric of {first.label}, {which}"
    return f"target: {what}; reached at the first evaluation that is at least as good"


def _of_differences(
    measured: Sequence[_Measured], *, counts: Sequence[float], comparisons: int, chosen: bool
) -> list[str]:
    notes = []
    tested = [pair.difference for pair in measured if pair.is_tested and pair.difference]
    untested = [pair.difference for pair in measured if not pair.is_tested and pair.difference]
    if untested:
        batches = _numbers_of_pairs(untested)
        notes.append(
            f"difference: best weights, paired over {batches} {_kind_of_pairs(counts)};"
            " the standard error covers the evaluation data only"
        )
    if tested:
        seeds = _numbers_of_pairs(tested)
        is_paired = all(pair.paired for pair in measured if pair.is_tested)
        covers_data = not any(pair.why for pair in measured if pair.is_tested)
        notes.append(
            f"difference: best scores of {seeds} seeds, {'paired by seed' if is_paired else 'not paired'};"
            f" the standard error covers {'seeds and evaluation data' if covers_data else 'seeds'}"
        )
        correction = (
            f"{INSIDE_NOISE}: not significant in a t test at {LEVEL:.0%}, with Holm's correction for"
            f" {counted(comparisons, 'comparison')}"
        )
        if chosen and comparisons > 1:
            correction += " (all pairs, because the best is chosen from the same metrics)"
        notes.append(correction)
    if not all(pair.is_tested for pair in measured):
        notes.append(
            f"{ONE_SEED}: another seed may change a score by more than this; compare several seeds"
        )
    for pair in measured:
        if not pair.why:
            continue
        if pair.is_tested:
            note = f"the standard error covers seeds only: {pair.why}"
        else:
            note = f"no paired difference: {pair.why}"
        if note not in notes:
            notes.append(note)
    return notes


def _numbers_of_pairs(differences: Sequence[ScoreDifference]) -> str:
    numbers = sorted({difference.pairs for difference in differences})
    return " to ".join(str(number) for number in numbers)


def _counts_of_all(groups: Mapping[str, Sequence[Compared]]) -> list[float]:
    """Return the targets of each evaluation batch if all runs have the same batches, else []."""
    known: list[list[float]] = []
    for run in chain.from_iterable(groups.values()):
        if run.batches is not None and "counts" in run.batches:
            known.append(run.batches["counts"])
    if not known or any(counts != known[0] for counts in known):
        return []
    return known[0]


def _kind_of_pairs(counts: Sequence[float]) -> str:
    """Name what was evaluated in each pair: a held-out sample, or a batch of so many targets."""
    if not counts:
        return "shared evaluation batches"
    fewest = int(min(counts))
    most = int(max(counts))
    if most == 1:
        return "held-out samples"
    size = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    return f"shared evaluation batches of {size} targets, {int(sum(counts)):,} in all"


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
    """Return a line for each thing that all runs with the same seed share, or do not."""
    unknown = _models_that_differ(runs)
    orders = []  # by seed if there are repeats
    is_repeated = len({run.variant.group for run in runs}) < len(runs)
    for run in runs:
        order = run.trained.order
        if order is not None:
            orders.append((order.get("seed") if is_repeated else None, order))
        elif run.trained.scores:
            unknown.append(
                f"unknown: the initial weights and sample order of {run.variant.name}, whose checkpoint at step 0 is missing"
            )
    seeds = {seed for seed, _ in orders}
    if len(seeds) == len(orders):
        return unknown

    def differs(name: str) -> bool:
        """Return True if two runs with the same seed differ in a part of their beginning."""
        return len({(seed, repr(order.get(name))) for seed, order in orders}) > len(seeds)

    lines = []
    if differs("precision"):
        lines.append("not shared: the precision")
    lines += unknown
    by_seed = ", seed by seed" if is_repeated else ""
    has_other_weights = differs("weights")
    other = [name for name in ("seed", "batch_size", "data") if differs(name)]
    if not has_other_weights and not other:
        return [f"shared: the initial weights and the sample order{by_seed}", *lines]
    if has_other_weights:
        lines.append(f"not shared: the initial weights{by_seed}")
    if other:
        lines.append(
            f"not shared: the sample order{by_seed}, because of different {', '.join(other)}"
        )
    else:
        lines.append(f"shared: the sample order{by_seed}")
    if not has_other_weights:
        lines.append(f"shared: the initial weights{by_seed}")
    return lines
