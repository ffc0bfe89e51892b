"""What a rank tells of itself, and which rank must be lost, judging by what was told: no threads, no clock, no sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Place = Literal["building", "running", "leaving", "left", "failed", "gone"]
_NEEDED: tuple[Place, ...] = ("building", "running", "leaving")  # others may be waiting for it
_OUT: tuple[Place, ...] = ("leaving", "left", "gone")  # of its loop


@dataclass(frozen=True)
class Beat:
    """What one rank says of itself; `number` is another one each time it says so.

    place: before its run is opened, in it, at its end, after it, ended by an error, or out of the process altogether.
    begun: the last step that it began; -1 before the first. error: what it failed of.
    """

    rank: int
    host: str
    pid: int
    number: int = 0
    place: Place = "building"
    begun: int = -1
    doing: str = "starting"
    error: str = ""

    def written(self) -> str:
        """As JSON.

        >>> Beat.read(Beat(1, "here", 42).written())
        Beat(rank=1, host='here', pid=42, number=0, place='building', begun=-1, doing='starting', error='')
        """
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | bytes) -> Beat:
        """What `written` wrote."""
        return Beat(**json.loads(text))

    @property
    def who(self) -> str:
        """Which process this is."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"

    @property
    def where(self) -> str:
        """How far it was.

        >>> Beat(1, "here", 42, begun=7, doing="training").where, Beat(1, "here", 42).where
        ('at step 7 (training)', 'before its first step (starting)')
        """
        return f"at step {self.begun} ({self.doing})" if self.begun >= 0 else f"before its first step ({self.doing})"


@dataclass(frozen=True)
class Lost:
    """A rank for which others wait in vain, and why, in words."""

    rank: int
    text: str

    def written(self) -> str:
        """As JSON.

        >>> Lost.read(Lost(1, "gone").written())
        Lost(rank=1, text='gone')
        """
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str | bytes) -> Lost:
        """What `written` wrote."""
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

    def heard(self, beats: Mapping[int, Beat], *, elapsed_s: float, hurried: bool = False) -> Lost | None:
        """Take in what was told since the last time, `elapsed_s` ago; which rank is lost, if one is.

        hurried: it is known that something has happened to one of them, so an error is believed at once.
        """
        found = dict(self._suspicions(beats))
        self.suspected = {which: self.suspected.get(which, -elapsed_s) + elapsed_s for which in found}
        self.known = dict(beats)
        for (rank, why), seconds in sorted(self.suspected.items(), key=lambda item: -item[1]):
            bearable_s = self.grace_s if why in ("failed", "left") else self.silent_s
            if seconds >= bearable_s or (hurried and why == "failed"):
                return Lost(rank, found[rank, why])
        return None

    def _suspicions(self, beats: Mapping[int, Beat]) -> Iterator[tuple[tuple[int, str], str]]:
        running = [beat for beat in beats.values() if beat.place == "running"]
        furthest = max((beat.begun for beat in running), default=-1)
        for rank, beat in beats.items():
            before = self.known.get(rank)
            if beat.place == "failed":
                yield (rank, "failed"), f"{beat.who} failed {beat.where}: {beat.error}"
            elif beat.place in _OUT and beat.begun < furthest:
                ended = f"after step {beat.begun}" if beat.begun >= 0 else "before its first step"
                yield (
                    (rank, "left"),
                    f"{beat.who} left its loop {ended}, and others wait for it at step {furthest}\n"
                    "  was that a `break`, or an error caught, on this rank alone? run.stop() ends the loop on all of them",
                )
            elif beat.place == "gone" and running:
                yield (rank, "gone"), f"{beat.who} ended {beat.where}, and others wait for it"
            elif beat.place in _NEEDED and before is not None and before.number == beat.number:
                yield (
                    (rank, "silent"),
                    f"{beat.who} has not been heard of for {self.silent_s:.0f} s, last {beat.where}\n"
                    "  it was stopped or killed, or its machine is lost",
                )
