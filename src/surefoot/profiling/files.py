"""A profile on disk: JSON, text, and a picture of the memory of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from surefoot.drawing import COLOURS, drawing, write
from surefoot.errors import ConfigError
from surefoot.profile.profile import Profile
from surefoot.profiling.memory_line import MemoryLine


def written(profile: Profile, place: Path) -> Profile:
    """Write all but the trace, which is there; returns the profile with the names of its files."""
    pictures = draw(profile.memory, place / "memory", title=f"memory of a step of {profile.what}")
    there = [place / "profile.txt", place / "profile.json", place / "trace.json.gz", *pictures]
    found = replace(profile, files=tuple(str(path) for path in there))
    try:
        (place / "profile.json").write_text(json.dumps(found.described(), indent=1, allow_nan=False) + "\n")
        (place / "profile.txt").write_text(f"{found}\n")
    except OSError as problem:
        raise ConfigError(
            f"cannot write to {place}: {problem.strerror or problem}\n  choose another place: --out DIR"
        ) from problem
    return found


def draw(memory: MemoryLine, path: Path, *, title: str) -> list[Path]:
    """The memory of a step over its time, what stands all the time below and gradients above it: PATH.png and PATH.svg."""
    from matplotlib.figure import Figure

    megabytes = 1e6
    standing = [
        ("parameters", memory.peak.parameters),
        ("optimizer state", memory.peak.optimizer),
        ("buffers", memory.peak.buffers),
    ]
    times = [point[0] * 1e3 for point in memory.curve]
    layers, below = [], 0.0
    for name, size in standing:
        if size:
            layers.append((name, [size / megabytes] * len(times)))
            below += size
    layers.append(("gradients", [point[2] / megabytes for point in memory.curve]))
    layers.append(
        ("activations and results", [max(0.0, point[1] - below - point[2]) / megabytes for point in memory.curve])
    )
    with drawing():
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.add_subplot()
        axes.stackplot(
            times, *[layer for _, layer in layers], labels=[name for name, _ in layers], colors=COLOURS, step="post"
        )
        axes.set(xlabel="ms since the step began, under the profiler", ylabel="MB", title=title)
        axes.legend(loc="upper right", frameon=False)
        axes.margins(x=0)
        return write(figure, path)
