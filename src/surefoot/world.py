"""Where this process stands among the others, and on which device it computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from surefoot.errors import ConfigError


@dataclass(frozen=True)
class World:
    """One process and its device. The names are torch.distributed's."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and lines."""
        return self.rank == 0


def one_process(device: str) -> World:
    """The world of a run that is alone; `device` is "auto" or anything `torch.device` takes.

    "auto" is the accelerator torch reports (CUDA, MPS, ...), else the CPU. Under a launcher that started several
    processes it raises `ConfigError`, since each of them would believe that it is the only one and write the same files.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise ConfigError(
            f"started as one of {size} processes (WORLD_SIZE={size}), but this version of surefoot trains in one\n"
            "  start it without the launcher: python FILE.py, or surefoot train RECIPE"
        )
    return World(_device(device))


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Only kernels that give the same bits in every run; where there is none, torch raises. Then as before."""
    before = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _device(name: str) -> torch.device:
    if name == "auto":
        return (
            (torch.accelerator.current_accelerator() or torch.device("cpu"))
            if torch.accelerator.is_available()
            else torch.device("cpu")
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).split("\n", maxsplit=1)[0]
        raise ConfigError(
            f"device = {name!r} cannot be used here: {reason}\n  try: --device cpu, or --device auto"
        ) from problem
    return device
