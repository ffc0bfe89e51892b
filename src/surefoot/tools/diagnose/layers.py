"""Checks for weights that do not move, unusual update-to-weight ratios, and dead or saturated
units.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from surefoot.tools.diagnose.finding import (
    Severity,
    Verdict,
    check,
    join_names,
    need,
    well,
    wrong,
)
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.statistics import level

USUAL = (1e-4, 1e-2)
"""Usual ratio of update norm to weight norm: a decade on both sides of the rule of thumb 1e-3.
Source: CS231n, "Ratio of weights:updates", https://cs231n.github.io/neural-networks-3/#ratio."""
FAR = 10.0
"""Factor outside `USUAL` that is a finding. Adam's first steps, small networks and the end of a
schedule deviate less.
"""
WATCHED = 3
"""Minimum number of measured steps: one step does not change a median of three."""
DEAD = 0.5
"""Fraction of a layer's units that are dead for the complete batch, as a median over measured
steps. Trained networks with ReLU use few units on any one token, but different units (Li et al.
2023, https://arxiv.org/abs/2210.06313)."""
ALIVE = 0.1
"""Maximum fraction of dead units at the start. With usual weights, hardly any unit is 0 for a
complete batch.
"""
ALL_FLAT = 0.99
"""Fraction of zero outputs of a dead rectifier. Untrained rectifiers have 0.5; sparse trained ones
have 0.9 or more.
"""
FLAT = 0.5
"""Fraction of saturated outputs (slope below 1/100) of tanh or sigmoid. With usual weights, the
fraction is at most a tenth (Glorot and Bengio 2010, section 3,
https://proceedings.mlr.press/v9/glorot10a.html)."""
SQUASHING = ("Tanh", "Sigmoid", "Hardtanh", "Hardsigmoid", "Softsign", "LogSigmoid")


def watched_steps(history: History) -> None:
    """Require enough steps with layer statistics."""
    need(
        history.layers_count >= WATCHED,
        f"{history.layers_count} measured steps are too few (at least {WATCHED})",
    )


@check("never-updated", needs=watched_steps)
def never_updated(history: History) -> Verdict:
    """Check for parameters without a gradient, and for parameters whose weights do not move."""
    without = history.records.never_updated
    moved = history.watched("update_norm")
    still = [parameter for parameter in unmoved(history) if parameter not in without]
    well(
        not without and (not still or not history.column("lr").value.any()),
        f"all {len(moved)} trainable parameters have gradients and change",
    )
    evidence = []
    if without:
        evidence.append(f"no gradient in any measured step: {join_names(without)}")
    if still:
        evidence.append(f"weights unchanged in every measured step: {join_names(still)}")
    count = len(without) + len(still)
    is_or_are = "is" if count == 1 else "are"
    return wrong(
        "warning",
        f"{count} of {max(len(moved), count)} parameters {is_or_are} never updated.",
        evidence,
        causes=(
            "a module that is built but not used in forward(), or used only where the loss does not depend on it",
            "a tensor that is detached, or computed under no_grad, between this layer and the loss",
            "a learning rate of 0 for this parameter group",
        ),
        try_=(
            "use the module, or remove it from the model",
            "if it is frozen on purpose, declare it: optimizer.frozen, or requires_grad_(False) before the run is built",
        ),
        numbers={"without_gradient": len(without), "unmoved": len(still)},
    )


