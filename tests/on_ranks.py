"""Several ranks on gloo, forked from this process, which has imported torch: that takes seconds."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

import pytest

from waiting import HANG_S, HangLimit

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


def on_ranks(count: int, work: Callable[[int], object], *, patience_s: float = HANG_S) -> list[int]:
    """Do `work(rank)` on so many ranks, each a process with the environment of a launcher; their exit statuses.

    A status is that of `SystemExit`, 1 for any other exception (its traceback goes to standard error), or minus a signal.
    Ranks that stand still are killed after `patience_s`; shortly before, each writes to standard error where its threads are.
    """
    import torch._dynamo  # what some runs of several ranks import: here it is once for all
    import torch.utils.tensorboard  # noqa: F401

    port = _free_port()
    ranks = [_forked(rank, count, port, work, patience_s) for rank in range(count)]
    statuses: dict[int, int] = {}
    limit = HangLimit(patience_s)
    while len(statuses) < count:
        for rank, process in enumerate(ranks):
            if rank not in statuses:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        if limit.is_over:
            for rank, process in enumerate(ranks):
                if rank not in statuses:
                    os.kill(process, signal.SIGKILL)
            limit = HangLimit(float("inf"))
        time.sleep(0.01)
    return [statuses[rank] for rank in range(count)]


def _forked(rank: int, count: int, port: int, work: Callable[[int], object], patience_s: float) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        faulthandler.dump_traceback_later(0.9 * patience_s, file=sys.__stderr__)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if count == 1:
            del os.environ["WORLD_SIZE"]
        work(rank)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
