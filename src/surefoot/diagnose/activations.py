"""Findings on units that do nothing: dead ones, which no sample of a batch reaches, and saturated ones."""

from collections.abc import Iterable

import numpy as np

from surefoot.diagnose.finding import Unclear, Verdict, Well, check, wrong
from surefoot.diagnose.history import History, Table
from surefoot.diagnose.text import listed
from surefoot.diagnose.weights import WATCHED, watched_steps

DEAD = 0.5
"""Of a layer's units, in the middle of the watched steps: half of what it costs is for nothing. (Trained networks with ReLU use few of
their units on any one token, but different ones: Li et al. 2023, https://arxiv.org/abs/2210.06313; here none of the whole batch.)"""
ALIVE = 0.1
"""Of a layer's units at the start: with weights as usual hardly any is 0 for all samples of a batch."""
ALL_FLAT = 0.99
"""Of the outputs of a rectifier (ReLU and its like), of which half are 0 at the start, and nine tenths or more in a trained sparse one."""
FLAT = 0.5
"""Of the outputs of a squashing activation (tanh, sigmoid): with weights of the usual size a tenth or less is where its slope
is below 1/100 (Glorot and Bengio 2010, section 3, https://proceedings.mlr.press/v9/glorot10a.html)."""
SQUASHING = ("Tanh", "Sigmoid", "Hardtanh", "Hardsigmoid", "Softsign", "LogSigmoid")


@check("dead-units", needs=watched_steps)
def dead_units(history: History) -> Verdict:
    """Rows of a matrix without any gradient, and rectifiers that give 0 for almost everything."""
    rows, flat = history.watched("zero_rows"), history.watched("saturated")
    unused = {str(parameter) for parameter in history.layers[-1].get("never_updated") or ()}
    rows = rows.of([name for name in rows.names if name not in unused and not _is_lookup(history, name)])
    flat = flat.of([module for module in flat.names if history.described.kind(module) not in SQUASHING])
    dead, silent = _above(rows, DEAD), _above(flat, ALL_FLAT)
    if not dead and not silent:
        return Well("in every layer most units are reached by some sample of each batch")
    worst = max([*dead.values(), *silent.values()])
    return wrong(
        "error" if worst > ALL_FLAT else "warning",
        f"Dead units: layers in which {'nothing learns' if worst > ALL_FLAT else 'half of the units or more do nothing'}.",
        (
            f"no gradient in any sample of a batch: {_shares(dead, 'of the rows of')}" if dead else "",
            f"at the flat end: {_shares(silent, 'of the outputs of')}" if silent else "",
        ),
        causes=(
            "a bias far below 0, or a step that was too large: a ReLU that is 0 for all samples has no gradient to come back by",
            "a layer before it that is dead itself, or a loss that does not depend on this one",
        ),
        try_=(
            history.described.lr_divided(10, otherwise="a lower learning rate"),
            "biases that start at 0; LeakyReLU or GELU for ReLU; a norm before the activation",
        ),
        step=min([*_begun(rows, dead, DEAD), *_begun(flat, silent, ALL_FLAT)]),
        numbers={"worst": worst},
    )


@check("saturated-units")
def saturated_units(history: History) -> Verdict:
    """Squashing activations whose outputs lie where they are flat."""
    flat = history.watched("saturated")
    flat = flat.of([module for module in flat.names if history.described.kind(module) in SQUASHING])
    if not flat.names:
        return Well("no module squashes its input (tanh, sigmoid), as far as the records tell")
    if len(flat) < WATCHED:
        return Unclear(f"{len(flat)} watched steps are too few (at least {WATCHED})")
    saturated = _above(flat, FLAT)
    if not saturated:
        return Well(f"less than half of what {listed(list(flat.names))} give is at a flat end")
    return wrong(
        "warning",
        f"Saturated units: {listed(sorted(saturated))} {'gives' if len(saturated) == 1 else 'give'} mostly what lies at the flat ends.",
        (_shares(saturated, "of the outputs of"),),
        causes=(
            "weights or inputs that are too large: there the slope is near 0, and hardly any gradient comes through",
        ),
        try_=(
            "inputs scaled to mean 0 and deviation 1; weights started smaller (Glorot's rule)",
            "a norm before the activation; a lower learning rate",
        ),
        step=min(_begun(flat, saturated, FLAT)),
        numbers={"worst": max(saturated.values())},
    )


def died(history: History) -> list[str]:
    """Layers of which a tenth of the units at most was dead at some time in the first third, and half or more are in the last."""
    rows = history.watched("zero_rows")
    third = len(rows) // 3
    if len(rows) < 2 * WATCHED:
        return []
    dead = []
    for parameter, column in zip(rows.names, rows.value.T, strict=True):
        first, last = np.nanmin(column[:third], initial=1.0), np.nanmedian(column[-third:])
        if first <= ALIVE and last >= DEAD and not _is_lookup(history, parameter):
            dead.append(f"{parameter} ({first:.0%}, then {last:.0%})")
    return dead


def _above(table: Table, limit: float) -> dict[str, float]:
    """The columns whose middle is at least `limit`, the largest first. The first watched step is left out where there are more."""
    later = table.rows(np.arange(len(table)) > 0) if len(table) > WATCHED else table
    middles = {name: float(np.median(values)) for name, values in later.columns().items() if values.size}
    return {name: middles[name] for name in sorted(middles, key=lambda name: -middles[name]) if middles[name] >= limit}


def _begun(table: Table, names: Iterable[str], limit: float) -> list[int]:
    """For each column named, the first watched step at which it was so."""
    columns = [table.value[:, table.names.index(name)] for name in names]
    return [int(table.step[np.flatnonzero(values >= limit)[0]]) for values in columns]


def _shares(shares: dict[str, float], of_what: str) -> str:
    return listed([f"{share:.0%} {of_what} {column}" for column, share in shares.items()])


def _is_lookup(history: History, parameter: str) -> bool:
    """Whether it is a table of which a batch needs a few rows only."""
    if kind := history.described.kind(parameter.rpartition(".")[0]):
        return "Embedding" in kind
    return any(word in parameter.lower() for word in ("emb", "wte", "wpe", "token", "position"))
