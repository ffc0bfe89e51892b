"""Comparison of saved and recomputed values: bit for bit on the run's machine, within rounding
elsewhere (`rescale`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.tensor_file import Stored
from surefoot.tools.verify.verdict import Difference
from surefoot.tracking.record import Record

TOLERANCE = 1e-2  # relative; ten times the rounding error observed over a hundred steps

_COUNTED = ("skipped", "targets")  # equal on any machine
# not comparable: rounding can move a step across the clipping threshold
_BY_THRESHOLD = ("clip_fraction",)
_OF_STATE_JSON = (
    "aliases",
    "extra",
    "optimizer",
    "param_groups",
    "trainable",
    "eval_mode",
    "skipped_in_a_row",
    "plateau",
)
# a replay does not run the body of the user's loop
_OF_THE_USER = ("kept/", *(f"meter/{kind}/" for kind in ("logged", "sum", "max", "min", "last")))
_NOISE = 1e-4  # relative to the RMS of a kind of state: below, the gradient was rounding error
_BUFFERS = "buffers"
_SAVED_LATER = {"list", "dict", "pairs", "numpy"}  # in parameter groups, since 0.2.0


def numbers(
    record: Record, window: Mapping[str, Any], *, known: set[str], exact: bool
) -> list[Difference]:
    """Return the differences between a record and the recomputed `window`, for the values named in
    `known`.
    """
    differences = []
    for name, computed in window.items():
        is_count = name in _COUNTED
        is_rounded = isinstance(computed, float) and name not in _BY_THRESHOLD
        if name not in known or not (exact or is_count or is_rounded):
            continue
        saved = record.get(name)
        if not _equal(saved, computed):
            apart = math.inf if is_count else _distance(saved, computed)
            saved_text = repr(saved) if name in record else "absent"
            differences.append(Difference(name, apart, saved_text, repr(computed)))
    return differences


def tensors(
    saved: Checkpoint, computed: Checkpoint, *, exact: bool, without: tuple[str, ...] = ()
) -> list[Difference]:
    """Return the tensors and plain values of a checkpoint that differ from the recomputed state.

    One tensor at a time is read. The user's objects and values, and state entries with a prefix in
    `without`, are excluded.
    """
    differences = []
    for file in dict.fromkeys([*saved.files, *computed.files]):
        if file not in saved.files or file not in computed.files:
            differences.append(_absent(f"{file}.safetensors", saved=file in saved.files))
            continue
        for name in dict.fromkeys([*saved.files[file], *computed.files[file]]):
            if file == "state" and name.startswith((*_OF_THE_USER, *without)):
                continue
            where = f"{file}.safetensors, {name}"
            a = _read(saved, file, name)
            b = _read(computed, file, name)
            if a is None or b is None:
                differences.append(_absent(where, saved=a is not None))
                continue
            difference = tensor(where, a, b)
            if difference is not None:
                differences.append(replace(difference, file=file, name=name))
    if exact:
        differences += _plain_values(saved, computed, without)
    return differences


def _plain_values(
    saved: Checkpoint, computed: Checkpoint, without: tuple[str, ...]
) -> list[Difference]:
    """Return the differences of state.json."""
    differences = []
    for name in _OF_STATE_JSON:
        a = saved.state.get(name)
        b = computed.state.get(name)
        if name == "param_groups":
            a = _without_learning_rates(a)
            b = _without_further_keys(_without_learning_rates(b), a)
        if a != b and not name.startswith(without):
            saved_text, computed_text = _first_unlike(a, b)
            differences.append(
                Difference(f"state.json, {name}", math.inf, saved_text, computed_text)
            )
    return differences


def tensor(where: str, saved: Tensor, computed: Tensor) -> Difference | None:
    """Return the largest difference between two tensors with its index and both values, or None if
    all bits are equal.

    >>> tensor("weight", torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.5]]))
    Difference(where='weight[0, 1]', relative=0.25, saved='2.0', computed='2.5', more='1 of 2 values', file='', name='', differing=0.5)
    """
    if saved.dtype != computed.dtype or saved.shape != computed.shape:
        return Difference(where, math.inf, _kind_of_tensor(saved), _kind_of_tensor(computed))
    unlike = _bits(saved) != _bits(computed)
    count = int(unlike.sum())
    if count == 0:
        return None
    a = saved.cpu().detach().reshape(-1).to(torch.float64)
    b = computed.cpu().detach().reshape(-1).to(torch.float64)
    apart = torch.where(unlike, (a - b).abs().nan_to_num(nan=math.inf), -1.0)
    apart[unlike & a.isnan() & b.isnan()] = 0.0  # NaN values with different bits
    index = int(apart.argmax())
    if saved.ndim:
        place = torch.unravel_index(torch.tensor(index), saved.shape)
        where += str([int(axis) for axis in place])
    relative = math.inf
    if saved.is_floating_point() or saved.is_complex():
        relative = _ratio(float(apart[index]), _largest(a))
    return Difference(
        where,
        relative,
        repr(saved.reshape(-1)[index].item()),
        repr(computed.reshape(-1)[index].item()),
        f"{count:,} of {saved.numel():,} values",
        differing=count / saved.numel(),
    )


def _kind_of_tensor(entries: Tensor) -> str:
    return f"{str(entries.dtype).removeprefix('torch.')} {list(entries.shape)}"


def _largest(entries: Tensor) -> float:
    """Return the largest absolute value that is finite, or 0."""
    finite = entries[entries.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _bits(entries: Tensor) -> Tensor:
    flat = entries.detach().cpu().contiguous().reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat).view(torch.int64).reshape(-1)
    if not flat.is_floating_point():
        return flat
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(of_size[flat.element_size()])


def _equal(saved: Any, computed: Any) -> bool:
    if isinstance(saved, int | float) and isinstance(computed, int | float):
        return repr(float(saved)) == repr(float(computed))
    return bool(saved == computed)


def _distance(saved: Any, computed: Any) -> float:
    for value in (saved, computed):
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
    return float(abs(saved - computed) / max(abs(saved), abs(computed)))


def _absent(where: str, *, saved: bool) -> Difference:
    if saved:
        return Difference(where, math.inf, "present", "absent")
    return Difference(where, math.inf, "absent", "present")


def _without_learning_rates(nested: Any) -> Any:
    """Remove the learning rates, which the schedule recomputes from `initial_lr` in each step."""
    if isinstance(nested, dict):
        kept = {name: value for name, value in nested.items() if name != "lr"}
        return {name: _without_learning_rates(value) for name, value in kept.items()}
    if isinstance(nested, list):
        return [_without_learning_rates(value) for value in nested]
    return nested


def _without_further_keys(groups: Any, saved: Any) -> Any:
    """Remove the lists and dictionaries of a parameter group that older versions did not save."""
    if isinstance(groups, dict) and isinstance(saved, dict):
        kept = {}
        for name, value in groups.items():
            is_nested = isinstance(value, dict) and value.keys() & _SAVED_LATER
            if name in saved or not is_nested:
                kept[name] = _without_further_keys(value, saved.get(name))
        return kept
    if isinstance(groups, list) and isinstance(saved, list) and len(groups) == len(saved):
        return [_without_further_keys(*pair) for pair in zip(groups, saved, strict=True)]
    return groups


def _first_unlike(saved: Any, computed: Any) -> tuple[str, str]:
    """Return the two values at the first place where nested dictionaries differ, as texts."""
    if isinstance(saved, dict) and isinstance(computed, dict) and saved.keys() == computed.keys():
        for name in saved:
            if saved[name] != computed[name]:
                return _first_unlike(saved[name], computed[name])
    return repr(saved)[:80], repr(computed)[:80]


def rescale(
    saved: Checkpoint,
    computed: Checkpoint,
    differences: Iterable[Difference],
    buffers: Collection[str],
) -> list[Difference]:
    """Return differences relative to the size of their kind, and one difference for each kind as a
    group.

    A kind is all weights, all `buffers`, one key of optimizer state, or one state tensor. A weight
    difference is relative to the largest entry of the tensor. A difference of optimizer state is
    relative to the largest entry or the RMS of the kind, whichever is larger. Groups are compared
    by RMS. The distance stays infinite for counts and for entries missing on one side.
    """
    rescaled: list[Difference] = []
    largest_of: dict[tuple[str, str], Difference] = {}
    size = cache(lambda file, kind: _group_sizes(saved, saved, file, kind, buffers)[0])
    for difference in differences:
        file = difference.file
        name = difference.name
        both = _comparable(saved, computed, file, name)
        if both is None:
            rescaled.append(difference)
            continue
        a, b = both
        kind = _kind(file, name, buffers)
        if kind != _BUFFERS:
            apart = (a.double() - b.double()).abs()
            apart[a.isnan() & b.isnan()] = 0.0
            counts = ~_is_noise(saved, file, name, a, size)
            own = apart.nan_to_num(nan=math.inf)[counts]
            distance = float(own.max()) if own.numel() else 0.0
            scale = _largest(a)
            if file.startswith("optimizer"):
                scale = max(scale, size(file, kind))
            rescaled.append(replace(difference, relative=_ratio(distance, scale)))
        largest = largest_of.get((file, kind))
        if largest is None or difference.relative > largest.relative:
            largest_of[file, kind] = difference
    for (file, kind), difference in largest_of.items():
        rms, apart_rms = _group_sizes(saved, computed, file, kind, buffers)
        relative = _ratio(apart_rms, rms)
        more = f"with all others of its kind, a relative RMS difference of {relative:.2g}"
        rescaled.append(replace(difference, relative=relative, more=more))
    return rescaled


def _ratio(distance: float, size: float) -> float:
    if distance == 0:
        return 0.0
    return distance / size if size else math.inf


def _kind(file: str, name: str, buffers: Collection[str]) -> str:
    if file.startswith("optimizer"):
        return name.rpartition("/")[2]
    if file == "state":
        return name
    return _BUFFERS if name in buffers else ""


def _group_sizes(
    saved: Checkpoint, computed: Checkpoint, file: str, kind: str, buffers: Collection[str]
) -> tuple[float, float]:
    """Return the RMS of the saved values of a kind, and the RMS of their differences."""
    squares = 0.0
    apart = 0.0
    count = 0
    for name in saved.files[file]:
        if _kind(file, name, buffers) != kind:
            continue
        both = _comparable(saved, computed, file, name)
        if both is None:
            continue
        a, b = both
        is_finite = a.isfinite() & b.isfinite()
        squares += float(a[is_finite].double().square().sum())
        apart += float((a[is_finite].double() - b[is_finite].double()).square().sum())
        count += a.numel()
    return math.sqrt(squares / max(count, 1)), math.sqrt(apart / max(count, 1))


def _is_noise(
    saved: Checkpoint, file: str, name: str, weight: Tensor, size: Callable[[str, str], float]
) -> Tensor:
    """Return a mask of weight entries whose optimizer state is so small that only rounding moves
    these entries.
    """
    none = torch.zeros_like(weight, dtype=torch.bool)
    kind, _, model = file.partition("-")
    if kind not in ("model", "ema") or not weight.ndim:
        return none
    state = f"optimizer-{model}" if model else "optimizer"
    small = []
    for key in saved.files.get(state, ()):
        parameter, _, entry = key.rpartition("/")
        if parameter != name:
            continue
        moment = _read(saved, state, key)
        if moment is None or moment.shape != weight.shape or not moment.is_floating_point():
            continue
        small.append(moment.abs() <= _NOISE * size(state, entry))
    return torch.stack(small).all(dim=0) if small else none


def _comparable(
    saved: Checkpoint, computed: Checkpoint, file: str, name: str
) -> tuple[Tensor, Tensor] | None:
    a = _read(saved, file, name)
    b = _read(computed, file, name)
    if a is None or b is None or a.shape != b.shape or not a.is_floating_point():
        return None
    return a, b


def _read(checkpoint: Checkpoint, file: str, name: str) -> Tensor | None:
    tensor = checkpoint.files.get(file, {}).get(name)
    return tensor.load() if isinstance(tensor, Stored) else tensor
