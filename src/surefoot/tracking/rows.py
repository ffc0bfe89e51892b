"""The rows of the table of a run, and the values below the table. A terminal and a notebook show
both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from surefoot.tracking.format import compact, duration, in_line, number
from surefoot.tracking.record import Record, is_own, scores_in

_CELL = 9  # characters of a score
_WRITTEN: dict[str, Callable[[float], str]] = {  # values of a training record, in order
    "eta_s": lambda value: f"eta {duration(value)}",
    "lr": lambda value: f"lr {value:.3g}".replace("e-0", "e-"),
    "grad_norm": lambda value: f"norm {value:.3g}".replace("e-0", "e-"),
    "targets_per_s": lambda value: f"{compact(value)}/s",
    "ms_per_step": lambda value: f"step {value:.3g} ms",
    "clip_fraction": lambda value: f"clipped {value:.2g}",
}


@dataclass(frozen=True)
class Row:
    """A row of the table. `scores` is empty if the step was not evaluated, and `epoch` if no epoch
    ended.
    """

    step: int
    loss: str
    scores: dict[str, str]
    epoch: str


@dataclass
class Rows:
    """The records that have a row: evaluations, epochs, and with `every_record` all training
    records.
    """

    every_record: bool
    train: Record | None = None  # the last training record
    epoch: Record | None = None  # the last finished epoch
    due: bool = False  # the last training record needs a row
    step: int = 0  # of the last row

    def add(self, record: Record) -> Iterator[Row]:
        """Add a record, and yield the rows that it completes. An evaluation of the same step may
        follow a training record.
        """
        match record["kind"]:
            case "train":
                yield from self.rest()
                self.train = record
                self.due = self.every_record and self.step != record["step"]
            case "epoch":
                self.epoch, self.due = record, True
                if not record["is_evaluated"]:
                    yield from self.rest()
            case "eval":
                if self.train is not None and self.train["step"] != record["step"]:
                    yield from self.rest()
                yield self._row(record)

    def rest(self) -> Iterator[Row]:
        """Yield the row that is due, if any."""
        if self.due and self.train is not None:
            yield self._row({"step": self.train["step"]})

    def _row(self, record: Record) -> Row:
        self.due, self.step = False, record["step"]
        epoch = (
            self.epoch if self.epoch is not None and self.epoch["step"] == record["step"] else None
        )
        scores = {in_line(name): score_text(value) for name, value in scores_in(record).items()}
        end = (
            f"epoch {epoch['epoch']}/{epoch['epochs']} in {duration(epoch['epoch_s'])}"
            if epoch
            else ""
        )
        return Row(record["step"], loss_text(epoch or self.train or {}), scores, end)


def live_values(record: Record, *, unit: str) -> list[tuple[str, str]]:
    """Return (text, color) of each value of a training record. The color is "red" or "". `unit` is
    "/s" or " tokens/s".
    """
    skipped, loss = record.get("skipped"), loss_text(record)
    values = [(f"{skipped} skipped", "red")] * bool(skipped) + [(f"loss {loss}", "")] * bool(loss)
    values += [
        (write(record[name]).replace("/s", unit), "")
        for name, write in _WRITTEN.items()
        if name in record
    ]
    return values + [
        (f"{in_line(name)} {number(value)}", "")
        for name, value in record.items()
        if not is_own(name)
    ]


def loss_text(record: Record) -> str:
    """Format the training loss of a record, or return "" without a loss."""
    loss = record.get("loss_applied", record.get("loss"))
    return "" if loss is None else number(loss)


def score_text(value: float) -> str:
    """Format a score for a table column.

    >>> score_text(3.36541), score_text(0.000123456), score_text(-1.2345e-100)
    ('3.3654', '0.000123', '-1.2e-100')
    """
    texts = (number(value), f"{value:.3g}", f"{value:.2g}")
    return next((text for text in texts if len(text) <= _CELL), f"{value:.0e}")
