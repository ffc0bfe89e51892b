"""The messages of heartbeats, the detection of lost ranks from messages, and connections that close
with a process.
"""

import json
import os
import re
import selectors
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from torch.distributed import DistError

# before the run is open, in its loop, at its end, after it, after an error, and at process exit
Stage = Literal["building", "running", "leaving", "left", "failed", "gone"]
# where a rank can wait for others, or let them wait
RankPhase = Literal[
    "data",
    "loss",
    "step",
    "body",
    "evaluation",
    "metric",
    "sample_fn",
    "panels_fn",
    "saving",
]
_PLACES: dict[RankPhase, str] = {
    "data": "the data of step {step}",
    "loss": "the loss of step {step}",
    "step": "step {step}",
    "body": "the body of step {step}",
    "evaluation": "an evaluation after step {step}",
    "metric": "a metric",
    "sample_fn": "sample_fn",
    "panels_fn": "panels_fn",
    "saving": "a save after step {step}",
}
_NEEDED: tuple[Stage, ...] = ("building", "running", "leaving")  # others may wait for such a rank
_OUT: tuple[Stage, ...] = ("leaving", "left", "gone")  # outside of the training loop
_CONNECT_S = 5.0
_LEFT = (
    "\n  did only this rank run a `break` or catch an error? run.stop() ends the loop on all ranks"
)
STOPPED = "\n  it was stopped or killed, or its machine failed"
_ENDED = (
    '\n  it was killed, or it crashed; gloo ends a rank so (SIGABRT, "collective mismatch")'
    "\n  if ranks call a sharded model, or its blocks, differently often"
)


