"""Conversion of optimizers to named tensors and JSON and back, with `state_dict` and
`load_state_dict`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from surefoot.checkpoint.module_state import Saved, read_rows
from surefoot.checkpoint.nested_state import (
    Named,
    first_difference,
    not_restored,
    pack_state,
)
from surefoot.checkpoint.tensor_file import Stored, equal_bits, host_copy
from surefoot.distributed.shards import Rows, name_of, rows_of, rows_of_state
from surefoot.errors import CheckpointError, ConfigError, Setting
from surefoot.optim.flat_parameters import APART
from surefoot.optim.kinds.kind import inner_optimizers

OWN = "own"  # key in the optimizer's plain state; all other keys contain a slash
# of a dict whose keys are no strings or integers
_KEYS = "~keys"
_ENTRIES = "~entries"
_PARAMETER = "~parameter"  # such a key
# of a tensor that is not contiguous
_TENSOR = "~tensor"
_STRIDE = "~stride"
_STRIDES = "strides"  # of such tensors among the entries of parameters


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[Tensor, str], *, include_unsharded: bool = True
) -> tuple[Named, dict[str, Any], dict[str, Rows]]:
    """Return copies of state tensors (PARAMETER/KEY), plain state, and row ranges.
    `include_unsharded`: see `model_tensors`.
    """
    entries: dict[str, tuple[Tensor, Any]] = {}
    for prefix, states in _states(optimizer).items():
        for owner, state in states.items():
            if isinstance(owner, Tensor):  # state that all parameters share has other keys
                for key, value in state.items():
                    entries[f"{name_of(owner, names)}/{prefix}{key}"] = (owner, value)
    tensors: Named = {}
    further: dict[str, Any] = {}
    rows_of_tensors: dict[str, Rows] = {}
    strides: dict[str, list[int]] = {}
    for name, (parameter, value) in entries.items():
        if not isinstance(value, Tensor):
            further[name] = value
            continue
        rows = rows_of_state(parameter, value)
        if rows is not None:
            rows_of_tensors[name] = rows
        elif _has_own_layout(value, parameter):
            strides[name] = list(value.stride())
        if include_unsharded or rows is not None:
            tensors[name] = host_copy(value)
    own = _own_state(optimizer)
    if strides:
        own[_STRIDES] = strides
    plain = _savable({OWN: own, **further}, names)
    return tensors, plain, rows_of_tensors


def load_optimizer(
    optimizer: Optimizer, tensors: Saved, plain: Mapping[str, Any], names: Mapping[Tensor, str]
) -> None:
    """Load complete tensors into an optimizer, with `load_state_dict` if the optimizer's class
    overrides that method.
    """
    # includes newly frozen parameters, which another check reports better
    parameters = {name: parameter for parameter, name in names.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters[name_of(parameter, names)] = parameter
    entries = _as_saved(plain, parameters)
    own = entries.pop(OWN)
    strides = own.pop(_STRIDES, {})
    for prefix, member in _with_inner(optimizer).items():  # inner ones may share the outer's state
        member.state.clear()
        member.state.update(own.get(_state_of(prefix), {}))
    entries = _in_order_of_groups({**tensors, **entries}, optimizer, names)
    _load_entries(optimizer, entries, parameters, strides)

    has_loaded = False
    shared = _shared_groups(optimizer)
    for prefix, member in reversed(_with_inner(optimizer).items()):  # the outer one last
        more = own.get(_more_of(prefix), {})
        if more or (not prefix and _overrides_load(optimizer)):
            member.load_state_dict({**member.state_dict(), **more})
            has_loaded = True
    if not has_loaded:
        return
    _share_groups(optimizer, shared)
    _load_entries(optimizer, entries, parameters, strides)  # some `load_state_dict` cast tensors
    now = {key: value for key, value in _own_state(optimizer).items() if key in own}
    saved_tensors, saved_plain = pack_state({OWN: _savable(own, names)})
    now_tensors, now_plain = pack_state({OWN: _savable(now, names)})
    wrong = first_difference(saved_plain[OWN], now_plain[OWN], saved_tensors, now_tensors)
    if wrong is not None:
        raise not_restored(type(optimizer).__name__, wrong)


def _with_inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return an optimizer and its inner optimizers by the prefix of their entries. torch's
    `state_dict` omits the inner ones.
    """
    optimizers = {"": optimizer}
    for name, inner in inner_optimizers(optimizer).items():
        optimizers[f"{name}:"] = inner
    return optimizers


