"""What is said below the table of a comparison: what its columns mean, and what the runs did and did not share."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from surefoot.compare.statistics import LEVEL, Difference
from surefoot.compare.trained import Compared, Row
from surefoot.tracking.format import as_typed, counted


def of_target(target: float | None, first: Row, *, is_first: bool) -> str:
    """What "to target" means; `first` is the first variant that has a score, which need not be the first of all."""
    if target is not None:
        return f"target: {as_typed(target)}, as asked; the first evaluation that was as good"
    assert first.best is not None
    which = f"{first.label}, which is the first{'' if is_first else ' that has a score'}"
    return f"target: {first.best:.5g}, the best of {which}; the first evaluation that was as good"


def of_what_was_open(found: Mapping[str, Any], *, settings: Container[str]) -> list[str]:
    """Which precision was chosen for all runs (`found` of a plan), and whether they are compiled, where these were left open.

    How to have it so again is said where it is one of the `settings`.

    >>> of_what_was_open({"precision": "bf16", "chosen": "1.3 times as fast as fp32"}, settings=())
    ['precision: bf16, chosen once for all runs (1.3 times as fast as fp32); another machine may choose otherwise']
    >>> of_what_was_open({"precision": "fp32", "compile": False}, settings={"compile"})
    ['compile: False, chosen once for all runs; another machine may choose otherwise: --compile False fixes it']
    """
    said = []
    if "chosen" in found:
        name, last = found["precision"], found.get("channels_last", False)
        fixed = f": --precision {name} fixes it" if "precision" in settings and not last else ""
        said.append(
            f"precision: {name}{', channels last' * last}, chosen once for all runs ({found['chosen']});"
            f" another machine may choose otherwise{fixed}"
        )
    if "compile" in found:
        fixed = f": --compile {found['compile']} fixes it" if "compile" in settings else ""
        said.append(
            f"compile: {found['compile']}, chosen once for all runs; another machine may choose otherwise{fixed}"
        )
    return said


def of_differences(
    differences: Mapping[tuple[str, str], Difference],
    groups: Mapping[str, Sequence[Compared]],
    *,
    chosen: bool,
) -> list[str]:
    why = ", all pairs, since the best was chosen by looking" if chosen and len(differences) > 1 else ""
    together = f"{counted(len(differences), 'comparison')}{why}"
    sizes = sorted({difference.pairs for difference in differences.values()})
    pairs = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    if any(len(runs) > 1 for runs in groups.values()):
        what = f"between the best scores of equal seeds, {pairs} of them; its error is that from seed to seed"
    else:
        what = (
            f"of the best weights, over {pairs} shared evaluation batches{_of_sizes(differences, groups)}; its error is"
            " that of the data evaluated on. Another seed may change more: --seeds 3"
        )
    return [f"difference: {what}", f"inside the noise: a t test at {LEVEL:.0%}, by Holm's method for {together}"]


def _of_sizes(differences: Mapping[tuple[str, str], Difference], groups: Mapping[str, Sequence[Compared]]) -> str:
    """How many targets each of the batches has, where that is the same for all differences."""
    counts = [batches["counts"] for pair in differences if (batches := groups[pair[0]][0].batches) is not None]
    if not counts or any(each != counts[0] for each in counts):
        return ""
    least, most = int(min(counts[0])), int(max(counts[0]))
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f" of {each} target{'s' if most != 1 else ''}" + (f", {int(sum(counts[0])):,} in all" if most > 1 else "")


def of_what_is_shared(runs: Sequence[Compared]) -> list[str]:
    """Whether the runs began with the same weights and saw the same samples in the same order, by what is on disk.

    Repeats of other seeds are compared among those of their own seed.
    """
    unknown = list[str]()
    by_seed: dict[Any, list[Mapping[str, Any]]] = {}
    repeated = len({run.variant.group for run in runs}) < len(runs)
    for run in runs:
        if run.trained.order is not None:
            by_seed.setdefault(run.trained.order.get("seed") if repeated else None, []).append(run.trained.order)
        elif run.trained.scores:
            unknown.append(f"not known, as its checkpoint of step 0 is gone: what {run.variant.name} began with")
    if all(len(held) < 2 for held in by_seed.values()):
        return unknown

    def differs(name: str) -> bool:
        return any(len({repr(facts.get(name)) for facts in held}) > 1 for held in by_seed.values())

    weights = not differs("weights")
    other = [name for name in ("seed", "batch_size", "data") if differs(name)]
    rounded = ["not shared: the precision of the passes"] if differs("precision") else []
    seeds = ", seed by seed" if repeated else ""
    if weights and not other:
        return [f"shared: initial weights, and the samples in their order{seeds}", *rounded, *unknown]
    lines = [*rounded, *unknown, *([] if weights else [f"not shared: the initial weights{seeds}"])]
    if other:
        lines.append(f"not shared: the samples in their order{seeds}, because of {', '.join(other)}")
    kept = ["the samples in their order"] * (not other) + ["the initial weights"] * weights
    return [*lines, *(f"shared: {what}{seeds}" for what in kept)]