@dataclass
class Beat:
    """The status message of one rank. `number` increases with every message."""

    rank: int
    host: str
    pid: int
    number: int = 0
    stage: Stage = "building"
    step: int = -1  # the last step begun; -1 before the first step
    doing: str = "starting"
    phase: RankPhase = "step"  # of the run; finer than `doing`
    entered: int = 0  # phases entered so far: a rank whose number rises goes on
    error: str = ""  # the message in a few lines
    run_dir: str = ""  # of the open run; "" if nothing is saved
    spent: dict[str, float] = field(default_factory=dict)  # until `step` began (`own_times.py`)

    def written(self) -> str:
        """Return the message as JSON.

        >>> Beat.read(Beat(1, "here", 42).written())
        Beat(rank=1, host='here', pid=42, number=0, stage='building', step=-1, doing='starting', phase='step', entered=0, error='', run_dir='', spent={})
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
        """The progress of the rank in words.

        >>> Beat(1, "here", 42, step=7, doing="training").where, Beat(1, "here", 42).where
        ('at step 7, training', 'while starting')
        """
        return _where(self.step, self.doing)

    @property
    def place(self) -> str:
        """The phase of the rank in words.

        >>> Beat(0, "here", 42, phase="sample_fn").place, Beat(1, "here", 43, step=3).place
        ('sample_fn', 'step 3')
        """
        return _PLACES[self.phase].format(step=self.step)

    @property
    def failure(self) -> str:
        """The error of the rank, with the directory of its traceback."""
        first, *more = self.error.splitlines() or [""]
        lines = [f"{self.who} failed {self.where}: {first}"]
        lines += [line.strip() for line in more]
        if self.run_dir and self.step >= 0:  # earlier tracebacks are not saved
            lines.append(f"its traceback is in {Path(self.run_dir) / 'crash'}")
        return "\n  ".join(lines)

    @property
    def has_left(self) -> bool:
        """True if the rank begins no further step and has not failed."""
        return self.stage in _OUT

    def left_alone(self, furthest: int) -> "LostRank":
        """Return this rank as lost: it left its loop, and others begin step `furthest`."""
        ended = f"after step {self.step}" if self.step >= 0 else "before its first step"
        how = f"{self.who} left its training loop {ended}, but other ranks wait for it at step {furthest}"
        return LostRank(self.rank, how, more=_LEFT)

    def lost(self, how: str, more: str = "") -> "LostRank":
        """Return this rank as lost, with its last reported progress."""
        return LostRank(self.rank, f"{self.who} {how}", step=self.step, doing=self.doing, more=more)


@dataclass(frozen=True)
class LostRank:
    """A lost rank. `how` names the rank and the cause."""

    rank: int
    how: str
    step: int = -1  # the last reported step
    doing: str = ""  # the last activity; "" leaves the progress out of the text
    more: str = ""  # further lines of the text

    @property
    def text(self) -> str:
        """The complete message.

        >>> (
        ...     LostRank(1, "rank 1 was killed", step=5, doing="training").text,
        ...     LostRank(1, "rank 1 failed: why").text,
        ... )
        ('rank 1 was killed, last heard from at step 5, training', 'rank 1 failed: why')
        """
        progress = ""
        if self.doing:
            progress = f", last heard from {_where(self.step, self.doing)}"
        return f"{self.how}{progress}{self.more}"

    def beside(self, other: Beat) -> "LostRank":
        """Return a copy with the progress of another rank, if that rank is ahead.

        The other rank could begin its step only after the lost rank finished the step before.

        >>> LostRank(1, "rank 1 was killed", step=5, doing="saving").beside(
        ...     Beat(0, "here", 41, step=9, doing="training")
        ... ).text
        'rank 1 was killed, last heard from at step 9, training'
        """
        if self.doing and other.step > self.step:
            return replace(self, step=other.step, doing=other.doing)
        return self

    def written(self) -> str:
        """Return the fields as JSON.

        >>> LostRank.read(LostRank(1, "gone").written())
        LostRank(rank=1, how='gone', step=-1, doing='', more='')
        """
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | bytes) -> "LostRank":
        return LostRank(**json.loads(text))


class RankWatch:
    """The last messages of some ranks, and the seconds since each rank became suspicious.

    silent_s: the longest tolerated silence. grace_s: the delay until a failed rank counts as lost,
    since other ranks may fail too.
    """

    def __init__(self, *, silent_s: float, grace_s: float) -> None:
        self.silent_s = silent_s
        self.grace_s = grace_s
        self.known: dict[int, Beat] = {}
        self.suspected: dict[tuple[int, str], float] = {}  # (rank, why) -> seconds

    def lost_rank(
        self,
        beats: Mapping[int, Beat],
        *,
        elapsed_s: float,
        hurried: bool = False,
        dead: Collection[int] = (),
    ) -> LostRank | None:
        """Process the messages read `elapsed_s` seconds after the previous call. Returns the lost
        rank, or None.

        hurried: whether to accept a reported error at once, since a connection has broken.
        dead: ranks whose processes ended before their messages were read.
        """
        suspicions = dict(self._suspicions(beats, dead))
        before = self.suspected
        self.suspected = {}
        for suspicion in suspicions:
            is_new = suspicion not in before
            self.suspected[suspicion] = 0.0 if is_new else before[suspicion] + elapsed_s
        self.known = dict(beats)
        longest_first = sorted(self.suspected.items(), key=lambda item: -item[1])
        for (rank, why), seconds in longest_first:
            bearable_s = self.grace_s if why in ("failed", "left") else self.silent_s
            is_certain = why == "ended" or (hurried and why in ("failed", "gone"))
            if is_certain or seconds >= bearable_s:
                return suspicions[rank, why]
        return None

    def _suspicions(
        self, beats: Mapping[int, Beat], dead: Collection[int]
    ) -> Iterator[tuple[tuple[int, str], LostRank]]:
        running = [beat for beat in beats.values() if beat.stage == "running"]
        furthest = max((beat.step for beat in running), default=-1)
        for rank, beat in beats.items():
            before = self.known.get(rank)
            is_silent = before is not None and before.number == beat.number
            if beat.stage == "failed":
                yield (rank, "failed"), LostRank(rank, beat.failure)
            elif beat.stage in _OUT and beat.step < furthest:
                yield (rank, "left"), beat.left_alone(furthest)
            elif beat.stage == "gone" and running:
                how = f"{beat.who} ended {beat.where}, but other ranks wait for it"
                yield (rank, "gone"), LostRank(rank, how)
            elif beat.stage in _NEEDED and rank in dead:
                yield (rank, "ended"), beat.lost("has ended and closed its connection", _ENDED)
            elif beat.stage in _NEEDED and is_silent:
                how = f"has been silent for {self.silent_s:.0f} s"
                yield (rank, "silent"), beat.lost(how, STOPPED)


class Stall:
    """Notices that ranks wait at different places and that none goes on, such as for code that
    calls a collective on one rank only.

    A slow rank may cause it too, so this is a notice, and is said once each time.
    """

    def __init__(self, *, after_s: float) -> None:
        self.after_s = after_s
        self.places: list[tuple[int, int, RankPhase, int]] = []
        self.seconds = 0.0
        self.is_over = False  # said, or nothing to say of these places

    def notice(self, beats: Mapping[int, Beat], *, elapsed_s: float) -> str | None:
        """Process the messages read `elapsed_s` seconds after the previous call. Returns the notice
        when it is due.
        """
        places = [(beat.rank, beat.step, beat.phase, beat.entered) for beat in beats.values()]
        if places != self.places:
            self.places = places
            self.seconds = 0.0
            self.is_over = False
            return None
        self.seconds += elapsed_s
        if self.is_over or self.seconds < self.after_s:
            return None
        self.is_over = True
        ranks_by_place: dict[str, list[int]] = {}
        for rank, beat in sorted(beats.items()):
            ranks_by_place.setdefault(beat.place, []).append(rank)
        all_run = all(beat.stage == "running" for beat in beats.values())
        if not all_run or len(ranks_by_place) < 2:
            return None
        (first_place, first_ranks), *others = ranks_by_place.items()
        verb = "is" if len(first_ranks) == 1 else "are"
        where = [f"{ranks_in_words(first_ranks)} {verb} in {first_place}"]
        where += [f"{ranks_in_words(ranks)} in {place}" for place, ranks in others]
        return (
            f"no rank has gone on for {self.seconds:.0f} s: {', '.join(where)}\n"
            "  if it stays so, ranks wait for each other: an evaluation, a call of a sharded model or of a"
            " block of it,\n"
            "  and every other collective must run on all ranks, and not under `if run.rank == 0`"
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks_in_words([2]), ranks_in_words([0, 1, 2, 3, 7])
    ('rank 2', 'ranks 0 to 3, 7')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = []
    for first, *others in spans:
        texts.append(f"{first} to {others[-1]}" if others else str(first))
    return f"ranks {', '.join(texts)}"


def _where(step: int, doing: str) -> str:
    return f"at step {step}, {doing}" if step >= 0 else f"while {doing}"


_WORDS = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|NCCL", re.IGNORECASE
)


def of_connection(problem: BaseException) -> bool:
    """Return whether an error, or one of its causes, is a broken connection between ranks."""
    if isinstance(problem, DistError):
        return True
    if isinstance(problem, RuntimeError) and _WORDS.search(str(problem)):
        return True
    before = problem.__cause__ or problem.__context__
    return before is not None and of_connection(before)


class RankConnections:
    """Idle connections between rank 0 and every other rank. The system closes a connection when its
    process ends.

    A killed rank is noticed at once. A stopped rank or a lost machine keeps its connection open,
    and some networks block such connections. In these cases, only missing heartbeats reveal the
    loss. Forked children, such as a loader's workers, close their copies.
    """

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce  # identifies both ends
        self.ranks: dict[socket.socket, int] = {}  # rank at the other end

    def connect(self, host: str, port: int, *, rank: int) -> None:
        """Connect this rank to rank 0 if possible."""
        with suppress(OSError):
            line = socket.create_connection((host, port), timeout=_CONNECT_S)
            line.sendall(f"{self.nonce} {rank}".encode())
            self.ranks[line] = -1  # until rank 0 answers

    def accept(self, server: socket.socket) -> None:
        """Accept the pending connections to rank 0."""
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
                if line not in self.ranks:  # not from a rank of this run
                    line.close()

    def watch(self, ended: Callable[[int], None]) -> None:
        """Call `ended` with each rank whose connection closes. Returns when no connection is
        open.
        """
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self.drop)
        with selectors.DefaultSelector() as ready:
            for line in self.ranks:
                ready.register(line, selectors.EVENT_READ, line)
            while ready.get_map():
                for key, _ in ready.select():
                    with suppress(OSError):  # a line broken by the network proves nothing
                        text = key.data.recv(64)
                        if text == self.nonce.encode():
                            self.ranks[key.data] = 0
                            continue
                        if not text:
                            ended(self.ranks[key.data])
                    ready.unregister(key.fileobj)

    def drop(self) -> None:
        for line in self.ranks:
            line.close()
