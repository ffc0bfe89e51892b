"""Checkpoints compared to the bit, and the newest intact one of a store that may have none."""

from __future__ import annotations

import torch

from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.format import Damage


def newest_intact(store: Store) -> tuple[Checkpoint | None, list[Damage]]:
    return store.newest_intact() or (None, [])


def equal_checkpoints(first: Checkpoint | None, second: Checkpoint | None) -> bool:
    if first is None or second is None:
        return first is second
    if (first.step, first.state, first.log) != (second.step, second.state, second.log):
        return False
    if first.files.keys() != second.files.keys():
        return False
    for file in first.files:
        tensors = first.tensors(file)
        other_tensors = second.tensors(file)
        if tensors.keys() != other_tensors.keys():
            return False
        for name, tensor in tensors.items():
            if not torch.equal(tensor, other_tensors[name]):
                return False
    return True
