"""A function on each of several ranks, in processes forked from this one, which has imported torch: that takes seconds.

answers = on_ranks(lambda: train(), 2)      # by rank; what a rank raised is its answer, as "ConfigError: ..."
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any


def on_ranks(function: Callable[[], Any], ranks: int) -> list[Any]:
    """What `function` returned (JSON) on each rank of a group that finds itself as torchrun's would."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    reading = []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _be(function, rank, ranks, port, write)
        os.close(write)
        reading.append((pid, read))
    answers = []
    for pid, read in reading:
        with os.fdopen(read) as told:
            text = told.read()
        os.waitpid(pid, 0)
        answers.append(json.loads(text) if text else None)
    return answers


def _be(function: Callable[[], Any], rank: int, ranks: int, port: int, write: int) -> None:
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        try:
            answer = function()
        except Exception as problem:
            if not type(problem).__module__.startswith("surefoot"):
                traceback.print_exc()
            answer = f"{type(problem).__name__}: {problem}"
        with os.fdopen(write, "w") as told:
            json.dump(answer, told)
    finally:
        sys.stderr.flush()
        os._exit(0)