def _states(optimizer: Optimizer) -> dict[str, dict[Any, Any]]:
    """Return what the states of an optimizer and of its inner optimizers hold, by prefix. What
    several hold is the innermost one's, and a dict that a property makes anew holds nothing.
    """
    states: dict[str, dict[Any, Any]] = {}
    in_deeper: set[int] = set()
    for prefix, member in reversed(_with_inner(optimizer).items()):
        state = member.state
        is_stored = state is member.state
        states[prefix] = {}
        if not is_stored:
            continue
        for owner, entries in state.items():
            if not isinstance(owner, Tensor) or id(entries) not in in_deeper:
                states[prefix][owner] = entries
        in_deeper.update(map(id, state.values()))
    return states


def _overrides_load(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is not Optimizer.load_state_dict


def _state_of(prefix: str) -> str:
    """Return the key of the state of no single parameter, of an optimizer or an inner one."""
    return prefix or "state"


def _more_of(prefix: str) -> str:
    """Return the key of what the `state_dict` of an optimizer has besides its state."""
    return f"{prefix}more"


def _shared_groups(optimizer: Optimizer) -> dict[str, list[int]]:
    """Return for each inner optimizer the indices of its groups among the outer one's."""
    indices = {id(group): index for index, group in enumerate(optimizer.param_groups)}
    shared = {}
    for name, inner in inner_optimizers(optimizer).items():
        shared[name] = [indices[id(group)] for group in inner.param_groups]
    return shared


def _share_groups(optimizer: Optimizer, shared: Mapping[str, list[int]]) -> None:
    """Let the inner optimizers have the outer one's groups again, which a `load_state_dict` may
    have replaced by copies: learning rates would not reach these.
    """
    for name, inner in inner_optimizers(optimizer).items():
        groups = [optimizer.param_groups[index] for index in shared[name]]
        pairs = zip(inner.param_groups, groups, strict=True)
        if any(group is not outer_group for group, outer_group in pairs):
            inner.param_groups = groups


def _in_order_of_groups(
    entries: Mapping[str, Any], optimizer: Optimizer, names: Mapping[Tensor, str]
) -> dict[str, Any]:
    """Return saved entries in the order in which a step makes them: the `state_dict` of some
    wrappers numbers them.
    """
    place: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            place[name_of(parameter, names)] = len(place)
    last = len(place)
    ordered = sorted(entries, key=lambda key: place.get(key.rpartition("/")[0], last))
    return {key: entries[key] for key in ordered}


def _load_entries(
    optimizer: Optimizer,
    entries: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    strides: Mapping[str, Sequence[int]],
) -> None:
    optimizers = _with_inner(optimizer)
    for key, value in entries.items():
        name, _, entry = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(
                "optimizer-state-of-other-parameter",
                problem=f"optimizer state for {name} is saved, but this optimizer does not train it",
                parameter=name,
            )
        prefix = _prefix_of(entry, optimizers)
        parameter = parameters[name]
        state = optimizers[prefix].state.setdefault(parameter, {})
        entry_name = entry.removeprefix(prefix)
        if not isinstance(value, Tensor | Stored):
            state[entry_name] = _on_device(value, parameter.device)
            continue
        # a scalar is equal on every rank
        saved = read_rows(value, rows_of(parameter) if value.shape else None)
        now = state.get(entry_name)
        is_there = isinstance(now, Tensor) and now.device == parameter.device
        if is_there and key not in strides and equal_bits(now, saved):
            continue
        restored = saved.to(parameter.device, copy=True)
        if key in strides:
            restored = _with_stride(restored, strides[key])
        elif restored.shape == parameter.shape:
            # fused kernels need state in the parameter's memory format
            like_parameter = torch.empty_like(parameter, dtype=restored.dtype, requires_grad=False)
            restored = like_parameter.copy_(restored)
        state[entry_name] = restored


def _prefix_of(entry: str, prefixes: Iterable[str]) -> str:
    """Return the prefix of the inner optimizer that has an entry, or "" for the outer one."""
    for prefix in prefixes:
        if prefix and entry.startswith(prefix):
            return prefix
    return ""


def _on_device(nested: Any, device: torch.device) -> Any:
    """Return nested lists with their tensors on a device, such as the directions of LBFGS."""
    if isinstance(nested, Tensor):
        return nested.to(device)
    if isinstance(nested, dict):
        return {key: _on_device(value, device) for key, value in nested.items()}
    if isinstance(nested, list | tuple):
        return type(nested)(_on_device(value, device) for value in nested)
    return nested


def _own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of no single parameter, and what each `state_dict` has besides the state."""
    own: dict[str, Any] = {}
    for prefix, state in _states(optimizer).items():
        own[_state_of(prefix)] = {
            key: value for key, value in state.items() if not isinstance(key, Tensor)
        }
    for prefix, member in _with_inner(optimizer).items():
        more = further_state(member)
        if more or not prefix:
            own[_more_of(prefix)] = more
    return own


def further_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the entries of an optimizer's `state_dict` that its class adds, and the state in it
    if that has further tensors, such as those of an optimizer that `inner_optimizers` misses.
    """
    has_hooks = bool(vars(optimizer).get("_optimizer_state_dict_post_hooks"))
    if type(optimizer).state_dict is Optimizer.state_dict and not has_hooks:
        return {}  # torch's state_dict would import the compiler and add nothing
    named: Any = optimizer.state_dict()
    if not isinstance(named, dict):
        raise ConfigError(
            "optimizer-state-dict",
            problem=f"{type(optimizer).__name__}.state_dict() returns a {type(named).__name__}",
            reason="a checkpoint holds its entries by name",
            remedy="return a dict of tensors, numbers, and dictionaries and lists of these",
            setting="optimizer",
            value=type(named).__name__,
        )
    further = {key: value for key, value in named.items() if key not in ("state", "param_groups")}
    known = {id(leaf) for leaf in pytree.tree_leaves([*_states(optimizer).values()])}
    leaves = pytree.tree_leaves(named.get("state"))
    if any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in leaves):
        further["state"] = named["state"]
    return further


