"""A change of a setting while a run goes on, as a line of the journal of changes has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SettingChange:
    """One line of the journal.

    number: from 1. from_step: the number of finished steps when the value first holds. was and now:
    JSON values. follows: other settings that change with this one, each with its two values.
    sha256: of the line before and of this one. origins: where `was` and `now` come from: "given",
    "default", "auto" (chosen for the user), "beginning" or "changed"; () if it is not known.
    """

    number: int
    from_step: int
    setting: str
    was: Any
    now: Any
    follows: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    because: str = ""
    when: str = ""
    sha256: str = ""
    origins: Sequence[str] = ()
