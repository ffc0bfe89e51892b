"""Conversion of models to the named tensors and JSON of a checkpoint and back. Each rank handles
only its own rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surefoot.checkpoint.nested_state import Named, join_state, not_restored, split_state
from surefoot.checkpoint.tensor_file import Stored, equal_bits, host_copy
from surefoot.distributed.shards import Rows, local_part, plain_tensors, saved_state
from surefoot.errors import CheckpointError, first_line

Saved = Mapping[str, Tensor | Stored]
EXTRA = "_extra_state"  # suffix of the names of `get_extra_state` values, whose shape may change


def shortened(problems: Sequence[str], limit: int = 4) -> list[str]:
    """Return at most `limit` lines; the last one then counts the lines that are left out."""
    if len(problems) <= limit:
        return list(problems)
    rest = len(problems) - limit + 1
    return [*problems[: limit - 1], f"... and {rest} more"]


class ModelState(NamedTuple):
    """The saved state of a model: tensors, {alias: name} of tied tensors, and other state_dict
    values as JSON (`extra`).
    """

    tensors: Mapping[str, Any]  # `Tensor` or `Stored`
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]
    rows: Mapping[str, Rows] = {}  # the row range of each sharded tensor of `tensors`


def live_state(model: nn.Module) -> tuple[Named, dict[str, Any]]:
    """Return a model's tensors without copies, and its other state_dict values as JSON
    (`split_state`).
    """
    tensors: Named = {}
    extra: dict[str, Any] = {}
    for name, value in saved_state(model).items():
        if isinstance(value, Tensor):
            tensors |= plain_tensors(name, value)
        else:
            extra[name] = split_state(f"extra/{name}", value, tensors)
    return tensors, extra


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of a model's frozen parameters in its state; a wrapper subclass has several
    names.
    """
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    names: set[str] = set()
    if frozen:
        for name, value in saved_state(model).items():
            if id(value) in frozen:
                names.update(plain_tensors(name, value))
    return names


def local_tensors(
    model: nn.Module, names: Collection[str]
) -> dict[str, tuple[Tensor, Rows | None]]:
    """Return this rank's parts of some of a model's tensors, without copies; tied tensors once,
    under their first name.
    """
    live, _ = live_state(model)
    aliases = _aliases(live)
    return {name: local_part(live[name]) for name in live if name in names and name not in aliases}


