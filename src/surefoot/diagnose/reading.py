"""The history of a run, collected during training or read from its directory. Torch-free.

The newest checkpoint provides the settings, and config.toml adds further settings. Unreadable records are skipped.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from surefoot.config.paths import local_path
from surefoot.diagnose.history import History, loss_applied
from surefoot.diagnose.run_settings import RunDescription, kinds_of_models
from surefoot.errors import ConfigError
from surefoot.tracking.record import PHASES, Record
from surefoot.tracking.run_reader import Session, read_records, read_run, standing_of


def history_in(path: Path | str) -> History:
    """Read the history of the run in a directory; raise `ConfigError` if the directory has no run."""
    run = local_path(path, setting="path")
    if not (run / "config.toml").is_file() and not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run} is not a run directory: it has neither config.toml nor metrics.jsonl\n"
            "  give the directory that was passed as --run-dir"
        )
    try:
        collected = RecordCollector(read_records(run) if (run / "metrics.jsonl").is_file() else ())
    except OSError as problem:
        raise ConfigError(f"cannot read {run / 'metrics.jsonl'}: {problem.strerror or problem}") from problem
    return collected.history(description_of(run))


def description_of(run: Path) -> RunDescription:
    """Return settings, kinds of models and progress of a run from its files alone; missing files leave None."""
    files = read_run(run)
    script, last = files.config.script, files.sessions[-1] if files.sessions else Session()
    return RunDescription(
        identity=files.config.of_script if files.state is None else files.state.identity,
        written={"workers": last.get("workers")} if script else files.config.flat,
        program=str(files.config.program.get("kind", "script")),
        kinds=kinds_of_models({} if files.state is None else files.state.architecture),
        standing=standing_of(run),
        name=str(run),
        processors=last.get("processors"),
        memory_bytes=last.get("memory_bytes"),
        saved_step=files.step,
        keeps_best=files.state is None or files.state.monitor is not None,
    )


MOST: dict[str, int] = {"train": 2000, "eval": 1000, "layer_stats": 200, "event": 200}
"""Maximum number of records per kind. Above this number, the older half of the records is thinned."""
_SUMMED = ("targets", "starting_targets", "skipped", *(f"{phase}_s" for phase in PHASES))
_LARGEST = ("grad_norm_max", "host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes")
_AVERAGED = ("loss", "grad_norm", "clip_fraction")
_INDEXES = 20


class RecordCollector:
    """A collector that builds a history during training, with at most `times` x `MOST` records of each kind."""

    def __init__(self, records: Iterable[Record] = (), *, times: int = 5) -> None:
        self.kinds: dict[str, list[Record]] = {}
        self.times = times
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Keep a record. Beyond the limit of its kind, the older half is thinned. Samples are dropped."""
        kind = record["kind"]
        if kind == "sample":
            return
        if kind == "resume":  # a resume clears the end of the earlier sessions
            self.kinds.pop("event", None)
        records = self.kinds.setdefault(kind, [])
        records.append(record)
        if len(records) > self.times * MOST.get(kind, len(records)):
            older = len(records) // 2 // 2 * 2
            records[:older] = thinned(records[:older])

    def history(self, described: RunDescription) -> History:
        """Return the collected records by kind, with the description of their run."""
        train, scores, layers, data, events, resumed = (
            tuple(self.kinds.get(kind, ()))
            for kind in ("train", "eval", "layer_stats", "data_check", "event", "resume")
        )
        return History(
            described,
            train=train,
            scores=scores,
            layers=layers,
            last_event=events[-1] if events else None,
            data=data[-1] if data else {},
            resumed=tuple(record["step"] for record in resumed),
        )


def thinned(records: Sequence[Record]) -> list[Record]:
    """Halve the records of one kind: merge pairs of training records, or drop every second record of another kind.

    >>> thinned([{"kind": "train", "step": 1, "loss": 2.0, "targets": 1}, {"kind": "train", "step": 2, "loss": 1.0, "targets": 3}])
    [{'kind': 'train', 'step': 2, 'loss': 1.25, 'targets': 4}]
    """
    return list(map(_as_one if records[0]["kind"] == "train" else _better, records[::2], records[1::2]))


def _as_one(first: Record, second: Record) -> Record:
    merged: dict[str, Any] = first | second
    share, of_other = first.get("targets", 1), second.get("targets", 1)
    for name in (*_SUMMED, *_LARGEST, *_AVERAGED):
        one, other = first.get(name), second.get(name)
        if isinstance(one, int | float) and isinstance(other, int | float):
            mean = (one * share + other * of_other) / (share + of_other or 1)
            merged[name] = one + other if name in _SUMMED else max(one, other) if name in _LARGEST else mean
    if (first.get("loss_max") or 0) > (second.get("loss_max") or 0):
        merged |= {name: first[name] for name in ("loss_max", "loss_max_step") if name in first}
    if "loss_applied" in merged:
        losses = [(loss_applied(record), record.get("targets", 1)) for record in (first, second)]
        known = [(loss, share) for loss, share in losses if isinstance(loss, int | float)]
        merged["loss_applied"] = sum(loss * share for loss, share in known) / (sum(share for _, share in known) or 1)
    indexes = [*(first.get("skipped_steps") or ()), *(second.get("skipped_steps") or ())]
    return merged | ({"skipped_steps": indexes[:_INDEXES]} if indexes else {})


def _better(first: Record, second: Record) -> Record:
    """Return the record with the lower first split loss, so that the best is kept; the second record without such losses."""
    name = next((name for name in second if name.endswith("/loss")), "")
    one, other = first.get(name), second.get(name)
    return first if isinstance(one, int | float) and isinstance(other, int | float) and one < other else second
