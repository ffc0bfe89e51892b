"""Optimizers: which ones there are, what decays, how a bad step is skipped, and averaged weights."""

from surefoot.optimizers.specs import OptimizerSpec, adamw, named, sgd

__all__ = ["OptimizerSpec", "adamw", "named", "sgd"]
