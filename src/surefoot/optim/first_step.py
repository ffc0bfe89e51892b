"""What the first step of torch's optimizers imports."""

import importlib
import sys
from collections.abc import Iterable
from inspect import unwrap
from threading import Thread

from torch.optim import Optimizer

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
    # the others call their kernel without `step`
    called = [
        trained.optimizer
        for trained in optimizers
        if not isinstance(trained.skip, StraightToKernel | FlatAdamW)
    ]
    if name in sys.modules or not any(map(_imports_dynamo, called)):
        return
    thread = Thread(target=importlib.import_module, args=(name,))
    thread.start()
    thread.join()


def _imports_dynamo(optimizer: Optimizer) -> bool:
    """Return True for a step with torch's decorator for differentiable optimizers."""
    step = getattr(type(optimizer), "step", None)
    names: list[str] = []

    def note(function: object) -> bool:
        names.append(getattr(getattr(function, "__code__", None), "co_name", ""))
        return False

    if callable(step):
        unwrap(step, stop=note)
    return "_use_grad" in names
