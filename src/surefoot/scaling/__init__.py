"""Scaling on paper: memory of each GPU, bytes that it sends and the time of a step, for any number of GPUs. Arithmetic alone.

What a model holds and what a pass over it computes is given here as numbers (`Workload`); `dry_pass.py` finds them on the meta
device. What the formulas leave out, and how one would notice that they are wrong, is in docs/decisions/0020-scaling-on-paper.md.
"""

from surefoot.scaling.memory import Memory, memory
from surefoot.scaling.traffic import (
    Machine,
    Timing,
    Window,
    hidden_from,
    ring_bandwidth,
    ring_gathered,
    ring_reduced,
    sent_bytes,
    timing,
    windows,
)
from surefoot.scaling.workload import Spread, Weight, Workload, shard_shape

__all__ = [
    "Machine",
    "Memory",
    "Spread",
    "Timing",
    "Weight",
    "Window",
    "Workload",
    "hidden_from",
    "memory",
    "ring_bandwidth",
    "ring_gathered",
    "ring_reduced",
    "sent_bytes",
    "shard_shape",
    "timing",
    "windows",
]
