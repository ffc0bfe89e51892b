"""What may make a step quicker, by name, and one such thing as it is tried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from surefoot.config import nearest
from surefoot.errors import ConfigError
from surefoot.profiling.watched import Stepping

NAMES = ("workers", "precision", "fused", "checkpointing", "channels-last", "micro-batch", "compile")
USUAL = NAMES[:-1]


@dataclass(frozen=True)
class Variant:
    """One thing to try. `flag` is what to type for it; `changes` says where results are not those of the run as it is."""

    name: str
    flag: str
    make: Callable[[], Stepping]
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    changes: str = ""
    workers: int | None = (
        None  # its samples are read beside the steps: it is measured by itself, from its first step on
    )


def tries_of(text: str) -> tuple[str, ...]:
    """The names in `--tries`: "none", "usual" (all but compile), "all", or some of them with commas between.

    >>> tries_of("workers,compile"), tries_of("none")
    (('workers', 'compile'), ())
    """
    if text in ("none", "usual", "all"):
        return {"none": (), "usual": USUAL, "all": NAMES}[text]
    names = tuple(part.strip().replace("_", "-") for part in text.split(","))
    for name in names:
        if name not in NAMES:
            meant = nearest(name, NAMES)
            cure = f"did you mean {meant}?" if meant else f"there are: none, usual, all, {', '.join(NAMES)}"
            raise ConfigError(f"--tries {name}: nothing of that name can be tried; {cure}")
    return names
