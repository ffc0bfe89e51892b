"""How long a forward and backward pass takes here; and which number format makes it quickest, where a run leaves that open.

Whatever is measured changes nothing: parameters, buffers, gradients and the random generators are as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal

from surefoot.loop import Step, forward_backward
from surefoot.micro_batch import MicroBatch
from surefoot.optimizers.gradients import clear
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


def settle_precision(parts: Parts) -> str | None:
    """Choose between fp32 and bf16 for a run that has not begun and says "auto", and say why; None where it is settled.

    On the CPU that is measured, with the first micro-batch: some machines multiply bfloat16 sixteen times as fast as
    float32, others emulate it. What was chosen is part of the run from then on. fp32 without measuring have models of less
    than 100,000 parameters, compiled runs (each format would be compiled), and those without a loss of their own.
    """
    precision = parts.whole.precision
    if not precision.open:
        return None
    numbers = sum(parameter.numel() for parameter in parts.state.parameters)
    if parts.task.loss is None or parts.compiled or numbers < _WORTH_ASKING:
        precision.settle("fp32")
        return None
    micro_batch = next((held for held in parts.supply.again(0) if held.count), None)
    if micro_batch is None:  # the data cannot be read; the first step will say why
        return None
    try:
        with untouched(), parts.numerics(), _left_open(parts):
            found, why = _quickest(parts, micro_batch)
    except Exception:  # it will come again in the first step, where it is explained and reported
        clear(parts.state.parameters)
        parts.state.buffers.undo()
        found, why = "fp32", "auto: not measured"
    precision.settle(found)
    parts.described["precision"] = found
    return why


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
