"""Plain console output for files, pipes and dumb terminals: one line of `key=value` per step that
has records.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Protocol, TextIO

from surefoot.config.paths import make_no_follow, open_no_follow
from surefoot.errors import visible
from surefoot.tracking.format import duration, in_line, number, sample_block
from surefoot.tracking.record import Record, Sink, logged_names, scores_in
from surefoot.tracking.rows import IN_ROWS

_SHOWN = (
    "loss",
    "loss_applied",
    "skipped",
    "lr",
    "grad_norm",
    "clip_fraction",
    "targets_per_s",
    "ms_per_step",
)
WIDTH = 80  # columns of a line that no terminal shows
_BETWEEN_S = 10.0  # seconds between two lines of training
_LONG_S = 60.0  # seconds of one activity before a line reports it
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_MOST = 1 << 16  # buffered characters of a rank log


class Screen(Sink, Protocol):
    """The console output of a run."""

    @property
    def fresh_line(self) -> str:
        """The prefix that starts another writer's message on a new line."""

    @property
    def width(self) -> int:
        """The columns of a line."""

    def say(self, text: str) -> None: ...
    def begin_steps(self, spent_s: float) -> None: ...
    def doing(self, what: str) -> None: ...
    def step_recorded(self) -> None:
        """Show the records of the newest step: it gets no others."""


@dataclass(eq=False)
class TextWriter:
    """Writer to a text stream, silent after a failed write. If `stream` is None, text goes to the
    current `sys.stdout`.
    """

    stream: TextIO | None
    gone: bool = False

    def put(self, text: str) -> None:
        """Write and flush the text; after an `OSError` (closed pipe, closed window, full disk),
        write nothing more.
        """
        stream = self.stream or sys.stdout
        if self.gone or stream is None:  # the stream was closed before the start
            return
        encoding = stream.encoding or "utf-8"  # a StringIO has no encoding
        encodable = text.encode(encoding, "replace").decode(encoding)
        try:
            print(encodable, end="", file=stream, flush=True)
        except OSError:  # a pipe without reader, a closed window or a full disk does not end a run
            self.gone = True
            if self.stream is None:
                # otherwise Python would flush the stream again at exit and print an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def can_redraw(stream: TextIO | None) -> bool:
    """Return True if a stream is a terminal that can redraw a line; a notebook (`!python train.py`)
    cannot.
    """
    plain = os.environ.get("TERM") in ("dumb", "unknown") or "JPY_PARENT_PID" in os.environ
    return stream is not None and stream.isatty() and not plain


def in_cell() -> bool:
    """Return True if standard output is the output of a notebook's cell."""
    kernel = sys.modules.get("ipykernel.iostream")
    return kernel is not None and isinstance(sys.stdout, kernel.OutStream)


