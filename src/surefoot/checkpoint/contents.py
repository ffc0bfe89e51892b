"""Between live objects and the named tensors and JSON of a checkpoint. Nothing here writes a file.

Where tensors lie over several ranks, each takes and gives back the rows that it holds; on disk every tensor is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from surefoot.checkpoint.tensor_file import Stored
from surefoot.errors import CheckpointError
from surefoot.optimizers.flat import APART
from surefoot.sharding import Rows, held_of, name_of, rows_of, rows_of_state

Saved = Mapping[str, Tensor | Stored]
Named = dict[str, Tensor]


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its state: nested dictionaries and lists of tensors and JSON values."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...  # noqa: D102


def model_tensors(model: nn.Module, *, whole: bool = True) -> tuple[Named, dict[str, str]]:
    """Copies on the host of all parameters and persistent buffers, tied ones once, and {alias: name} for the others.

    Of what lies over several ranks these are this rank's rows; `whole` tells whether to copy also what each of them has.
    """
    tensors: Named = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name}: a module's extra state must be a tensor, this is {type(value).__name__}; use run.keep for it"
            )
        if id(value) in first:
            aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        held, rows = held_of(value)
        if whole or rows is not None:
            tensors[name] = copied(held)
    return tensors, aliases


def model_rows(model: nn.Module) -> dict[str, Rows]:
    """How those tensors of a model lie in the whole that lie over several ranks; tied ones once, by their first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        first.setdefault(id(value), (name, value))
    lying = {name: held_of(value)[1] for name, value in first.values()}
    return {name: rows for name, rows in lying.items() if rows is not None}


def load_model(model: nn.Module, tensors: Saved, aliases: Mapping[str, str], *, where: str) -> None:
    """Put a model's tensors back from whole ones; every name, shape and dtype must agree, or all differences are named."""
    live = model.state_dict(keep_vars=True)
    saved = {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}
    problems = tensor_differences(saved, live)
    if problems:
        raise CheckpointError(f"{where} holds another model\n  " + "\n  ".join(shortened(problems)))
    with torch.no_grad():
        for name, value in live.items():
            held, rows = held_of(value)
            held.copy_(taken(saved[name], rows))


def put_back(model: nn.Module, tensors: Named) -> None:
    """Give a model what `model_tensors` took of it, on the same rank."""
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if name in tensors:
                held_of(value)[0].copy_(tensors[name])


def taken(saved: Tensor | Stored, rows: Rows | None) -> Tensor:
    """What a rank needs of a saved tensor, all of it where it holds no rows of its own; of one on disk nothing else is read."""
    if isinstance(saved, Stored):
        return saved.whole() if rows is None else saved.rows(rows.start, rows.stop)
    return saved if rows is None else saved[rows.start : rows.stop]


def tensor_differences(saved: Saved, live: Mapping[str, Tensor]) -> list[str]:
    """One line for each name, shape or dtype in which two sets of tensors differ."""
    problems = [
        f"{name} {list(saved[name].shape)} is saved, but not in this model" for name in saved if name not in live
    ]
    problems += [
        f"{name} {list(live[name].shape)} is in this model, but not saved" for name in live if name not in saved
    ]
    for name in live:
        if name in saved and saved[name].shape != live[name].shape:
            problems.append(f"{name} was {list(saved[name].shape)}, now {list(live[name].shape)}")
        elif name in saved and saved[name].dtype != live[name].dtype:
            problems.append(f"{name} was {saved[name].dtype}, now {live[name].dtype}")
    return problems


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], *, whole: bool = True
) -> tuple[Named, dict[str, Any]]:
    """Copies of the state of every parameter as PARAMETER/KEY, and what in it is not a tensor; `whole` as for a model."""
    tensors: Named = {}
    plain: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor):
                plain[f"{name_of(parameter, names)}/{key}"] = value
            elif whole or rows_of_state(parameter, value) is not None:
                tensors[f"{name_of(parameter, names)}/{key}"] = copied(value)
    return tensors, plain


