"""One process of the line `ranks`."""

from __future__ import annotations

from gpu_lines.ranks import train_here


def check(device: str) -> str:
    """Train."""
    train_here(device)
    return "trained"
