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
_BY_THRESHOLD = (
    "clip_fraction",
)  # not comparable: rounding can move a step across the clipping threshold
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
        counted, saved = name in _COUNTED, record.get(name)
        comparable = exact or (
            name not in _BY_THRESHOLD and (isinstance(computed, float) or counted)
        )
        if name in known and comparable and not _equal(saved, computed):
            apart = math.inf if counted else _distance(saved, computed)
            differences.append(
                Difference(name, apart, repr(saved) if name in record else "absent", repr(computed))
            )
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
            where, a, b = (
                f"{file}.safetensors, {name}",
                _read(saved, file, name),
                _read(computed, file, name),
            )
            if a is None or b is None:
                differences.append(_absent(where, saved=a is not None))
            elif (difference := tensor(where, a, b)) is not None:
                differences.append(replace(difference, file=file, name=name))
    for name in _OF_STATE_JSON if exact else ():
        a, b = (checkpoint.state.get(name) for checkpoint in (saved, computed))
        if name == "param_groups":
            a = _without_learning_rates(a)
            b = _without_further_keys(_without_learning_rates(b), a)
        if a != b and not name.startswith(without):
            differences.append(Difference(f"state.json, {name}", math.inf, *_first_unlike(a, b)))
    return differences


def tensor(where: str, saved: Tensor, computed: Tensor) -> Difference | None:
    """Return the largest difference between two tensors with its index and both values, or None if
    all bits are equal.

    >>> tensor("weight", torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.5]]))
    Difference(where='weight[0, 1]', relative=0.25, saved='2.0', computed='2.5', more='1 of 2 values', file='', name='', differing=0.5)
    """
    if (saved.dtype, saved.shape) != (computed.dtype, computed.shape):
        kinds = [
            f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (saved, computed)
        ]
        return Difference(where, math.inf, kinds[0], kinds[1])
    unlike = _bits(saved) != _bits(computed)
    count = int(unlike.sum())
    if count == 0:
        return None
    a, b = (x.detach().reshape(-1).to(torch.float64) for x in (saved.cpu(), computed.cpu()))
    apart = torch.where(unlike, (a - b).abs().nan_to_num(nan=math.inf), -1.0)
    apart[unlike & a.isnan() & b.isnan()] = 0.0  # NaN values with different bits
    index = int(apart.argmax())
    largest = float(a[a.isfinite()].abs().max()) if bool(a.isfinite().any()) else 0.0
    if saved.ndim:
        where += str([int(each) for each in torch.unravel_index(torch.tensor(index), saved.shape)])
    relative = (
        _ratio(float(apart[index]), largest)
        if saved.is_floating_point() or saved.is_complex()
        else math.inf
    )
    value, recomputed = (repr(x.reshape(-1)[index].item()) for x in (saved, computed))
    return Difference(
        where,
        relative,
        value,
        recomputed,
        f"{count:,} of {saved.numel():,} values",
        differing=count / saved.numel(),
    )


def _bits(entries: Tensor) -> Tensor:
    flat = entries.detach().cpu().contiguous().reshape(-1)
    if flat.dtype == torch.bool or not (flat.is_floating_point() or flat.is_complex()):
        return flat
    if flat.is_complex():
        return torch.view_as_real(flat).view(torch.int64).reshape(-1)
    return flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    )


def _equal(saved: Any, computed: Any) -> bool:
    numbers = isinstance(saved, int | float) and isinstance(computed, int | float)
    return repr(float(saved)) == repr(float(computed)) if numbers else bool(saved == computed)


def _distance(saved: Any, computed: Any) -> float:
    finite = all(
        isinstance(value, int | float) and math.isfinite(value) for value in (saved, computed)
    )
    return float(abs(saved - computed) / max(abs(saved), abs(computed))) if finite else math.inf


def _absent(where: str, *, saved: bool) -> Difference:
    return Difference(
        where, math.inf, "present" if saved else "absent", "absent" if saved else "present"
    )


def _without_learning_rates(nested: Any) -> Any:
    """Remove the learning rates, which the schedule recomputes from `initial_lr` in each step."""
    if isinstance(nested, dict):
        return {
            name: _without_learning_rates(each) for name, each in nested.items() if name != "lr"
        }
    return (
        [_without_learning_rates(each) for each in nested] if isinstance(nested, list) else nested
    )