def optimizer_rows(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Rows]:
    """How those tensors of an optimizer's state lie in the whole that lie over several ranks."""
    return {
        f"{name_of(parameter, names)}/{key}": rows
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and (rows := rows_of_state(parameter, value)) is not None
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: Saved,
    plain: Mapping[str, Any],
    names: Mapping[Tensor, str],
) -> None:
    """Put an optimizer's state back from whole tensors."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # those that are frozen now too: what else is not as it was says more
    parameters = {name: held for held, name in names.items()}
    parameters |= {name_of(parameter, names): parameter for parameter in trained}
    optimizer.state.clear()
    for key, value in {**tensors, **plain}.items():
        name, _, entry = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(
                f"cannot resume: optimizer state for {name} is saved, but this optimizer does not train it"
            )
        parameter = parameters[name]
        held = value
        if isinstance(value, Tensor | Stored):
            rows = rows_of(parameter) if value.shape else None  # a number is the same on every rank
            held = taken(value, rows).to(parameter.device, copy=True)
            if held.shape == parameter.shape:  # fused kernels walk memory: state must lie as its parameter does
                held = torch.empty_like(parameter, dtype=held.dtype, requires_grad=False).copy_(held)
        optimizer.state[parameter][entry] = held


def group_numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group holds besides parameters: rates and decays, which user code may change, and what some optimizers count."""
    kinds = (bool, int, float, str, Tensor, tuple)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}
        for group in optimizer.param_groups
    ]


def load_group_numbers(optimizer: torch.optim.Optimizer, plain: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put `group_numbers`, taken apart by `kept_state`, back."""
    groups = _joined(plain, tensors)
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"cannot resume: the optimizer had {len(groups)} groups of parameters, now {len(optimizer.param_groups)}\n"
            "  were other parameters frozen, or other decays chosen?"
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.pop(APART, None)  # by a step that this takes back
        for key, value in saved.items():
            held = group.get(key)
            group[key] = value.to(held.device) if isinstance(value, Tensor) and isinstance(held, Tensor) else value


def kept_state(objects: Mapping[str, Any]) -> tuple[Named, dict[str, Any]]:
    """The user's own objects as tensors and JSON: tensors, dictionaries and lists of JSON, or anything `Stateful`."""
    tensors: Named = {}
    plain: dict[str, Any] = {}
    for name, held in objects.items():
        plain[name] = _split(_escaped(name), held.state_dict() if isinstance(held, Stateful) else held, tensors)
    return tensors, plain


def restore_kept(held: Any, tensors: Mapping[str, Tensor], plain: Any, *, name: str) -> None:
    """Put one of the user's objects back as it was, in place."""
    saved = _joined(plain, tensors)
    if isinstance(held, Stateful):
        held.load_state_dict(saved)
    elif isinstance(held, Tensor):
        with torch.no_grad():
            held.copy_(saved)
    elif isinstance(held, dict):
        held.clear()
        held.update(saved)
    elif isinstance(held, list):
        held[:] = saved
    else:
        raise CheckpointError(
            f"cannot keep {name!r}: a {type(held).__name__} is none of tensor, dict, list, or object with state_dict"
        )


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host that later updates cannot reach."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.contiguous()


def shortened(problems: list[str], most: int = 4) -> Iterable[str]:
    """The first few problems, and how many more there are."""
    return problems if len(problems) <= most else [*problems[: most - 1], f"... and {len(problems) - most + 1} more"]


def _split(path: str, value: Any, tensors: Named) -> Any:
    """`value` with every tensor moved to `tensors` and named in its place."""
    if isinstance(value, Tensor):
        tensors[path] = copied(value)
        return {"tensor": path}
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise CheckpointError(f"cannot keep {path!r}: the key {wrong[0]!r} is not a string")
        return {"dict": {key: _split(f"{path}/{_escaped(key)}", held, tensors) for key, held in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_split(f"{path}/{place}", held, tensors) for place, held in enumerate(value)]}
    if isinstance(value, float):
        return {"float": repr(float(value))}  # NumPy's are floats too, and write themselves otherwise
    if value is None or isinstance(value, bool | int | str):
        return {"value": value}
    raise CheckpointError(f"cannot keep {path!r}: a {type(value).__name__} is neither a tensor nor JSON")


def _escaped(name: str) -> str:
    """A part of a path that holds no slash, different for different names (as in RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _joined(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_split` took apart."""
    match plain:
        case {"tensor": path}:
            return tensors[path].clone()
        case {"dict": held}:
            return {key: _joined(value, tensors) for key, value in held.items()}
        case {"list": held}:
            return [_joined(value, tensors) for value in held]
        case {"tuple": held}:
            return tuple(_joined(value, tensors) for value in held)
        case {"float": text}:
            return float(text)
    return plain["value"]
