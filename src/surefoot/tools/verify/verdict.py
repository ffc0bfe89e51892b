"""The verdict on a run: proved facts, unproved facts and problems, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from surefoot.errors import CheckpointError, DataError, visible
from surefoot.tracking.format import counted

Kind = Literal["damaged", "inconsistent", "data", "differs"]
DIFFERS = 8  # exit status: replayed steps gave other results
_STATUS = {  # the first kind that occurs determines the exit status
    "damaged": CheckpointError.exit_status,
    "inconsistent": CheckpointError.exit_status,
    "data": DataError.exit_status,
    "differs": DIFFERS,
}


@dataclass(frozen=True)
class Problem:
    """A difference from the saved run. `text` is for people, and the other fields are for programs.

    "damaged": a file differs from its hash. "inconsistent": files contradict each other. "data":
    the data set has changed. "differs": a replayed step has another result. `step` counts completed
    steps.
    """

    kind: Kind
    text: str
    step: int | None = None
    file: str | None = None
    quantity: str | None = None
    saved: str | None = None
    computed: str | None = None


@dataclass(frozen=True)
class Window:
    """Steps to replay, from the checkpoint at step `start` to the compared state at step `stop`."""

    start: int
    stop: int

    @property
    def steps(self) -> int:
        """The number of steps.

        >>> Window(100, 150).steps
        50
        """
        return self.stop - self.start


@dataclass(frozen=True)
class Difference:
    """Two unequal values, and their distance relative to the saved value (infinite if not
    numeric).
    """

    where: str
    relative: float
    saved: str
    computed: str
    more: str = ""  # further differences
    file: str = ""  # the entry of `Checkpoint.files`
    name: str = ""  # the name of the tensor
    differing: float = 1.0  # the fraction of values that differ


def as_problem(difference: Difference, *, step: int, what: str) -> Problem:
    """Return the problem for a difference at `step`; `what` names the checkpoint."""
    where = difference.where
    saved = difference.saved
    now = difference.computed
    more = difference.more
    text = f"{what}: {where} was saved as {saved}, and is {now} when recomputed"
    if more.startswith("with"):
        text += f" ({more})"
    elif more:
        text += f" ({more} differs)" if more.startswith("1 ") else f" ({more} differ)"
    file, _, quantity = where.partition(",")
    return Problem("differs", text, step, f"{what}/{file}", quantity.removeprefix(" "), saved, now)


@dataclass
class Outcome:
    """The result of a window: the steps of the records and checkpoints that matched.

    `exact` is True if all bits had to be equal. Otherwise, `unlike` names the changed conditions,
    and `largest` has the largest differences. `unknown` names recorded values that only the user's
    loop can compute.
    """

    window: Window
    exact: bool
    unlike: str = ""
    records: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    met_records: int = 0  # records in the window, comparable or not
    largest: dict[str, Difference] = field(default_factory=dict)  # keys: "records", "tensors"
    unknown: set[str] = field(default_factory=set)
    loss_counts: bool = False  # the loss counts its targets, so only a replay knows their number
    has_user_state: bool = False  # a checkpoint holds user objects, which are not compared
    lost: str | None = None  # the reason for an early end: a running run deleted a checkpoint


@dataclass(frozen=True)
class Verdict:
    """The proved facts, unproved facts and problems of a run. Its text is the output of
    `surefoot verify`.

    >>> print(Verdict("runs/a", proved=["steps 0 to 40, bit for bit"], not_proved=[], problems=[]))
    proved
      steps 0 to 40, bit for bit
    runs/a: the files match their manifests; no step was repeated
    """

    run: str
    proved: list[str]
    not_proved: list[str]
    problems: list[Problem]
    outcomes: list[Outcome] = field(default_factory=list)
    hints: Sequence[str] = ()
    whole: bool = False  # every step was replayed, and the last state compared

    @property
    def sound(self) -> bool:
        """True if no problem was found. Unproved facts may still be wrong."""
        return not self.problems

    @property
    def exit_status(self) -> int:
        """The exit status: 0 without problems, 4 for damaged or inconsistent files, 3 for changed
        data, 8 if steps differ.

        >>> problems = [Problem("differs", "step 3 ..."), Problem("data", "...")]
        >>> Verdict("runs/a", [], [], problems).exit_status
        3
        """
        kinds = {problem.kind for problem in self.problems}
        for kind, status in _STATUS.items():
            if kind in kinds:
                return status
        return 0

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.problems:
            return f"{self.run} failed verification: {counted(len(self.problems), 'problem')}"
        if not self.outcomes:
            return f"{self.run}: the files match their manifests; no step was repeated"
        is_exact = all(outcome.exact for outcome in self.outcomes)
        sentence = f"{self.run} is proved {'bit for bit' if is_exact else 'up to rounding'}"
        return sentence if self.whole else f"{sentence}, in part"

    def __str__(self) -> str:
        titles = {
            "proved": self.proved,
            "not proved": self.not_proved,
            "WRONG": [problem.text for problem in self.problems],
            "why": list(self.hints),
        }
        lines = []
        for title, facts in titles.items():
            if facts:
                lines.append(title)
                lines += [f"  {fact}" for fact in facts]
        return visible("\n".join([*lines, self.sentence]))

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values, as in `surefoot verify --json`."""
        return {
            "run": self.run,
            "exit_status": self.exit_status,
            "verdict": self.sentence,
            "whole": self.whole,
            "proved": list(self.proved),
            "not_proved": list(self.not_proved),
            "why": list(self.hints),
            "problems": [asdict(problem) for problem in self.problems],
            "windows": [_window_values(outcome) for outcome in self.outcomes],
        }


def _window_values(outcome: Outcome) -> dict[str, Any]:
    largest = {}
    for name, difference in outcome.largest.items():
        largest[name] = {
            "difference": difference.relative,
            "where": difference.where,
            "saved": difference.saved,
            "computed": difference.computed,
        }
    return {
        "start": outcome.window.start,
        "stop": outcome.window.stop,
        "exact": outcome.exact,
        "unlike": outcome.unlike,
        "records": outcome.records,
        "checkpoints": outcome.checkpoints,
        "largest": largest,
    }


def steps_in_words(steps: Sequence[int], *, limit: int = 3) -> str:
    """Return several steps as text.

    >>> steps_in_words([4]), steps_in_words([4, 8]), steps_in_words(list(range(9)))
    ('step 4', 'steps 4 and 8', 'steps 0, 1, 2 and 6 more')
    """
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    words = [f"{step:,}" for step in steps]
    if len(steps) > limit + 1:
        words[limit:] = [f"{len(steps) - limit} more"]
    return f"steps {', '.join(words[:-1])} and {words[-1]}"
