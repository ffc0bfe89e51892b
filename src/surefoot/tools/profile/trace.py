"""Steps under torch's profiler: the slowest operators, and the memory over time."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from surefoot.distributed.shards import local_part
from surefoot.memory import tensor_bytes
from surefoot.optim.kinds.kind import state_tensors
from surefoot.tools.profile.timed_step import RANGE, REST
from surefoot.tools.report.charts import Chart, Line
from surefoot.train.loop import State

_POINTS = 400  # of a curve


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step's tensors by purpose."""

    parameters: int
    optimizer: int
    buffers: int  # of models and their averages, with the averages' weights
    gradients: int
    activations: int  # and all other tensors of a step

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.buffers + self.gradients + self.activations


@dataclass(frozen=True)
class MemoryLine:
    """The memory of one step. `curve` has tuples of seconds, bytes and bytes of gradients; `phases`
    has the peak of each phase.
    """

    peak: StepMemory
    phases: dict[str, StepMemory]
    curve: list[tuple[float, int, int]]
    told_by_allocator: int | None = None  # the peak of CUDA's allocator


@dataclass(frozen=True)
class Operator:
    """One operator of a step. `self_s` excludes the time of nested operators."""

    name: str
    calls: float
    self_s: float
    share: float  # of the time of all
    shapes: str = ""


def run_profiler(
    make: Callable[[], Any],
    device: torch.device,
    *,
    times: int = 1,
    shapes: bool,
    memory: bool = True,
) -> Any:
    """Run `make` under torch's profiler, which also records the device on CUDA. Returns the
    profiler.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    trace = profile(activities=activities, record_shapes=shapes, profile_memory=memory)
    with _quiet():
        trace.start()
    try:
        for _ in range(times):
            make()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        with _quiet():
            trace.stop()
    return trace


@contextmanager
def _quiet() -> Iterator[None]:
    # torch 2.13's profiler writes to standard error at every log level
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(nowhere)


def operators(trace: Any, *, steps: int, shapes: bool, on_device: bool) -> list[Operator]:
    """Return the 15 operators that take most of the time of `steps` profiled steps, longest
    first.
    """
    time_name = "self_device_time_total" if on_device else "self_cpu_time_total"
    rows = []
    for row in trace.key_averages(group_by_input_shape=shapes):
        time_us = getattr(row, time_name)
        if time_us > 0 and not row.key.startswith((RANGE, "ProfilerStep")):
            rows.append((float(time_us) / 1e6 / steps, row))
    total_s = sum(self_s for self_s, _ in rows)
    rows.sort(key=itemgetter(0), reverse=True)
    longest = []
    for self_s, row in rows[:15]:
        input_shapes = str(row.input_shapes) if shapes else ""
        longest.append(Operator(row.key, row.count / steps, self_s, self_s / total_s, input_shapes))
    return longest


def device_busy_s(trace: Any, *, steps: int) -> float:
    """Return the seconds per step in which the device is busy: the union of its kernels and
    copies.
    """
    spans = []
    for event in trace.profiler.kineto_results.events():
        is_work = event.device_type() == DeviceType.CUDA and not event.name().startswith(RANGE)
        if is_work and event.duration_ns():
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    busy_ns = 0
    end = 0
    for begin, stop in sorted(spans):
        busy_ns += max(0, stop - max(begin, end))
        end = max(end, stop)
    return busy_ns / 1e9 / steps


def copied_s(trace: Any, *, steps: int) -> float:
    """Return the seconds per step of copies from the host, which overlap the work of the device."""
    copies = [
        event for event in trace.profiler.kineto_results.events() if "Memcpy HtoD" in event.name()
    ]
    return float(sum(event.duration_ns() for event in copies)) / 1e9 / steps


def memory_line(make: Callable[[], Any], state: State, device: torch.device) -> MemoryLine:
    """Measure the memory of one step, which `make` runs, with torch's profiler."""
    standing_bytes = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        standing_bytes = torch.cuda.memory_allocated(device)
    gradients: dict[Tensor, tuple[int, int]] = {}  # time of creation (ns), and bytes

    def note_gradient(parameter: Tensor) -> None:
        # later gradients are added to the first one
        if parameter not in gradients and parameter.grad is not None:
            gradients[parameter] = time.time_ns(), tensor_bytes([parameter.grad])

    with ExitStack() as hooks:
        for parameter in state.parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(note_gradient).remove)  # type: ignore[no-untyped-call]
        trace = run_profiler(make, device, shapes=False)
    parameters, optimizer, buffers = _standing_bytes(state)
    at_least = parameters + optimizer + buffers

    def breakdown(total: int, of_gradients: int) -> StepMemory:
        extra = max(0, total - at_least)
        of_gradients = min(of_gradients, extra)
        return StepMemory(parameters, optimizer, buffers, of_gradients, extra - of_gradients)

    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    ranges, changes = _ranges_and_changes(trace, kind)
    moments = [begin for begin, _, _ in ranges] + [moment for moment, _ in changes]
    start_ns = min(moments, default=0)
    update_ends = max((end for _, end, name in ranges if name == "optimizer"), default=0)
    now = max(standing_bytes, at_least)
    curve = [(0.0, now, 0)]
    phases: dict[str, StepMemory] = {}
    peak = breakdown(now, 0)
    for moment, change in changes:
        now += change
        of_gradients = 0  # they are cleared after the update
        if moment < update_ends:
            of_gradients = sum(size for then, size in gradients.values() if then <= moment)
        here = breakdown(now, of_gradients)
        curve.append(((moment - start_ns) / 1e9, now, here.gradients))
        phase = _phase_at(moment, ranges)
        if phase not in phases or here.total > phases[phase].total:
            phases[phase] = here
        if here.total > peak.total:
            peak = here
    allocator_bytes = None
    if device.type == "cuda":
        allocator_bytes = int(torch.cuda.max_memory_allocated(device))
    return MemoryLine(peak, phases, _thinned(curve), allocator_bytes)


