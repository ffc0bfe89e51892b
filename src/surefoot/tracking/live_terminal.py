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
from surefoot.tracking.rows import EPOCH_MEAN, TableRow, TableRows, live_values

if TYPE_CHECKING:
    from rich.text import Text

_ERASE = "\r\x1b[2K"
_GAP = "  "
_SHORTEST_BAR = 5  # columns; a shorter one is left out
_LONGEST_BAR = 16
# columns: loss, ETA, learning rate, norm and targets per second, at their usual widths
_BESIDE_BAR = 58
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

        self.unit = unit
        self.rows = TableRows(every_record, epochs, marks_loss)
        self.length = length
        self.now = now
        self.start_s = now()
        self.stream = stream or sys.stdout
        self.rich = Console(
            file=self.stream, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self.writer = TextWriter(self.stream)
        # standard streams of other writers while the live line is visible
        self.guests = ExitStack()
        self.done_mark = "━"  # of the bar
        self.left_mark = "─"
        try:
            "━─".encode(self.stream.encoding or "utf-8")
        except UnicodeEncodeError:
            self.done_mark = "#"
            self.left_mark = "-"
        self.phrase = ""  # the current long activity
        self.columns: list[tuple[str, ...]] | None = None  # titles in the table
        self.names: list[str] = []  # metric names in the table
        self.drawn = False  # the live line is visible
        self.unfinished = False  # another writer's line is

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

    def _print_rows(self, rows: Iterable[TableRow]) -> None:
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
        self.rows.train = None
        self.phrase = ""
        self.drawn = False
        self.unfinished = False

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
        start = self._start() if self.drawn or self.unfinished else ""
        self.writer.put(start + captured.get())
        self.drawn = False
        self.unfinished = False

    def _draw(self) -> None:
        if self.rows.train is None and not self.phrase:
            return
        with self.rich.capture() as captured:
            self.rich.print(self._line(), end="")
        self.writer.put(self._start() + captured.get())
        if not self.drawn and self.stream is sys.stdout:
            guest = cast(TextIO, _Guest(sys.stdout, self.give_way))
            self.guests.enter_context(redirect_stdout(guest))
            if sys.stderr is not None and sys.stderr.isatty():
                guest = cast(TextIO, _Guest(sys.stderr, self.give_way))
                self.guests.enter_context(redirect_stderr(guest))
        self.drawn = True
        self.unfinished = False

    def _line(self) -> "Text":
        from rich.text import Text

        line = Text()
        record = self.rows.train
        room = max(1, self.rich.width - _ECHO)
        # both depend on the width alone
        spare = room - _BESIDE_BAR - 2 * len(str(self.length)) - 2
        unit = f" {self.unit}/s" if spare > _LONGEST_BAR + len(self.unit) else "/s"
        if record is not None:
            width = min(_LONGEST_BAR, spare)
            if width >= _SHORTEST_BAR:
                done = round(width * min(1.0, record["step"] / max(1, self.length)))
                line.append(self.done_mark * done, "green")
                line.append(self.left_mark * (width - done), "dim")
                line.append(" ")
            line.append(f"{record['step']}/{self.length}")
        values = [(self.phrase, "bold")] if self.phrase else live_values(record or {}, unit=unit)
        for text, style in values:
            gap = _GAP if line else ""
            if len(values) == 1 or line.cell_len + len(gap) + Text(text).cell_len <= room:
                line.append(gap)
                line.append(text, style)
        line.truncate(room, overflow="crop")
        return line

    def _worded(self, line: str) -> "str | Text":
        from rich.text import Text

        text = wrapped(line, width=self.width)
        word = text.split(" ", 1)[0]
        is_title = text.startswith(f"{word}  ")
        style = _STYLES.get(word.rstrip(":"), "cyan" if is_title else "")
        return Text.assemble((word, style), text[len(word) :])

    def _row(self, row: TableRow) -> "list[str | Text]":
        from rich.cells import cell_len
        from rich.text import Text

        values = row.scores or dict.fromkeys(self.names, "")
        self.names = [*values]
        if self.rows.epochs:
            values = {**values, EPOCH_MEAN: row.epoch_mean}
        step_width = max(5, len(str(self.length)))
        room = self.rich.width - 1 - step_width - len(_GAP) - _TIME
        # scores take precedence over the epoch
        room_of_epoch = len(_GAP) + _EPOCH if self.rows.epochs else 0
        titles: list[tuple[str, ...]] = [(self.rows.loss_title,)]
        titles += [(name,) for name in values]
        if _ends(titles)[-1] > room - room_of_epoch:  # two lines are narrower
            titles = [tuple(self.rows.loss_title.split())]
            titles += map(_split, values)
        count = max(1, sum(end <= room for end in _ends(titles)))
        columns = titles[:count]
        widths = [max(_CELL, *map(cell_len, title)) for title in columns]
        lines: list[str | Text] = []
        if columns != self.columns:
            self.columns = columns
            line_count = len(columns[0])
            for index in range(line_count):
                is_last = index == line_count - 1
                head = ["step".rjust(step_width) if is_last else " " * step_width]
                for title, width in zip(columns, widths, strict=True):
                    head.append(" " * (width - cell_len(title[index])) + title[index])
                head.append("time".rjust(_TIME) if is_last else " " * _TIME)
                lines.append(Text(_GAP.join(head), "bold"))
            hidden = [*values][count - 1 :]
            if hidden:
                note = f"not shown (terminal too narrow): {', '.join(hidden)}"
                lines.append(Text(wrapped(note, width=self.width), "dim"))
        cells = [str(row.step).rjust(step_width)]
        for text, width in zip([row.loss, *values.values()], widths, strict=False):
            cells.append(text.rjust(width))
        cells.append(duration(self.now() - self.start_s).rjust(_TIME))
        line = _GAP.join(cells)
        if row.epoch and len(line) + len(_GAP) + len(row.epoch) < self.rich.width:
            line += f"{_GAP}{row.epoch}"
        return [*lines, line]


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
        self.stream = stream
        self.give_way = give_way

    def write(self, text: str) -> int:
        self.give_way(text)
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _split(name: str) -> tuple[str, str]:
    if name == EPOCH_MEAN:
        return "epoch", "mean"
    split, _, metric = name.rpartition("/")
    return split, metric


def _ends(titles: Sequence[tuple[str, ...]]) -> list[int]:
    from rich.cells import cell_len

    return list(accumulate(len(_GAP) + max(_CELL, *map(cell_len, title)) for title in titles))
