"""A run on paper in numbers: its weights by block, its optimizer's state, and what a pass over it would hold and compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from surefoot.blocks import blocks_of
from surefoot.dry_pass import Pass
from surefoot.memory import tensor_bytes
from surefoot.optim.memory import state_bytes, update_bytes
from surefoot.parts import Parts
from surefoot.scaling import Weight, Workload


def workload(parts: Parts, passed: Pass) -> Workload:
    """The numbers that scaling is computed from: of a run on paper, and of a dry pass of one of its micro-batches.

    State that is not known before an optimizer's first step counts as nothing here; `optim.memory.state_bytes` says None.
    """
    models, trained = parts.state.models, list(parts.state.trained.values())
    outside, blocks = units(models, parts.parallel.blocks)
    return Workload(
        outside=outside,
        blocks=blocks,
        state_bytes=lambda shards: sum(state_bytes(held.optimizer, shards=shards) or 0 for held in trained),
        update_bytes=lambda shards: max(update_bytes(held.skip, held.optimizer, shards=shards) for held in trained),
        averages=int(bool(parts.state.averages)),
        buffer_bytes=tensor_bytes(held for model in models.values() for held in model.buffers()),
        pass_bytes=passed.most_bytes,
        flops=passed.flops,
        samples=passed.samples,
    )


def units(
    models: Mapping[str, nn.Module], named: Sequence[str] = ()
) -> tuple[tuple[Weight, ...], tuple[tuple[Weight, ...], ...]]:
    """The weights that belong to no block, and those of each block, as FSDP gathers them together.

    `named` are names as `blocks_of` takes them; without any the model's own are meant. A block with a weight that stands
    outside of it too is gathered with what stands around it.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    >>> outside, blocks = units({"model": nn.Sequential(*blocks, nn.Linear(4, 1))})
    >>> [weight.shape for weight in outside], [[weight.shape for weight in block] for block in blocks]
    ([(1, 4), (1,)], [[(4, 4), (4,)], [(4, 4), (4,)]])
    """
    outside: list[nn.Parameter] = []
    blocks: list[list[nn.Parameter]] = []
    for model in models.values():
        alone = [
            list(block.parameters()) for block in blocks_of(model, named or "auto").values() if _is_alone(block, model)
        ]
        inside = {parameter for block in alone for parameter in block}
        outside += [parameter for parameter in model.parameters() if parameter not in inside]
        blocks += [block for block in alone if block]
    return _weights(outside), tuple(_weights(block) for block in blocks)


def _is_alone(block: nn.Module, model: nn.Module) -> bool:
    """True where no module outside of a block holds a parameter of it."""
    within, own = set(block.modules()), set(block.parameters())
    others = (module for module in model.modules() if module not in within)
    return not any(parameter in own for module in others for parameter in module.parameters(recurse=False))


def _weights(parameters: Iterable[Tensor]) -> tuple[Weight, ...]:
    return tuple(Weight(tuple(held.shape), held.element_size(), held.requires_grad) for held in parameters)
