"""The terminal view of a run: a table with one row per evaluation, and one live line below the
table.

Only the live line is redrawn. No thread runs and the cursor stays visible, so the terminal stays
usable after any exit.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TextIO, cast

from surefoot.errors import visible
from surefoot.tracking.console import Console, Screen, TextWriter, can_redraw, in_cell
from surefoot.tracking.format import duration, in_line, sample_block, wrapped
from surefoot.tracking.record import Record
from surefoot.tracking.rows import EPOCH_MEAN, Row, Rows, live_values

if TYPE_CHECKING:
    from rich.text import Text

_ERASE = "\r\x1b[2K"
_GAP = "  "
_BAR = (5, 16)  # columns; a shorter bar is left out
_BESIDE_BAR = (
    58  # columns: loss, ETA, learning rate, norm and targets per second, at their usual widths
)
_ECHO = 3  # columns: the terminal's "^C" must not wrap, and some terminals wrap at the last column
_CELL = 9  # columns of a score
_TIME = 6
_STYLES = {
    **dict.fromkeys(("ERROR", "WARNING"), "bold red"),
    **dict.fromkeys(("warning", "stopped"), "yellow"),
    "note": "dim",
    "finished": "bold green",
}
_EPOCH = 20  # columns of "epoch 12/30 in 1m05s"


class Terminal:
    """The live view on a terminal (default: standard output); honors NO_COLOR and uses only the
    eight plain colors.
    """

    def __init__(
        self,
        length: int,
        stream: TextIO | None = None,
        *,
        unit: str = "targets",
        every_record: bool = False,
        epochs: int = 0,
        marks_loss: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console  # the import takes 60 ms, and only terminals need rich

        self.unit, self.rows = unit, Rows(every_record, epochs, marks_loss)
        self.length, self.now, self.start_s = length, now, now()
        self.stream = stream or sys.stdout
        self.rich = Console(
            file=self.stream, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self.writer = TextWriter(self.stream)
        # standard streams of other writers while the live line is visible
        self.guests = ExitStack()
        self.bar = ("━", "─")
        try:
            "━─".encode(self.stream.encoding or "utf-8")
        except UnicodeEncodeError:
            self.bar = ("#", "-")
        self.phrase = ""  # the current long activity
        self.columns: list[tuple[str, ...]] | None = None  # titles in the table
        self.names: list[str] = []  # metric names in the table
        self.drawn = self.unfinished = (
            False  # the live line is visible; another writer's line is unfinished
        )

    @property
    def fresh_line(self) -> str:
        """The text that erases the live line, or "" if standard error is not this terminal."""
        return _ERASE if os.isatty(2) else ""

    @property
    def width(self) -> int:
        """The columns of the terminal, 20 or more."""
        return max(20, self.rich.width)

    def write(self, record: Record) -> None:
        """Print a record (scores as a row, a sample as text), and redraw the live line."""
        self.phrase = ""
        self._print_rows(self.rows.add(record))
        if record["kind"] == "sample":
            self._above(visible(sample_block(record)))
        self._draw()

    def _print_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._above(*self._row(row))

    def say(self, text: str) -> None:
        """Print wrapped text above the live line; the first word is colored if it is a severity."""
        self._above(*map(self._worded, visible(text).split("\n")))
        self._draw()

    def begin_steps(self, spent_s: float) -> None:
        self.start_s = self.now() - spent_s

    def step_recorded(self) -> None:
        rows = [*self.rows.rest()]
        if rows:
            self._print_rows(rows)
            self._draw()

    def doing(self, what: str) -> None:
        if in_line(what) != self.phrase:
            self.phrase = in_line(what)
            self._draw()

    def close(self) -> None:
        """Print the last row and erase the live line."""
        self._print_rows(self.rows.rest())
        self.guests.close()
        if self.drawn or self.unfinished:
            self.writer.put(self._start())
        self.rows.train, self.phrase, self.drawn, self.unfinished = None, "", False, False

    def give_way(self, text: str) -> None:
        """Erase the live line, because another program prints `text` at this position."""
        if self.drawn:
            self.writer.put(_ERASE)
        self.drawn = False
        if text:
            self.unfinished = not text.endswith("\n")

    def _start(self) -> str:
        return "\n" if self.unfinished else _ERASE

    def _above(self, *lines: "str | Text") -> None:
        with self.rich.capture() as captured:
            for line in lines:
                self.rich.print(line)
        self.writer.put((self._start() if self.drawn or self.unfinished else "") + captured.get())
        self.drawn = self.unfinished = False

    def _draw(self) -> None:
        if self.rows.train is None and not self.phrase:
            return
        with self.rich.capture() as captured:
            self.rich.print(self._line(), end="")
        self.writer.put(self._start() + captured.get())
        if not self.drawn and self.stream is sys.stdout:
            self.guests.enter_context(
                redirect_stdout(cast(TextIO, _Guest(sys.stdout, self.give_way)))
            )
            if sys.stderr is not None and sys.stderr.isatty():
                self.guests.enter_context(
                    redirect_stderr(cast(TextIO, _Guest(sys.stderr, self.give_way)))
                )
        self.drawn, self.unfinished = True, False

    def _line(self) -> "Text":
        from rich.text import Text

        line, record, room = Text(), self.rows.train, max(1, self.rich.width - _ECHO)
        spare = room - _BESIDE_BAR - 2 * len(str(self.length)) - 2
        # depends on the width alone
        unit = f" {self.unit}/s" if spare > _BAR[1] + len(self.unit) else "/s"
        if record is not None:
            if (width := min(_BAR[1], spare)) >= _BAR[0]:
                full = round(width * min(1.0, record["step"] / max(1, self.length)))
                line.append(self.bar[0] * full, "green").append(
                    self.bar[1] * (width - full), "dim"
                ).append(" ")
            line.append(f"{record['step']}/{self.length}")
        values = [(self.phrase, "bold")] if self.phrase else live_values(record or {}, unit=unit)
        for text, style in values:
            gap = _GAP if line else ""
            if len(values) == 1 or line.cell_len + len(gap) + Text(text).cell_len <= room:
                line.append(gap).append(text, style)
        line.truncate(room, overflow="crop")
        return line

    def _worded(self, line: str) -> "str | Text":
        from rich.text import Text

        text = wrapped(line, width=self.width)
        word = text.split(" ", 1)[0]
        style = _STYLES.get(word.rstrip(":"), "cyan" if text.startswith(f"{word}  ") else "")
        return Text.assemble((word, style), text[len(word) :])

    def _row(self, row: Row) -> "list[str | Text]":
        from rich.cells import cell_len
        from rich.text import Text

        values = row.scores or dict.fromkeys(self.names, "")
        self.names = [*values]
        if self.rows.epochs:
            values = {**values, EPOCH_MEAN: row.epoch_mean}
        end = f"{_GAP}{row.epoch}" if row.epoch else ""
        step = max(5, len(str(self.length)))
        room = self.rich.width - 1 - step - len(_GAP) - _TIME
        note = (
            len(_GAP) + _EPOCH if self.rows.epochs else 0
        )  # scores take precedence over the epoch
        in_one_line, in_two = (
            ((self.rows.loss_title,), *((name,) for name in values)),
            (tuple(self.rows.loss_title.split()), *map(_split, values)),
        )
        titles = in_one_line if _ends(in_one_line)[-1] <= room - note else in_two
        widths = [max(_CELL, *map(cell_len, title)) for title in titles]
        count = max(1, sum(end <= room for end in _ends(titles)))
        columns, lines = [*titles[:count]], list[str | Text]()
        if columns != self.columns:
            self.columns = columns
            for index in range(len(columns[0])):
                ends = ("step", "time") if index == len(columns[0]) - 1 else ("", "")
                names = (
                    " " * (width - cell_len(title[index])) + title[index]
                    for title, width in zip(columns, widths, strict=False)
                )
                lines.append(
                    Text(_GAP.join([ends[0].rjust(step), *names, ends[1].rjust(_TIME)]), "bold")
                )
            if hidden := [*values][count - 1 :]:
                left_out = f"not shown (terminal too narrow): {', '.join(hidden)}"
                lines.append(Text(wrapped(left_out, width=self.width), "dim"))
        texts = [row.loss, *values.values()][:count]
        cells = [text.rjust(width) for text, width in zip(texts, widths, strict=False)]
        text = _GAP.join(
            [str(row.step).rjust(step), *cells, duration(self.now() - self.start_s).rjust(_TIME)]
        )
        return [*lines, text + end * (len(text) + len(end) < self.rich.width)]


def screen(
    length: int,
    stream: TextIO | None = None,
    *,
    unit: str = "targets",
    every_record: bool = False,
    epochs: int = 0,
    marks_loss: bool = False,
) -> Screen:
    """Return a `Notebook` in a notebook's cell, a `Terminal` if `stream` (default: standard output)
    can redraw a line, else a `Console`.
    """
    settings: dict[str, Any] = {"unit": unit, "every_record": every_record, "epochs": epochs}
    if stream is None and in_cell():
        from surefoot.tracking.notebook import Notebook

        return Notebook(length, marks_loss=marks_loss, **settings)
    if can_redraw(stream or sys.stdout):
        return Terminal(length, stream, marks_loss=marks_loss, **settings)
    return Console(length, stream, **settings)


class _Guest:
    def __init__(self, stream: TextIO, give_way: Callable[[str], None]) -> None:
        self.stream, self.give_way = stream, give_way

    def write(self, text: str) -> int:
        self.give_way(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _split(name: str) -> tuple[str, str]:
    return ("epoch", "mean") if name == EPOCH_MEAN else name.rpartition("/")[::2]


def _ends(titles: Sequence[tuple[str, ...]]) -> list[int]:
    from rich.cells import cell_len

    return list(accumulate(len(_GAP) + max(_CELL, *map(cell_len, title)) for title in titles))
