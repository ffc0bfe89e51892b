"""Which parameters share a decay and a rate. What decays is decided by the kind of module that owns them, never by names.

Names mislead: "LayerNorm.weight" matches no `norm1.weight`, and "bias" matches the matrix `bias_proj.weight`.
So a parameter is spared where it has fewer than two dimensions, is a module's bias, or belongs to a norm or
an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # batch and instance norms of all dimensions, synchronised ones too
)
_BIASES = ("bias", "bias_k", "bias_v")  # the last two are MultiheadAttention's, of three dimensions


@dataclass(frozen=True)
class Group:
    """Parameters that share a weight decay and a rate (a factor on the base learning rate), with their names in the model."""

    name: str
    decay: float
    parameters: list[nn.Parameter]
    names: list[str]
    hidden: bool = False  # whether they are matrices between embeddings and head: `hidden.split` says so
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
            spared = bool(weight_decay) and _is_spared(module, name, parameter)
            rate = 1.0 if rates is None else rates.get(whole, 1.0)
            title = "no decay" if spared else "decay" if weight_decay else "all"
            fresh = Group(title, 0.0 if spared else weight_decay, [], [], rate=rate)
            group = groups.setdefault((spared, rate), fresh)
            group.parameters.append(parameter)
            group.names.append(whole)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[1] != 1.0, -key[1], key[0]))]


def table(groups: Sequence[Group]) -> str:
    """The groups as lines of text: rate, decay, number of tensors and of values, names of the first and the last.

    >>> print(table(parameter_groups(nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 1)), 0.1)))
    group     rate  weight_decay  tensors  values  names
    decay        1           0.1        2    1240  0.weight ... 1.weight
    no decay     1           0.0        2      41  0.bias ... 1.bias
    """
    rows = [("group", "rate", "weight_decay", "tensors", "values", "names")]
    for group in groups:
        values = sum(parameter.numel() for parameter in group.parameters)
        numbers = (f"{group.rate:g}", repr(group.decay), str(len(group.parameters)), str(values))
        rows.append((group.name, *numbers, first_and_last(group.names)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 5)), row[5]])
        for row in rows
    )


def first_and_last(names: Sequence[str]) -> str:
    """Some names in short.

    >>> first_and_last(["a", "b", "c"]), first_and_last(["a"])
    ('a ... c', 'a')
    """
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"


def is_embedding(owner: nn.Module) -> bool:
    """True for what looks rows of its matrix up."""
    return isinstance(owner, nn.Embedding | nn.EmbeddingBag)


def is_bias_or_norm(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """True for what is added to activations, or scales them one by one."""
    return parameter.ndim < 2 or name in _BIASES or isinstance(owner, _NORMS)


def _is_spared(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    return is_bias_or_norm(owner, name, parameter) or is_embedding(owner)
