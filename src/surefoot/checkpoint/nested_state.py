"""Nested state of live objects as named tensors and JSON: conversion, comparison and
restoration.
"""

import operator
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.checkpoint.tensor_file import Stored, equal_bits, host_copy, not_writable
from surefoot.errors import CheckpointError, first_line
from surefoot.metrics.contract import torchmetrics_in

Named = dict[str, Tensor]


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and loads its state as nested dictionaries and lists of tensors and JSON
    values.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


def pack_state(objects: Mapping[str, Any]) -> tuple[Named, dict[str, Any]]:
    """Convert the user's objects (nested state, torch generators, or `Stateful` objects) to tensors
    and JSON.
    """
    tensors: Named = {}
    plain: dict[str, Any] = {}
    for name, live in objects.items():
        state = live
        if isinstance(live, torch.Generator):
            state = live.get_state()
        elif isinstance(live, Stateful):
            state = live.state_dict()
        # the state_dict of a torchmetrics metric lacks its update count and most of its state
        metrics = torchmetrics_in(live)
        if metrics:
            of_metrics = [[metric.metric_state, metric.update_count] for metric in metrics]
            state = {"module": state, "metrics": of_metrics}
        if not isinstance(state, Tensor | dict | list):
            kind = type(live).__name__
            raise CheckpointError(
                "object-not-saved",
                problem=f"cannot save {name!r}: a {kind} is not a tensor, dict, list,"
                " torch.Generator, or object with state_dict",
                remedy="give it state_dict() and load_state_dict(state), or keep its values in a"
                " dict and register the dict",
                setting=name,
                value=kind,
            )
        plain[name] = split_state(_escape(name), state, tensors)
    return tensors, plain


def restore_object(live: Any, tensors: Mapping[str, Tensor], plain: Any, *, name: str) -> None:
    """Restore a registered object in place; raise `CheckpointError` if the object would then save
    other values.
    """
    try:
        _load_state(live, join_state(plain, tensors))
        now_tensors, now = pack_state({name: live})
        wrong = first_difference(plain, now[name], tensors, now_tensors)
    except Exception as problem:
        wrong = f"{type(problem).__name__}: {first_line(problem)}"
    if wrong is not None:
        raise not_restored(f"{name!r}, registered with run.register_state,", wrong)


def not_restored(what: str, wrong: str) -> CheckpointError:
    """Return the error of an object that has another state than the saved one after it was
    restored.
    """
    return CheckpointError(
        "saved-state-not-restored",
        problem=f"{what} did not restore its saved state: {wrong}",
        reason="the run would continue with a state other than the saved one",
        remedy="make its load_state_dict undo its state_dict, and set_extra_state undo"
        " get_extra_state; or\nkeep its tensors and numbers in a dictionary",
        name=what,
        difference=wrong,
    )


def split_state(path: str, value: Any, tensors: Named) -> Any:
    """Return `value` as JSON, with each tensor moved to `tensors` and replaced by its name."""
    if isinstance(value, Tensor):
        tensors[path] = host_copy(value)
        return {"tensor": path}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                why = f"the key {key!r} is neither a string nor an integer"
                raise not_writable(repr(path), why)
        pairs = []
        for key, entry in value.items():
            pairs.append([key, split_state(f"{path}/{_escape(key)}", entry, tensors)])
        if all(isinstance(key, str) for key in value):
            return {"dict": dict(pairs)}
        return {"pairs": pairs}  # JSON turns integer keys of a dictionary into strings
    if isinstance(value, list | tuple | deque):
        parts = [split_state(f"{path}/{index}", part, tensors) for index, part in enumerate(value)]
        if isinstance(value, deque):
            return {"deque": parts, "maxlen": value.maxlen}
        return {"list": parts} if isinstance(value, list) else {"tuple": parts}
    if isinstance(value, float):
        return {"float": repr(float(value))}  # NumPy floats are floats too, with another repr
    if isinstance(value, np.bool_):
        return {"value": bool(value)}
    if isinstance(value, np.integer | np.floating):
        return {"numpy": value.dtype.name, "text": repr(value.item())}
    if value is None or isinstance(value, bool | int | str):
        return {"value": value}
    raise CheckpointError(
        "value-not-saved",
        problem=f"cannot save {path!r}: a {type(value).__name__} is neither a tensor nor JSON",
        reason="a checkpoint would not hold it, and a resumed run would continue without it",
        remedy="use tensors, numbers, strings, and dictionaries and lists of these (in a module:"
        " with get_extra_state)",
        setting=path,
        value=type(value).__name__,
    )


