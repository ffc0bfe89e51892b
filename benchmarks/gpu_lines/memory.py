"""The peak of memory that a block takes is what it allocated, as the allocator counts it."""

from __future__ import annotations

import torch

from surefoot.memory import free_bytes, peak

BYTES = 64 << 20


def check(device: str) -> str:
    """Allocate 64 MiB and free them."""
    where = torch.device(device)
    with peak(where) as highest:
        tensor = torch.zeros(BYTES // 4, device=where)
        del tensor
    if device == "cuda":
        assert highest.memory_bytes == BYTES, (
            f"{highest.memory_bytes} bytes, and {BYTES} were allocated"
        )
        assert 0 < free_bytes(where) <= torch.cuda.get_device_properties(where).total_memory
    return f"{highest.memory_bytes / 2**20:.0f} MiB, free {free_bytes(where) / 2**30:.0f} GiB"
