"""Conversion of models to the named tensors and JSON of a checkpoint and back. Each rank handles
only its own rows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surefoot.checkpoint.nested_state import Named, join_state, not_restored, split_state
from surefoot.checkpoint.tensor_file import Stored, equal_bits, host_copy
from surefoot.distributed.shards import Rows, held_of, plain_tensors, saved_state
from surefoot.errors import CheckpointError, first_line


def shortened(problems: list[str], limit: int = 4) -> Iterable[str]:
    """Return at most `limit` lines; the last one then counts the lines that are left out."""
    return (
        problems
        if len(problems) <= limit
        else [*problems[: limit - 1], f"... and {len(problems) - limit + 1} more"]
    )


Saved = Mapping[str, Tensor | Stored]
EXTRA = "_extra_state"  # suffix of the names of `get_extra_state` values, whose shape may change


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
    tensors, extra = Named(), dict[str, Any]()
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
    state = saved_state(model) if frozen else {}
    return {
        inner
        for name, value in state.items()
        if id(value) in frozen
        for inner in plain_tensors(name, value)
    }


def local_tensors(
    model: nn.Module, names: Collection[str]
) -> dict[str, tuple[Tensor, Rows | None]]:
    """Return this rank's parts of some of a model's tensors, without copies; tied tensors once,
    under their first name.
    """
    unique: dict[int, str] = {}
    live = live_state(model)[0]
    for name, value in live.items():
        unique.setdefault(id(value), name)
    return {name: held_of(live[name]) for name in unique.values() if name in names}


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
    first = {id(value): name for name, value in reversed(live.items())}
    aliases = {name: first[id(value)] for name, value in live.items() if first[id(value)] != name}
    local = {
        name: held_of(live[name]) for name in live if name not in aliases and name not in without
    }
    tensors = {
        name: host_copy(each)
        for name, (each, rows) in local.items()
        if include_unsharded or rows is not None
    }
    return ModelState(
        tensors,
        aliases,
        extra,
        {name: rows for name, (_, rows) in local.items() if rows is not None},
    )


def load_model(
    model: nn.Module, state: ModelState, *, where: str, same_ties: bool = True
) -> Callable[[], None]:
    """Load complete tensors into a model, or raise `CheckpointError` with all differences; return
    the check of `copy_into`.

    With `same_ties`, tensors that were one (tied) must be one in the model, and others must not.
    """
    saved, live = (
        without_extra_state(_with_aliases(state)),
        without_extra_state(live_state(model)[0]),
    )
    problems = _changed_ties(state.aliases, live) if same_ties else []
    problems += [
        f"{name} {list(saved[name].shape)} is saved, but not in this model"
        for name in saved
        if name not in live
    ]
    problems += [
        f"{name} {list(live[name].shape)} is in this model, but not saved"
        for name in live
        if name not in saved
    ]
    for name in [name for name in live if name in saved]:
        if saved[name].shape != live[name].shape:
            problems.append(f"{name} was {list(saved[name].shape)}, now {list(live[name].shape)}")
        elif saved[name].dtype != live[name].dtype:
            problems.append(f"{name} was {saved[name].dtype}, now {live[name].dtype}")
    if problems:
        raise OtherModelError(
            "model-of-other-tensors",
            problem=f"{where} holds another model: {'; '.join(shortened(problems, 2))}",
            differences=problems,
        )
    return copy_into(model, state, where=where)


def _changed_ties(before: Mapping[str, str], live: dict[str, Any]) -> list[str]:
    first = {id(value): name for name, value in reversed(live.items())}
    now = {name: first[id(value)] for name, value in live.items() if first[id(value)] != name}
    lost = [name for name in before if name in live and name not in now]
    new = [name for name in now if name not in before]
    return [
        f"{name} was tied to {before[name]}, and is now a parameter of its own" for name in lost
    ] + [f"{name} was a parameter of its own, and is now tied to {now[name]}" for name in new]


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
    saved, refusal = _with_aliases(state), ""

    def read(name: str, live: Tensor, rows: Rows | None) -> Tensor:
        tensor = read_rows(saved[name], None if own_rows else rows)
        return tensor if name.endswith(EXTRA) else tensor.to(live.dtype)

    with torch.no_grad():
        state_dict = saved_state(model)
        for name, value in state_dict.items():
            if name in state.extra:
                state_dict[name] = join_state(state.extra[name], saved)
            elif not isinstance(value, Tensor):
                state_dict[name] = read_rows(saved[name], None).clone() if name in saved else value
            for inner, part in (
                plain_tensors(name, value).items() if isinstance(value, Tensor) else ()
            ):
                if inner in saved:
                    local, rows = held_of(part)
                    tensor = read(inner, local, rows)
                    if (local.dtype, local.shape, 0 in local.stride()) == (
                        tensor.dtype,
                        tensor.shape,
                        False,
                    ):
                        local.copy_(tensor)
                    else:  # extra state of another shape, or an expanded tensor (stride 0)
                        state_dict[name] = tensor.to(local.device, copy=True)
        try:
            model.load_state_dict(state_dict)
        except Exception as problem:
            refusal = f" ({first_line(problem)})"

    def check() -> None:
        live, extra = live_state(model)
        wrong = (
            []
            if partial
            else [name for name in {**saved, **live} if (name in saved) != (name in live)]
        )
        wrong += [name for name in state.extra if extra.get(name) != state.extra[name]]
        for name in live.keys() & saved.keys():
            local, rows = held_of(live[name])
            wrong += [] if equal_bits(local, read(name, local, rows)) else [name]
        if wrong:
            raise not_restored("a model", f"{min(wrong)} differs{refusal}").inside(where)

    return check


def refuse_lossy(model: nn.Module, *, trained: Collection[str], name: str) -> None:
    """Raise `CheckpointError` if saving and loading would change a parameter that state_dict
    converts; restore the model.
    """
    live = live_state(model)[0]  # keeps the tensors alive, so that ids stay unique
    saved = {id(each) for each in live.values()}
    parts = {
        key: part
        for name, each in model.named_parameters()
        for key, part in plain_tensors(name, each).items()
    }
    if not (
        apart := {
            key: part
            for key, part in parts.items()
            if id(part) not in saved and part.is_floating_point()
        }
    ):
        return
    parameters, own = [held_of(each)[0].detach() for each in apart.values()], model_tensors(model)
    before = [each.clone() for each in parameters]
    for each in parameters:
        each.copy_(
            torch.arange(1, each.numel() + 1, dtype=torch.float64).sqrt().frac().view(each.shape)
        )
    saved_fill, filled = model_tensors(model), [each.clone() for each in parameters]
    torch._foreach_zero_(parameters)
    copy_into(model, saved_fill, where=name, own_rows=True)
    compared = zip(
        apart, parameters, filled, strict=True
    )  # a model may rebuild a frozen parameter without saving it
    lost = [
        key
        for key, now, then in compared
        if not equal_bits(now, then) and (key in trained or now.any())
    ]
    torch._foreach_copy_(parameters, before)
    copy_into(model, own, where=name, own_rows=True)
    lost += [
        key
        for key, now, then in zip(apart, parameters, before, strict=True)
        if not equal_bits(now, then)
    ]
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
    if rows is None:
        return saved.load() if isinstance(saved, Stored) else saved
    return (
        saved.rows(rows.start, rows.stop)
        if isinstance(saved, Stored)
        else saved[rows.start : rows.stop]
    )


def _with_aliases(state: ModelState) -> dict[str, Tensor | Stored]:
    return {
        **state.tensors,
        **{alias: state.tensors[name] for alias, name in state.aliases.items()},
    }


def without_extra_state(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model except extra state (`get_extra_state`), because its shape may
    change.
    """
    return {
        name: each
        for name, each in tensors.items()
        if not (name.startswith("extra/") or name.endswith(EXTRA))
    }
