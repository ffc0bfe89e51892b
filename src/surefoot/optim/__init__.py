"""Optimizers: which ones there are, what decays, how a bad step is skipped, and averaged weights."""

from surefoot.optim.specs import (
    OptimizerSpec,
    adafactor,
    adam,
    adamw,
    adamw8bit,
    lion,
    muon,
    nadam,
    named,
    radam,
    schedule_free,
    sgd,
)

__all__ = [
    "OptimizerSpec",
    "adafactor",
    "adam",
    "adamw",
    "adamw8bit",
    "lion",
    "muon",
    "nadam",
    "named",
    "radam",
    "schedule_free",
    "sgd",
]
