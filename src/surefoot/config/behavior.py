"""Versions of behavior: one table of everything that changed the bits, samples, pixels or tokens of
a run, and since when. Imports no torch.

A run keeps the number with which it began, in its identity (absent: 1). So an older run is resumed,
verified and evaluated as it began. To change a behavior, add a `BehaviorChange` with the next
number, a constant for that number, and ask for it where the behavior differs:

    AVERAGE_RAMP = 2
    ...
    decay = ramp(step) if behavior >= AVERAGE_RAMP else constant
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.errors import CheckpointError

FIRST = 1
STEP_OF_SAMPLES = 2
AVERAGES = 3
MUON_OF_CONV1D = 4
STREAM_OF_ONE_RANK = 5
RATES_OF_CODE = 6
BEST_IS_STRICT = 7
NOTHING_IS_NAN = 8
BUFFERS_IN_ORDER = 9
WHAT_PEOPLE_BRING = 10  # one number for all readers of files, and a name for each point
ONE_SCANNER = WHAT_PEOPLE_BRING
FIELDS_OF_CHATS = WHAT_PEOPLE_BRING
END_TOKENS = WHAT_PEOPLE_BRING
KINDS_OF_TEXT = WHAT_PEOPLE_BRING
PAIRS_AS_MEANT = WHAT_PEOPLE_BRING
ANSWERS_OF_CHATS = WHAT_PEOPLE_BRING
PICTURES_AS_SHOWN = WHAT_PEOPLE_BRING
DOCUMENTS_APART = 11


@dataclass(frozen=True)
class BehaviorChange:
    """What runs do differently from behavior `number` on; `since` is the version of surefoot."""

    number: int
    since: str
    what: str


BEHAVIORS = [
    BehaviorChange(FIRST, since="0.1.0", what="the behavior of 0.1.0"),
    BehaviorChange(
        STEP_OF_SAMPLES, since="0.2.0", what="the argument `step` of a data set's `__getitem__`"
    ),
    BehaviorChange(
        AVERAGES,
        since="0.2.0",
        what="averages of weights whose decay rises at the start, that are float32 for 16-bit"
        " weights, and that take everything else from the model",
    ),
    BehaviorChange(
        MUON_OF_CONV1D, since="0.2.0", what="Muon for the matrices of transformers' `Conv1D`"
    ),
    BehaviorChange(
        STREAM_OF_ONE_RANK,
        since="0.2.0",
        what="on several ranks, the source of a stream is read as rank 0 of 1, and data that differ"
        " among ranks are refused",
    ),
    BehaviorChange(RATES_OF_CODE, since="0.2.0", what="learning rates that the loop's body writes"),
    BehaviorChange(
        BEST_IS_STRICT,
        since="0.2.0",
        what="the best checkpoint ignores min_delta, and is kept only with `best`",
    ),
    BehaviorChange(NOTHING_IS_NAN, since="0.2.0", what="a mean of nothing is NaN instead of 0"),
    BehaviorChange(
        BUFFERS_IN_ORDER,
        since="0.2.0",
        what="buffers other than those of normalizations that go from micro-batch to micro-batch",
    ),
    BehaviorChange(
        WHAT_PEOPLE_BRING,
        since="0.2.0",
        what="files of a directory by one rule: suffixes without case, compressed text, linked"
        " folders, no hidden names, no README beside data; all fields of chats;"
        " end tokens of any name; rows of files and token shards for what they are;"
        " sentence pairs without headers, ids and quotes of spreadsheets;"
        " answers of chats from the tokens of their prompts;"
        " pictures as viewers show them, more than 8 bits by their range, and their parts without"
        " case",
    ),
    BehaviorChange(
        DOCUMENTS_APART,
        since="0.2.0",
        what="documents of a GPT's text that are kept apart, unless data.documents is joined",
    ),
]


def newest_behavior() -> int:
    """Return the behavior of a run that begins now."""
    return BEHAVIORS[-1].number


def known_behavior(number: Any, *, run: str) -> int:
    """Return the behavior of an existing run; raise `CheckpointError` if this version lacks it."""
    newest = newest_behavior()
    is_known = type(number) is int and FIRST <= number <= newest
    if not is_known:
        raise CheckpointError(
            "behavior-unknown",
            problem=f"{run} began with behavior {number!r}, and this version knows 1 to {newest}",
            reason="it would continue with other bits, samples, pixels or tokens",
            remedy="install the version of surefoot that began the run, or a newer one",
            setting="behavior",
            value=number,
            newest=newest,
        )
    return int(number)


def behavior_in_identity(number: int) -> dict[str, int]:
    """Return what the identity of a run says of its behavior: nothing of the first one."""
    return {} if number == FIRST else {"behavior": number}


def behavior_of(identity: Mapping[str, Any]) -> Any:
    """Return the behavior in the identity of a run, which may be one that this version lacks."""
    return identity.get("behavior", FIRST)


def mean_of_nothing(behavior: int) -> float:
    """Return what a mean over no value is in evaluations and records."""
    return math.nan if behavior >= NOTHING_IS_NAN else 0.0


def note_of_older(number: int) -> str | None:
    """Return a line about what a run does not do because it began earlier, or None.

    >>> note_of_older(newest_behavior()) is None
    True
    """
    missing = [change for change in BEHAVIORS if change.number > number]
    if not missing:
        return None
    changes = "; ".join(f"{change.what} (since {change.since})" for change in missing)
    return f"this run continues with behavior {number}, as it began, without: {changes}"
