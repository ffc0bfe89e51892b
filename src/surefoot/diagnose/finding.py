"""The verdict of a check on a run's records: a finding, healthy, or unknown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import TextWrapper
from typing import Any, Literal

from surefoot.diagnose.history import History

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst first. error: the run is broken or useless; warning: it costs quality or time; note: worth knowing."""


_WIDE = 80
_HEAD = 11  # columns of what stands before evidence, causes and things to try


@dataclass(frozen=True)
class Finding:
    """A problem of a run, or a fact worth knowing, with its evidence and remedies.

    `evidence` has sentences with numbers and steps, `numbers` the values that were compared with thresholds. `step` is where it
    began (None: all of the run). `causes` has the likely ones first, `try_` flags or code with the current value.

    >>> Finding("loss-spikes", "warning", "The loss jumped.", step=40).to_dict()["name"]
    'loss-spikes'
    >>> print(Finding("loss-spikes", "warning", "The loss jumped.", try_=("--clip 'norm 1.0'",)))
    WARNING  loss-spikes
      The loss jumped.
      try      --clip 'norm 1.0'
    """

    name: str
    severity: Severity
    message: str
    evidence: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    try_: tuple[str, ...] = ()
    step: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Write the finding as `surefoot diagnose` does: message, evidence, causes and things to try, 80 columns wide."""
        lines = [f"{self.severity.upper()}  {self.name}", *wrapped(self.message, "  ", 2, width=_WIDE - 2)]
        for head, texts in (("evidence", self.evidence), ("causes", self.causes), ("try", self.try_)):
            for index, text in enumerate(texts):
                lines += wrapped(text, f"  {head if index == 0 else '':<{_HEAD - 2}}", _HEAD + 2)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values; `try_` is called "try" there."""
        return {
            "name": self.name,
            "severity": self.severity,
            "message": self.message,
            "step": self.step,
            "evidence": list(self.evidence),
            "numbers": dict(self.numbers),
            "causes": list(self.causes),
            "try": list(self.try_),
        }


def wrapped(text: str, first: str, indent: int, *, width: int = _WIDE) -> list[str]:
    """Wrap a text into lines; commands and paths in it stay whole."""
    return TextWrapper(width, first, " " * indent, break_long_words=False, break_on_hyphens=False).wrap(text)


@dataclass(frozen=True)
class Healthy:
    """The verdict of a check without a problem; `message` has the evidence."""

    message: str
    name: str = ""  # its check's


@dataclass(frozen=True)
class Unknown:
    """The verdict of a check that the records do not suffice for; `message` names the missing part."""

    message: str
    name: str = ""


Verdict = Finding | Healthy | Unknown
Needs = Callable[[History], None]


class EndedError(Exception):
    """Raised by `need` and `well` to end a check; its argument is the check's verdict."""


def need(holds: object, lacking: str) -> None:
    """End a check as unknown unless `holds`; `lacking` names the missing part of the records."""
    if not holds:
        raise EndedError(Unknown(lacking))


def well(holds: object, message: str) -> None:
    """End a check as healthy if `holds`; `message` has the evidence."""
    if holds:
        raise EndedError(Healthy(message))


@dataclass(frozen=True)
class Check:
    """A check of a run: its name, its preconditions (`needs`, shared with others), and the function that measures."""

    name: str
    needs: Needs
    measure: Callable[[History], Verdict]

    def __call__(self, history: History) -> Verdict:
        try:
            self.needs(history)
            verdict = self.measure(history)
        except EndedError as end:
            verdict = end.args[0]
        return replace(verdict, name=self.name)


def check(name: str, needs: Needs = lambda _: None) -> Callable[[Callable[[History], Verdict]], Check]:
    """A decorator that makes a `Check` of the function that measures."""
    return lambda measure: Check(name, needs, measure)


def wrong(
    severity: Severity,
    message: str,
    evidence: Sequence[str],
    *,
    causes: Sequence[str],
    try_: Sequence[str],
    step: int | None = None,
    numbers: Mapping[str, float],
) -> Finding:
    """A finding that does not have the check's name yet; empty texts are left out.

    >>> wrong("note", "The loss jumped.", ("once", ""), causes=(), try_=(), numbers={}).evidence
    ('once',)
    """
    evidence, causes, try_ = (tuple(filter(None, texts)) for texts in (evidence, causes, try_))
    return Finding("", severity, message, evidence, causes, try_, step, numbers)


def worst_first(verdicts: Iterable[Verdict]) -> list[Finding]:
    """The findings: errors, warnings, notes; within each in the given order.

    >>> [one.name for one in worst_first([Finding("a", "note", ""), Finding("b", "error", "")])]
    ['b', 'a']
    """
    return sorted((one for one in verdicts if isinstance(one, Finding)), key=lambda one: SEVERITIES.index(one.severity))


def join_names(names: Sequence[object], *, limit: int = 4) -> str:
    """Names in a line, and the number of those left out.

    >>> join_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    text = ", ".join(str(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
