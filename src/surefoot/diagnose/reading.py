"""The history of a run, collected during training or read from its directory. Torch-free.

The newest checkpoint provides the settings, and config.toml adds further settings. Unreadable
records are skipped.
"""

from collections.abc import Iterable
from pathlib import Path

from surefoot.config.paths import run_path
from surefoot.diagnose.history import History
from surefoot.diagnose.run_settings import RunDescription, kinds_of_models
from surefoot.diagnose.training_table import TrainingTable
from surefoot.tracking.columns import Columns, in_columns
from surefoot.tracking.record import Record
from surefoot.tracking.run_reader import (
    Session,
    missing_run,
    read_blocks,
    read_run,
    standing_of,
    unreadable_records,
)


def history_in(path: Path | str) -> History:
    """Read the history of the run in a directory; raise `ConfigError` if the directory has no
    run.
    """
    run = run_path(path, setting="path")
    if not (run / "config.toml").is_file() and not (run / "metrics.jsonl").is_file():
        raise missing_run(run, run.parent)
    try:
        collected = RecordCollector()
        for part in in_columns(read_blocks(run) if (run / "metrics.jsonl").is_file() else ()):
            collected.add_part(part)
    except OSError as problem:
        raise unreadable_records(run / "metrics.jsonl", problem) from problem
    return collected.history(description_of(run))


def description_of(run: Path) -> RunDescription:
    """Return settings, kinds of models and progress of a run from its files alone; missing files
    leave None.
    """
    files = read_run(run)
    script, last = files.config.script, files.sessions[-1] if files.sessions else Session()
    watched = None if files.state is None else files.state.watched
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
        monitored=None if watched is None else (watched["direction"], watched["score"]),
    )


MOST: dict[str, int] = {
    "train": 2000,
    "eval": 1000,
    "layer_stats": 200,
    "slow_rank": 200,
    "event": 200,
}
"""Maximum number of records per kind. Above this number, the older half of the records is thinned.
"""


class RecordCollector:
    """A collector that builds a history during training, with at most `times` x `MOST` records of
    each kind.
    """

    def __init__(self, records: Iterable[Record] = (), *, times: int = 5) -> None:
        self.kinds: dict[str, list[Record]] = {}  # of training records, those after `older`
        self.older = TrainingTable()
        self.times = times
        self.add_all(records)

    def add_all(self, records: Iterable[Record]) -> None:
        """Keep records in order. Beyond the limit of a kind, its older half is thinned. Samples are
        dropped.
        """
        for record in records:
            kind = record["kind"]
            if kind == "sample":
                continue
            if kind == "resume":  # a resume clears the end of the earlier sessions
                self.kinds.pop("event", None)
            of_kind = self.kinds.setdefault(kind, [])
            of_kind.append(record)
            limit = self.times * MOST.get(kind, len(of_kind))
            if kind == "train" and self.older.count + len(of_kind) > limit:
                self.older.extend(of_kind)
                self.older.halve(self.older.count // 2)
                of_kind.clear()
            elif len(of_kind) > limit:
                older = len(of_kind) // 2 // 2 * 2
                of_kind[:older] = map(_better, of_kind[:older:2], of_kind[1:older:2])

    def add(self, record: Record) -> None:
        """Keep one record, as `add_all` does."""
        self.add_all([record])

    def add_part(self, part: Columns | list[Record]) -> None:
        """Keep records, or columns of training records, as `add_all` does."""
        if not isinstance(part, Columns):
            self.add_all(part)
            return
        latest, limit = self.kinds.setdefault("train", []), self.times * MOST["train"]
        if latest:
            self.older.extend(latest)
            latest.clear()
        while len(part):
            free = limit + 1 - self.older.count
            self.older.extend(part[:free])
            part = part[free:]
            if self.older.count > limit:
                self.older.halve(self.older.count // 2)

    def by_kind(self) -> dict[str, list[Record]]:
        """Return all kept records by kind."""
        older = self.older.records()
        if not older:
            return self.kinds
        return self.kinds | {"train": [*older, *self.kinds.get("train", ())]}

    def history(self, described: RunDescription) -> History:
        """Return the collected records by kind, with the description of their run."""
        kinds = self.by_kind()
        train, scores, layers, slow_ranks, data, events, resumed = (
            tuple(kinds.get(kind, ()))
            for kind in (
                "train",
                "eval",
                "layer_stats",
                "slow_rank",
                "data_check",
                "event",
                "resume",
            )
        )
        return History(
            described,
            train=train,
            scores=scores,
            layers=layers,
            slow_ranks=slow_ranks,
            last_event=events[-1] if events else None,
            data=data[-1] if data else {},
            resumed=tuple(record["step"] for record in resumed),
        )


def _better(first: Record, second: Record) -> Record:
    """Return the record with the lower first split loss, so that the best is kept; the second
    record without such losses.
    """
    name = next((name for name in second if name.endswith("/loss")), "")
    one = first.get(name)
    other = second.get(name)
    if isinstance(one, int | float) and isinstance(other, int | float) and one < other:
        return first
    return second
