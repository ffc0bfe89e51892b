"""A function in a process of its own, where each text that a chat template writes has a limit of
computing time and memory: a template is a program of somebody else. Imports no torch.
"""

import gc
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from surefoot.distributed.environment import end_with_parent
from surefoot.errors import SurefootError, error_of_dict

T = TypeVar("T")
SECONDS = 5.0  # of computing, for each text
MEMORY_BYTES = 1 << 30  # that all texts may take together, beyond what the process had
_NO_MEMORY = '{"over": "memory"}'  # written where memory is short
_INSIDE = ContextVar("inside", default=False)


class OverLimitError(Exception):
    """The function took more than it may for the item `index`: "time", "memory", or what ended its
    process, such as "SIGSEGV".
    """

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index = index
        self.what = what


def is_inside() -> bool:
    """Return True within a function that `limited` calls."""
    return _INSIDE.get()


@contextmanager
def one_text() -> Iterator[None]:
    """Limit the computing time of the block, in a function that `limited` calls. Blocks are not
    nested.
    """
    if not hasattr(os, "fork"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limited(function: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
    """Return `function(item)` for each item, computed in a process under limits. Results are JSON.

    A `SurefootError` of the function is raised here; any other exception is a `RuntimeError` with
    its traceback. Raises `OverLimitError` if a block `one_text` takes more than `SECONDS` of
    computing, or all items more than `MEMORY_BYTES`, and if the process ends otherwise. Where a
    process cannot fork (Windows), nothing is limited; macOS limits the time only.
    """
    if is_inside() or not items:
        return [function(item) for item in items]
    if not hasattr(os, "fork"):
        before = _INSIDE.set(True)
        try:
            return [function(item) for item in items]
        finally:
            _INSIDE.reset(before)
    parent = os.getpid()
    reader, writer = os.pipe()
    with warnings.catch_warnings():  # of threads, none of which this process needs
        warnings.simplefilter("ignore")
        process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            _work(function, items, writer, parent)
        finally:
            os._exit(0)
    os.close(writer)
    results = list[Any]()
    try:
        with open(reader, "rb") as answers:
            for line in answers:
                results.append(_result(json.loads(line), len(results)))
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        raise
    finally:
        status = _wait(process)
    if len(results) < len(items):
        raise OverLimitError(len(results), _cause(status))
    return results


def _result(answer: dict[str, Any], index: int) -> Any:
    if "error" in answer:
        raise error_of_dict(answer["error"])
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    if "over" in answer:
        raise OverLimitError(index, answer["over"])
    return answer["result"]


def _wait(process: int) -> int:
    try:
        _, status = os.waitpid(process, 0)
    except ChildProcessError:  # SIGCHLD is ignored: nobody knows
        return 0
    return os.waitstatus_to_exitcode(status)


def _cause(status: int) -> str:
    if status == -signal.SIGPROF:
        return "time"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def _work(function: Callable[[T], Any], items: Sequence[T], writer: int, parent: int) -> None:
    end_with_parent(parent)
    _INSIDE.set(True)
    gc.freeze()  # nothing of the other process is collected here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it computes
    _limit_memory()
    with open(writer, "w", encoding="ascii") as answers:
        for item in items:
            try:
                answer = json.dumps({"result": function(item)})
            except MemoryError:
                answer = _NO_MEMORY
            except SurefootError as problem:
                answer = json.dumps({"error": problem.to_dict()})
            except Exception:
                answer = json.dumps({"failed": traceback.format_exc()})
            print(answer, file=answers, flush=True)


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
