"""Which parameters decay: decided by what kind of module owns them, never by how they are called.

Names mislead: "LayerNorm.weight" matches no `norm1.weight`, and "bias" matches the matrix `bias_proj.weight`.
So a parameter is spared where it has fewer than two dimensions, is a module's bias, or belongs to a norm or
an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_SPARED_OWNERS = (
    nn.Embedding,
    nn.EmbeddingBag,
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
    rate: float = 1.0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[Group]:
    """The trainable parameters of `model` in one group that decays and one that does not, if not empty.

    Without weight decay all of them are one group. A tied parameter stands once, and its first owner decides.
    A parameter with `requires_grad=False` at this moment is frozen and left out.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [(group.name, group.decay, group.names) for group in parameter_groups(model, 0.1)]
    [('decay', 0.1, ['1.weight']), ('no decay', 0.0, ['0.weight', '1.bias', '2.weight', '2.bias'])]
    """
    decaying = Group("decay" if weight_decay else "all", weight_decay, [], [])
    spared = Group("no decay", 0.0, [], []) if weight_decay else decaying
    seen: set[nn.Parameter] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            group = spared if _is_spared(module, name, parameter) else decaying
            group.parameters.append(parameter)
            group.names.append(f"{path}.{name}" if path else name)
    return [group for group in ([decaying] if spared is decaying else [decaying, spared]) if group.parameters]


def table(groups: Sequence[Group]) -> str:
    """The groups as lines of text: decay, number of tensors and of values, names of the first and the last.

    >>> print(table(parameter_groups(nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 1)), 0.1)))
    group     weight_decay  tensors  values  names
    decay              0.1        2    1240  0.weight ... 1.weight
    no decay           0.0        2      41  0.bias ... 1.bias
    """
    rows = [("group", "weight_decay", "tensors", "values", "names")]
    for group in groups:
        values = sum(parameter.numel() for parameter in group.parameters)
        ends = group.names if len(group.names) == 1 else [group.names[0], "...", group.names[-1]]
        rows.append((group.name, repr(group.decay), str(len(group.parameters)), str(values), " ".join(ends)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in (1, 2, 3)), row[4]])
        for row in rows
    )


def _is_spared(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or name in _BIASES or isinstance(owner, _SPARED_OWNERS)
