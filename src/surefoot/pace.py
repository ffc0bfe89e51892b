"""Passes before the first step: how long one takes here, which number format is quickest where a run leaves that open, and
one that makes ranks ready.

Whatever is measured changes nothing: parameters, buffers, gradients and the random generators are as they were.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

from surefoot.loop import Step, forward_backward
from surefoot.micro_batch import MicroBatch
from surefoot.optimizers.gradients import clear
from surefoot.parallel import Alone
from surefoot.parts import Parts
from surefoot.seeding import untouched

_WORTH_ASKING = 100_000  # parameters: of a smaller model's pass too little is multiplication for casts to pay
_WORTH_IT = 1.2  # so many times as fast must bf16 be, since it costs digits
_ROUNDS = 5
_ENOUGH_S = 10.0  # of measuring


def passed(parts: Parts, micro_batch: MicroBatch) -> tuple[float, int, float]:
    """Seconds of one forward and backward pass, the targets that it counted, and its loss; waits for the device."""
    begun, step = perf_counter(), Step(0, [micro_batch], parts.task, parts.state)
    loss = float(forward_backward(step))
    took_s = perf_counter() - begun
    clear(parts.state.parameters)
    parts.state.buffers.undo()
    return took_s, int(step.count), loss


def make_ready(parts: Parts) -> None:
    """Where several ranks share a step: one pass that counts nothing, after which all passes are alike. Collective.

    DDP puts gradients into buckets in the order in which the first pass makes them, and adds the ranks up bucket by bucket: a
    resumed run, whose first pass is another, would round otherwise.
    """
    if parts.world.size == 1 or parts.task.loss is None:
        return
    micro_batch = parts.supply.first(parts.state.step)
    if any(parts.world.gathered(micro_batch is None)) or micro_batch is None:  # no data: the first step will say why
        return
    with untouched(), parts.numerics(), warnings.catch_warnings():
        # a kernel of one channel has two ways to lie in memory; torch says so once, in the first pass
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        forward_backward(Step(parts.state.step, [replace(micro_batch, count=0)], parts.task, parts.state))
    clear(parts.state.parameters)
    parts.state.buffers.undo()


def settle_precision(parts: Parts) -> str | None:
    """Choose between fp32 and bf16 for a run that has not begun and says "auto", and say why; None where it is settled.

    On the CPU that is measured, with the first micro-batch: some machines multiply bfloat16 sixteen times as fast as
    float32, others emulate it. What was chosen is part of the run from then on. fp32 without measuring have models of less
    than 100,000 parameters, compiled runs (each format would be compiled), those under FSDP, which no process can pass
    by itself, and those without a loss of their own.
    """
    precision = parts.whole.precision
    if not precision.open:
        return None
    numbers = sum(parameter.numel() for parameter in parts.state.parameters)
    spread = parts.parallel.kind == "fsdp"
    if parts.task.loss is None or parts.compiled or numbers < _WORTH_ASKING or spread:
        precision.settle("fp32")
        return "auto: not measured where the model is spread over ranks" if spread else None
    name, why = parts.world.from_main(_measured(parts) if parts.world.is_main else None)
    if name is None:
        return None
    precision.settle(name)
    parts.described["precision"] = name
    return str(why)


def _measured(parts: Parts) -> tuple[Literal["fp32", "bf16"] | None, str]:
    """Measure here, in this process alone."""
    micro_batch = next((held for held in parts.supply.again(0) if held.count), None)
    if micro_batch is None:  # the data cannot be read; the first step will say why
        return None, ""
    models: dict[str, Any] = dict(parts.state.models)
    alone = replace(parts.task, ranks=Alone(), forward=models["model"] if list(models) == ["model"] else models)
    try:
        with untouched(), parts.numerics(), _left_open(parts):
            return _quickest(replace(parts, task=alone), micro_batch)
    except Exception:  # it will come again in the first step, where it is explained and reported
        clear(parts.state.parameters)
        parts.state.buffers.undo()
        return "fp32", "auto: not measured"


def _quickest(parts: Parts, micro_batch: MicroBatch) -> tuple[Literal["fp32", "bf16"], str]:
    formats: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    least_s = dict.fromkeys(formats, math.inf)  # the least is what noise of other processes moves least
    begun = perf_counter()
    for place in range(_ROUNDS + 1):
        for name in formats:
            parts.whole.precision.name = name
            took_s, _, loss = passed(parts, micro_batch)
            if name == "bf16" and not math.isfinite(loss):
                return "fp32", "auto: the loss is not finite in bf16"
            if place:  # the first of each allocates
                least_s[name] = min(least_s[name], took_s)
        if place and perf_counter() - begun > _ENOUGH_S:
            break
    faster = least_s["fp32"] / least_s["bf16"]
    if faster >= _WORTH_IT:
        return "bf16", f"auto: {faster:.1f} times as fast as fp32"
    return "fp32", f"auto: bf16 is {faster:.1f} times as fast"


@contextmanager
def _left_open(parts: Parts) -> Iterator[None]:
    """The precision as it was before, whatever happens: a loss that fails fails in the first step, where it is explained."""
    precision = parts.whole.precision
    before = precision.name
    try:
        yield
    finally:
        precision.name = before
