"""A run in a terminal: a table that grows by one row per evaluation, and one live line under it.

Rows are ordinary text and scroll away; only the last line is drawn again, in one write, when a record comes. No thread, no
hidden cursor: whatever ends the process leaves the terminal as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from surefoot.record import OWN, Record
from surefoot.sinks.console import Said, duration, number

if TYPE_CHECKING:
    from rich.text import Text

_ERASE = "\r\x1b[2K"
_BAR = 16  # columns of a line of 80
_GAP = "  "


class Terminal:
    """The terminal that standard output (or `stream`) is. NO_COLOR is obeyed; only the eight plain colours are used."""

    fresh_line = _ERASE

    def __init__(self, length: int, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console  # 60 ms, and only terminals need it

        self.length, self.now, self.begun = length, now, now()
        self.rich = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.said = Said(stream)
        self.train: Record | None = None  # the last one
        self.phrase = ""  # what is being done, where that takes long
        self.columns: list[str] = []  # scores in the table
        self.drawn = False

    def write(self, record: Record) -> None:
        """Take one record: a row for scores, text for a sample; the live line is drawn again."""
        match record["kind"]:
            case "train":
                self.train, self.phrase = record, ""
            case "scores":
                self.phrase = ""
                self._above(*self._row(record))
            case "sample":
                self._above(f"--- sample at step {record['step']} ---\n{record['text']}\n---")
        self._draw()

    def say(self, text: str) -> None:
        """Print prose above the live line."""
        self._above(text)
        self._draw()

    def doing(self, what: str) -> None:
        """Show on the live line what is being done from now on, until the next record."""
        self.phrase = what
        self._draw()

    def close(self) -> None:
        """Take the live line away: what follows stands on a line of its own."""
        if self.drawn:
            self.said.put(_ERASE)
        self.train, self.phrase, self.drawn = None, "", False

    def _above(self, *lines: str | Text) -> None:
        with self.rich.capture() as captured:
            for line in lines:
                self.rich.print(line)
        self.said.put((_ERASE if self.drawn else "") + captured.get())
        self.drawn = False

    def _draw(self) -> None:
        if self.train is None and not self.phrase:
            return
        line = self._line()
        line.truncate(max(1, self.rich.width - 1), overflow="ellipsis")  # the last column would wrap in some terminals
        with self.rich.capture() as captured:
            self.rich.print(line, end="")
        self.said.put(_ERASE + captured.get())
        self.drawn = True

    def _line(self) -> Text:
        from rich.text import Text

        line = Text()
        record = self.train
        if record is None:
            return line.append(self.phrase)
        done = int(record["step"])
        width = min(_BAR, max(4, self.rich.width // 5))
        full = round(width * min(1.0, done / max(1, self.length)))
        line.append("━" * full, "green").append("━" * (width - full), "dim").append(f" {done}/{self.length}")
        if self.phrase:
            return line.append(_GAP).append(self.phrase, "bold")
        parts = [("left", duration(record["left_s"]))] if "left_s" in record else []
        if "loss" in record:
            parts.insert(
                0, ("loss", number(record["loss_of_applied"] if "loss_of_applied" in record else record["loss"]))
            )
        for name, key in (("lr", "learning_rate"), ("norm", "norm"), ("/s", "targets_per_s")):
            if key in record:
                parts.append((name, f"{record[key]:.3g}" if key != "targets_per_s" else f"{record[key]:,.0f}"))
        parts += [(name, number(value)) for name, value in record.items() if name not in OWN]
        if record.get("skipped"):
            line.append(f"{_GAP}{record['skipped']} skipped", "red")
        for name, text in parts:
            line.append(_GAP)
            line.append(f"{text}/s" if name == "/s" else f"{name} {text}")
        return line

    def _row(self, record: Record) -> list[str | Text]:
        from rich.text import Text

        values = {name: number(value) for name, value in record.items() if "/" in name}
        titles = _titles(list(values))
        step, time_wide = max(5, len(str(self.length))), 6
        room = self.rich.width - 1 - step - len(_GAP) - len("train loss") - len(_GAP) - time_wide
        shown: list[str] = []
        for name in values:
            room -= len(_GAP) + max(8, len(titles[name]))
            if room < 0:
                break
            shown.append(name)
        lines: list[str | Text] = []
        if shown != self.columns:
            self.columns = shown
            heads = [
                "step".rjust(step),
                "train loss",
                *(f"{titles[name]:>8}" for name in shown),
                "time".rjust(time_wide),
            ]
            lines.append(Text(_GAP.join(heads), "bold"))
            if len(shown) < len(values):
                lines.append(Text(f"not shown for lack of room: {', '.join(list(values)[len(shown) :])}", "dim"))
        loss = "" if self.train is None or "loss" not in self.train else number(self.train["loss"])
        cells = [str(record["step"]).rjust(step), loss.rjust(len("train loss"))]
        cells += [values[name].rjust(max(8, len(titles[name]))) for name in shown]
        lines.append(_GAP.join([*cells, duration(self.now() - self.begun).rjust(time_wide)]))
        return lines


def _titles(names: list[str]) -> dict[str, str]:
    """Scores without their split, as long as no two would be called the same.

    >>> _titles(["held-out/loss", "cloze/accuracy"]), _titles(["a/loss", "b/loss"])
    ({'held-out/loss': 'loss', 'cloze/accuracy': 'accuracy'}, {'a/loss': 'a/loss', 'b/loss': 'b/loss'})
    """
    last = {name: name.rpartition("/")[2] for name in names}
    return last if len(set(last.values())) == len(names) else {name: name for name in names}
