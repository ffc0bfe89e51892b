"""Names and packages of the trackers, run facts for a tracker, and saved tracker state. This module
avoids torch.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from surefoot.config.extras import TRACKERS, refuse_missing
from surefoot.config.paths import read_regular, write_whole
from surefoot.config.tree import did_you_mean
from surefoot.errors import ConfigError, Remedy, Setting
from surefoot.tracking.record import Record

_USUAL = ("runs", "outputs", "experiments")  # common parent directories that are not project names
_LONGEST = 100  # characters of a name; Weights & Biases allows 128


def trackers_of(trackers: str | Sequence[str] | None, *, out: str | Path | None) -> tuple[str, ...]:
    """Parse tracker names from "wandb,mlflow" or a sequence; raise `ConfigError` for unknown or
    repeated names, or if `out` is None.

    >>> (
    ...     trackers_of("wandb, mlflow", out="runs/first"),
    ...     trackers_of(["trackio"], out="a"),
    ...     trackers_of(None, out=None),
    ... )
    (('wandb', 'mlflow'), ('trackio',), ())
    """
    names = tuple(
        name.strip()
        for name in (trackers.split(",") if isinstance(trackers, str) else trackers or ())
    )
    for name in names:
        if name not in TRACKERS:
            remedy: Remedy = did_you_mean(
                name, TRACKERS, otherwise=f"available: {', '.join(TRACKERS)}"
            )
            if name == "tensorboard":
                remedy = Setting("tensorboard", True)
            raise ConfigError(
                "tracker-unknown",
                problem=f"no tracker {name!r}",
                remedy=remedy,
                setting="trackers",
                value=name,
            )
    if len(set(names)) < len(names):
        raise ConfigError(
            "tracker-named-twice",
            problem=f"trackers = {trackers!r} names a tracker twice",
            setting="trackers",
            value=trackers,
        )
    if names and out is None:
        raise ConfigError(
            "trackers-without-directory",
            problem=f"trackers = {trackers!r}: a tracker's run id is stored in the run directory,"
            " and this run has none",
            remedy=Setting("run_dir", "DIR"),
            setting="trackers",
            value=trackers,
        )
    return names


def refuse_missing_trackers(names: Sequence[str]) -> None:
    """Raise one `ConfigError` for all trackers whose packages are not installed."""
    modules = [module for name in names for module in TRACKERS[name]]
    refuse_missing(f"trackers = {','.join(names)}", *modules, instead="or leave out the tracker")


def project_and_name(out: Path) -> tuple[str, str]:
    """Return the project name (the parent directory, skipping "runs" and the like) and the run name
    (the run's directory).

    >>> (
    ...     project_and_name(Path("/home/ann/poems/runs/first")),
    ...     project_and_name(Path("/data/poems/second try")),
    ... )
    (('poems', 'first'), ('poems', 'second_try'))
    """
    directory = out.resolve()
    above = next(
        (folder for folder in directory.parents if folder.name not in _USUAL), directory.parent
    )
    return _plain(above.name) or "surefoot", _plain(directory.name) or "run"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_.-")[:_LONGEST]


@dataclass(frozen=True)
class About:
    """The facts about a run for its tracker, which may write to `directory` (OUT/trackers)."""

    tracker: str
    project: str
    name: str
    directory: str
    settings: dict[str, Any]


@dataclass
class TrackerState:
    """A run's id in a tracker and its last sent steps, saved as NAME.json in the run's
    directory.
    """

    path: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    started: bool = False  # True once the run exists in the tracker
    sent: dict[str, int] = field(default_factory=dict)  # the largest sent step of each record kind

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a saved state; return a new state if the file is missing or unreadable."""
        try:
            saved = json.loads(read_regular(path))
            return cls(
                path,
                str(saved["id"]),
                bool(saved["begun"]),
                {str(k): int(v) for k, v in saved["sent"].items()},
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls(path)

    def write(self) -> None:
        write_whole(
            self.path,
            (json.dumps({"id": self.id, "begun": self.started, "sent": self.sent}) + "\n").encode(),
        )


def numbers_in(record: Record) -> dict[str, float]:
    """Return the numeric values of a record by tracker name; nested values are named "NAME/KEY".

    Metrics ("SPLIT/METRIC") keep their names. Other names are prefixed with the record's kind, as
    in TensorBoard.

    >>> numbers_in({"kind": "train", "step": 3, "loss": 0.5, "grad_noise": {"small": 1.0}})
    {'train/loss': 0.5, 'train/grad_noise/small': 1.0}
    >>> numbers_in({"kind": "eval", "step": 3, "val/loss": 0.5, "val/confusion": [[1, 0], [0, 1]]})
    {'val/loss': 0.5}
    """
    prefix = "" if record["kind"] in ("eval", "final_eval") else f"{record['kind']}/"
    return {
        prefix + name: value
        for name, value in _flat(record).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def text_in(record: Record) -> str | None:
    """Return the text of a sample or an event, or None for other records.

    >>> (
    ...     text_in({"kind": "sample", "step": 3, "text": "once"}),
    ...     text_in({"kind": "train", "step": 3, "loss": 0.5}),
    ... )
    ('once', None)
    """
    text = record.get({"sample": "text", "event": "event"}.get(record["kind"], ""))
    return None if text is None else str(text)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    # slashes separate the keys, because parameter names contain dots
    by_name: dict[str, Any] = {}
    for name, value in nested.items():
        by_name |= (
            _flat(value, f"{prefix}{name}/")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return by_name