class Console:
    """Printer of the records of each step as one line, with at most one line of training alone per
    ten seconds.

    The first and last training records, and records before messages, are always printed.
    `every_record`: print all training records. `epochs` is the number of epochs of the run.
    """

    fresh_line = "\n"

    def __init__(
        self,
        length: int,
        stream: TextIO | None = None,
        *,
        unit: str = "targets",
        every_record: bool = False,
        epochs: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.length = length
        self.unit = unit
        self.every_record = every_record
        self.now = now
        self.epochs = epochs
        self.writer = TextWriter(stream)
        self.printed_at: float | None = None  # the last training record
        self.newest: dict[str, Record] = {}  # unprinted records of one step, by kind
        # those of an earlier step, printed before a step that has scores and no training record
        self.before: dict[str, Record] = {}
        self.is_complete = False  # the step of `newest` gets no other records
        self.what = ""
        self.activity_start: float | None = None  # None after the line of the current activity

    @property
    def width(self) -> int:
        """The columns of the terminal, or of a line in a file."""
        stream = self.writer.stream or sys.stdout
        if stream is None or not stream.isatty():
            return WIDTH
        return shutil.get_terminal_size((WIDTH, 24)).columns

    def write(self, record: Record) -> None:
        """Print a sample, or keep a record until its step has all its records."""
        self.what = ""
        kind = record["kind"]
        if kind in IN_ROWS:
            if any(earlier["step"] != record["step"] for earlier in self.newest.values()):
                if not self.is_complete:
                    self.step_recorded()
                self.before = self.newest
                self.newest = {}
            self.newest[kind] = record
            self.is_complete = False
        elif kind == "sample":
            self.say(sample_block(record))

    def step_recorded(self) -> None:
        """Print the line of the newest step. A step with nothing but a training record has a line
        at most every `_BETWEEN_S` seconds, unless `every_record` is set.
        """
        self.is_complete = True
        train = self.newest.get("train")
        is_due = self.printed_at is None or self.now() - self.printed_at >= _BETWEEN_S
        is_last = train is not None and train["step"] >= self.length
        if self.every_record or is_due or is_last or self.newest.keys() - {"train"}:
            self._print_newest()

    def say(self, text: str) -> None:
        if self.is_complete:
            self._print_newest()
        self._print(text)

    def begin_steps(self, spent_s: float) -> None:
        """Do nothing, because the lines contain no times."""

    def doing(self, what: str) -> None:
        """Print one line if the same activity lasts over a minute."""
        if what != self.what:
            self.what = what
            self.activity_start = self.now()
        elif self.activity_start is not None and self.now() - self.activity_start >= _LONG_S:
            self.activity_start = None
            self.say(f"still {what} ...")

    def close(self) -> None:
        self._print_newest()

    def _print_newest(self) -> None:
        if not self.newest:
            return
        if "train" not in self.newest:
            self._print_step(self.before)
        self._print_step(self.newest)
        self.before = {}
        self.newest = {}

    def _print_step(self, records: dict[str, Record]) -> None:
        if not records:
            return
        train = records.get("train", {})
        epoch = records.get("epoch", {})
        scored = records.get("eval", {})
        parts = [f"step={(train or epoch or scored)['step']}/{self.length}"]
        if epoch:
            parts.append(f"epoch={epoch['epoch']}/{self.epochs}")
        if train:
            self.printed_at = self.now()
            parts += self._training(train)
        if epoch:
            parts.append(f"train/epoch_mean={number(epoch['loss'])}")
        parts += [f"{in_line(name)}={number(value)}" for name, value in scores_in(scored).items()]
        if epoch.get("epoch_s", 0.0) >= 0.5:
            parts.append(f"epoch_time={duration(epoch['epoch_s'])}")
        if "eta_s" in train:
            parts.append(f"eta={duration(train['eta_s'])}")
        self._print(" ".join(parts))

    def _training(self, record: Record) -> list[str]:
        texts = []
        for name in _SHOWN:
            if name not in record or (name == "skipped" and not record[name]):
                continue
            title = name.replace("targets", self.unit)
            if name.startswith("loss"):
                title = f"train/{title}"
            texts.append(f"{title}={number(record[name])}")
        for name in logged_names(record):
            texts.append(f"{in_line(name)}={number(record[name])}")
        return texts

    def _print(self, text: str) -> None:
        self.writer.put(f"{visible(text)}\n")


class TextLog:
    """The plain text log of a run: a `Console` of all records that writes to a file."""

    def __init__(self, length: int, *, unit: str, epochs: int) -> None:
        self.file = RankLog()
        self.console = Console(length, self.file, unit=unit, every_record=True, epochs=epochs)

    def open(self, path: Path) -> None:
        """Append to a file what was said so far, and what follows."""
        self.file.open(path)


class RankLog(StringIO):
    """Messages of a rank above 0, or of log.txt: buffered in memory until `open`, then written to a
    file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None

    def open(self, path: Path) -> None:
        """Append the time, the buffered text and all later text to a file; create its directory if
        necessary.
        """
        make_no_follow(path.parent)
        self.path = path
        self.at_once(f"--- {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} ---")
        self.flush()

    def flush(self) -> None:
        """Append the text to the rank's log. Without a path, the text stays in memory up to a
        limit, then is dropped.
        """
        if self.path is None and self.tell() <= _MOST:
            return
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        if self.path is None:
            return
        make_no_follow(self.path.parent)  # the run's directory may have been deleted
        with open(open_no_follow(self.path, _APPEND), "a", encoding="utf-8") as file:
            file.write(text)

    def at_once(self, text: str) -> None:
        """Append a line to the open file without buffering, for signal handlers and other
        threads.
        """
        if self.path is None:
            return
        with suppress(OSError):
            make_no_follow(self.path.parent)
            with os.fdopen(open_no_follow(self.path, _APPEND), "ab", buffering=0) as file:
                file.write(f"{text}\n".encode())
