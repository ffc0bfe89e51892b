"""Reading a number on the CPU: the one device where it is there already, so that asking for it waits for nothing."""

from __future__ import annotations

from torch import Tensor


def read_on_cpu(number: Tensor) -> float:
    """A number of the step, on the host; the one function below the loop that reads one (docs/decisions/0033).

    Raises `RuntimeError` for a tensor on any other device: there the host would wait for it.

    >>> import torch
    >>> read_on_cpu(torch.tensor(0.5))
    0.5
    """
    if not number.is_cpu:
        raise RuntimeError(f"read_on_cpu was given a number on {number.device}")
    return number.item()
