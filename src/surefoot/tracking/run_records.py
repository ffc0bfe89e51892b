"""What the records of a run say, in bounded memory: its values in tables, and its last events,
samples and checks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from surefoot.tracking.jsonl import read_records
from surefoot.tracking.record import AT_CHANGE, COMPLETE, PHASES, Phase, Record, scores_in
from surefoot.tracking.table import Table

MOST = 1000
"""Training records and evaluations that stay as they are. At most as many stretches hold the
earlier ones."""
MOST_LAYERS = 240
"""Stretches of measured steps. The last 160 measured steps stay as they are."""
_RECENT_LAYERS = 160
_MOST_EVENTS = 200
_LONGEST_EVENT = 500  # characters
_MOST_SLOW = 1000  # records of slow ranks
_MOST_SKIPPED = 10_000  # indexes of skipped steps
_SKIPPED_OF_RECORD = 20
_MOST_SAMPLES = 8
_LONGEST_SAMPLE = 6_000  # characters
_LAYER_VALUES = (
    "grad_norm",
    "weight_norm",
    "update_norm",
    "zero_grad_row_fraction",
    "saturated_fraction",
    "activation_rms",
    "grad_noise",
)
RATIO = "ratio"  # of the update to the weight, which no record has


@dataclass(frozen=True)
class RunEvent:
    """An event and the number of steps completed before the event."""

    step: int
    what: str
    resumed: bool = False


class RunRecords:
    """The records of a run, of which `add` takes the next one.

    `train` and `scores` have the numbers of training records and of evaluations by name, `layers`
    those of layer statistics as "KIND/LAYER" with the measured step.
    """

    def __init__(self) -> None:
        self.train = Table(recent=MOST, stretches=MOST, places={"loss_max": "loss_max_step"})
        self.scores = Table(recent=MOST, stretches=MOST)
        self.layers = Table(recent=_RECENT_LAYERS, stretches=MOST_LAYERS)
        self.count = 0
        self.last_step = 0
        self.ending: Record = {}  # the last event, if no record followed
        self.resumed: list[int] = []
        self.events: list[RunEvent] = []
        self.more_events = 0
        self.skipped_steps: list[int] = []
        self.user_rates: set[str] = set()  # names of rates that the user's code logged
        self.data: Record = {}  # the last check of the data
        self.slow_ranks: list[Record] = []
        self.never_updated: list[str] = []
        self.at_end: dict[str, float] = {}  # computed once at the end of the run
        self.at_end_of_step: int | None = None
        self.kept_samples: list[tuple[int, str]] = []
        self.last_sample: tuple[int, str] | None = None
        self.sampled = 0
        self.sampled_every = 1  # one sample in this number is stored

    def add(self, record: Record) -> None:
        """Add a record."""
        self.count += 1
        step = record["step"]
        self.last_step = max(self.last_step, step)
        kind = record["kind"]
        self.ending = record if kind == "event" else {}
        if kind == "train":
            self.train.append(self._applied(record) if "loss_applied" in record else record)
            if record.get("skipped"):
                self._note_skipped(step, record)
            if "logged_rates" in record:
                self.user_rates.update(_texts(record["logged_rates"]))
            return
        match kind:
            case "eval":
                self.scores.append(_scores_of(record))
            case "layer_stats":
                self._add_layers(record)
            case "final_eval":
                self.at_end = scores_in(record)
                weights_step = record.get("weights_step")
                self.at_end_of_step = weights_step if isinstance(weights_step, int) else None
            case "sample" if isinstance(record.get("text"), str):
                self._add_sample(step, record["text"])
            case "slow_rank":
                self.slow_ranks = [*self.slow_ranks, record][-_MOST_SLOW:]
            case "data_check":
                self.data = record
            case "resume":
                self.last_step = step  # events of later steps, which the run has left, stay
                self.resumed.append(step)
                self._tell(RunEvent(step, f"resumed after step {step:,}", resumed=True))
            case "event" if isinstance(record.get("event"), str):
                self._tell(RunEvent(step, record["event"][:_LONGEST_EVENT]))

    def extend(self, records: Iterable[Record]) -> None:
        """Add records."""
        for record in records:
            self.add(record)

    def _applied(self, record: Record) -> Record:
        """Return a training record with the loss of the steps that were applied, if there were any."""
        loss = record.get("loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            self.train.mark_strange("loss", record["step"])
        if record["loss_applied"] == 0.0:  # no step was applied
            return {name: value for name, value in record.items() if name != "loss"}
        return record | {"loss": record["loss_applied"]}

    def _note_skipped(self, step: int, record: Record) -> None:
        skipped = record["skipped"]
        if not isinstance(skipped, int) or skipped <= 0:
            return
        values = record.get("skipped_steps")
        indexes = []
        if isinstance(values, list):
            indexes = [index for index in values if isinstance(index, int)]
        if len(self.skipped_steps) < _MOST_SKIPPED:
            self.skipped_steps += indexes[:_SKIPPED_OF_RECORD]
        subject = "1 step was" if skipped == 1 else f"{skipped:,} steps were"
        what = f"{subject} skipped because of a non-finite gradient or loss"
        if indexes:
            what += f": {', '.join(map(str, indexes[:5]))}"
            if skipped > 5:
                what += ", ..."
        self._tell(RunEvent(step, what))

    def _add_layers(self, record: Record) -> None:
        measured = record.get("measured_step")
        values: Record = {"step": measured if isinstance(measured, int) else record["step"]}
        for kind in _LAYER_VALUES:
            for name, value in _items(record.get(kind)):
                values[f"{kind}/{name}"] = value
        for name, update in _items(record.get("update_norm")):
            weight = values.get(f"weight_norm/{name}")
            if _is_number(update) and _is_number(weight) and weight > 0:
                values[f"{RATIO}/{name}"] = update / weight
        self.layers.append(values)
        self.never_updated = _texts(record.get("never_updated"))

    def _add_sample(self, step: int, text: str) -> None:
        cut = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} \u2026"
        if self.sampled % self.sampled_every == 0:
            self.kept_samples.append((step, cut))
        self.sampled += 1
        self.last_sample = (step, cut)
        if len(self.kept_samples) > _MOST_SAMPLES:
            self.kept_samples = self.kept_samples[::2]
            self.sampled_every *= 2

    def _tell(self, event: RunEvent) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)
        else:
            self.more_events += 1

    def total(self, name: str) -> float:
        """Return the sum of a value over all training records and the last event, which covers the
        time after the last record.
        """
        ending = self.ending.get(name)
        if not _is_number(ending) or not math.isfinite(ending):
            return self.train.total(name)
        return self.train.total(name) + ending

    @property
    def ended_by(self) -> str | None:
        """How the last session ended, such as "finished" or "diverged". None if it trains or was
        killed.
        """
        return str(self.ending.get("event") or "") or None

    @property
    def is_at_change(self) -> bool:
        """True if the last session ended where settings change, so that its process may go on."""
        return self.ended_by == f"stopped by {AT_CHANGE}"

    @property
    def is_complete(self) -> bool:
        """True if the last session wrote all that the end of a run writes."""
        return self.ended_by in COMPLETE

    def completed_step(self, saved_step: int) -> int:
        """Return the last step that is known to be complete: that of the last record, or of the
        newest checkpoint, which may be ahead of the records.

        >>> records = RunRecords()
        >>> records.extend([{"kind": "train", "step": 4}])
        >>> records.completed_step(2), records.completed_step(6)
        (4, 6)
        """
        return max(self.last_step, saved_step)

    @property
    def spent_s(self) -> dict[Phase, float]:
        """The seconds of all sessions by phase, from the clock of the run (`train/timer.py`)."""
        return {phase: self.total(f"{phase}_s") for phase in PHASES}

    @property
    def targets(self) -> float:
        """The targets of all steps but the first ones of each session."""
        return self.train.total("targets") - self.train.total("starting_targets")

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return int(self.train.total("skipped"))

    @property
    def eta_s(self) -> float | None:
        """The remaining seconds by the last training record, if it has them."""
        eta_s = self.train.last("eta_s")
        return eta_s if math.isfinite(eta_s) else None

    @property
    def samples(self) -> list[tuple[int, str]]:
        """The steps and texts of samples, thinned if there are many. The last sample is always
        included.
        """
        if self.last_sample is None or self.last_sample in self.kept_samples[-1:]:
            return self.kept_samples
        return [*self.kept_samples, self.last_sample]

    def tables(self) -> dict[str, Table]:
        """Return the tables by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Table)}

    def state(self) -> dict[str, Any]:
        """Return all but the tables as JSON values."""
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, Table)}
        events = [vars(event) for event in self.events]
        return plain | {"events": events, "user_rates": sorted(self.user_rates)}

    def restore(self, state: dict[str, Any]) -> None:
        """Replace all but the tables by the values of `state`."""
        for name, value in state.items():
            setattr(self, name, value)
        self.events = [RunEvent(**event) for event in state["events"]]
        self.user_rates = set(state["user_rates"])
        self.kept_samples = [(step, text) for step, text in state["kept_samples"]]
        last = state["last_sample"]
        self.last_sample = None if last is None else (last[0], last[1])


def records_of(run: Path) -> RunRecords:
    """Read the records of a run's directory; none if it has no file. Raises `OSError` if the file
    cannot be read.
    """
    records = RunRecords()
    records.extend(read_records(run / "metrics.jsonl"))
    return records


def _scores_of(record: Record) -> Record:
    scores = {"step": record["step"]}
    for name, value in record.items():
        if "/" in name and (value is None or isinstance(value, int | float)):
            scores[name] = value
    return scores


def _items(values: Any) -> Sequence[tuple[str, Any]]:
    return [*values.items()] if isinstance(values, dict) else []


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list) else []


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
