"""Conversion of optimizers to named tensors and JSON and back, with `state_dict` and
`load_state_dict`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.checkpoint.module_state import Saved, read_rows
from surefoot.checkpoint.nested_state import Named, first_difference, join_state, pack_state
from surefoot.checkpoint.tensor_file import Stored, equal_bits, host_copy
from surefoot.distributed.shards import Rows, name_of, rows_of, rows_of_state
from surefoot.errors import CheckpointError
from surefoot.optim.flat_parameters import APART
from surefoot.optim.kinds.kind import inner_optimizers

_OWN = "own"  # key in the optimizer's plain state; all other keys contain a slash


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[Tensor, str], *, include_unsharded: bool = True
) -> tuple[Named, dict[str, Any], dict[str, Rows]]:
    """Return copies of state tensors (PARAMETER/KEY), plain state, and row ranges.
    `include_unsharded`: see `model_tensors`.
    """
    entries = {
        f"{name_of(owner, names)}/{prefix}{key}": (owner, value)
        for prefix, each in _with_inner(optimizer).items()
        for owner, state in each.state.items()
        if isinstance(owner, Tensor)  # state that all parameters share has other keys
        for key, value in state.items()
    }
    local = {
        name: (value, rows_of_state(of, value))
        for name, (of, value) in entries.items()
        if isinstance(value, Tensor)
    }
    tensors = {
        name: host_copy(value)
        for name, (value, rows) in local.items()
        if include_unsharded or rows is not None
    }
    plain = _own_state(optimizer) | {
        name: value for name, (_, value) in entries.items() if name not in local
    }
    return tensors, plain, {name: rows for name, (_, rows) in local.items() if rows is not None}


def load_optimizer(
    optimizer: Optimizer, tensors: Saved, plain: Mapping[str, Any], names: Mapping[Tensor, str]
) -> None:
    """Load complete tensors into an optimizer, with `load_state_dict` if the optimizer's class
    overrides that method.
    """
    # includes newly frozen parameters, which another check reports better
    parameters = {name: parameter for parameter, name in names.items()}
    parameters |= {
        name_of(each, names): each for group in optimizer.param_groups for each in group["params"]
    }
    own = plain[_OWN]
    for prefix, each in _with_inner(optimizer).items():
        each.state.clear()
        each.state.update(own["state"] if not prefix else own.get(prefix, {}))
    entries = {**tensors, **{key: value for key, value in plain.items() if key != _OWN}}
    _load_entries(optimizer, entries, parameters)
    if own["more"] or type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict({**optimizer.state_dict(), **own["more"]})
        _load_entries(
            optimizer, entries, parameters
        )  # some `load_state_dict` methods cast their tensors
        (then_tensors, then), (now_tensors, now) = (
            pack_state({_OWN: own}),
            pack_state(_own_state(optimizer)),
        )
        if (
            wrong := first_difference(then[_OWN], now[_OWN], then_tensors, now_tensors)
        ) is not None:
            raise CheckpointError(
                f"cannot resume: {type(optimizer).__name__} did not restore its saved state: {wrong}\n"
                "  its steps would differ from the saved run's steps\n"
                "  make its load_state_dict undo its state_dict"
            )


def _with_inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return an optimizer and its inner optimizers by the prefix of their entries. torch's
    `state_dict` omits the inner ones.
    """
    is_custom = type(optimizer).state_dict is not Optimizer.state_dict  # it may save them itself
    return {"": optimizer} | {
        f"{name}:": each for name, each in inner_optimizers(optimizer).items() if not is_custom
    }


def _load_entries(
    optimizer: Optimizer, entries: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> None:
    optimizers = _with_inner(optimizer)
    for key, value in entries.items():
        name, _, entry = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(
                f"cannot resume: optimizer state for {name} is saved, but this optimizer does not train it"
            )
        prefix = next((each for each in optimizers if each and entry.startswith(each)), "")
        state, entry = optimizers[prefix].state, entry.removeprefix(prefix)
        parameter = parameters[name]
        restored = _on_device(value, parameter.device)
        if isinstance(value, Tensor | Stored):
            read = read_rows(
                value, rows_of(parameter) if value.shape else None
            )  # a scalar is equal on every rank
            now = state[parameter].get(entry)
            if isinstance(now, Tensor) and now.device == parameter.device and equal_bits(now, read):
                continue
            restored = read.to(parameter.device, copy=True)
            if (
                restored.shape == parameter.shape
            ):  # fused kernels need state in the parameter's memory format
                restored = torch.empty_like(
                    parameter, dtype=restored.dtype, requires_grad=False
                ).copy_(restored)
        state[parameter][entry] = restored


def _on_device(nested: Any, device: torch.device) -> Any:
    """Return nested lists with their tensors on a device, such as the directions of LBFGS."""
    if isinstance(nested, dict):
        return {key: _on_device(each, device) for key, each in nested.items()}
    if isinstance(nested, list | tuple):
        return type(nested)(_on_device(each, device) for each in nested)
    return nested.to(device) if isinstance(nested, Tensor) else nested


def _own_state(optimizer: Optimizer) -> dict[str, Any]:
    of_torch = (
        type(optimizer).state_dict is Optimizer.state_dict
        and not optimizer._optimizer_state_dict_post_hooks
    )
    # torch's state_dict would import the compiler and add nothing
    named = {} if of_torch else optimizer.state_dict()
    shared = {
        prefix or "state": {
            key: value for key, value in each.state.items() if not isinstance(key, Tensor)
        }
        for prefix, each in _with_inner(optimizer).items()
    }
    return {
        _OWN: shared
        | {"more": {k: v for k, v in named.items() if k not in ("state", "param_groups")}}
    }


def group_numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of each parameter group (learning rate, decay, counters) without its
    parameters.
    """
    kinds = (bool, int, float, str, Tensor, tuple)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}
        for group in optimizer.param_groups
    ]


def load_group_numbers(optimizer: Optimizer, plain: Any, tensors: Mapping[str, Tensor]) -> None:
    """Restore the values of `group_numbers` from the result of `pack_state`."""
    groups = join_state(plain, tensors)
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"cannot resume: the optimizer had {len(groups)} parameter groups, now {len(optimizer.param_groups)}\n"
            "  were other parameters frozen, or other weight decays set?"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.pop(APART, None)  # set by a step that this load undoes
        for key, value in saved.items():
            now = group.get(key)
            if now is not None and _shape_of(now) != _shape_of(value):
                raise CheckpointError(
                    f"cannot resume: {key} of the optimizer was {value!r}, and is now {now!r}\n"
                    "  the optimizer cannot step with the saved value\n"
                    "  resume from an older checkpoint, or start from its weights with --init-from"
                )
            group[key] = (
                value.to(now.device)
                if isinstance(value, Tensor) and isinstance(now, Tensor)
                else value
            )


def _shape_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shape_of(each) for each in value]
    return "number" if isinstance(value, bool | int | float | Tensor) else type(value).__name__
