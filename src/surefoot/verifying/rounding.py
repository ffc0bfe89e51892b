"""How far two checkpoints are apart where equal bits cannot be asked for: another machine, or one process in the place of several.

A weight whose gradient is zero but for rounding (a bias before a batch normalisation, the keys' bias of an attention) goes where
rounding takes it as soon as an optimizer divides by the gradient's size: such entries are told by their optimizer state. They are
judged only together with all others, and so are running statistics, which follow them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.tensor_file import Stored
from surefoot.verifying.comparing import Difference

_NOISE = 1e-4  # of the root mean square of a kind of state: what is smaller says that the gradient was rounding

_BUFFERS = "buffers"


def judged(
    saved: Contents, computed: Contents, found: Iterable[Difference], buffers: Collection[str]
) -> list[Difference]:
    """The same differences, each relative to what it may be compared with, and for each kind of numbers one of all together.

    A weight is taken relative to the largest entry of its tensor, optimizer state relative to that or to the root mean square of its
    kind in the whole model; all weights together, all `buffers` (by their names), and each kind of state, by root mean squares.
    What is counted, or lies in one of them only, stays infinitely far apart.
    """
    told: list[Difference] = []
    largest_of: dict[tuple[str, str], Difference] = {}
    sizes: dict[tuple[str, str], float] = {}  # root mean squares of what was saved
    for difference in found:
        file, name = difference.file, difference.name
        one, other = _whole(saved, file, name), _whole(computed, file, name)
        if one is None or other is None or one.shape != other.shape or not one.is_floating_point():
            told.append(difference)
            continue
        kind = file, _kind(file, name, buffers)
        if kind not in sizes:
            sizes[kind], _ = _together(saved, saved, *kind, buffers)
        apart = (one.double() - other.double()).abs()
        apart[one.isnan() & other.isnan()] = 0.0
        own = apart.nan_to_num(nan=math.inf)[~_driven(saved, file, name, one, sizes)]
        distance = float(own.max()) if own.numel() else 0.0
        scale = float(one[one.isfinite()].double().abs().max()) if bool(one.isfinite().any()) else 0.0
        if file.startswith("optimizer"):
            scale = max(scale, sizes[kind])
        if kind[1] != _BUFFERS:
            told.append(replace(difference, relative=_ratio(distance, scale)))
        held = largest_of.get(kind)
        if held is None or difference.relative > held.relative:
            largest_of[kind] = difference
    for kind, difference in largest_of.items():
        size, distance = _together(saved, computed, *kind, buffers)
        relative = _ratio(distance, size)
        told.append(replace(difference, relative=relative, more=f"with all others of its kind {relative:.2g} apart"))
    return told


def _ratio(distance: float, size: float) -> float:
    return 0.0 if distance == 0 else distance / size if size else math.inf


def _kind(file: str, name: str, buffers: Collection[str]) -> str:
    """Numbers that are of one size: all weights, all buffers, a key of the optimizer's state, a tensor of the state by itself."""
    if file.startswith("optimizer"):
        return name.rpartition("/")[2]
    return name if file == "state" else _BUFFERS if name in buffers else ""


def _together(
    saved: Contents, computed: Contents, file: str, kind: str, buffers: Collection[str]
) -> tuple[float, float]:
    """Root mean squares over a kind: of what was saved, and of how far what was computed is from it."""
    squares, apart, count = 0.0, 0.0, 0
    for name in saved.files[file]:
        one, other = _whole(saved, file, name), _whole(computed, file, name)
        if _kind(file, name, buffers) != kind or one is None or other is None or one.shape != other.shape:
            continue
        if not one.is_floating_point():
            continue
        there = one.isfinite() & other.isfinite()
        squares += float(one[there].double().square().sum())
        apart += float((one[there].double() - other[there].double()).square().sum())
        count += one.numel()
    return math.sqrt(squares / max(count, 1)), math.sqrt(apart / max(count, 1))


def _driven(saved: Contents, file: str, name: str, one: Tensor, sizes: dict[tuple[str, str], float]) -> Tensor:
    """Which entries of a weight go where rounding takes them, by all state of the optimizer that has the weight's shape."""
    kind, _, model = file.partition("-")
    nothing = torch.zeros_like(one, dtype=torch.bool)
    state = f"optimizer-{model}" if model else "optimizer"
    if kind not in ("model", "ema") or state not in saved.files:
        return nothing
    driven: Tensor | None = None
    for key in saved.files[state]:
        parameter, _, entry = key.rpartition("/")
        held = _whole(saved, state, key) if parameter == name else None
        if held is None or held.shape != one.shape or not held.is_floating_point() or not one.ndim:
            continue
        if (state, entry) not in sizes:
            sizes[state, entry], _ = _together(saved, saved, state, entry, ())
        small = held.abs() <= _NOISE * sizes[state, entry]
        driven = small if driven is None else driven & small
    return nothing if driven is None else driven


def _whole(contents: Contents, file: str, name: str) -> Tensor | None:
    held = contents.files.get(file, {}).get(name)
    return held.whole() if isinstance(held, Stored) else held
