"""Plain console output for files, pipes and dumb terminals: one line of `key=value` per record."""

import os
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
from surefoot.tracking.format import duration, in_line, number
from surefoot.tracking.record import Record, Sink, is_own, scores_in

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
_BETWEEN_S = 10.0  # seconds between two lines of training
_LONG_S = 60.0  # seconds of one activity before a line reports it
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_MOST = 1 << 16  # buffered characters of a rank log


class Screen(Sink, Protocol):
    """The console output of a run."""

    @property
    def fresh_line(self) -> str:
        """The prefix that starts another writer's message on a new line."""

    def say(self, text: str) -> None: ...
    def started(self, spent_s: float) -> None: ...
    def doing(self, what: str) -> None: ...


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
        try:
            print(
                text.encode(encoding, "replace").decode(encoding), end="", file=stream, flush=True
            )
        except OSError:  # a pipe without reader, a closed window or a full disk does not end a run
            self.gone = True
            if (
                self.stream is None
            ):  # otherwise Python would flush the stream again at exit and print an error
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
    """Printer of records as lines on a stream, with at most one training line per ten seconds.

    The first and last training records, and records before messages, are always printed.
    `every_record`: print all training records.
    """

    fresh_line = "\n"

    def __init__(
        self,
        length: int,
        stream: TextIO | None = None,
        *,
        unit: str = "targets",
        every_record: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.length, self.unit, self.every_record, self.now = length, unit, every_record, now
        self.writer = TextWriter(stream)
        self.printed_at: float | None = None
        self.latest: Record | None = None  # the newest unprinted training record
        self.epoch: Record | None = None  # an unprinted finished epoch
        self.what = ""
        self.activity_start: float | None = None  # None after the line of the current activity

    def write(self, record: Record) -> None:
        """Print a record: training records at most every `_BETWEEN_S` seconds, unless
        `every_record` is set.
        """
        self.what = ""
        step = record["step"]
        match record["kind"]:
            case "train":
                self.latest = record
                is_due = self.printed_at is None or self.now() - self.printed_at >= _BETWEEN_S
                if self.every_record or step >= self.length or is_due:
                    self._print_latest()
            case "epoch":
                self.epoch, self.latest = record, None  # the printed line includes the epoch
                if not record["is_evaluated"]:
                    self._print_scores({"step": step})
            case "eval":
                self._print_scores(record)
            case "sample":
                self.say(f"--- sample at step {step} ---\n{record['text']}\n---")

    def say(self, text: str) -> None:
        self._print_latest()
        self._print(text)

    def started(self, spent_s: float) -> None:
        """Do nothing, because the lines contain no times."""

    def doing(self, what: str) -> None:
        """Print one line if the same activity lasts over a minute."""
        if what != self.what:
            self.what, self.activity_start = what, self.now()
        elif self.activity_start is not None and self.now() - self.activity_start >= _LONG_S:
            self.activity_start = None
            self.say(f"still {what} ...")

    def close(self) -> None:
        self._print_latest()
        if self.epoch is not None:  # the evaluation of the epoch was aborted
            self._print_scores({"step": self.epoch["step"]})

    def _print_scores(self, record: Record) -> None:
        values = [f"{in_line(name)}={number(value)}" for name, value in scores_in(record).items()]
        step, epoch, self.epoch = f"step={record['step']}/{self.length}", self.epoch, None
        if epoch is None or epoch["step"] != record["step"]:
            self.say(" ".join([step, *values]))
            return
        loss, took = (
            f"train/loss={number(epoch['loss'])}",
            f" time={duration(epoch['epoch_s'])}" * (epoch["epoch_s"] >= 0.5),
        )
        self._print(
            " ".join([f"epoch={epoch['epoch']}/{epoch['epochs']}", step, loss, *values]) + took
        )

    def _print_latest(self) -> None:
        record, self.latest = self.latest, None
        if record is None:
            return
        self.printed_at = self.now()
        texts = [
            f"{'train/' * name.startswith('loss')}{name.replace('targets', self.unit)}={number(record[name])}"
            for name in _SHOWN
            if name in record and (name != "skipped" or record[name])
        ]
        users = [
            f"{in_line(name)}={number(value)}" for name, value in record.items() if not is_own(name)
        ]
        eta = [f"eta={duration(record['eta_s'])}"] if "eta_s" in record else []
        self._print(" ".join([f"step={record['step']}/{self.length}", *texts, *users, *eta]))

    def _print(self, text: str) -> None:
        self.writer.put(f"{visible(text)}\n")


class RankLog(StringIO):
    """Messages of a rank above 0: buffered in memory until `open`, then written to a file."""

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
