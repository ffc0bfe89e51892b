"""A run in a notebook: a display that is updated in place, and an interrupt that ends a cell
without a traceback.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from surefoot.errors import first_line, visible
from surefoot.tracking.console import WIDTH
from surefoot.tracking.format import counted, duration, in_line, sample_block, text_table
from surefoot.tracking.record import Record
from surefoot.tracking.rows import EPOCH_MEAN, IN_ROWS, TableRow, TableRows, live_values

if TYPE_CHECKING:
    from surefoot.tracking.run_records import RunRecords

_ROWS = 100  # rows of the table; earlier ones are counted
_BETWEEN_S = 0.1  # seconds between two updates by training records


class Notebook:
    """The live view in a cell: a table with one row per evaluation, and a bar, in one output that
    each record updates.

    Messages and samples are ordinary text below the output. Each session of a run has an output of
    its own.
    """

    fresh_line = "\n"
    width = WIDTH

    def __init__(
        self,
        length: int,
        *,
        unit: str = "targets",
        every_record: bool = False,
        epochs: int = 0,
        marks_loss: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.length = length
        self.unit = unit
        self.now = now
        self.start_s = now()
        self.rows = TableRows(every_record, epochs, marks_loss)
        self.table: deque[tuple[TableRow, str]] = deque(maxlen=_ROWS)  # with the time of each row
        self.count = 0  # rows, including those that are no longer in the table
        self.phrase = ""  # the current long activity
        self.is_started = False
        self.drawn_at = -_BETWEEN_S
        self.handle: Any = None  # IPython's handle of the output of this session
        self.records: RunRecords | None = None  # of a run without a directory

    def write(self, record: Record) -> None:
        """Add a record to the table or the bar, or print a sample."""
        self.phrase = ""
        if self.records is not None:
            self.records.add(record)
        self._add(self.rows.add(record))
        if record["kind"] == "sample":
            self.say(sample_block(record))
            return
        # a record of the start comes before the header
        is_first = self.rows.train is None and not self.table
        # the other records of a row are drawn when their step is complete
        is_due = record["kind"] == "train" and self.now() - self.drawn_at >= _BETWEEN_S
        if not is_first and (is_due or record["kind"] not in IN_ROWS):
            self._draw()

    def say(self, text: str) -> None:
        """Print a message, after the last row of a session that ends."""
        if text.startswith(("finished", "stopped")):
            self._add(self.rows.rest())
        print(visible(text), flush=True)

    def begin_steps(self, spent_s: float) -> None:
        """Begin to show activities: the output is then below the header of the run."""
        self.start_s = self.now() - spent_s
        self.is_started = True

    def step_recorded(self) -> None:
        rows = [*self.rows.rest()]
        self._add(rows)
        is_due = self.now() - self.drawn_at >= _BETWEEN_S
        if any(row.scores or row.epoch or is_due for row in rows):
            self._draw()

    def doing(self, what: str) -> None:
        if in_line(what) != self.phrase:
            self.phrase = in_line(what)
            if self.is_started:
                self._draw()

    def close(self) -> None:
        """Add the last row, and remove the bar."""
        self._add(self.rows.rest())
        self.rows.train = None
        self.phrase = ""
        self.is_started = False
        if self.handle is not None:
            self._draw()

    def finish(self, draw_chart: Callable[[], str]) -> None:
        """Draw the chart of a closed session, as HTML, below its table. A later session has a new
        output. A failure is printed.
        """
        try:
            chart = draw_chart()
            if chart:
                self._draw(chart)
        except Exception as problem:  # the failure of a picture never breaks a run
            self.say(
                f"warning: no chart of the run: {type(problem).__name__}: {first_line(problem)}"
            )
        self.table.clear()
        self.handle = None
        self.count = 0

    def _add(self, rows: Iterable[TableRow]) -> None:
        for row in rows:
            self.table.append((row, duration(self.now() - self.start_s)))
            self.count += 1

    def _draw(self, chart: str = "") -> None:
        self.drawn_at = self.now()
        html = []
        plain = []
        cells = self._cells()
        if cells:
            html.append(_html_table(cells))
            plain += text_table(cells, left=())
        hidden = self.count - len(self.table)
        if hidden:
            note = f"{counted(hidden, 'earlier row')} not shown"
            html.append(f"<p>{note}</p>")
            plain.append(note)
        line = self._line()
        if line:
            bar = ""
            if self.rows.train is not None:
                step = self.rows.train["step"]
                bar = f'<progress value="{step}" max="{self.length}"></progress> '
            html.append(f"<p>{bar}{escape(line)}</p>")
            plain.append(line)
        if chart:
            html.append(chart)
        bundle = {"text/html": "\n".join(html), "text/plain": "\n".join(plain)}
        if self.handle is not None:
            self.handle.update(bundle, raw=True)
        else:
            display = import_module("IPython.display").display
            self.handle = display(bundle, raw=True, display_id=True)

    def _cells(self) -> list[list[str]]:
        if not self.table:
            return []
        names = list(dict.fromkeys(chain.from_iterable(row.scores for row, _ in self.table)))
        has_epochs = any(row.epoch for row, _ in self.table)
        head = ["step", self.rows.loss_title, *names]
        head += [EPOCH_MEAN, "time", ""] if has_epochs else ["time"]
        cells = [head]
        for row, time_text in self.table:
            scores = [row.scores.get(name, "") for name in names]
            ends = [row.epoch_mean, time_text, row.epoch] if has_epochs else [time_text]
            cells.append([str(row.step), row.loss, *scores, *ends])
        return [list(map(visible, line)) for line in cells]

    def _line(self) -> str:
        record = self.rows.train
        texts = []
        if record is not None:
            texts.append(f"{record['step']:,} of {self.length:,} steps")
        if self.phrase:
            texts.append(self.phrase)
        else:
            texts += [text for text, _ in live_values(record or {}, unit=f" {self.unit}/s")]
        return visible(" \u00b7 ".join(texts))


class Interrupt(KeyboardInterrupt):
    """The end of a cell that was interrupted. IPython shows no traceback."""

    def _render_traceback_(self) -> list[str]:
        return ["interrupted"]  # by a magic command that shows all errors itself


def interrupt() -> KeyboardInterrupt:
    """Return the exception that ends a cell, and with it the cells that wait. Outside IPython a
    `KeyboardInterrupt`.

    IPython shows every exception as a traceback, except those with a handler of their own. Handlers
    of the user stay.
    """
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        return KeyboardInterrupt()
    if Interrupt not in shell.custom_exceptions:
        others = shell.custom_exceptions
        show_other = shell.CustomTB

        def show(_shell: Any, kind: Any, problem: Any, trace: Any, tb_offset: Any = None) -> Any:
            if isinstance(problem, Interrupt):
                return None
            return show_other(kind, problem, trace, tb_offset=tb_offset)

        shell.set_custom_exc((*others, Interrupt), show)
    return Interrupt()


def _html_table(cells: Sequence[Sequence[str]]) -> str:
    head, *body = cells
    rows = "".join(_html_row(row, "td") for row in body)
    return f"<table><thead>{_html_row(head, 'th')}</thead><tbody>{rows}</tbody></table>"


def _html_row(cells: Iterable[str], tag: str) -> str:
    columns = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{columns}</tr>"
