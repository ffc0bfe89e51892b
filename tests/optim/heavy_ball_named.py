"""The function that specifies the optimizer of `heavy_ball.py`, and its declaration; without torch,
as those of surefoot are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.optim.optimizers import OptimizerSpec, named
from surefoot.optim.validation import DECLARED, at_least, declared


def heavy_ball(lr: float, *, weight_decay: float = 0.0, friction: float = 0.9) -> OptimizerSpec:
    return named("heavy_ball", lr=lr, weight_decay=weight_decay, settings={"friction": friction})


@contextmanager
def added() -> Iterator[None]:
    """With the optimizer among the others, as an import of `optimizers.py` would leave it."""
    declared("optim.heavy_ball", first_run=(0.02, 0.1), checks={"friction": at_least(0, below=1)})(
        heavy_ball
    )
    try:
        yield
    finally:
        del DECLARED["heavy_ball"]
