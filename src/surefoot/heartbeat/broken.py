"""Connections between ranks that broke: whether an error says so, and lines that only tell it; of what, the other ranks know."""

from __future__ import annotations

import os
import re
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Self
from weakref import WeakSet

from torch.distributed import DistError

_WORDS = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|NCCL", re.IGNORECASE)
_CONNECT_S = 5.0
_LOOK_S = 0.5  # from being told to close until the thread has seen it


def of_connection(problem: BaseException) -> bool:
    """Whether an error, or what it came from, is of a connection between ranks that broke."""
    return any(isinstance(one, RuntimeError) and _broken(one) for one in _with_causes(problem))


class Lines:
    """Connections between rank 0 and each other rank, which carry nothing: the system closes one when its process ends.

    So a rank that was killed is noticed at once. One that is stopped, or whose machine is lost, leaves its line open; and
    where a network lets no line through, silence alone tells. Forked children do not hold lines open.
    """

    def __init__(self, own: socket.socket, nonce: str, *, rank: int) -> None:
        self.own, self.nonce, self.rank = own, nonce, rank
        self.sockets = {own}
        self.closing = False
        _all.add(self)
        _leave_children_out()

    @classmethod
    def listening(cls, nonce: str) -> Self:
        """Rank 0's, to which the others come at `port`."""
        if socket.has_dualstack_ipv6():
            return cls(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True), nonce, rank=0)
        return cls(socket.create_server(("", 0)), nonce, rank=0)

    @classmethod
    def leading_to(cls, host: str, port: int, nonce: str, *, rank: int) -> Self | None:
        """Another rank's, to rank 0; None where none can be had."""
        try:
            line = socket.create_connection((host, port), timeout=_CONNECT_S)
            line.sendall(f"{nonce} {rank}".encode())
        except OSError:
            return None
        return cls(line, nonce, rank=rank)

    @property
    def port(self) -> int:
        """Where rank 0 listens."""
        return int(self.own.getsockname()[1])

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended` with each rank whose line is closed, until this one closes its own."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.own, selectors.EVENT_READ, data=0)
            while not self.closing:
                for key, _ in ready.select(timeout=_LOOK_S):
                    if key.fileobj is self.own and self.rank == 0:
                        self._accept(ready)
                    elif not self._read(key, ready) and not self.closing:
                        ended(key.data)
        self.drop()

    def close(self) -> None:
        """Have `watch` end, and close every line."""
        self.closing = True
        with suppress(OSError):
            self.own.shutdown(socket.SHUT_RDWR)  # which wakes it

    def drop(self) -> None:
        """Close what this process holds of the lines."""
        for each in list(self.sockets):
            each.close()
        self.sockets.clear()

    def _accept(self, ready: selectors.BaseSelector) -> None:
        with suppress(OSError):
            line, _ = self.own.accept()
            line.settimeout(_CONNECT_S)
            self.sockets.add(line)
            ready.register(line, selectors.EVENT_READ, data=None)  # until it says whose it is

    def _read(self, key: selectors.SelectorKey, ready: selectors.BaseSelector) -> bool:
        """Read from a line; False where it is one of a rank that has closed it. A network that breaks one proves nothing."""
        line: socket.socket = key.fileobj  # type: ignore[assignment]  # no others are registered
        try:
            text = line.recv(64).decode()
        except (OSError, UnicodeDecodeError):
            text = None
        nonce, _, rank = (text or "").partition(" ")
        if key.data is None and nonce == self.nonce and rank.isdigit():
            ready.modify(line, selectors.EVENT_READ, data=int(rank))
        elif not text or key.data is None:
            ready.unregister(line)
            self.sockets.discard(line)
            line.close()
        return text != "" or key.data is None


_all = WeakSet[Lines]()


@cache
def _leave_children_out() -> None:
    """A forked process, such as a worker of a loader, must not hold open what ends with its parent."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_drop_all)


def _drop_all() -> None:
    for lines in _all:
        lines.drop()


def _broken(problem: RuntimeError) -> bool:
    return isinstance(problem, DistError) or _WORDS.search(str(problem)) is not None


def _with_causes(problem: BaseException | None) -> Iterator[BaseException]:
    while problem is not None:
        yield problem
        problem = problem.__cause__ or problem.__context__
