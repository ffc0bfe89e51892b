"""Whether an error says that a connection between ranks broke; what it broke for, only the other ranks know."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.distributed import DistError

_WORDS = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|NCCL", re.IGNORECASE)


def of_connection(problem: BaseException) -> bool:
    """Whether an error, or what it came from, is of a connection between ranks that broke."""
    return any(isinstance(one, RuntimeError) and _broken(one) for one in _with_causes(problem))


def _broken(problem: RuntimeError) -> bool:
    return isinstance(problem, DistError) or _WORDS.search(str(problem)) is not None


def _with_causes(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__
