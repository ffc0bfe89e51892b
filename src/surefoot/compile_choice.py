"""Whether compiling a run's models is worth it, where `compile` is "auto": estimated first, and only then tried and measured.

Compiling takes half a minute, so what is too short to earn that back is told by the seconds of one pass, and nothing is
compiled for it. What is measured changes nothing, as in `pace.py`; what was compiled for it is forgotten, so the run begins with
what a resume of it begins with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from surefoot.compiling import compiled
from surefoot.data.buckets import Buckets
from surefoot.errors import first_line
from surefoot.micro_batch import MicroBatch
from surefoot.optimizers.gradients import clear
from surefoot.pace import alone, passed
from surefoot.parts import Parts
from surefoot.seeding import untouched
from surefoot.sinks.console import duration

_COST_S = {"cpu": 30.0, "cuda": 60.0}  # to compile forward and backward passes of a model for the first time, about
_SHARE = {"cpu": 0.05, "cuda": 0.1}  # of a run's seconds that may be spent on trying; the CPU gains a quarter at most
_WORTH_IT = 1.1  # so many times as fast must a compiled pass be: modules in it are not watched any more
_STEPS = 4  # whose micro-batches are looked at, and passed in turn
_ROUNDS = 8
_ENOUGH_S = 20.0  # of measuring, without the compiling
_MANY_GRAPHS = 8  # into so many pieces a model may fall


def settle_compile(parts: Parts) -> tuple[Parts, str | None]:
    """The run as it begins, its models compiled where that was chosen, and why, where it was chosen now; collective.

    For a run that has not begun and says "auto", after its precision is settled: rank 0 measures, and all do what it chose.
    What was chosen is part of the run from then on.
    """
    why = None
    if parts.compiling.open:
        on, why = parts.world.from_main(_chosen(parts) if parts.world.is_main else None)
        parts.compiling.settle(on)
        parts.described["compile"] = parts.compiling.on
    return (parts.with_compiled() if parts.compiling.late else parts), why


def expected(parts: Parts) -> str:
    """What "auto" will do when the run begins, in words; passes a micro-batch twice, and compiles nothing."""
    reason, run_s = _not_worth_trying(parts)
    if reason is not None:
        return f"off (auto: {reason})"
    return f"auto, tried when the run begins: it takes about {duration(run_s)}, compiling {_COST_S[parts.device.type]:.0f} s"


def _chosen(parts: Parts) -> tuple[bool, str]:
    reason, _ = _not_worth_trying(parts)
    if reason is None:
        parts.doing("compiling, to measure whether that is quicker")
        return _tried(parts)
    return False, f"auto: {reason}"


def _not_worth_trying(parts: Parts) -> tuple[str | None, float]:
    """Why nothing is to be compiled, else None; and about how many seconds the run's passes take."""
    kind = parts.device.type
    if parts.task.loss is None:
        return "not measured, the steps are the program's own", math.nan
    if kind not in _COST_S:
        return f"not measured on {kind}", math.nan
    if parts.parallel.kind == "fsdp":
        return "not measured where the model is spread over ranks", math.nan
    if isinstance(parts.supply.plan, Buckets):
        return "batches by tokens have another shape in almost every step", math.nan
    micro_batch = next((held for held in parts.supply.again(0) if held.count), None)
    try:
        if micro_batch is None:
            raise ValueError("no data can be read")
        with _without_a_trace(parts):
            pass_s = min(passed(alone(parts), micro_batch)[0] for _ in range(2))
    except Exception:  # it will come again in the first step, where it is explained and reported
        return "not measured", math.nan
    run_s = pass_s * parts.supply.sizes.pieces / parts.world.ranks * parts.length.steps
    if run_s * _SHARE[kind] < _COST_S[kind]:
        return f"a run of about {duration(run_s)} is too short to earn back compiling", run_s
    return None, run_s


def _tried(parts: Parts) -> tuple[bool, str]:
    """Compile, and pass micro-batches compiled and not in turn."""
    held = [each for step in range(_STEPS) for each in parts.supply.again(step) if each.count]
    if len({_shapes(each) for each in held}) > 1:
        return False, "auto: micro-batches have other shapes in other steps, and each would be compiled anew"
    try:
        with _without_a_trace(parts):
            return _quicker(parts, held)
    except Exception as problem:  # the model can be passed: `_not_worth_trying` has done so
        return False, f"auto: it does not compile ({type(problem).__name__}: {first_line(problem)[:100]})"
    finally:
        torch.compiler.reset()


def _quicker(parts: Parts, held: Sequence[MicroBatch]) -> tuple[bool, str]:
    eager, forwards = alone(parts), compiled(parts.state.models)
    forward: Any = forwards["model"] if list(forwards) == ["model"] else forwards
    ways = {"eager": eager, "compiled": replace(eager, task=replace(eager.task, forward=forward))}
    least_s = dict.fromkeys(ways, math.inf)  # the least is what noise of other processes moves least
    before, after_first, compiling_s, begun = _graphs(), 0, 0.0, perf_counter()
    for place in range(_ROUNDS + 1):
        for name, way in ways.items():
            took_s, _, loss = passed(way, held[place % len(held)])
            if not math.isfinite(loss) and math.isfinite(passed(eager, held[place % len(held)])[2]):
                return False, "auto: compiled, the loss is not finite"
            if place:
                least_s[name] = min(least_s[name], took_s)
            elif name == "compiled":
                compiling_s, begun = perf_counter() - begun, perf_counter()
        graphs = _graphs() - before
        if graphs > _MANY_GRAPHS:
            return False, f"auto: the model falls into more than {_MANY_GRAPHS} graphs when it is compiled"
        if place == 1:
            after_first = graphs
        elif place > 1 and graphs > after_first:
            return False, "auto: it is compiled anew in pass after pass"
        if place > 1 and perf_counter() - begun > _ENOUGH_S:
            break
    faster = least_s["eager"] / least_s["compiled"]
    if faster >= _WORTH_IT:
        return True, f"auto: {faster:.2f} times as fast, compiled in {compiling_s:.0f} s"
    return False, f"auto: compiled it is {faster:.2f} times as fast"


@contextmanager
def _without_a_trace(parts: Parts) -> Iterator[None]:
    """Passes in this block change nothing, whatever happens in them."""
    try:
        with untouched(), parts.numerics():
            yield
    finally:
        clear(parts.state.parameters)
        parts.state.buffers.undo()


def _graphs() -> int:
    """How many graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters  # which takes seconds to import

    return int(counters["stats"]["unique_graphs"])


def _shapes(micro_batch: MicroBatch) -> tuple[Any, ...]:
    leaves = pytree.tree_leaves(micro_batch.batch)
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
