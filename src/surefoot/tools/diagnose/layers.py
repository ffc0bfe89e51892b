"""Checks for weights that do not move, unusual update-to-weight ratios, and dead or saturated
units.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from surefoot.tools.diagnose.finding import Verdict, check, join_names, need, well, wrong
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
    count = len(without) + len(still)
    return wrong(
        "warning",
        f"{count} of {max(len(moved), count)} parameters {'is' if count == 1 else 'are'} never updated.",
        (
            f"no gradient in any measured step: {join_names(without)}" if without else "",
            f"weights unchanged in every measured step: {join_names(still)}" if still else "",
        ),
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
    medians, watched = _ratios(history)
    need(
        medians, f"{watched} measured steps at high learning rates are too few (at least {WATCHED})"
    )
    low, middle, high = USUAL[0] / FAR, math.sqrt(USUAL[0] * USUAL[1]), USUAL[1] * FAR
    small = [parameter for parameter in medians if medians[parameter] < low]
    large = [parameter for parameter in medians if medians[parameter] > high]
    typical = float(np.median(list(medians.values())))
    count, script = len(small) + len(large), history.described.program == "script"
    factors = (
        "sf.optim.layer_decay, width_scaling"
        if script
        else "--optimizer.layer-decay, --optimizer.base-width"
    )
    well(
        not count,
        f"the median update of all layers is {typical:.1g} of the weight norm (usual: 1e-4 to 1e-2)",
    )
    evidence = [
        f"the median update of all {len(medians)} layers is {typical:.2g} of the weight norm"
    ]
    for far, where in ((large, f"above {high:g}"), (small, f"below {low:g}")):
        ranked = sorted(far, key=lambda parameter: -abs(math.log(medians[parameter] / middle)))
        if ranked:
            evidence.append(
                f"{where}: {join_names([f'{name} ({medians[name]:.1g})' for name in ranked])}"
            )
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
    moved = {
        parameter: series.finite.value
        for parameter, series in history.watched("update_norm").items()
    }
    return [
        parameter
        for parameter, values in moved.items()
        if values.size >= WATCHED and not values.any()
    ]


def ratio_at_full_rate(history: History) -> float:
    """Return the median update-to-weight ratio at high learning rates, or NaN with too few measured
    steps.
    """
    medians, _ = _ratios(history)
    return float(np.median(list(medians.values()))) if medians else math.nan


def matrices(history: History, names: Iterable[str]) -> list[str]:
    """Select parameters that are matrices, by name and module class. Biases and norm weights are
    not matrices.
    """

    def is_matrix(parameter: str) -> bool:
        module, _, leaf = parameter.rpartition(".")
        kind = history.described.kinds.get(module, "")
        return (
            "bias" not in leaf
            and "Norm" not in kind
            and (kind != "" or "norm" not in parameter.lower())
        )

    return list(filter(is_matrix, names))


def _ratios(history: History) -> tuple[dict[str, float], int]:
    moved, weights = history.watched("update_norm"), history.watched("weight_norm")
    rates, medians, watched = history.column("lr").finite, dict[str, float](), 0
    for parameter in matrices(history, [name for name in moved if name in weights]):
        step, weight = moved[parameter].step, weights[parameter].value
        if len(step) != len(weight):
            continue
        none = np.ones(len(step), dtype=bool)
        full = (
            np.interp(step + 1, rates.step, rates.value) >= 0.5 * rates.value.max()
            if len(rates)
            else none
        )
        watched = int(full.sum())
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = moved[parameter].value / weight
            # a head initialized to 0 changes completely at first
            settled = weight >= 0.5 * weight[-1]
        usable = ratio[full & settled & np.isfinite(ratio) & (ratio > 0)]
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
    dead, silent = _above(rows, DEAD), _above(_flat(history, squashing=False), ALL_FLAT)
    well(
        not dead and not silent,
        "in every layer, most units get a gradient from some sample of each batch",
    )
    worst = max(share for share, _, _ in dead + silent)
    return wrong(
        "error" if worst > ALL_FLAT else "warning",
        f"Dead units: in some layers, {'nothing learns' if worst > ALL_FLAT else 'at least half of the units do nothing'}.",
        (
            f"no gradient from any sample of a batch: {_shares(dead, 'of the rows of')}"
            if dead
            else "",
            f"slope near 0: {_shares(silent, 'of the outputs of')}" if silent else "",
        ),
        causes=(
            "a bias far below 0, or a step that was too large: a ReLU that is 0 for all samples gets no gradient, so it stays 0",
            "an earlier layer that is dead, or a loss that does not depend on this layer",
        ),
        try_=(
            history.described.lr_divided(10, otherwise="a lower learning rate"),
            "biases initialized to 0; LeakyReLU or GELU instead of ReLU; a norm before the activation",
        ),
        step=min(step for _, step, _ in dead + silent),
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
    names = join_names(sorted(name for _, _, name in saturated))
    return wrong(
        "warning",
        f"Saturated units: at least half of the outputs of {names} have a slope near 0.",
        (_shares(saturated, "of the outputs of"),),
        causes=(
            "weights or inputs that are too large: the slope is then near 0, and hardly any gradient passes",
        ),
        try_=(
            "inputs scaled to mean 0 and standard deviation 1; smaller initial weights (Glorot initialization)",
            "a norm before the activation; a lower learning rate",
        ),
        step=min(step for _, step, _ in saturated),
        numbers={"worst": saturated[0][0]},
    )


def died(history: History) -> list[str]:
    """Return the layers with at most 10% dead units in part of the first third, and 50% or more in
    the last third.
    """
    dead = []
    for parameter, series in history.watched("zero_grad_row_fraction").items():
        third = len(series) // 3
        first, last = np.nanmin(series.value[:third], initial=1.0), level(series.value[-third:])
        if (
            len(series) >= 2 * WATCHED
            and first <= ALIVE
            and last >= DEAD
            and not _is_lookup(history, parameter)
        ):
            dead.append(f"{parameter} ({first:.0%}, then {last:.0%})")
    return dead


def _flat(history: History, *, squashing: bool) -> dict[str, Series]:
    return {
        module: series
        for module, series in history.watched("saturated_fraction").items()
        if (history.described.kinds.get(module, "") in SQUASHING) is squashing
    }


def _above(columns: Mapping[str, Series], limit: float) -> list[tuple[float, int, str]]:
    middles = {
        name: level(each.value[1:] if len(each) > WATCHED else each.value)
        for name, each in columns.items()
    }
    above = {
        name: columns[name].where(columns[name].value >= limit)
        for name in middles
        if middles[name] >= limit
    }
    return sorted(
        ((middles[name], int(above[name].step[0]), name) for name in above),
        key=lambda column: -column[0],
    )


def _shares(columns: Iterable[tuple[float, int, str]], of_what: str) -> str:
    return join_names([f"{share:.0%} {of_what} {name}" for share, _, name in columns])


def _is_lookup(history: History, parameter: str) -> bool:
    kind = history.described.kinds.get(parameter.rpartition(".")[0])
    words = ("emb", "wte", "wpe", "token", "position")
    return "Embedding" in kind if kind else any(word in parameter.lower() for word in words)