def join_state(plain: Any, tensors: Mapping[str, Tensor | Stored]) -> Any:
    """Return the nested value from the result of `split_state` and its tensors."""
    match plain:
        case {"tensor": path}:
            return _read(tensors[path])
        case {"dict": parts}:
            return {key: join_state(value, tensors) for key, value in parts.items()}
        case {"pairs": pairs}:
            return {key: join_state(value, tensors) for key, value in pairs}
        case {"deque": parts, "maxlen": maxlen}:
            return deque([join_state(value, tensors) for value in parts], maxlen)
        case {"list": parts}:
            return [join_state(value, tensors) for value in parts]
        case {"tuple": parts}:
            return tuple(join_state(value, tensors) for value in parts)
        case {"float": text}:
            return float(text)
        case {"numpy": name, "text": text}:
            return np.dtype(name).type(text)
    return plain["value"]


def first_difference(
    saved: Any,
    now: Any,
    saved_tensors: Mapping[str, Tensor | Stored],
    now_tensors: Mapping[str, Tensor],
) -> str | None:
    """Return the path of the first bitwise difference between two converted states, or None if they
    are equal.
    """
    if saved != now:
        return "its keys or numbers differ"
    for path, tensor in now_tensors.items():
        if not equal_bits(_read(saved_tensors[path]), tensor):
            return f"{path} differs"
    return None


def _escape(key: str | int) -> str:
    """Return a unique path component without slashes (RFC 6901). The component of an integer key
    begins with ~2.
    """
    return f"~2{key}" if isinstance(key, int) else key.replace("~", "~0").replace("/", "~1")


def _read(tensor: Tensor | Stored) -> Tensor:
    return tensor.load() if isinstance(tensor, Stored) else tensor.clone()


def _load_state(live: Any, saved: Any) -> None:
    if isinstance(live, torch.Generator):
        live.set_state(saved)
    elif isinstance(live, Stateful):
        metrics = torchmetrics_in(live)
        if metrics:
            _load_metrics(metrics, saved["metrics"])
            saved = saved["module"]
        # keeps the version metadata of state_dict, without which a module assumes an old format
        if isinstance(live, nn.Module):
            state = live.state_dict()
            state.clear()
            state.update(saved)
            saved = state
        live.load_state_dict(saved)
    else:
        _restore_into(live, saved)


def _load_metrics(metrics: list[Any], saved: list[Any]) -> None:
    """Restore the states and the update counts of torchmetrics objects."""
    for metric, (state, update_count) in zip(metrics, saved, strict=True):
        for key, value in state.items():
            on_device = value.to(metric.device) if isinstance(value, Tensor) else value
            setattr(metric, key, on_device)
        metric._update_count = update_count
        metric._computed = None


def _restore_into(live: Any, saved: Any) -> Any:
    """Copy `saved` into existing tensors, dicts and lists, so that other references see the new
    values.
    """
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        if (live.shape, live.dtype) != (saved.shape, saved.dtype):
            return saved.to(live.device)
        with torch.no_grad():
            live.copy_(saved)
        return live
    if isinstance(live, dict) and isinstance(saved, dict):
        entries = {key: _restore_into(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(entries)
        return live
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        values = [_restore_into(*pair) for pair in zip(live, saved, strict=False)]
        values += saved[len(live) :]
        if isinstance(live, list):
            live[:] = values
            return live
        if len(live) == len(values) and all(map(operator.is_, live, values)):
            return live
        return tuple(values)
    return saved
