"""The weights of runs, compared bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import surefoot as sf


def weights(run: sf.Run, model: str = "model") -> dict[str, Tensor]:
    """A copy of the parameters and buffers of a model of a run."""
    state = run.state.models[model].state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def changed_names(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that differ between two dictionaries of the same names."""
    assert tensors.keys() == others.keys()
    return [name for name in tensors if not torch.equal(tensors[name], others[name])]


def assert_same_bits(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert changed_names(tensors, expected) == []
