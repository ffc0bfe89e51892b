"""Which parameters share a decay and a rate, and which are hidden matrices: decided by modules and shapes, never by names.

Names mislead: "LayerNorm.weight" matches no `norm1.weight`, and "bias" matches the matrix `bias_proj.weight`.
So a parameter is spared where it has fewer than two dimensions, is a module's bias, or belongs to a norm or
an embedding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from surefoot.config.tree import nearest
from surefoot.errors import ConfigError
from surefoot.optim.param_roles import EMBEDDINGS, final_layer, is_bias_or_norm, is_embedding

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # MultiheadAttention's own


@dataclass(frozen=True)
class Group:
    """Parameters that share a weight decay and a rate (a factor on the base learning rate), with their names in the model."""

    name: str
    decay: float
    parameters: list[nn.Parameter]
    names: list[str]
    hidden: bool = False  # whether they are matrices between embeddings and head: `split_hidden` says so
    rate: float = 1.0


def parameter_groups(
    model: nn.Module, weight_decay: float, *, rates: Mapping[str, float] | None = None, trained: set[str] | None = None
) -> list[Group]:
    """The trainable parameters of `model`, those with the same decay and the same rate in one group.

    `rates` are factors on the base learning rate, by name; what it does not name has 1. Groups of rate 1 come first, then by
    falling rate; of one rate first the group that decays, then the one that does not. A tied parameter stands once, and its
    first owner decides. `trained` names those that are taken; None takes all that have `requires_grad` at this moment.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [(group.name, group.decay, group.names) for group in parameter_groups(model, 0.1)]
    [('decay', 0.1, ['1.weight']), ('no decay', 0.0, ['0.weight', '1.bias', '2.weight', '2.bias'])]
    >>> [(group.name, group.rate, group.names) for group in parameter_groups(model, 0.0, rates={"0.weight": 0.5})]
    [('all', 1.0, ['1.weight', '1.bias', '2.weight', '2.bias']), ('all', 0.5, ['0.weight'])]
    """
    groups: dict[tuple[bool, float], Group] = {}
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole = f"{path}.{name}" if path else name
            if parameter in seen or not (parameter.requires_grad if trained is None else whole in trained):
                continue
            seen.add(parameter)
            spared = bool(weight_decay) and (is_bias_or_norm(module, name, parameter) or is_embedding(module))
            rate = 1.0 if rates is None else rates.get(whole, 1.0)
            title = "no decay" if spared else "decay" if weight_decay else "all"
            decay = 0.0 if spared else weight_decay
            group = groups.setdefault((spared, rate), Group(title, decay, [], [], rate=rate))
            group.parameters.append(parameter)
            group.names.append(whole)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[1] != 1.0, -key[1], key[0]))]


def first_and_last(names: Sequence[str]) -> str:
    """Some names in short.

    >>> first_and_last(["a", "b", "c"]), first_and_last(["a"])
    ('a ... c', 'a')
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


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
        dict(module.named_parameters())["weight"] for module in model.modules() if isinstance(module, EMBEDDINGS)
    }
    if excepted is None:
        tied = any(module.weight in embedded for module in model.modules() if isinstance(module, nn.Linear))
        head = None if tied else final_layer(model)
        left_out: set[nn.Parameter] = set() if head is None else set(head.parameters(recurse=False))
    else:
        left_out = _called(model, excepted)
    found = {weight for module in model.modules() for weight in _matrices(module)}
    return found - embedded - left_out


def split_hidden(groups: Sequence[Group], hidden: set[nn.Parameter]) -> list[Group]:
    """The groups in two each, hidden matrices first, where both are not empty; all else of a group stays as it was."""
    parts = []
    for is_hidden in (True, False):
        for group in groups:
            pairs = zip(group.parameters, group.names, strict=True)
            part = {held: name for held, name in pairs if (held in hidden) is is_hidden}
            if part:
                kind = f"{group.name}, hidden" if is_hidden else group.name
                parts.append(replace(group, name=kind, parameters=[*part], names=[*part.values()], hidden=is_hidden))
    return parts


def with_rates(groups: Sequence[Group], lr: float) -> list[dict[str, Any]]:
    """The groups as torch's optimizers take them: each has its decay, and `lr` times its own rate."""
    return [{"params": group.parameters, "weight_decay": group.decay, "lr": lr * group.rate} for group in groups]


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear) or (isinstance(module, _CONVOLUTIONS) and module.groups == 1):
        yield own["weight"]
    elif isinstance(module, nn.MultiheadAttention):
        yield from (own[name] for name in _PROJECTIONS if name in own)


def _called(model: nn.Module, names: Sequence[str]) -> set[nn.Parameter]:
    """All parameters of the modules, and the parameters, that are called so."""
    called = {name: [*module.parameters()] for name, module in model.named_modules(remove_duplicate=False)}
    called |= {name: [parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name in names:
        if name not in called:
            meant = nearest(name, [*called])
            raise ConfigError(
                f"optimizer.adamw_for: {type(model).__name__} has no module or parameter {name!r}"
                + (f"; did you mean {meant}?" if meant else "")
            )
    return {parameter for name in names for parameter in called[name]}
