"""Records as plain lines, one per record: `key=value`, no colour, nothing redrawn."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from surefoot.record import OWN, Record

_SHOWN = ("loss", "loss_of_applied", "skipped", "learning_rate", "norm", "targets_per_s")


class Console:
    """Lines on a stream (default: standard output, looked up when a line is written)."""

    def __init__(self, length: int, stream: TextIO | None = None) -> None:
        self.length = length
        self.stream = stream
        self.gone = False

    def write(self, record: Record) -> None:
        """Print one record."""
        kind, step = record["kind"], record["step"]
        if kind == "train":
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
        """Print a line of prose; where nobody reads any more (`... | head`), be silent from then on."""
        if self.gone:
            return
        try:
            print(text, file=self.stream or sys.stdout, flush=True)
        except BrokenPipeError:
            self.gone = True
            if self.stream is None:  # or Python would try to flush it once more at exit, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Nothing is held back."""


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