def _aliases(live: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of each tied tensor by its further names."""
    first_names: dict[int, str] = {}
    aliases = {}
    for name, value in live.items():
        first = first_names.setdefault(id(value), name)
        if first != name:
            aliases[name] = first
    return aliases


class OtherModelError(CheckpointError):
    """Raised if a checkpoint holds the tensors of another model."""


def model_tensors(
    model: nn.Module, *, include_unsharded: bool = True, without: Collection[str] = ()
) -> ModelState:
    """Return a host copy of a model's state. Without `include_unsharded`, only this rank's shards
    are copied.

    Tensors named in `without` are left out.
    """
    live, extra = live_state(model)
    aliases = _aliases(live)
    tensors = {}
    rows_of_tensors = {}
    for name, tensor in live.items():
        if name in aliases or name in without:
            continue
        local, rows = local_part(tensor)
        if rows is not None:
            rows_of_tensors[name] = rows
        if include_unsharded or rows is not None:
            tensors[name] = host_copy(local)
    return ModelState(tensors, aliases, extra, rows_of_tensors)


def load_model(
    model: nn.Module, state: ModelState, *, where: str, same_ties: bool = True
) -> Callable[[], None]:
    """Load complete tensors into a model, or raise `CheckpointError` with all differences; return
    the check of `copy_into`.

    With `same_ties`, tensors that were one (tied) must be one in the model, and others must not.
    """
    problems = _differences(state, model, same_ties=same_ties)
    if problems:
        raise OtherModelError(
            "model-of-other-tensors",
            problem=f"{where} holds another model: {'; '.join(shortened(problems, 2))}",
            differences=problems,
        )
    return copy_into(model, state, where=where)


def _differences(state: ModelState, model: nn.Module, *, same_ties: bool) -> list[str]:
    saved = without_extra_state(_with_aliases(state))
    live = without_extra_state(live_state(model)[0])
    problems = _changed_ties(state.aliases, live) if same_ties else []
    for name in saved:
        if name not in live:
            problems.append(f"{name} {list(saved[name].shape)} is saved, but not in this model")
    for name in live:
        if name not in saved:
            problems.append(f"{name} {list(live[name].shape)} is in this model, but not saved")
    for name in live:
        if name not in saved:
            continue
        if saved[name].shape != live[name].shape:
            problems.append(f"{name} was {list(saved[name].shape)}, now {list(live[name].shape)}")
        elif saved[name].dtype != live[name].dtype:
            problems.append(f"{name} was {saved[name].dtype}, now {live[name].dtype}")
    return problems


def _changed_ties(before: Mapping[str, str], live: Mapping[str, Any]) -> list[str]:
    now = _aliases(live)
    problems = []
    for name, first in before.items():
        if name in live and name not in now:
            problems.append(f"{name} was tied to {first}, and is now a parameter of its own")
    for name, first in now.items():
        if name not in before:
            problems.append(f"{name} was a parameter of its own, and is now tied to {first}")
    return problems


def copy_into(
    model: nn.Module,
    state: ModelState,
    *,
    where: str,
    own_rows: bool = False,
    partial: bool = False,
) -> Callable[[], None]:
    """Copy saved tensors into a model, cast to the model's dtypes, then call `load_state_dict` with
    the complete state.

    The copied values stay in the model if `load_state_dict` fails, as in bitsandbytes. With
    `own_rows`, the tensors are this rank's `model_tensors`. With `partial`, tensors may be missing.
    Returns a check to call after all loads. The check reads all tensors again, and raises
    `CheckpointError` if the model would save other values.
    """
    saved = _with_aliases(state)
    refusal = ""

    def read(name: str, live: Tensor, rows: Rows | None) -> Tensor:
        tensor = read_rows(saved[name], None if own_rows else rows)
        return tensor if name.endswith(EXTRA) else tensor.to(live.dtype)

    with torch.no_grad():
        state_dict = saved_state(model)
        for name, value in state_dict.items():
            if name in state.extra:
                state_dict[name] = join_state(state.extra[name], saved)
            elif not isinstance(value, Tensor) and name in saved:
                state_dict[name] = read_rows(saved[name], None).clone()
            if not isinstance(value, Tensor):
                continue
            for inner, part in plain_tensors(name, value).items():
                if inner not in saved:
                    continue
                local, rows = local_part(part)
                tensor = read(inner, local, rows)
                fits = local.dtype == tensor.dtype and local.shape == tensor.shape
                is_expanded = 0 in local.stride()
                if fits and not is_expanded:
                    local.copy_(tensor)
                else:  # extra state of another shape, for example
                    state_dict[name] = tensor.to(local.device, copy=True)
        try:
            model.load_state_dict(state_dict)
        except Exception as problem:
            refusal = f" ({first_line(problem)})"

    def check() -> None:
        live, extra = live_state(model)
        wrong = [name for name in state.extra if extra.get(name) != state.extra[name]]
        if not partial:
            wrong += live.keys() ^ saved.keys()
        for name in live.keys() & saved.keys():
            local, rows = local_part(live[name])
            if not equal_bits(local, read(name, local, rows)):
                wrong.append(name)
        if wrong:
            raise not_restored("a model", f"{min(wrong)} differs{refusal}").inside(where)

    return check


def refuse_lossy(model: nn.Module, *, trained: Collection[str], name: str) -> None:
    """Raise `CheckpointError` if saving and loading would change a parameter that state_dict
    converts; restore the model.
    """
    live, _ = live_state(model)  # keeps the tensors alive, so that ids stay unique
    saved = {id(tensor) for tensor in live.values()}
    converted: dict[str, Tensor] = {}
    for parameter_name, parameter in model.named_parameters():
        for key, part in plain_tensors(parameter_name, parameter).items():
            if id(part) not in saved and part.is_floating_point():
                converted[key] = local_part(part)[0].detach()
    if not converted:
        return

    state = model_tensors(model)
    tensors = [*converted.values()]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        numbers = torch.arange(1, tensor.numel() + 1, dtype=torch.float64).sqrt().frac()
        tensor.copy_(numbers.view(tensor.shape))
    filled_state = model_tensors(model)
    filled = [tensor.clone() for tensor in tensors]
    torch._foreach_zero_(tensors)
    copy_into(model, filled_state, where=name, own_rows=True)
    lost = []
    for (key, tensor), expected in zip(converted.items(), filled, strict=True):
        # a model may rebuild a frozen parameter without saving it
        if not equal_bits(tensor, expected) and (key in trained or tensor.any()):
            lost.append(key)
    torch._foreach_copy_(tensors, before)
    copy_into(model, state, where=name, own_rows=True)
    for (key, tensor), expected in zip(converted.items(), before, strict=True):
        if not equal_bits(tensor, expected):
            lost.append(key)
    if lost:
        raise CheckpointError(
            "weights-saved-with-loss",
            problem=f"{name}: {lost[0]} cannot be restored bit for bit from the model's state_dict",
            reason="a resumed run would continue with weights other than the trained ones",
            remedy="make state_dict save it completely in its own dtype, and load_state_dict"
            " restore it",
            model=name,
            tensor=lost[0],
        )


def read_rows(saved: Tensor | Stored, rows: Rows | None) -> Tensor:
    """Return the rows of a saved tensor, or the complete tensor if `rows` is None. Other rows are
    not read.
    """
    if isinstance(saved, Stored):
        return saved.load() if rows is None else saved.rows(rows.start, rows.stop)
    return saved if rows is None else saved[rows.start : rows.stop]


def _with_aliases(state: ModelState) -> dict[str, Tensor | Stored]:
    tensors = dict(state.tensors)
    for alias, name in state.aliases.items():
        tensors[alias] = state.tensors[name]
    return tensors


def without_extra_state(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model except extra state (`get_extra_state`), because its shape may
    change.
    """
    return {name: tensors[name] for name in tensors if not _is_extra_state(name)}


def _is_extra_state(name: str) -> bool:
    return name.startswith("extra/") or name.endswith(EXTRA)
