"""Findings on how weights move: not at all, or by an unusual part of themselves in a step."""

import math

import numpy as np

from surefoot.diagnose.finding import Unclear, Verdict, Well, check, wrong
from surefoot.diagnose.history import History, Table
from surefoot.diagnose.text import listed

USUAL = (1e-4, 1e-2)
"""Norm of an update over that of the weight. Karpathy's rule of thumb is 1e-3 (CS231n, "Ratio of weights:updates",
https://cs231n.github.io/neural-networks-3/#ratio); a decade to both sides of it is usual."""
FAR = 10.0
"""How far outside of that is told: Adam's first steps, small networks and the end of a schedule leave the range by less."""
WATCHED = 3
"""Watched steps: a median of three is not moved by one."""


def watched_steps(history: History) -> str:
    """What a check of layers lacks."""
    count = len(history.layers)
    return f"{count} watched steps are too few (at least {WATCHED})" if count < WATCHED else ""


@check("never-updated", needs=watched_steps)
def never_updated(history: History) -> Verdict:
    """Parameters without any gradient, and parameters whose weights do not move."""
    without = [str(parameter) for parameter in history.layers[-1].get("never_updated") or ()]
    moved = history.watched("update_norm")
    still = [parameter for parameter in unmoved(history) if parameter not in without]
    learning = [record for record in history.train if record.get("learning_rate")]
    if not without and (not still or not learning):
        return Well(f"all {len(moved.names)} trainable parameters have gradients and move")
    count = len(without) + len(still)
    return wrong(
        "warning",
        f"{count} of {max(len(moved.names), count)} parameters {'is' if count == 1 else 'are'} never updated.",
        (
            f"no gradient in any watched step: {listed(without)}" if without else "",
            f"weights unchanged by every watched step: {listed(still)}" if still else "",
        ),
        causes=(
            "a module that is made and not used in forward(), or only where the loss does not depend on it",
            "a tensor detached, or computed under no_grad, between this layer and the loss",
            "a rate of 0 for this group of parameters",
        ),
        try_=(
            "use the module, or leave it out of the model",
            "where it is frozen on purpose, say so: optimizer.frozen, or requires_grad_(False) before the run is built",
        ),
        numbers={"without_gradient": len(without), "unmoved": len(still)},
    )


@check("unusual-updates")
def unusual_updates(history: History) -> Verdict:
    """The median of update over weight, for each matrix, at the higher rates of the run."""
    table = _ratios(history)
    medians = _medians(table)
    if not medians:
        return Unclear(f"{len(table)} watched steps at the higher rates are too few (at least {WATCHED})")
    low, middle, high = USUAL[0] / FAR, math.sqrt(USUAL[0] * USUAL[1]), USUAL[1] * FAR
    small = [parameter for parameter in medians if medians[parameter] < low]
    large = [parameter for parameter in medians if medians[parameter] > high]
    typical = float(np.median(list(medians.values())))
    count = len(small) + len(large)
    if not count:
        return Well(
            f"an update is {typical:.1g} of the weight's norm in the middle of all layers (usual: 1e-4 to 1e-2)"
        )
    evidence = [f"in the middle of all {len(medians)} layers an update is {typical:.2g} of the weight's norm"]
    for far, where in ((large, f"above {high:g}"), (small, f"below {low:g}")):
        shown = sorted(far, key=lambda parameter: -abs(math.log(medians[parameter] / middle)))
        if shown:
            evidence.append(f"{where}: {listed([f'{parameter} ({medians[parameter]:.1g})' for parameter in shown])}")
    return wrong(
        "warning" if count > len(medians) / 2 else "note",
        f"Updates of {count} of {len(medians)} layers are far from the usual 1e-4 to 1e-2 of their weights.",
        evidence,
        causes=(
            "a rate that does not suit these layers: much too high or low, or one for all where their gradients differ by far",
            "weights that start much smaller or larger than others",
            "gradients that hardly reach these layers",
        ),
        try_=(
            history.described.rate_test,
            "a rate of their own: sf.Rates for groups of parameters, --optimizer.layer-decay, --optimizer.base-width",
        ),
        numbers={"median": typical, "small": len(small), "large": len(large)},
    )


def unmoved(history: History) -> list[str]:
    """Parameters whose weights no watched step has changed, of those that were seen often enough."""
    columns = history.watched("update_norm").columns()
    return [parameter for parameter, values in columns.items() if values.size >= WATCHED and not values.any()]


def ratio_at_full_rate(history: History) -> float:
    """Update over weight in the middle of all layers, at the higher rates of the run; NaN where too little was watched."""
    medians = list(_medians(_ratios(history)).values())
    return float(np.median(medians)) if medians else math.nan


def matrices(history: History, names: tuple[str, ...]) -> list[str]:
    """The parameters that are matrices, by their names and the kinds of their modules: no biases, no norms."""
    kept = []
    for parameter in names:
        module, _, leaf = parameter.rpartition(".")
        kind = history.described.kind(module)
        if "bias" not in leaf and "Norm" not in kind and (kind or "norm" not in parameter.lower()):
            kept.append(parameter)
    return kept


def _ratios(history: History) -> Table:
    """Update over weight of matrices, where the rate is at least half of its highest and the weight did not begin near 0."""
    moved, weights = history.watched("update_norm"), history.watched("weight_norm")
    names = [parameter for parameter in matrices(history, moved.names) if parameter in weights.names]
    moved, weights = moved.of(names), weights.of(names)
    if not len(moved) or len(moved) != len(weights):
        return Table(moved.step[:0], (), moved.value[:0, :0])
    order = [weights.names.index(parameter) for parameter in moved.names]
    of_weight = weights.value[:, order]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = moved.value / of_weight
        settled = of_weight >= 0.5 * of_weight[-1]  # a head that starts at 0 moves by all of itself at first
    value = np.where(settled & np.isfinite(value), value, np.nan)
    rates = history.column("learning_rate").finite
    full = np.ones(len(moved), dtype=bool)
    if len(rates):
        at = np.interp(moved.step + 1, rates.step, rates.value)
        full = at >= 0.5 * rates.value.max()
    return Table(moved.step, moved.names, value).rows(full)


def _medians(table: Table) -> dict[str, float]:
    """The middle of each column that has enough numbers; what does not move at all is `never_updated`."""
    moved = {parameter: values[values > 0] for parameter, values in table.columns().items()}
    return {parameter: float(np.median(values)) for parameter, values in moved.items() if values.size >= WATCHED}
