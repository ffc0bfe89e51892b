"""What a tracker is told of a run before its records, and what is kept of the tracker in the run's directory."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from surefoot.config.paths import read_regular, write_whole


@dataclass(frozen=True)
class About:
    """One run, as a tracker is told of it. `directory` is where the tracker may write: OUT/trackers."""

    tracker: str
    project: str
    name: str
    directory: str
    settings: dict[str, Any]

    def line(self) -> str:
        """As a line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def read(cls, line: str) -> Self:
        """Back from a line."""
        return cls(**json.loads(line))


@dataclass
class Kept:
    """Which run in a tracker this one is, and how far it has been told; a file of the run's directory, NAME.json."""

    path: Path
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    begun: bool = False  # the tracker knows it
    sent: dict[str, int] = field(default_factory=dict)  # kind -> largest step

    @classmethod
    def read(cls, path: Path) -> Self:
        """What an earlier sitting kept; a new run in the tracker where there is none, or none that can be read."""
        try:
            held = json.loads(read_regular(path))
            return cls(path, str(held["id"]), bool(held["begun"]), {str(k): int(v) for k, v in held["sent"].items()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return cls(path)

    def write(self) -> None:
        """Keep it, so that it is there whole or not at all."""
        write_whole(self.path, (json.dumps({"id": self.id, "begun": self.begun, "sent": self.sent}) + "\n").encode())
