"""Findings on units that do nothing: dead ones, which no sample of a batch reaches, and saturated ones."""

from __future__ import annotations

import numpy as np

from surefoot.diagnose.finding import Finding, Unclear, Verdict, Well
from surefoot.diagnose.history import History, Table
from surefoot.diagnose.text import listed
from surefoot.diagnose.weights import WATCHED

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


def dead_units(history: History) -> Verdict:
    """Rows of a matrix without any gradient, and rectifiers that give 0 for almost everything."""
    name = "dead-units"
    rows, flat = history.watched("zero_rows"), history.watched("saturated")
    lookups = [parameter for parameter in rows.names if _is_lookup(history, parameter)]
    unused = {str(parameter) for record in history.layers[-1:] for parameter in record.get("never_updated") or ()}
    rows = rows.of([parameter for parameter in rows.names if parameter not in lookups and parameter not in unused])
    flat = flat.of([module for module in flat.names if history.described.kind(module) not in SQUASHING])
    if len(history.layers) < WATCHED:
        return Unclear(name, f"{len(history.layers)} watched steps are too few (at least {WATCHED})")
    dead = _above(rows, DEAD)
    silent = _above(flat, ALL_FLAT)
    if not dead and not silent:
        return Well(name, "in every layer most units are reached by some sample of each batch")
    evidence = []
    if dead:
        evidence.append(f"no gradient in any sample of a batch: {listed(_shares(dead, 'of the rows of'))}")
    if silent:
        evidence.append(f"at the flat end: {listed(_shares(silent, 'of the outputs of'))}")
    worst = max([*dead.values(), *silent.values()])
    return Finding(
        name,
        "error" if worst > ALL_FLAT else "warning",
        f"Dead units: layers in which {'nothing learns' if worst > ALL_FLAT else 'half of the units or more do nothing'}.",
        evidence=tuple(evidence),
        causes=(
            "a bias far below 0, or a step that was too large: a ReLU that is 0 for all samples has no gradient to come back by",
            "a layer before it that is dead itself, or a loss that does not depend on this one",
        ),
        try_=(
            history.described.typed("optimizer.lr", float(f"{history.described.lr / 10:.3g}"))
            if history.described.lr
            else "a lower learning rate",
            "biases that start at 0; LeakyReLU or GELU for ReLU; a norm before the activation",
        ),
        step=min([*_begun(rows, dead, DEAD), *_begun(flat, silent, ALL_FLAT)]),
        numbers={"worst": worst},
    )


def saturated_units(history: History) -> Verdict:
    """Squashing activations whose outputs lie where they are flat."""
    name = "saturated-units"
    flat = history.watched("saturated")
    flat = flat.of([module for module in flat.names if history.described.kind(module) in SQUASHING])
    if not flat.names:
        return Well(name, "no module squashes its input (tanh, sigmoid), as far as the records tell")
    if len(flat) < WATCHED:
        return Unclear(name, f"{len(flat)} watched steps are too few (at least {WATCHED})")
    found = _above(flat, FLAT)
    if not found:
        return Well(name, f"less than half of what {listed(list(flat.names))} give is at a flat end")
    worst = max(found.values())
    return Finding(
        name,
        "warning",
        f"Saturated units: {listed(sorted(found))} {'gives' if len(found) == 1 else 'give'} mostly what lies at the flat ends.",
        evidence=(listed(_shares(found, "of the outputs of")),),
        causes=(
            "weights or inputs that are too large: there the slope is near 0, and hardly any gradient comes through",
        ),
        try_=(
            "inputs scaled to mean 0 and deviation 1; weights started smaller (Glorot's rule)",
            "a norm before the activation; a lower learning rate",
        ),
        step=min(_begun(flat, found, FLAT)),
        numbers={"worst": worst},
    )


def died(history: History) -> list[str]:
    """Layers of which a tenth of the units at most was dead at some time in the first third, and half or more are in the last."""
    rows = history.watched("zero_rows")
    if len(rows) < 2 * WATCHED:
        return []
    found = []
    for place, parameter in enumerate(rows.names):
        first, last = rows.value[: len(rows) // 3, place], rows.value[-(len(rows) // 3) :, place]
        if np.nanmin(first, initial=1.0) <= ALIVE and np.nanmedian(last) >= DEAD and not _is_lookup(history, parameter):
            found.append(f"{parameter} ({float(np.nanmin(first)):.0%}, then {float(np.nanmedian(last)):.0%})")
    return found


def _above(table: Table, most: float) -> dict[str, float]:
    """The columns whose middle is at least `most`, the largest first. The first watched step is left out where there are more."""
    later = table.rows(np.arange(len(table)) > 0) if len(table) > WATCHED else table
    found = {}
    for place, column in enumerate(later.names):
        values = later.value[:, place][np.isfinite(later.value[:, place])]
        if values.size and np.median(values) >= most:
            found[column] = float(np.median(values))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _begun(table: Table, found: dict[str, float], most: float) -> list[int]:
    """For each column found, the first watched step at which it was so."""
    columns = {column: table.value[:, table.names.index(column)] for column in found}
    return [int(table.step[np.flatnonzero(values >= most)[0]]) for values in columns.values()]


def _shares(found: dict[str, float], of_what: str) -> list[str]:
    return [f"{share:.0%} {of_what} {column}" for column, share in found.items()]


def _is_lookup(history: History, parameter: str) -> bool:
    """Whether it is a table of which a batch needs a few rows only."""
    module = parameter.rpartition(".")[0]
    kind = history.described.kind(module)
    return (
        "Embedding" in kind
        if kind
        else any(word in parameter.lower() for word in ("emb", "wte", "wpe", "token", "position"))
    )
