"""What the machine has."""

from __future__ import annotations

import os

import torch


class Skip(Exception):  # noqa: N818  # no error
    """The machine lacks what a line needs; the message names it."""


def require(device: str) -> None:
    """Raise unless the device is there."""
    assert device != "cuda" or torch.cuda.is_available(), (
        "torch sees no GPU: --device cpu makes a dry run"
    )


def limit_s() -> float:
    """Seconds that this line may take."""
    return float(os.environ.get("LINE_LIMIT_S", "600"))
