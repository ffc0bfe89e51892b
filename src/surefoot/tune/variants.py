"""The variants of a comparison: combinations of settings, and the name that each has as a directory and in a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, count, product
from typing import Any

from surefoot.errors import ConfigError

_LONGEST = 80  # letters of a name: directories may have 255 bytes, tables less


@dataclass(frozen=True)
class Variant:
    """One run of a comparison, by its directory's name.

    `varied` are the settings that were asked to vary, `settings` all in which the runs are not alike, both by dotted name.
    Runs that differ in nothing but the seed are repeats, of one `group`.
    """

    name: str
    group: str
    varied: Mapping[str, Any]
    settings: Mapping[str, Any]


def grid(vary: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values, the last setting changing fastest.

    >>> grid({"optimizer.name": ["adamw", "sgd"], "optimizer.lr": [0.1, 0.2]})[1]
    {'optimizer.name': 'adamw', 'optimizer.lr': 0.2}
    >>> grid({})
    []
    """
    return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())] if vary else []


def names(combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each combination of settings: short, its own, and fit for a directory anywhere.

    >>> names([{"optimizer.name": "adamw", "optimizer.lr": 0.001}, {"optimizer.name": "sgd", "optimizer.lr": 1e-1}])
    ['name=adamw,lr=0.001', 'name=sgd,lr=0.1']
    >>> names([{"optimizer.name": "adamw", "schedule.name": "wsd"}, {"data.path": "a/b"}])
    ['optimizer.name=adamw,schedule.name=wsd', 'path=a_b']
    >>> names([{"data.path": "a/b"}, {"data.path": "a:b"}, {}])
    ['path=a_b', 'path=a_b-2', 'base']
    """
    short = short_names({setting for combination in combinations for setting in combination})
    found: list[str] = []
    for combination in combinations:
        text = (
            ",".join(f"{short[setting]}={_plain(written(value))}" for setting, value in combination.items()) or "base"
        )
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 9]}-{sha256(text.encode()).hexdigest()[:8]}"
        others = (f"{text}-{number}" for number in count(2))  # two paths may be one text
        found.append(next(name for name in chain([text], others) if name not in found))
    return found


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """Settings by their last part, as long as no two would be called the same.

    >>> short_names(["optimizer.lr", "optimizer.name", "schedule.name"])
    {'optimizer.lr': 'lr', 'optimizer.name': 'optimizer.name', 'schedule.name': 'schedule.name'}
    """
    known = list(settings)
    last = [setting.rpartition(".")[2] for setting in known]
    return {setting: leaf if last.count(leaf) == 1 else setting for setting, leaf in zip(known, last, strict=True)}


def written(value: Any) -> str:
    """A value as one types it: a number short where that is exact, parts of a list with blanks between.

    >>> written(0.0001), written((0.9, 0.95)), written(None), written("5%"), written(True)
    ('0.0001', '0.9 0.95', 'None', '5%', 'True')
    """
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        return " ".join(written(part) for part in value)
    return str(value)


def flags(settings: Mapping[str, Any]) -> str:
    """Settings as they are typed.

    >>> flags({"optimizer.lr": 0.003, "schedule.warmup": "100 steps", "model.tied": None})
    "--optimizer.lr 0.003 --schedule.warmup '100 steps' --model.tied None"
    """
    from shlex import quote

    typed = []
    for setting, value in settings.items():
        many = isinstance(value, list | tuple)
        text = " ".join(quote(written(part)) for part in value) if many else quote(written(value))
        typed.append(f"--{setting.replace('_', '-')} {text}")
    return " ".join(typed)


def refuse_twins(combinations: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where two combinations are the same: one of them would be trained for nothing."""
    for place, combination in enumerate(combinations):
        if any(dict(combination) == dict(earlier) for earlier in combinations[:place]):
            raise ConfigError(f"two variants are the same: {flags(combination)}\n  leave one of them out")


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+%-]+", "_", text)
