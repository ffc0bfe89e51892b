"""What memory a step takes, from moment to moment, and what holds it.

Every allocation that torch makes under its profiler is known with its time; the gradients are told apart by a hook on each parameter,
and parameters, optimizer state and buffers by asking for their sizes. What is left are activations and temporary results.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from surefoot.memory import tensor_bytes
from surefoot.profile.stopwatch import RANGE
from surefoot.train.loop import State

_POINTS = 400  # of a curve


@dataclass(frozen=True)
class Held:
    """Bytes by what holds them."""

    parameters: int
    optimizer: int
    buffers: int  # of models and their averages, with the averages' weights
    gradients: int
    activations: int  # and everything else that a step makes

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.buffers + self.gradients + self.activations


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one step: `curve` is (seconds since its begin, bytes, of which gradients); `phases` what each held at its peak."""

    peak: Held
    phases: dict[str, Held]
    curve: list[tuple[float, int, int]]
    told_by_allocator: int | None = None  # on CUDA: the most that the allocator had given out


@contextmanager
def gradients_seen(parameters: list[nn.Parameter]) -> Iterator[list[tuple[int, int]]]:
    """The time (ns) and the bytes of each gradient as it is made, the first of a step alone: others are added to it."""
    seen: list[tuple[int, int]] = []

    def made(parameter: Tensor) -> None:
        if id(parameter) not in known and parameter.grad is not None:
            known.add(id(parameter))
            seen.append((time.time_ns(), tensor_bytes([parameter.grad])))

    known: set[int] = set()
    with ExitStack() as hooks:
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(made).remove)  # type: ignore[no-untyped-call]
        yield seen


def memory_line(
    found: Any, state: State, gradients: list[tuple[int, int]], device: torch.device, *, standing_bytes: int
) -> MemoryLine:
    """The memory of the one step that was made under the profiler; `standing_bytes` of a device were there before."""
    models, averages = state.models.values(), [average.model for average in state.averages.values()]
    states = [held for trained in state.trained.values() for held in trained.optimizer.state.values()]
    own = tensor_bytes(parameter for model in models for parameter in model.parameters())
    optimizer = tensor_bytes(value for held in states for value in held.values() if isinstance(value, Tensor))
    buffers = tensor_bytes(buffer for model in (*models, *averages) for buffer in model.buffers())
    buffers += tensor_bytes(parameter for average in averages for parameter in average.parameters())
    at_least = own + optimizer + buffers
    standing = max(standing_bytes, at_least)
    ranges, changes = _seen(found, on_device=device.type == "cuda")
    begun = min([begin for begin, _, _ in ranges] + [moment for moment, _ in changes], default=0)
    ends = max((end for _, end, name in ranges if name == "optimizer"), default=0)
    now, curve, phases = standing, [(0.0, standing, 0)], dict[str, Held]()

    def held(total: int, of_gradients: int) -> Held:
        extra = max(0, total - at_least)
        return Held(own, optimizer, buffers, min(of_gradients, extra), extra - min(of_gradients, extra))

    peak, total_of = held(standing, 0), attrgetter("total")
    for moment, change in changes:
        now += change
        so_far = sum(size for then, size in gradients if then <= moment) if moment < ends else 0
        here = held(now, so_far)
        curve.append(((moment - begun) / 1e9, now, here.gradients))
        phase = _innermost(ranges, moment)
        phases[phase] = max(phases.get(phase, here), here, key=total_of)
        peak = max(peak, here, key=total_of)
    told = int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None
    return MemoryLine(peak, phases, _thinned(curve), told)


def _seen(found: Any, *, on_device: bool) -> tuple[list[tuple[int, int, str]], list[tuple[int, int]]]:
    """The phases, each with its begin and end, and every change of memory with its moment and bytes, in their order; in ns."""
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    events = found.profiler.kineto_results.events()
    ranges = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name().removeprefix(RANGE))
        for event in events
        if event.name().startswith(RANGE) and event.device_type() == DeviceType.CPU
    ]
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == kind
    )
    return ranges, changes


def _innermost(ranges: list[tuple[int, int, str]], moment: int) -> str:
    inside = [(end - begin, name) for begin, end, name in ranges if begin <= moment <= end]
    return min(inside)[1] if inside else "rest"


def _thinned(curve: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Of each stretch of the curve its highest point, so that no peak is lost."""
    size = -(-len(curve) // _POINTS)
    return [max(curve[place : place + size], key=lambda point: point[1]) for place in range(0, len(curve), size)]
