"""How many operations a second this device can do: the best of matrix products in the run's number format."""

from __future__ import annotations

from time import perf_counter

import torch

from surefoot.errors import ConfigError
from surefoot.precision import FORMATS

_SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
_LONG_S = 1.0


def measured_peak(device: torch.device, precision: str, *, limit_s: float = _LONG_S) -> float:
    """Operations a second of square matrix products, the best of several sizes, within about `limit_s`.

    In bfloat16 or float16 where the run computes in it; with torch's settings as they are, so TF32 where the run has it.
    A product of two matrices of n x n is 2 n^3 operations. What is measured stays below what a maker states.

    >>> measured_peak(torch.device("cpu"), "fp32", limit_s=0.01) > 1e8
    True
    """
    dtype = FORMATS[precision].autocast or torch.float32
    best, sizes = 0.0, _SIZES.get(device.type, _SIZES["cpu"])
    for size in sizes:
        left, right = (torch.full((size, size), 0.5, device=device, dtype=dtype) for _ in range(2))
        made = left @ right
        until, took_s = perf_counter() + limit_s / len(sizes), 0.0
        while True:
            took_s = _once_s(left, right, made)
            best = max(best, 2.0 * size**3 / took_s)
            if perf_counter() + took_s > until:
                break
        if 8 * took_s > limit_s:  # the next size takes eight times as long
            break
    return best


def given_peak(text: str) -> float:
    """The number in `--peak 989e12`; `ConfigError` for what is none above 0.

    >>> given_peak("989e12")
    989000000000000.0
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(
            f"--peak {text!r} is no number of operations a second\n  write it as in --peak 989e12 (an H100's, in bf16)"
        )
    return found


def _once_s(left: torch.Tensor, right: torch.Tensor, made: torch.Tensor) -> float:
    if left.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.mm(left, right, out=made)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    begun = perf_counter()
    torch.mm(left, right, out=made)
    return perf_counter() - begun