def _without_further_keys(groups: Any, saved: Any) -> Any:
    """Remove the lists and dictionaries of a parameter group that older versions did not save."""
    if isinstance(groups, dict) and isinstance(saved, dict):
        return {
            name: _without_further_keys(each, saved.get(name))
            for name, each in groups.items()
            if name in saved or not (isinstance(each, dict) and each.keys() & _SAVED_LATER)
        }
    if isinstance(groups, list) and isinstance(saved, list) and len(groups) == len(saved):
        return [_without_further_keys(*pair) for pair in zip(groups, saved, strict=True)]
    return groups


def _first_unlike(saved: Any, computed: Any) -> tuple[str, str]:
    while (
        isinstance(saved, dict) and isinstance(computed, dict) and saved.keys() == computed.keys()
    ):
        name = next(name for name in saved if saved[name] != computed[name])
        saved, computed = saved[name], computed[name]
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
        file, name = difference.file, difference.name
        both = _comparable(saved, computed, file, name)
        if both is None:
            rescaled.append(difference)
            continue
        a, b = both
        kind = file, _kind(file, name, buffers)
        apart = (a.double() - b.double()).abs()
        apart[a.isnan() & b.isnan()] = 0.0
        own = apart.nan_to_num(nan=math.inf)[~_is_noise(saved, file, name, a, size)]
        distance = float(own.max()) if own.numel() else 0.0
        scale = float(a[a.isfinite()].double().abs().max()) if bool(a.isfinite().any()) else 0.0
        scale = max(scale, size(*kind)) if file.startswith("optimizer") else scale
        if kind[1] != _BUFFERS:
            rescaled.append(replace(difference, relative=_ratio(distance, scale)))
        largest_of[kind] = max(
            largest_of.get(kind, difference), difference, key=lambda each: each.relative
        )
    for kind, difference in largest_of.items():
        relative = _ratio(*_group_sizes(saved, computed, *kind, buffers)[::-1])
        more = f"with all others of its kind, a relative RMS difference of {relative:.2g}"
        rescaled.append(replace(difference, relative=relative, more=more))
    return rescaled


def _ratio(distance: float, size: float) -> float:
    return 0.0 if distance == 0 else distance / size if size else math.inf


def _kind(file: str, name: str, buffers: Collection[str]) -> str:
    if file.startswith("optimizer"):
        return name.rpartition("/")[2]
    return name if file == "state" else _BUFFERS if name in buffers else ""


def _group_sizes(
    saved: Checkpoint, computed: Checkpoint, file: str, kind: str, buffers: Collection[str]
) -> tuple[float, float]:
    squares, apart, count = 0.0, 0.0, 0
    for name in saved.files[file]:
        both = (
            _comparable(saved, computed, file, name) if _kind(file, name, buffers) == kind else None
        )
        if both is None:
            continue
        a, b = both
        there = a.isfinite() & b.isfinite()
        squares += float(a[there].double().square().sum())
        apart += float((a[there].double() - b[there].double()).square().sum())
        count += a.numel()
    return math.sqrt(squares / max(count, 1)), math.sqrt(apart / max(count, 1))


def _is_noise(
    saved: Checkpoint, file: str, name: str, weight: Tensor, size: Callable[[str, str], float]
) -> Tensor:
    """Return a mask of weight entries whose optimizer state is so small that only rounding moves
    these entries.
    """
    kind, _, model = file.partition("-")
    state = f"optimizer-{model}" if model else "optimizer"
    small = []
    for key in saved.files.get(state, ()) if kind in ("model", "ema") else ():
        parameter, _, entry = key.rpartition("/")
        moment = _read(saved, state, key) if parameter == name else None
        if (
            moment is None
            or moment.shape != weight.shape
            or not moment.is_floating_point()
            or not weight.ndim
        ):
            continue
        small.append(moment.abs() <= _NOISE * size(state, entry))
    return torch.stack(small).all(dim=0) if small else torch.zeros_like(weight, dtype=torch.bool)


def _comparable(
    saved: Checkpoint, computed: Checkpoint, file: str, name: str
) -> tuple[Tensor, Tensor] | None:
    a, b = _read(saved, file, name), _read(computed, file, name)
    if a is None or b is None or a.shape != b.shape or not a.is_floating_point():
        return None
    return a, b


def _read(checkpoint: Checkpoint, file: str, name: str) -> Tensor | None:
    tensor = checkpoint.files.get(file, {}).get(name)
    return tensor.load() if isinstance(tensor, Stored) else tensor
