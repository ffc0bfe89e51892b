"""The tensors of runs and of their checkpoints, compared bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import surefoot as sf
from surefoot.checkpoint import Checkpoint, Store


def weights(run: sf.Run, model: str = "model") -> dict[str, Tensor]:
    """A copy of the parameters and buffers of a model of a run."""
    state = run.state.models[model].state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def newest_checkpoint(run_dir: Path) -> Checkpoint:
    """The newest checkpoint of a run that has no damaged one after it."""
    newest = Store(run_dir / "checkpoints").newest_intact()
    assert newest is not None
    checkpoint, damaged = newest
    assert damaged == []
    return checkpoint


def tensors_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of a checkpoint, also those that its bases have, as FILE/NAME."""
    tensors = {}
    for file in checkpoint.files:
        for name, tensor in checkpoint.tensors(file).items():
            tensors[f"{file}/{name}"] = tensor
    return tensors


def changed_names(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that differ between two dictionaries of the same names."""
    assert tensors.keys() == others.keys()
    return [name for name in tensors if not torch.equal(tensors[name], others[name])]


def assert_same_bits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert changed_names(tensors, expected) == []
