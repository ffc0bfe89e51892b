"""The verdict of a check on a run's records: a finding, healthy, or unknown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import TextWrapper
from typing import Any, Literal

from surefoot.errors import visible
from surefoot.tools.diagnose.history import History

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Severities, worst first. error: the run is broken or useless; warning: quality or time is lost;
note: worth knowing.
"""

IGNORED_LABELS = "labels that are all ignored (ignore_index, such as -100), so that nothing counts"
NOT_FINITE = "the last record has no finite loss, and earlier ones do not show that the run is well"

_WIDE = 80
_HEAD = 11  # columns of the label before evidence, causes and remedies


@dataclass(frozen=True)
class Finding:
    """A problem or a notable fact of a run, with evidence and remedies.

    `evidence` has sentences with values and steps. `numbers` has the values compared with
    thresholds. `step` is the first affected step, or None for the complete run. `causes` lists
    likely causes first. `try_` has flags or code with the current values.

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
        """Format the finding as `surefoot diagnose` prints it, 80 columns wide."""
        lines = [
            f"{self.severity.upper()}  {self.name}",
            *wrapped(self.message, "  ", 2, width=_WIDE - 2),
        ]
        for head, texts in (
            ("evidence", self.evidence),
            ("causes", self.causes),
            ("try", self.try_),
        ):
            label = head  # before the first text only
            for text in texts:
                lines += wrapped(text, f"  {label:<{_HEAD - 2}}", _HEAD + 2)
                label = ""
        return visible("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values. The key of `try_` is "try"."""
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
    """Wrap a text into lines, the first one after `first` and the others after `indent` spaces."""
    wrapper = TextWrapper(
        width, first, " " * indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


@dataclass(frozen=True)
class Healthy:
    """The verdict of a check without a problem. `message` has the evidence."""

    message: str
    name: str = ""  # the check's name


@dataclass(frozen=True)
class Unknown:
    """The verdict of a check without enough records. `message` names the missing records."""

    message: str
    name: str = ""


Verdict = Finding | Healthy | Unknown
Needs = Callable[[History], None]


class EndedError(Exception):
    """The exception that `need` and `well` raise to end a check. Its argument is the check's
    verdict.
    """


def need(holds: object, lacking: str) -> None:
    """End a check as unknown if `holds` is false. `lacking` names the missing records."""
    if not holds:
        raise EndedError(Unknown(lacking))


def well(holds: object, message: str) -> None:
    """End a check as healthy if `holds` is true. `message` has the evidence."""
    if holds:
        raise EndedError(Healthy(message))


@dataclass(frozen=True)
class Check:
    """A check of a run: its name, its preconditions `needs`, and its function."""

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


def check(
    name: str, needs: Needs = lambda _: None
) -> Callable[[Callable[[History], Verdict]], Check]:
    """Decorate a function as a `Check`; `needs` raises if the history is too short for the
    check.
    """
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
    """Build a finding without empty texts and unknown numbers. The check adds its name later.

    >>> wrong("note", "The loss jumped.", ("once", ""), causes=(), try_=(), numbers={}).evidence
    ('once',)
    """
    return Finding(
        name="",
        severity=severity,
        message=message,
        evidence=tuple(filter(None, evidence)),
        causes=tuple(filter(None, causes)),
        try_=tuple(filter(None, try_)),
        step=step,
        numbers={name: value for name, value in numbers.items() if not math.isnan(value)},
    )


def worst_first(verdicts: Iterable[Verdict]) -> list[Finding]:
    """Sort findings by severity: errors, warnings, notes. Findings of equal severity keep their
    order.

    >>> findings = worst_first([Finding("a", "note", ""), Finding("b", "error", "")])
    >>> [finding.name for finding in findings]
    ['b', 'a']
    """
    findings = [verdict for verdict in verdicts if isinstance(verdict, Finding)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def join_names(names: Sequence[object], *, limit: int = 4) -> str:
    """Join names with commas, and append the number of omitted names.

    >>> join_names(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    text = ", ".join(str(name) for name in names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit} more"
    return text
