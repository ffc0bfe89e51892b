"""The rows of the table of a run, and the values below the table. A terminal and a notebook show
both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from surefoot.tracking.format import compact, duration, in_line, number
from surefoot.tracking.record import Record, logged_names, scores_in

_CELL = 9  # characters of a score
_WRITTEN: dict[str, Callable[[float], str]] = {  # values of a training record, in order
    "eta_s": lambda value: f"eta {duration(value)}",
    "lr": lambda value: f"lr {value:.3g}".replace("e-0", "e-"),
    "grad_norm": lambda value: f"norm {value:.3g}".replace("e-0", "e-"),
    "targets_per_s": lambda value: f"{compact(value)}/s",
    "ms_per_step": lambda value: f"step {value:.3g} ms",
    "clip_fraction": lambda value: f"clipped {value:.2g}",
}


IN_ROWS = ("train", "epoch", "eval")  # the kinds of records that a row shows
EPOCH_MEAN = "epoch mean"  # the title of the training loss over an epoch


@dataclass(frozen=True)
class TableRow:
    """A row of the table: the records of one step. `loss` is empty if the step has no training
    record, `scores` if it was not evaluated, `epoch_mean` and `epoch` if no epoch ended.
    """

    step: int
    loss: str
    scores: dict[str, str]
    epoch_mean: str
    epoch: str


@dataclass
class TableRows:
    """The steps that have a row: those with an evaluation or the end of an epoch, and with
    `every_record` those with a training record. `epochs` is the number of epochs of the run, or 0.
    With `marks_loss`, the title of the training loss has a mark, which the header explains.
    """

    every_record: bool
    epochs: int = 0
    marks_loss: bool = False
    train: Record | None = None  # the last training record
    newest: dict[str, Record] = field(default_factory=dict)  # of one step, by kind, not yet shown

    def add(self, record: Record) -> Iterator[TableRow]:
        """Add a record, and yield the row of an earlier step that no `rest` has shown."""
        kind = record["kind"]
        if kind not in IN_ROWS:
            return
        if any(earlier["step"] != record["step"] for earlier in self.newest.values()):
            yield from self.rest()
        self.newest[kind] = record
        if kind == "train":
            self.train = record

    def rest(self) -> Iterator[TableRow]:
        """Yield the row of the newest step, if it has one that was not yet shown."""
        train = self.newest.get("train", {})
        epoch = self.newest.get("epoch", {})
        scored = self.newest.get("eval", {})
        self.newest = {}
        if not (epoch or scored or (self.every_record and train)):
            return
        step = (train or epoch or scored)["step"]
        scores = {in_line(name): score_text(value) for name, value in scores_in(scored).items()}
        mean = number(epoch["loss"]) if epoch else ""
        yield TableRow(step, loss_text(train), scores, mean, self._end_of(epoch))

    @property
    def loss_title(self) -> str:
        """The title of the training loss of a step."""
        return "train loss*" if self.marks_loss else "train loss"

    def _end_of(self, epoch: Record) -> str:
        if not epoch:
            return ""
        return f"epoch {epoch['epoch']}/{self.epochs} in {duration(epoch['epoch_s'])}"


def live_values(record: Record, *, unit: str) -> list[tuple[str, str]]:
    """Return (text, color) of each value of a training record. The color is "red" or "". `unit` is
    "/s" or " tokens/s".
    """
    values = []
    skipped = record.get("skipped")
    if skipped:
        values.append((f"{skipped} skipped", "red"))
    loss = loss_text(record)
    if loss:
        values.append((f"loss {loss}", ""))
    for name, write in _WRITTEN.items():
        if name in record:
            values.append((write(record[name]).replace("/s", unit), ""))
    for name in logged_names(record):
        values.append((f"{in_line(name)} {number(record[name])}", ""))
    return values


def loss_text(record: Record) -> str:
    """Format the training loss of a record, or return "" without a loss."""
    loss = record.get("loss_applied", record.get("loss"))
    return "" if loss is None else number(loss)


def score_text(value: float) -> str:
    """Format a score for a table column.

    >>> score_text(3.36541), score_text(0.000123456), score_text(-1.2345e-100)
    ('3.3654', '0.000123', '-1.2e-100')
    """
    for text in (number(value), f"{value:.3g}", f"{value:.2g}"):
        if len(text) <= _CELL:
            return text
    return f"{value:.0e}"