def _savable(nested: Any, names: Mapping[Tensor, str]) -> Any:
    """Return nested state that can be saved. A dict with parameters, tuples or floats as keys
    becomes lists of its keys and entries. A tensor is saved with its strides unless it is
    contiguous: results of matrix products depend on them.
    """
    if isinstance(nested, Tensor) and _has_own_layout(nested):
        return {_TENSOR: nested, _STRIDE: list(nested.stride())}
    if isinstance(nested, dict):
        entries = {key: _savable(value, names) for key, value in nested.items()}
        if all(type(key) in (str, int) for key in nested):
            return entries
        keys: list[Any] = []
        for key in nested:
            keys.append({_PARAMETER: name_of(key, names)} if isinstance(key, Tensor) else key)
        return {_KEYS: keys, _ENTRIES: list(entries.values())}
    if type(nested) in (list, tuple):
        return type(nested)(_savable(value, names) for value in nested)
    return nested


def _as_saved(nested: Any, parameters: Mapping[str, Tensor]) -> Any:
    """Return nested state as it was before `_savable`."""
    if isinstance(nested, dict):
        if nested.keys() == {_TENSOR, _STRIDE}:
            return _with_stride(nested[_TENSOR], nested[_STRIDE])
        if nested.keys() == {_KEYS, _ENTRIES}:
            keys = []
            for key in nested[_KEYS]:
                keys.append(parameters[key[_PARAMETER]] if isinstance(key, dict) else key)
            entries = [_as_saved(value, parameters) for value in nested[_ENTRIES]]
            return dict(zip(keys, entries, strict=True))
        return {key: _as_saved(value, parameters) for key, value in nested.items()}
    if type(nested) in (list, tuple):
        return type(nested)(_as_saved(value, parameters) for value in nested)
    return nested


def _has_own_layout(tensor: Tensor, parameter: Tensor | None = None) -> bool:
    """Return True if the layout in memory is neither that of a new tensor nor the parameter's."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    if parameter is not None and tensor.shape == parameter.shape:
        return tensor.stride() != parameter.stride()
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # without gaps


def _with_stride(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    empty = torch.empty_strided(
        tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device
    )
    return empty.copy_(tensor)


def group_numbers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of each parameter group (learning rate, decay, counters, buffers) without
    its parameters.
    """
    types = (bool, int, float, str, np.generic, Tensor, tuple, list, dict)
    groups = []
    for group in optimizer.param_groups:
        values = {}
        for key, value in group.items():
            if key not in ("params", "param_names") and isinstance(value, types):
                values[key] = value
        groups.append(values)
    return groups


def load_group_numbers(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Restore the values of `group_numbers`."""
    if len(groups) != len(optimizer.param_groups):
        count = len(optimizer.param_groups)
        raise CheckpointError(
            "optimizer-groups-differ",
            problem=f"the optimizer had {len(groups)} parameter groups, now {count}",
            reason="were other parameters frozen, or other weight decays set?",
            saved=len(groups),
            groups=count,
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.pop(APART, None)  # set by a step that this load undoes
        for key, value in saved.items():
            now = group.get(key)
            if now is not None and _shape_of(now) != _shape_of(value):
                raise CheckpointError(
                    "optimizer-value-differs",
                    problem=f"{key} of the optimizer was {value!r}, and is now {now!r}",
                    reason="the optimizer cannot step with the saved value",
                    remedy=(
                        "resume from an older checkpoint, or start from its weights:",
                        Setting("init_from"),
                    ),
                    name=key,
                    saved=value,
                    value=now,
                )
            if isinstance(value, Tensor) and isinstance(now, Tensor):
                group[key] = value.to(now.device)
            else:
                group[key] = value


def _shape_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_shape_of(entry) for entry in value]
    if isinstance(value, bool | int | float | np.generic | Tensor):
        return "number"
    return type(value).__name__
