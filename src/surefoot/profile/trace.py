"""Steps under torch's profiler: the trace, the operators that take the time, and every allocation of memory."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from surefoot.errors import ConfigError
from surefoot.profile.memory_timeline import MemoryLine
from surefoot.profile.stopwatch import RANGE
from surefoot.report.figures import COLOURS, drawing, write


@dataclass(frozen=True)
class Operator:
    """One operator, in a step: how often it is called, and the time it takes itself, without those that it calls."""

    name: str
    calls: float
    self_s: float
    share: float  # of the time of all
    shapes: str = ""


def profiled(
    make: Callable[[], Any], device: torch.device, *, times: int = 1, shapes: bool, memory: bool = True
) -> Any:
    """What `make` does, called so many times, under torch's profiler, with the device's own activities where it is CUDA."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    found = profile(activities=activities, record_shapes=shapes, profile_memory=memory)
    with _quiet():
        found.start()
    try:
        for _ in range(times):
            make()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        with _quiet():
            found.stop()
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch 2.13's profiler writes to standard error by itself, whatever its log level, when it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def operators(found: Any, *, steps: int, shapes: bool, on_device: bool, most: int = 15) -> list[Operator]:
    """The operators that take most of the time, of so many steps under the profiler, longest first."""
    rows = [
        row
        for row in found.key_averages(group_by_input_shape=shapes)
        if not row.key.startswith((RANGE, "ProfilerStep"))
    ]

    def self_s(row: Any) -> float:
        return float(row.self_device_time_total if on_device else row.self_cpu_time_total) / 1e6 / steps

    whole = sum(map(self_s, rows)) or 1.0
    longest = sorted(rows, key=self_s, reverse=True)[:most]
    return [
        Operator(row.key, row.count / steps, self_s(row), self_s(row) / whole, str(row.input_shapes) if shapes else "")
        for row in longest
        if self_s(row) > 0
    ]


def device_busy_s(found: Any, *, steps: int) -> float:
    """Seconds of a step in which the device did something: the union of what its kernels and copies took."""
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in found.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() and not event.name().startswith(RANGE)
    )
    busy_ns, end = 0, 0
    for begin, stop in spans:
        busy_ns += max(0, stop - max(begin, end))
        end = max(end, stop)
    return busy_ns / 1e9 / steps


def copied_s(found: Any, *, steps: int) -> float:
    """Seconds of a step in which the device takes copies from the host, which run beside its work."""
    copies = [event for event in found.profiler.kineto_results.events() if "Memcpy HtoD" in event.name()]
    return float(sum(event.duration_ns() for event in copies)) / 1e9 / steps


def write_trace(found: Any, path: Path) -> None:
    """Write the trace as Chrome and Perfetto (https://ui.perfetto.dev) read it."""
    try:
        found.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as problem:
        raise ConfigError(f"cannot write {path}: {problem}\n  choose another place: --out DIR") from problem


def draw(memory: MemoryLine, path: Path, *, title: str) -> list[Path]:
    """The memory of a step over its time, what stands all the time below and gradients above it: PATH.png and PATH.svg."""
    from matplotlib.figure import Figure

    peak, megabytes = memory.peak, 1e6
    standing = {"parameters": peak.parameters, "optimizer state": peak.optimizer, "buffers": peak.buffers}
    below = sum(standing.values())
    times_ms = [point[0] * 1e3 for point in memory.curve]
    layers = {name: [size / megabytes] * len(times_ms) for name, size in standing.items() if size}
    layers["gradients"] = [point[2] / megabytes for point in memory.curve]
    layers["activations and results"] = [max(0, now - below - of) / megabytes for _, now, of in memory.curve]
    with drawing():
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.stackplot(times_ms, *layers.values(), labels=list(layers), colors=COLOURS, step="post")
        axes.set(xlabel="ms since the step began, under the profiler", ylabel="MB", title=title)
        axes.legend(loc="upper right", frameon=False)
        axes.margins(x=0)
        return write(figure, path)
