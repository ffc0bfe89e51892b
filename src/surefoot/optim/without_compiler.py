"""Optimizers made without torch's compiler, the import of which takes a second or two: decision 0037."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make optimizers in this block without importing `torch._dynamo`; where that is imported already, as always.

    torch wraps `Optimizer.add_param_group`, which every optimizer calls when it is made, so that code being compiled leaves it
    out; the wrapper imports the compiler to say so. In this block the method itself is called, as nothing is being compiled.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    wrapped = Optimizer.add_param_group
    Optimizer.add_param_group = inspect.unwrap(wrapped)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = wrapped  # type: ignore[method-assign]
