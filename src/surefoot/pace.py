"""Passes before the first step: how long one takes here, which number format is quickest where a run leaves that open, and
one that makes ranks ready.

Whatever is measured changes nothing: parameters, buffers, gradients and the random generators are as they were.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any, Literal

import torch
from torch import nn

from surefoot.checkpoint.unsaved import Observation
from surefoot.loop import Step, forward_backward
from surefoot.micro_batch import MicroBatch
from surefoot.optimizers.gradients import clear
from surefoot.parallel import Alone
from surefoot.parts import Parts
from surefoot.seeding import untouched
from surefoot.sharding import extra_states

_WORTH_ASKING = 100_000  # parameters: of a smaller model's pass too little is multiplication for casts to pay
_WORTH_IT = 1.2  # so many times as fast must bf16 be, since it costs digits
_LAYOUT_WORTH_IT = 1.1  # and another layout of images, which costs none
_ROUNDS = 5
_ENOUGH_S = 10.0  # of measuring

Name = Literal["fp32", "bf16"]


def passed(parts: Parts, micro_batch: MicroBatch) -> tuple[float, int, float]:
    """Seconds of one forward and backward pass, the targets that it counted, and its loss; waits for the device.

    On one thread of the CPU these are the processor's seconds, which other processes do not lengthen.
    """
    clock = process_time if parts.device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    begun, step = clock(), Step(0, [micro_batch], parts.task, parts.state)
    loss = float(forward_backward(step))
    took_s = clock() - begun
    clear(parts.state.parameters)
    parts.state.buffers.undo()
    return took_s, int(step.count), loss


def alone(parts: Parts) -> Parts:
    """The same run for passes that this process makes by itself, of the plain models, whatever else shares or compiles them."""
    models: dict[str, Any] = dict(parts.state.models)
    forward = models["model"] if list(models) == ["model"] else models
    return replace(parts, task=replace(parts.task, ranks=Alone(), forward=forward))


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
    before = Observation(parts.state.models, parts.task.loss, user_state=parts.whole.kept.objects)
    extras = [each for model in parts.state.models.values() for each in extra_states(model)]
    with untouched(), parts.numerics(), warnings.catch_warnings():
        # a kernel of one channel has two ways to lie in memory; torch says so once, in the first pass
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        forward_backward(Step(parts.state.step, [replace(micro_batch, count=0)], parts.task, parts.state))
    before.put_back()
    clear(parts.state.parameters)
    parts.state.buffers.undo()
    for module, extra in extras:
        module.set_extra_state(extra)


def settle_precision(parts: Parts) -> str | None:
    """Choose between fp32 and bf16 for a run that has not begun and says "auto", and say why; None where it is settled.

    On the CPU that is measured, with the first micro-batch: some machines multiply bfloat16 sixteen times as fast as
    float32, others emulate it. For models with convolutions so is the layout of images (`memory_format.py`), where that is open
    too. What was chosen is part of the run from then on. fp32 without measuring have models of less than 100,000 parameters,
    those under FSDP, which no process can pass by itself, and those without a loss of their own. Runs that are compiled are
    measured uncompiled, since each format would be compiled.
    """
    precision = parts.whole.precision
    if not precision.open:
        parts.layout.settle(False)
        return None
    numbers = sum(parameter.numel() for parameter in parts.state.parameters)
    spread = parts.parallel.kind == "fsdp"
    if parts.task.loss is None or numbers < _WORTH_ASKING or spread:
        precision.settle("fp32")
        parts.layout.settle(False)
        return "auto: not measured where the model is spread over ranks" if spread else None
    name, channels_last, why = parts.world.from_main(_measured(parts) if parts.world.is_main else None)
    if name is None:
        return None
    precision.settle(name)
    parts.layout.settle(channels_last)
    parts.described["precision"] = name
    parts.described.update({"channels_last": True} if parts.layout.channels_last else {})
    return str(why)


def _measured(parts: Parts) -> tuple[Name | None, bool, str]:
    """Measure here, in this process alone: the number format, whether channels are last, and why."""
    micro_batch = next((held for held in parts.supply.again(0) if held.count), None)
    if micro_batch is None:  # the data cannot be read; the first step will say why
        return None, False, ""
    try:
        with untouched(), parts.numerics(), _left_open(parts):
            return _quickest(alone(parts), micro_batch)
    except Exception:  # it will come again in the first step, where it is explained and reported
        clear(parts.state.parameters)
        parts.state.buffers.undo()
        return "fp32", False, "auto: not measured"


def _quickest(parts: Parts, micro_batch: MicroBatch) -> tuple[Name, bool, str]:
    layouts = (False, True) if parts.layout.open and _laid_otherwise(parts, micro_batch) else (False,)
    ways: list[tuple[Name, bool]] = [("fp32", last) for last in layouts] + [("bf16", last) for last in layouts]
    least_s = dict.fromkeys(ways, math.inf)  # the least is what noise of other processes moves least
    begun = perf_counter()
    for place in range(_ROUNDS + 1):
        for name, last in ways:
            parts.whole.precision.name, parts.layout.channels_last = name, last
            took_s, _, loss = passed(parts, micro_batch)
            if name == "bf16" and not math.isfinite(loss):
                return "fp32", False, "auto: the loss is not finite in bf16"
            if place:  # the first of each allocates
                least_s[name, last] = min(least_s[name, last], took_s)
        if place and perf_counter() - begun > _ENOUGH_S:
            break
    fp32, bf16 = _with_layout("fp32", least_s), _with_layout("bf16", least_s)
    faster = least_s[fp32] / least_s[bf16]
    if faster >= _WORTH_IT:
        return *bf16, f"auto: {least_s['fp32', False] / least_s[bf16]:.1f} times as fast as fp32"
    sooner = f", and channels last {least_s['fp32', False] / least_s[fp32]:.1f} times as fast as not" * fp32[1]
    return *fp32, f"auto: bf16 is {faster:.1f} times as fast{sooner}"


def _with_layout(name: Name, least_s: Mapping[tuple[Name, bool], float]) -> tuple[Name, bool]:
    """A number format with the layout that is quicker in it."""
    last = least_s.get((name, True), math.inf)
    return name, last * _LAYOUT_WORTH_IT <= least_s[name, False]


def _laid_otherwise(parts: Parts, micro_batch: MicroBatch) -> bool:
    """Whether any convolution is given images whose channels are not last: a model may see to that itself."""
    found: list[bool] = []

    def look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(any(not held.is_contiguous(memory_format=torch.channels_last) for held in inputs))

    parts_of = [part for model in parts.state.models.values() for part in model.modules()]
    with ExitStack() as hooks:
        for part in parts_of:
            if isinstance(part, nn.Conv2d):
                hooks.callback(part.register_forward_pre_hook(look).remove)
        passed(parts, micro_batch)
    return any(found)


@contextmanager
def _left_open(parts: Parts) -> Iterator[None]:
    """Precision and layout as they were before, whatever happens: a loss that fails fails in the first step, where it is explained."""
    precision, layout = parts.whole.precision, parts.layout
    before = precision.name, layout.channels_last
    try:
        yield
    finally:
        precision.name, layout.channels_last = before
