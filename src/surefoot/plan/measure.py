"""What a run would do, in words and numbers, before it does anything: nothing is trained, and nothing is written.

One micro-batch goes forward and backward, to measure its time and memory; its gradients are let go.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from surefoot.memory import peak
from surefoot.run.components import RunComponents
from surefoot.train.scratch import timed_pass


@dataclass(frozen=True)
class Measured:
    """One micro-batch forward and backward: targets counted, bytes that the backward pass holds, median seconds."""

    targets: int
    activation_bytes: int
    pass_s: float


def measure(parts: RunComponents) -> Measured:
    """Pass the first micro-batch of the run forward and backward a few times; parameters and buffers stay what they were.

    Of blocks that are computed again the backward pass holds one at a time: there the most at any time is measured.
    """
    micro_batch = parts.supply.again(0)[0]
    held: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in parts.state.parameters}

    def packed(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            held[place] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        timed_pass(parts.task, parts.state, micro_batch)
    activation_bytes = sum(held.values())
    if parts.computed_again is not None and not parts.compiled:
        with peak(parts.device) as found:
            timed_pass(parts.task, parts.state, micro_batch)
        activation_bytes = found.memory_bytes
    times, counts = zip(*(timed_pass(parts.task, parts.state, micro_batch) for _ in range(3)), strict=True)
    return Measured(counts[0], activation_bytes, median(times))