def _standing_bytes(state: State) -> tuple[int, int, int]:
    """Return the bytes of parameters, of optimizer state, and of buffers and averaged weights."""
    weights = []
    buffers: list[Tensor] = []
    averaged_weights = []
    for model in state.models.values():
        weights += [local_part(weight)[0] for weight in model.parameters()]
        buffers += model.buffers()
    for average in state.ema_models.values():
        averaged_weights += [local_part(weight)[0] for weight in average.model.parameters()]
        buffers += average.model.buffers()
    optimizer_state = []
    for trained in state.optimizers.values():
        optimizer_state += state_tensors(trained.optimizer)
    buffer_bytes = tensor_bytes(buffers) + tensor_bytes(averaged_weights)
    return tensor_bytes(weights), tensor_bytes(optimizer_state), buffer_bytes


def _phase_at(moment: int, ranges: list[tuple[int, int, str]]) -> str:
    """Return the name of the shortest range around a moment."""
    around = [(end - begin, name) for begin, end, name in ranges if begin <= moment <= end]
    _, name = min(around, default=(0, REST))
    return name


def _thinned(curve: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Keep the highest point of each stretch of a curve, so that no peak is lost."""
    size = math.ceil(len(curve) / _POINTS)
    stretches = [curve[first : first + size] for first in range(0, len(curve), size)]
    return [max(stretch, key=lambda point: point[1]) for stretch in stretches]


def _ranges_and_changes(
    trace: Any, kind: DeviceType
) -> tuple[list[tuple[int, int, str]], list[tuple[int, int]]]:
    # times are in ns
    events = trace.profiler.kineto_results.events()
    ranges = []
    changes = []
    for event in events:
        name = event.name()
        start_ns = event.start_ns()
        if name.startswith(RANGE) and event.device_type() == DeviceType.CPU:
            ranges.append((start_ns, start_ns + event.duration_ns(), name.removeprefix(RANGE)))
        if name == "[memory]" and event.device_type() == kind:
            changes.append((start_ns, event.nbytes()))
    return ranges, sorted(changes)


def memory_chart(memory: MemoryLine) -> Chart:
    """Chart the memory of a step over time: permanent memory at the bottom, gradients and
    activations above.
    """
    peak = memory.peak
    times_ms = [point[0] * 1e3 for point in memory.curve]
    layers = {
        "parameters": [peak.parameters] * len(times_ms),
        "optimizer state": [peak.optimizer] * len(times_ms),
        "buffers": [peak.buffers] * len(times_ms),
        "gradients": [of_gradients for _, _, of_gradients in memory.curve],
    }
    below = peak.parameters + peak.optimizer + peak.buffers
    layers["activations and results"] = [
        max(0, now - below - of_gradients) for _, now, of_gradients in memory.curve
    ]
    lines: list[Line] = []
    tops = [0] * len(times_ms)
    for series, (name, sizes) in enumerate(layers.items()):
        if not any(sizes):
            continue
        tops = [top + size for top, size in zip(tops, sizes, strict=True)]
        points = tuple(zip(times_ms, map(float, tops), strict=True))
        lines.insert(0, Line(name, points, series, area=True))  # a lower layer covers what is below
    return Chart(
        "memory",
        "",
        tuple(lines),
        unit="bytes",
        scale="linear",
        zero=True,
        wide=True,
        x_from=times_ms[0],
        x_name="ms since the step began, under the profiler",
    )
