"""Which matrices are hidden: between a model's embeddings and its head. Decided by modules and shapes, not by names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from surefoot.config import nearest
from surefoot.errors import ConfigError
from surefoot.optim.param_groups import Group
from surefoot.optim.param_roles import final_layer

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # MultiheadAttention's own


def hidden_matrices(model: nn.Module, *, excepted: Sequence[str] | None = None) -> set[nn.Parameter]:
    """The weights of Linear layers, of attention's projections and of convolutions, but for the head's and embeddings'.

    The head is every Linear whose weight is an embedding's; where there is none, the last layer with a matrix (`final_layer`).
    `excepted` names modules or parameters to leave out instead of it. A convolution in groups is not hidden: its
    kernel is several matrices in one tensor. Nor are tensors that another kind of module owns: what they are, nobody knows.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 9))
    >>> [name for name, weight in model.named_parameters() if weight in hidden_matrices(model)]
    ['1.weight']
    """
    embedded = {
        dict(module.named_parameters())["weight"] for module in model.modules() if isinstance(module, _EMBEDDINGS)
    }
    if excepted is None:
        tied = any(module.weight in embedded for module in model.modules() if isinstance(module, nn.Linear))
        head = None if tied else final_layer(model)
        left_out: set[nn.Parameter] = set() if head is None else set(head.parameters(recurse=False))
    else:
        left_out = _called(model, excepted)
    found = {weight for module in model.modules() for weight in _matrices(module)}
    return found - embedded - left_out


def split(groups: Sequence[Group], hidden: set[nn.Parameter]) -> list[Group]:
    """The groups in two each, hidden matrices first, where both are not empty; all else of a group stays as it was."""
    parts = []
    for is_hidden in (True, False):
        for group in groups:
            places = [place for place, held in enumerate(group.parameters) if (held in hidden) is is_hidden]
            if places:
                parameters, names = [group.parameters[p] for p in places], [group.names[p] for p in places]
                kind = f"{group.name}, hidden" if is_hidden else group.name
                parts.append(replace(group, name=kind, parameters=parameters, names=names, hidden=is_hidden))
    return parts


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear) or (isinstance(module, _CONVOLUTIONS) and module.groups == 1):
        yield own["weight"]
    elif isinstance(module, nn.MultiheadAttention):
        yield from (own[name] for name in _PROJECTIONS if name in own)


def _called(model: nn.Module, names: Sequence[str]) -> set[nn.Parameter]:
    """All parameters of the modules, and the parameters, that are called so."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: set[nn.Parameter] = set()
    for name in names:
        if name in parameters:
            found.add(parameters[name])
        elif name in modules:
            found |= set(modules[name].parameters())
        else:
            meant = nearest(name, [*modules, *parameters])
            raise ConfigError(
                f"optimizer.adamw_for: {type(model).__name__} has no module or parameter {name!r}"
                + (f"; did you mean {meant}?" if meant else "")
            )
    return found
