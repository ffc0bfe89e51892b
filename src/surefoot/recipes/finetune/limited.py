"""A function in a process of its own, where each text that a chat template writes has a limit of
computing time and memory: a template is a program of somebody else. Imports no torch.
"""

import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
SECONDS = 5.0  # of computing, for each text
MEMORY_BYTES = 1 << 30  # that all texts may take together, beyond what the process had
_FAILED, _NO_MEMORY = b"failed", b"memory"
_process = {"is_limited": False, "is_inside": False}


class OverLimitError(Exception):
    """The function took more than it may for the item `index`."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index
        self.what = what


def is_inside() -> bool:
    """Return True within a function that `limited` calls."""
    return _process["is_inside"]


@contextmanager
def one_text() -> Iterator[None]:
    """Limit the computing time of the block, in a process of `limited`. Blocks are not nested."""
    if not _process["is_limited"]:
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limited(function: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
    """Return `function(item)` for each item, computed in a process under limits. Results are JSON.

    An exception of the function is raised here. Raises `OverLimitError` if a block `one_text` takes
    more than `SECONDS` of computing, or all items more than `MEMORY_BYTES`. Where a process cannot
    fork (Windows), nothing is limited; macOS limits the time only.
    """
    if is_inside() or not items:
        return [function(item) for item in items]
    if not hasattr(os, "fork"):
        return [_inside(function, item) for item in items]
    import multiprocessing

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, items, sender))
    with warnings.catch_warnings():  # of threads, none of which this process needs
        warnings.simplefilter("ignore")
        process.start()
    sender.close()
    results = list[Any]()
    try:
        while len(results) < len(items):
            try:
                answer = receiver.recv_bytes()
            except EOFError:
                process.join()
                is_late = process.exitcode == -signal.SIGPROF
                raise OverLimitError(len(results), "time" if is_late else "memory") from None
            if answer == _NO_MEMORY:
                raise OverLimitError(len(results), "memory")
            if answer == _FAILED:  # the same exception, with its whole chain
                results.append(_inside(function, items[len(results)]))
            else:
                results.append(json.loads(answer))
    finally:
        process.kill()
        process.join()
        process.close()
        receiver.close()
    return results


def _inside(function: Callable[[T], Any], item: T) -> Any:
    before = _process["is_inside"]
    _process["is_inside"] = True
    try:
        return function(item)
    finally:
        _process["is_inside"] = before


def _work(function: Callable[[T], Any], items: Sequence[T], sender: Any) -> None:
    _process.update(is_limited=True, is_inside=True)
    gc.freeze()  # nothing of the other process is collected here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it computes
    _limit_memory()
    with suppress(BrokenPipeError):
        for item in items:
            try:
                answer = json.dumps(function(item)).encode()
            except MemoryError:
                answer = _NO_MEMORY
            except Exception:
                answer = _FAILED
            sender.send_bytes(answer)


def _limit_memory() -> None:
    if not sys.platform.startswith("linux"):
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = size_bytes + MEMORY_BYTES
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
