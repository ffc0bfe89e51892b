"""What of a model can be sharded by rows, and which of its parts can be gathered by themselves; nothing here does it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from surefoot.errors import ConfigError


def refuse_unshardable(model: nn.Module) -> None:
    """Raise one `ConfigError` that names every parameter that FSDP cannot shard, and why.

    >>> refuse_unshardable(nn.Linear(2, 1))
    """
    found: list[str] = []
    for name, held in model.named_parameters():
        if held.ndim == 0:
            found.append(f"{name} is a single number without dimension: make it nn.Parameter(torch.ones(1))")
        elif not held.is_contiguous():
            found.append(f"{name} does not lie row by row in memory (channels last?): give it contiguous weights")
        elif held.is_complex():
            found.append(f"{name} holds complex numbers: keep it as two real parts (torch.view_as_real)")
    types = sorted({str(held.dtype).removeprefix("torch.") for held in model.parameters() if held.requires_grad})
    if len(types) > 1:
        found.append(f"its trained parameters are of several types, {', '.join(types)}: gradients travel in one")
    if found:
        shown = found if len(found) <= 3 else [*found[:2], f"and {len(found) - 2} more like these"]
        lines = [f"parallel = fsdp: {type(model).__name__} cannot be sharded as it is", *shown, "or use --parallel ddp"]
        raise ConfigError("\n  ".join(lines))


def by_themselves(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks, innermost first, but for those without parameters or with one that is used outside of them too.

    Such a one is gathered with what stands around it: one parameter cannot be in two parts.
    """
    chosen = []
    for module in reversed(list(model.modules())):
        if module is model or all(module is not block for block in blocks):
            continue
        own, outside = (
            set(module.parameters()),
            {held for other in _beside(model, module) for held in other._parameters.values()},
        )
        if own and own.isdisjoint(outside):
            chosen.append(module)
    return chosen


def _beside(module: nn.Module, block: nn.Module) -> set[nn.Module]:
    """All modules that are used without entering a block; a part that it shares with others is among them."""
    found, left = {module}, [module]
    while left:
        fresh = {child for child in left.pop().children() if child is not block} - found
        found |= fresh
        left += fresh
    return found
