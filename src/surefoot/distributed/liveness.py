"""What a rank tells of itself, and which rank must be lost, judging by what was told: no threads, no clock, no sockets."""

import json
import os
import re
import selectors
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch.distributed import DistError

Stage = Literal["building", "running", "leaving", "left", "failed", "gone"]
_NEEDED: tuple[Stage, ...] = ("building", "running", "leaving")  # others may be waiting for it
_OUT: tuple[Stage, ...] = ("leaving", "left", "gone")  # of its loop
_CONNECT_S = 5.0
_LEFT = "\n  was that a `break`, or an error caught, on this rank alone? run.stop() ends the loop on all of them"
STOPPED = "\n  it was stopped or killed, or its machine is lost"


@dataclass
class Beat:
    """What one rank says of itself; `number` is another one each time it says so.

    stage: before its run is opened, in it, at its end, after it, ended by an error, or out of the process altogether.
    step: the last step that it began; -1 before the first. error: what it failed of, in a few lines. run_dir: the directory of
    its run, once that is opened; "" where nothing is saved.
    """

    rank: int
    host: str
    pid: int
    number: int = 0
    stage: Stage = "building"
    step: int = -1
    doing: str = "starting"
    error: str = ""
    run_dir: str = ""

    def written(self) -> str:
        """As JSON.

        >>> Beat.read(Beat(1, "here", 42).written())
        Beat(rank=1, host='here', pid=42, number=0, stage='building', step=-1, doing='starting', error='', run_dir='')
        """
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | bytes) -> "Beat":
        return Beat(**json.loads(text))

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def where(self) -> str:
        """How far it was when it said so.

        >>> Beat(1, "here", 42, step=7, doing="training").where, Beat(1, "here", 42).where
        ('at step 7, training', 'while starting')
        """
        return _where(self.step, self.doing)

    @property
    def failure(self) -> str:
        """What it failed of, and what holds more of that."""
        first, *more = self.error.splitlines() or [""]
        if self.run_dir and self.step >= 0:  # what happens earlier is not kept
            more.append(f"its traceback is in {Path(self.run_dir) / 'crash'}")
        return "\n  ".join([f"{self.who} failed {self.where}: {first}", *(line.strip() for line in more)])

    def lost(self, how: str, more: str = "") -> "Lost":
        """Its loss: it was last heard of where it is here."""
        return Lost(self.rank, f"{self.who} {how}", step=self.step, doing=self.doing, more=more)


@dataclass(frozen=True)
class Lost:
    """A rank for which others wait in vain: `how` says which, and why.

    step, doing: where it was last heard of; where nothing is to be said of that, doing is "". more: what follows.
    """

    rank: int
    how: str
    step: int = -1
    doing: str = ""
    more: str = ""

    @property
    def text(self) -> str:
        """All of it, in words.

        >>> Lost(1, "rank 1 was killed", step=5, doing="training").text, Lost(1, "rank 1 failed: why").text
        ('rank 1 was killed, last heard of at step 5, training', 'rank 1 failed: why')
        """
        return self.how + (f", last heard of {_where(self.step, self.doing)}" if self.doing else "") + self.more

    def beside(self, other: Beat) -> "Lost":
        """The same, knowing what another rank has begun: it could not, had the lost one not made the step before.

        >>> Lost(1, "rank 1 was killed", step=5, doing="saving").beside(Beat(0, "here", 41, step=9, doing="training")).text
        'rank 1 was killed, last heard of at step 9, training'
        """
        return replace(self, step=other.step, doing=other.doing) if self.doing and other.step > self.step else self

    def written(self) -> str:
        """As JSON.

        >>> Lost.read(Lost(1, "gone").written())
        Lost(rank=1, how='gone', step=-1, doing='', more='')
        """
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | bytes) -> "Lost":
        return Lost(**json.loads(text))


class Watch:
    """What is known of some ranks, and since when each of them has been suspicious.

    silent_s: how long one may say nothing. grace_s: how long what several ranks do one after the other may look like a
    contradiction between them, such as an error that all of them meet.
    """

    def __init__(self, *, silent_s: float, grace_s: float) -> None:
        self.silent_s, self.grace_s = silent_s, grace_s
        self.known: dict[int, Beat] = {}
        self.suspected: dict[tuple[int, str], float] = {}  # (rank, why) -> for so many seconds

    def lost_rank(
        self, beats: Mapping[int, Beat], *, elapsed_s: float, hurried: bool = False, dead: Collection[int] = ()
    ) -> Lost | None:
        """Take in what was told since the last time, `elapsed_s` ago; which rank is lost, if one is.

        hurried: it is known that something has happened to one of them, so an error is believed at once. dead: the ranks
        whose processes had ended before their beats were read.
        """
        suspicions = dict(self._suspicions(beats, dead))
        self.suspected = {which: self.suspected.get(which, -elapsed_s) + elapsed_s for which in suspicions}
        self.known = dict(beats)
        for (rank, why), seconds in sorted(self.suspected.items(), key=lambda item: -item[1]):
            bearable_s = self.grace_s if why in ("failed", "left") else self.silent_s
            if seconds >= bearable_s or why == "ended" or (hurried and why in ("failed", "gone")):
                return suspicions[rank, why]
        return None

    def _suspicions(self, beats: Mapping[int, Beat], dead: Collection[int]) -> Iterator[tuple[tuple[int, str], Lost]]:
        running = [beat for beat in beats.values() if beat.stage == "running"]
        furthest = max((beat.step for beat in running), default=-1)
        for rank, beat in beats.items():
            before = self.known.get(rank)
            if beat.stage == "failed":
                yield (rank, "failed"), Lost(rank, beat.failure)
            elif beat.stage in _OUT and beat.step < furthest:
                ended = f"after step {beat.step}" if beat.step >= 0 else "before its first step"
                how = f"{beat.who} left its loop {ended}, and others wait for it at step {furthest}"
                yield (rank, "left"), Lost(rank, how, more=_LEFT)
            elif beat.stage == "gone" and running:
                yield (rank, "gone"), Lost(rank, f"{beat.who} ended {beat.where}, and others wait for it")
            elif beat.stage in _NEEDED and rank in dead:
                yield (
                    (rank, "ended"),
                    beat.lost("has ended, and closed its connection", "\n  it was killed, or it crashed"),
                )
            elif beat.stage in _NEEDED and before is not None and before.number == beat.number:
                yield (rank, "silent"), beat.lost(f"has been silent for {self.silent_s:.0f} s", STOPPED)


def _where(step: int, doing: str) -> str:
    return f"at step {step}, {doing}" if step >= 0 else f"while {doing}"


_WORDS = re.compile(r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|NCCL", re.IGNORECASE)


def of_connection(problem: BaseException) -> bool:
    """Whether an error, or what it came from, is of a connection between ranks that broke."""
    broken = isinstance(problem, DistError) or (isinstance(problem, RuntimeError) and _WORDS.search(str(problem)))
    before = problem.__cause__ or problem.__context__
    return bool(broken) or (before is not None and of_connection(before))


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
        for line in self.ranks:
            line.close()
