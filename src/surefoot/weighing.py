"""A run on paper in numbers: its weights by block, its optimizer's state, and what a pass over it would hold and compute."""

from __future__ import annotations

from torch import nn

from surefoot.dry_pass import Pass
from surefoot.loop import Trained
from surefoot.optimizers.memory import restored_bytes, state_bytes
from surefoot.optimizers.roles import depths
from surefoot.parts import Parts
from surefoot.memory import tensor_bytes
from surefoot.scaling import Weight, Workload


def workload(parts: Parts, passed: Pass) -> Workload:
    """The numbers that scaling is computed from, of a run on paper and a dry pass of one of its micro-batches.

    State of an optimizer that is not known before its first step counts as nothing: `unknown_state` names such.
    """
    trained = list(parts.state.trained.values())
    units: list[tuple[nn.Module, list[nn.Module]]] = [(model, _blocks(model)) for model in parts.state.models.values()]
    blocks = [tuple(_weights(block.parameters())) for _, held in units for block in held]
    inside = {parameter for _, held in units for block in held for parameter in block.parameters()}
    outside = [held for model, _ in units for held in model.parameters() if held not in inside]
    return Workload(
        outside=tuple(_weights(outside)),
        blocks=tuple(blocks),
        state_bytes=lambda shards: sum(state_bytes(held.optimizer, shards=shards) or 0 for held in trained),
        update_bytes=lambda shards: max(restored_bytes(held.skip, held.optimizer, shards=shards) for held in trained),
        averages=int(bool(parts.state.averages)),
        buffer_bytes=tensor_bytes(held for model, _ in units for held in model.buffers()),
        pass_bytes=passed.most_bytes,
        flops=passed.flops,
        samples=passed.samples,
    )
