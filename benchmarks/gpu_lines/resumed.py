"""One process of the line `resume`."""

from __future__ import annotations

from gpu_lines.resume import train_here


def check(device: str) -> str:
    """Train to the end, or until this process kills itself."""
    train_here(device)
    return "trained"
