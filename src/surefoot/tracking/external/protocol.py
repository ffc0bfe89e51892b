"""What a tracker is told of a run before its records, and what is kept of the tracker in the run's directory."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from surefoot.config.paths import read_regular, write_whole
from surefoot.tracking.record import Record


@dataclass(frozen=True)
class About:
    """One run, as a tracker is told of it. `directory` is where the tracker may write: OUT/trackers."""

    tracker: str
    project: str
    name: str
    directory: str
    settings: dict[str, Any]

    def line(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def read(cls, line: str) -> Self:
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


_TEXTS = {"sample": "text", "event": "what"}  # kind -> its text


def numbers_in(record: Record) -> dict[str, float]:
    """The numbers of a record by the names that they have in a tracker; those of a dictionary by its own names too.

    Scores have their own names, "SPLIT/SCORE"; all else stands under its kind, as in TensorBoard. What is scored once is under "end".

    >>> numbers_in({"kind": "train", "step": 3, "loss": 0.5, "noise": {"small": 1.0}})
    {'train/loss': 0.5, 'train/noise/small': 1.0}
    >>> numbers_in({"kind": "scores", "step": 3, "held-out/loss": 0.5, "held-out/confusion": [[1, 0], [0, 1]]})
    {'held-out/loss': 0.5}
    """
    prefix = "" if record["kind"] == "scores" else f"{record['kind']}/"
    values = {name: value for name, value in record.items() if name not in ("kind", "step", "nonfinite")}
    flat = flat_settings(values, separator="/").items()
    return {
        prefix + name: value for name, value in flat if isinstance(value, int | float) and not isinstance(value, bool)
    }


def text_in(record: Record) -> str | None:
    """The text of a sample or an event; None for a record of numbers.

    >>> text_in({"kind": "sample", "step": 3, "text": "once"}), text_in({"kind": "train", "step": 3, "loss": 0.5})
    ('once', None)
    """
    name = _TEXTS.get(record["kind"])
    return None if name is None or name not in record else str(record[name])


def flat_settings(settings: Mapping[str, Any], *, separator: str = ".") -> dict[str, Any]:
    """Nested settings as one level with dotted names; lists stay whole.

    >>> flat_settings({"seed": 0, "optimizer": {"name": "adamw", "betas": [0.9, 0.95]}})
    {'seed': 0, 'optimizer.name': 'adamw', 'optimizer.betas': [0.9, 0.95]}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            nested = flat_settings(value, separator=separator)
            flat |= {f"{name}{separator}{inner}": part for inner, part in nested.items()}
        else:
            flat[name] = value
    return flat