@check("unusual-updates")
def unusual_updates(history: History) -> Verdict:
    """Measure each matrix's median update-to-weight ratio at high learning rates."""
    medians, watched = _ratios(history, since=history.described.steps_changed_at)
    need(
        medians, f"{watched} measured steps at high learning rates are too few (at least {WATCHED})"
    )
    low = USUAL[0] / FAR
    high = USUAL[1] * FAR
    small = [parameter for parameter in medians if medians[parameter] < low]
    large = [parameter for parameter in medians if medians[parameter] > high]
    typical = float(np.median(list(medians.values())))
    count = len(small) + len(large)
    well(
        not count,
        f"the median update of all layers is {typical:.1g} of the weight norm (usual: 1e-4 to 1e-2)",
    )
    evidence = [
        f"the median update of all {len(medians)} layers is {typical:.2g} of the weight norm"
    ]
    if large:
        large.sort(key=lambda parameter: medians[parameter], reverse=True)
        names = [f"{name} ({medians[name]:.1g})" for name in large]
        evidence.append(f"above {high:g}: {join_names(names)}")
    if small:
        small.sort(key=lambda parameter: medians[parameter])
        names = [f"{name} ({medians[name]:.1g})" for name in small]
        evidence.append(f"below {low:g}: {join_names(names)}")
    if history.described.program == "script":
        factors = "sf.optim.layer_decay, width_scaling"
    else:
        factors = "--optimizer.layer-decay, --optimizer.base-width"
    return wrong(
        "warning" if count > len(medians) / 2 else "note",
        f"Updates of {count} of {len(medians)} layers are far from the usual 1e-4 to 1e-2 of their weights.",
        evidence,
        causes=(
            "a learning rate that does not suit these layers: much too high or low, or the same for layers with very different gradients",
            "initial weights that are much smaller or larger than others",
            "gradients that hardly reach these layers",
        ),
        try_=(
            history.described.rate_test,
            f"a separate learning rate: sf.optim.LRMultipliers for parameter groups, {factors}",
        ),
        numbers={"median": typical, "small": len(small), "large": len(large)},
    )


def unmoved(history: History) -> list[str]:
    """Return the parameters that were measured often and never changed."""
    names = []
    for parameter, series in history.watched("update_norm").items():
        updates = series.finite.value
        if updates.size >= WATCHED and not updates.any():
            names.append(parameter)
    return names


def ratio_at_full_rate(history: History, *, since: int = 0) -> float:
    """Return the median update-to-weight ratio at high learning rates from step `since` on, or NaN
    with too few measured steps.
    """
    medians, _ = _ratios(history, since=since)
    return float(np.median(list(medians.values()))) if medians else math.nan


def matrices(history: History, names: Iterable[str]) -> list[str]:
    """Select parameters that are matrices, by name and module class. Biases and norm weights are
    not matrices.
    """

    def is_matrix(parameter: str) -> bool:
        module, _, leaf = parameter.rpartition(".")
        if "bias" in leaf:
            return False
        kind = history.described.kinds.get(module, "")
        if kind:
            return "Norm" not in kind
        return "norm" not in parameter.lower()

    return [name for name in names if is_matrix(name)]


