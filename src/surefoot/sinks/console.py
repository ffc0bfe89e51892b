"""Records as plain lines, one per record: `key=value`, no colour, nothing redrawn. For files, pipes and dumb terminals."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from surefoot.record import OWN, Record, Sink

_SHOWN = ("loss", "loss_of_applied", "skipped", "learning_rate", "norm", "targets_per_s")
_BETWEEN_S = 10.0  # lines of training


class Screen(Sink, Protocol):
    """Where a person reads what a run does."""

    fresh_line: str
    """What a message must begin with that is written past it, to stand on a line of its own."""

    def say(self, text: str) -> None: ...  # noqa: D102
    def doing(self, what: str) -> None: ...  # noqa: D102


class Said:
    """Text on a stream (default: standard output, looked up when it is written), until nobody reads any more."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.gone = False

    def put(self, text: str) -> None:
        """Write and flush; where nobody reads any more (`... | head`), be silent from then on."""
        if self.gone:
            return
        try:
            print(text, end="", file=self.stream or sys.stdout, flush=True)
        except BrokenPipeError:
            self.gone = True
            if self.stream is None:  # or Python would try to flush it once more at exit, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console:
    """Lines on a stream: of training at most one in ten seconds, and always the first and the last; of all else each."""

    fresh_line = "\n"

    def __init__(self, length: int, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.length, self.now = length, now
        self.said = Said(stream)
        self.printed_at: float | None = None

    def write(self, record: Record) -> None:
        """Print one record."""
        kind, step = record["kind"], record["step"]
        if kind == "train":
            if step < self.length and self.printed_at is not None and self.now() - self.printed_at < _BETWEEN_S:
                return
            self.printed_at = self.now()
            shown = [
                f"{name}={number(record[name])}"
                for name in _SHOWN
                if name in record and not (name == "skipped" and not record[name])
            ]
            users = [f"{name}={number(value)}" for name, value in record.items() if name not in OWN]
            left = [f"left={duration(record['left_s'])}"] if "left_s" in record else []
            self.say(" ".join([f"step={step}/{self.length}", *shown, *users, *left]))
        elif kind == "scores":
            values = [f"{name}={number(value)}" for name, value in record.items() if "/" in name]
            self.say(" ".join([f"step={step}/{self.length}", *values]))
        elif kind == "sample":
            self.say(f"--- sample at step {step} ---\n{record['text']}\n---")

    def say(self, text: str) -> None:
        """Print a line of prose."""
        self.said.put(f"{text}\n")

    def doing(self, what: str) -> None:
        """Nothing: lines tell of what was done."""

    def close(self) -> None:
        """Nothing is held back."""


def screen(length: int) -> Screen:
    """The live view where standard output is a terminal that can redraw a line, else plain lines."""
    if sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from surefoot.sinks.terminal import Terminal

        return Terminal(length)
    return Console(length)


def number(value: float) -> str:
    """A number to four or five significant digits, never rounded to 0.

    >>> number(0.00003), number(2.34567), number(51234.0), number(float("nan"))
    ('3e-05', '2.3457', '51234', 'nan')
    """
    if isinstance(value, int) or abs(value) >= 10000:
        return f"{value:.0f}"
    return f"{value:.5g}"


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(42), duration(192), duration(7260)
    ('42s', '3m12s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
