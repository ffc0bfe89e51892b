"""What a comparison shows while it runs: a line for each running variant in a terminal, `key=value` lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Protocol, TextIO

from surefoot.tracking.console import Said
from surefoot.tracking.format import duration, in_line, number, shortened, visible
from surefoot.tracking.record import Record

_BETWEEN_S = 10.0  # lines of one variant
_NAME = 20  # letters of a name at least, on a line that is too short for it
_ABOVE, _ERASE_BELOW = "\x1b[{}A\r", "\x1b[J"


@dataclass
class Standing:
    """How far a variant is, as far as its records tell."""

    step: int = 0
    steps: int | None = None
    loss: float | None = None
    score: float | None = None
    left_s: float | None = None

    def take(self, record: Record, *, score: str | None) -> None:
        self.step = int(record["step"])
        if record["kind"] == "train":
            self.loss = record.get("loss_of_applied", record.get("loss"))
            self.left_s = record.get("left_s")
        elif record["kind"] == "scores" and score in record:
            self.score = record[score]

    def values(self) -> list[str]:
        shown = [f"step={self.step}" + (f"/{self.steps}" if self.steps else "")]
        known = (("loss", self.loss, number), ("score", self.score, number), ("left", self.left_s, duration))
        return shown + [f"{name}={form(value)}" for name, value, form in known if value is not None]


class Screen(Protocol):
    """Where a person follows a comparison."""

    def leave(self) -> None: ...
    def say(self, text: str) -> None: ...
    def show(self, standing: Mapping[str, Standing]) -> None: ...
    def close(self) -> None: ...


class Lines:
    """Plain lines: of each variant at most one in ten seconds, and none where nothing is new."""

    def __init__(self, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.said, self.now = Said(stream), now
        self.printed: dict[str, tuple[float, list[str]]] = {}

    def say(self, text: str) -> None:
        self.said.put(f"{visible(text)}\n")

    def show(self, standing: Mapping[str, Standing]) -> None:
        for name, how in standing.items():
            at, before = self.printed.get(name, (-_BETWEEN_S, []))
            values = how.values()
            if how.step > 0 and values != before and self.now() - at >= _BETWEEN_S:
                self.printed[name] = (self.now(), values)
                self.say(" ".join([f"variant={in_line(name)}", *values]))

    def leave(self) -> None: ...  # nothing is drawn over
    def close(self) -> None: ...  # nothing is held back


class Board:
    """A terminal: the running variants, one a line, drawn again in one write where something is new. No hidden cursor."""

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        self.said, self.width = Said(stream), width
        self.drawn: list[str] = []

    def leave(self) -> None:
        """Let the lines stand: something else has been printed below them, and they are drawn anew under that."""
        self.drawn = []

    def say(self, text: str) -> None:
        lines, start = self.drawn, self._start()
        self.drawn = []
        self.said.put(f"{start}{visible(text)}\n")
        self._draw(lines)

    def show(self, standing: Mapping[str, Standing]) -> None:
        names = {name: in_line(name) for name in standing}
        values = {name: how.values() if how.step > 0 else ["starting"] for name, how in standing.items()}
        room = (self.width or get_terminal_size().columns) - 1
        longest = max((len("  ".join(["", *shown])) for shown in values.values()), default=0)
        wide = min(max((len(name) for name in names.values()), default=0), max(_NAME, room - longest))
        lines = [
            "  ".join([shortened(names[name], wide, keep="both").ljust(wide), *shown])[:room]
            for name, shown in values.items()
        ]
        if lines != self.drawn:
            self._draw(lines, self._start())

    def close(self) -> None:
        self.said.put(self._start())
        self.drawn = []

    def _start(self) -> str:
        return _ABOVE.format(len(self.drawn)) + _ERASE_BELOW if self.drawn else ""

    def _draw(self, lines: list[str], start: str = "") -> None:
        self.said.put(start + "".join(f"{line}\n" for line in lines))
        self.drawn = lines


def screen(stream: TextIO | None = None) -> Screen:
    """Lines that are drawn again where `stream` (default: standard output) is a terminal, else plain ones."""
    shown = stream or sys.stdout
    plain = os.environ.get("TERM") in ("dumb", "unknown") or "JPY_PARENT_PID" in os.environ
    return Lines(stream) if shown is None or not shown.isatty() or plain else Board(stream)