def _ratios(history: History, *, since: int) -> tuple[dict[str, float], int]:
    """Return each matrix's median update-to-weight ratio at high learning rates from step `since`
    on, and the number of steps that were measured at such rates.
    """
    updates = history.watched("update_norm")
    weights = history.watched("weight_norm")
    rates = history.column("lr").finite.since(since)
    medians = {}
    watched = 0
    for parameter in matrices(history, [name for name in updates if name in weights]):
        of_updates = updates[parameter]
        of_weights = weights[parameter]
        if len(of_updates) != len(of_weights):
            continue
        of_updates = of_updates.where(of_updates.step >= since)
        of_weights = of_weights.where(of_weights.step >= since)
        if not len(of_updates):
            continue
        step = of_updates.step
        weight = of_weights.value
        is_high_rate = np.ones(len(step), dtype=bool)
        if len(rates):
            rate = np.interp(step + 1, rates.step, rates.value)
            is_high_rate = rate >= 0.5 * rates.value.max()
        watched = int(is_high_rate.sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = of_updates.value / weight
            # a head initialized to 0 changes completely at first
            is_settled = weight >= 0.5 * weight[-1]
        usable = ratio[is_high_rate & is_settled & np.isfinite(ratio) & (ratio > 0)]
        if usable.size >= WATCHED:
            medians[parameter] = float(np.median(usable))
    return medians, watched


@check("dead-units", needs=watched_steps)
def dead_units(history: History) -> Verdict:
    """Check for matrix rows without a gradient, and for rectifiers whose outputs are almost all
    0.
    """
    unused = history.records.never_updated
    rows = {
        name: series
        for name, series in history.watched("zero_grad_row_fraction").items()
        if name not in unused and not _is_lookup(history, name)
    }
    dead = _above(rows, DEAD)
    silent = _above(_flat(history, squashing=False), ALL_FLAT)
    well(
        not dead and not silent,
        "in every layer, most units get a gradient from some sample of each batch",
    )
    worst = max(layer.share for layer in dead + silent)
    severity: Severity = "warning"
    message = "Dead units: in some layers, at least half of the units do nothing."
    if worst > ALL_FLAT:
        severity = "error"
        message = "Dead units: in some layers, nothing learns."
    evidence = []
    if dead:
        rows_of = join_names([f"{layer.share:.0%} of the rows of {layer.name}" for layer in dead])
        evidence.append(f"no gradient from any sample of a batch: {rows_of}")
    if silent:
        evidence.append(f"slope near 0: {_shares_of_outputs(silent)}")
    return wrong(
        severity,
        message,
        evidence,
        causes=(
            "a bias far below 0, or a step that was too large: a ReLU that is 0 for all samples gets no gradient, so it stays 0",
            "an earlier layer that is dead, or a loss that does not depend on this layer",
        ),
        try_=(
            history.described.lr_divided(10, otherwise="a lower learning rate"),
            "biases initialized to 0; LeakyReLU or GELU instead of ReLU; a norm before the activation",
        ),
        step=min(layer.step for layer in dead + silent),
        numbers={"worst": worst},
    )


@check("saturated-units")
def saturated_units(history: History) -> Verdict:
    """Check for saturating activations whose outputs have almost zero slope."""
    flat = _flat(history, squashing=True)
    well(not flat, "the records show no activation that saturates (tanh, sigmoid)")
    watched = max(map(len, flat.values()))
    need(watched >= WATCHED, f"{watched} measured steps are too few (at least {WATCHED})")
    saturated = _above(flat, FLAT)
    well(not saturated, f"less than half of the outputs of {join_names(list(flat))} are saturated")
    names = join_names(sorted(layer.name for layer in saturated))
    return wrong(
        "warning",
        f"Saturated units: at least half of the outputs of {names} have a slope near 0.",
        (_shares_of_outputs(saturated),),
        causes=(
            "weights or inputs that are too large: the slope is then near 0, and hardly any gradient passes",
        ),
        try_=(
            "inputs scaled to mean 0 and standard deviation 1; smaller initial weights (Glorot initialization)",
            "a norm before the activation; a lower learning rate",
        ),
        step=min(layer.step for layer in saturated),
        numbers={"worst": saturated[0].share},
    )


def died(history: History) -> list[str]:
    """Return the layers with at most 10% dead units in part of the first third, and 50% or more in
    the last third.
    """
    dead = []
    for parameter, series in history.watched("zero_grad_row_fraction").items():
        if len(series) < 2 * WATCHED or _is_lookup(history, parameter):
            continue
        third = len(series) // 3
        first = np.nanmin(series.value[:third], initial=1.0)
        last = level(series.value[-third:])
        if first <= ALIVE and last >= DEAD:
            dead.append(f"{parameter} ({first:.0%}, then {last:.0%})")
    return dead


def _flat(history: History, *, squashing: bool) -> dict[str, Series]:
    """Return the fraction of outputs with a slope near 0, of activations that saturate or of the
    others (rectifiers).
    """
    flat = {}
    for module, series in history.watched("saturated_fraction").items():
        kind = history.described.kinds.get(module, "")
        if (kind in SQUASHING) == squashing:
            flat[module] = series
    return flat


class _Layer(NamedTuple):
    """A layer in which a share of units is above a limit in the median, from a step on."""

    name: str
    share: float
    step: int


def _above(columns: Mapping[str, Series], limit: float) -> list[_Layer]:
    """Return the layers above a limit, the largest share first."""
    layers = []
    for name, series in columns.items():
        # the first measured step has initial weights
        values = series.value[1:] if len(series) > WATCHED else series.value
        share = level(values)
        if share >= limit:
            above = series.where(series.value >= limit)
            layers.append(_Layer(name, share, int(above.step[0])))
    return sorted(layers, key=lambda layer: -layer.share)


def _shares_of_outputs(layers: Iterable[_Layer]) -> str:
    return join_names([f"{layer.share:.0%} of the outputs of {layer.name}" for layer in layers])


def _is_lookup(history: History, parameter: str) -> bool:
    kind = history.described.kinds.get(parameter.rpartition(".")[0])
    if kind:
        return "Embedding" in kind
    words = ("emb", "wte", "wpe", "token", "position")
    return any(word in parameter.lower() for word in words)
