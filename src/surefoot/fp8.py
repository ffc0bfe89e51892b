"""Linear layers that multiply in 8 bits, by torchao; all else of a step is bf16 autocast's, and weights stay float32."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from surefoot.errors import ConfigError, first_line
from surefoot.optim.param_groups import hidden_matrices

_MULTIPLE = 16  # both sizes of a matrix: what the devices' instructions take


def with_fp8(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with its hidden linear layers multiplying in float8, forward and backward; changed in place.

    Each tensor is scaled by its own largest number (e4m3 forwards, e5m2 for gradients; Micikevicius et al. 2022, section 3:
    https://arxiv.org/abs/2209.05433). Parameters keep their names and stay the same objects. Taken are layers of class
    `nn.Linear` whose sizes are multiples of 16, but not heads and what shares its weight with an embedding. On the CPU the 8 bits are
    emulated, which shows the rounding and is slow. Raises `ConfigError` without torchao, and where there is no such layer.
    """
    hidden = hidden_matrices(model)
    taken = [name for name, part in model.named_modules() if _is_taken(part, hidden)]
    if not taken:
        raise ConfigError(
            f"precision = fp8: {type(model).__name__} has no hidden nn.Linear whose sizes are multiples of {_MULTIPLE}\n"
            "  try: --precision bf16"
        )
    torchao = _torchao()
    config = torchao.Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    evaluating = [name for name, part in model.named_modules() if not part.training]
    torchao.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in taken, config=config)
    for name in evaluating:  # what torchao makes is in training mode
        model.get_submodule(name).training = False
    return model


def _is_taken(part: nn.Module, hidden: set[nn.Parameter]) -> bool:
    if type(part) is not nn.Linear or part.weight not in hidden:
        return False
    return part.in_features % _MULTIPLE == 0 and part.out_features % _MULTIPLE == 0


def _torchao() -> Any:
    try:
        return import_module("torchao.float8")
    except Exception as problem:  # a build for another torch raises what it likes
        raise ConfigError(
            f"precision = fp8 needs torchao, which cannot be imported: {type(problem).__name__}: {first_line(problem)}\n"
            "  install it: pip install surefoot[fp8]"
        ) from problem
