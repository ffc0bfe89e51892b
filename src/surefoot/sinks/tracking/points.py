"""What trackers take of a record: numbers under the record's kind, texts apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.record import Record

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
    held = {name: value for name, value in record.items() if name not in ("kind", "step", "nonfinite")}
    return {prefix + name: value for name, value in _flat(held)}


def text_in(record: Record) -> str | None:
    """The text of a sample or an event; None for a record of numbers.

    >>> text_in({"kind": "sample", "step": 3, "text": "once"}), text_in({"kind": "train", "step": 3, "loss": 0.5})
    ('once', None)
    """
    name = _TEXTS.get(record["kind"])
    return None if name is None or name not in record else str(record[name])


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings as one level with dotted names; lists stay whole.

    >>> flat_settings({"seed": 0, "optimizer": {"name": "adamw", "betas": [0.9, 0.95]}})
    {'seed': 0, 'optimizer.name': 'adamw', 'optimizer.betas': [0.9, 0.95]}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": held for inner, held in flat_settings(value).items()}
        else:
            found[name] = value
    return found


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _flat(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
