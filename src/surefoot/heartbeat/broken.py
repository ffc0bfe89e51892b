"""Connections between ranks that broke: whether an error says so, and lines that only tell it; of what, the other ranks know."""

from __future__ import annotations

import os
import re
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

from torch.distributed import DistError

_WORDS = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|NCCL", re.IGNORECASE)
_CONNECT_S = 5.0


def of_connection(problem: BaseException) -> bool:
    """Whether an error, or what it came from, is of a connection between ranks that broke."""
    return any(isinstance(one, RuntimeError) and _broken(one) for one in _with_causes(problem))


class Lines:
    """Connections between rank 0 and each other rank, which carry nothing: the system closes one when its process ends.

    So a rank that was killed is noticed at once. One that is stopped, or whose machine is lost, leaves its line open; and
    where a network lets no line through, silence alone tells. Forked children (a loader's workers) do not hold lines open.
    """

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce  # by which both ends know each other
        self.ranks: dict[socket.socket, int] = {}  # who is at the other end

    def connect(self, host: str, port: int, *, rank: int) -> None:
        """Connect this rank to rank 0, where that can be done."""
        with suppress(OSError):
            line = socket.create_connection((host, port), timeout=_CONNECT_S)
            line.sendall(f"{self.nonce} {rank}".encode())
            self.ranks[line] = -1  # nobody, until rank 0 answers

    def accept(self, server: socket.socket) -> None:
        """Take in the ranks that have connected to rank 0."""
        server.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                line, _ = server.accept()
                line.settimeout(_CONNECT_S)
                with suppress(OSError, ValueError):
                    nonce, rank = line.recv(64).decode().split()
                    if nonce == self.nonce:
                        line.sendall(nonce.encode())
                        self.ranks[line] = int(rank)
                if line not in self.ranks:  # a stranger's
                    line.close()

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended` with each rank that closes its line; returns when none is open."""
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self.drop)
        with selectors.DefaultSelector() as ready:
            for line in self.ranks:
                ready.register(line, selectors.EVENT_READ, line)
            while ready.get_map():
                for key, _ in ready.select():
                    with suppress(OSError):  # a network that breaks a line proves nothing
                        if (text := key.data.recv(64)) == self.nonce.encode():
                            self.ranks[key.data] = 0
                            continue
                        if not text:
                            ended(self.ranks[key.data])
                    ready.unregister(key.fileobj)

    def drop(self) -> None:
        """Close what this process holds of the lines."""
        for line in self.ranks:
            line.close()


def _broken(problem: RuntimeError) -> bool:
    return isinstance(problem, DistError) or _WORDS.search(str(problem)) is not None


def _with_causes(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__
