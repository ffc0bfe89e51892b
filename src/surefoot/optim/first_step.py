"""What the first step of torch's optimizers imports."""

import importlib
import sys
from collections.abc import Iterable
from threading import Thread

from surefoot.optim.adamw_fused import StraightToKernel
from surefoot.optim.build import RunOptimizer
from surefoot.optim.flat_parameters import FlatAdamW


def import_for_steps(optimizers: Iterable[RunOptimizer]) -> None:
    """Import torch._dynamo if the first step of an optimizer would import it.

    An exception within that import keeps all frames of its stack, and what they refer to, until
    Python collects garbage: the model of a notebook's first run, after `del run`. So it happens on
    the stack of a thread.
    """
    name = "torch._dynamo"
    if name in sys.modules or not any(map(_imports_dynamo, optimizers)):
        return
    thread = Thread(target=importlib.import_module, args=(name,))
    thread.start()
    thread.join()


def _imports_dynamo(trained: RunOptimizer) -> bool:
    """Return True for a step with torch's decorator for differentiable optimizers."""
    if isinstance(trained.skip, StraightToKernel | FlatAdamW):
        return False  # they call their kernel without `step`
    step = getattr(type(trained.optimizer), "step", None)
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is not None and code.co_name == "_use_grad":
            return True
        step = getattr(step, "__wrapped__", None)
    return False
