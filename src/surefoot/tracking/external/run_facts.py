"""Run facts for a tracker, and saved tracker state. This module avoids torch."""

import json
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from surefoot.config.paths import read_regular, write_whole
from surefoot.tracking.record import Record

_USUAL = ("runs", "outputs", "experiments")  # common parent directories that are not project names
_LONGEST = 100  # characters of a name; Weights & Biases allows 128


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
    own_folders = [folder for folder in directory.parents if folder.name not in _USUAL]
    project = own_folders[0] if own_folders else directory.parent
    return _plain(project.name) or "surefoot", _plain(directory.name) or "run"


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
            sent = {str(kind): int(step) for kind, step in saved["sent"].items()}
            return cls(path, id=str(saved["id"]), started=bool(saved["begun"]), sent=sent)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls(path)

    def write(self) -> None:
        text = json.dumps({"id": self.id, "begun": self.started, "sent": self.sent})
        write_whole(self.path, f"{text}\n".encode())


def text_in(record: Record) -> str | None:
    """Return the text of a sample or an event, or None for other records.

    >>> (
    ...     text_in({"kind": "sample", "step": 3, "text": "once"}),
    ...     text_in({"kind": "train", "step": 3, "loss": 0.5}),
    ... )
    ('once', None)
    """
    text = None
    if record["kind"] == "sample":
        text = record.get("text")
    elif record["kind"] == "event":
        text = record.get("event")
    return None if text is None else str(text)
