"""metrics.jsonl line by line, with the place of each, against what checkpoints have noted of the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from surefoot.tracking.format import counted
from surefoot.tracking.jsonl import parse_record
from surefoot.tracking.record import Record
from surefoot.verify.verdict import Problem

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Line:
    """One line: its number from 1, its bytes from `start` up to `stop`, and the record in it, None where it is none."""

    number: int
    start: int
    stop: int
    record: Record | None


@dataclass(frozen=True)
class Noted:
    """What the checkpoint of a step says of the file as it was then: its length in bytes and its SHA-256."""

    step: int
    length: int
    digest: str


@dataclass(frozen=True)
class Log:
    """All lines; those that no resume has superseded; how many bytes are proved, and what is wrong with them."""

    data: bytes
    lines: list[Line]
    proved_bytes: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def curve(self) -> list[Line]:
        """The lines that hold the records of one curve, as `surefoot.sinks.records` reads them."""
        return curve(self.lines)

    def of(self, kind: str) -> list[Record]:
        """The records of one kind on the curve."""
        return [line.record for line in self.curve if line.record is not None and line.record["kind"] == kind]


def read(data: bytes, noted: Iterable[Noted]) -> Log:
    """The lines of the file, checked against what checkpoints have noted of it, and whether each of them is one."""
    lines = split(data)
    changed, proved = _changed(data, lines, sorted(noted, key=lambda each: each.length))
    return Log(data, lines, proved, (*changed, *_unreadable(lines)))


def split(data: bytes) -> list[Line]:
    """Every line of the file with its place; the last one need not be whole.

    >>> [(line.number, line.start, line.stop, line.record) for line in split(b'{"kind": "event", "step": 1}' + bytes([10]) + b"{")]
    [(1, 0, 29, {'kind': 'event', 'step': 1}), (2, 29, 30, None)]
    """
    found, start = [], 0
    for number, text in enumerate(_by_newline(data), start=1):
        found.append(Line(number, start, start + len(text), parse_record(text)))
        start += len(text)
    return found


def curve(lines: Iterable[Line]) -> list[Line]:
    """The lines with records that no later resume has superseded."""
    kept: list[Line] = []
    for line in lines:
        if line.record is None:
            continue
        if line.record["kind"] == "resumed":
            kept = [before for before in kept if before.record and before.record["step"] <= line.record["step"]]
        kept.append(line)
    return kept


def _by_newline(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _changed(data: bytes, lines: Sequence[Line], noted: Sequence[Noted]) -> tuple[list[Problem], int]:
    """What is not as it was noted, and up to which byte all is."""
    proved, before = 0, 0
    digest = sha256()
    hashed = 0
    first: tuple[Noted, int, int] | None = (
        None  # the first that does not hold, with the step and bytes proved before it
    )
    later: Noted | None = None  # one after it that holds
    for each in noted:
        digest.update(data[hashed : each.length])
        hashed = min(each.length, len(data))
        if len(data) >= each.length and digest.hexdigest() == each.digest:
            later = each if first is not None else None
            proved, before = (each.length, each.step) if first is None else (proved, before)
        elif first is None:
            first = each, before, proved
    if first is None:
        return [], proved
    return [_problem(data, lines, *first, later=later)], proved


def _problem(
    data: bytes, lines: Sequence[Line], wrong: Noted, before: int, proved: int, *, later: Noted | None
) -> Problem:
    between = (
        f"between the checkpoints of steps {before:,} and {wrong.step:,}" if proved else f"before step {wrong.step:,}"
    )
    if len(data) < wrong.length and later is None and _is_prefix(data, lines, proved):
        last = next((line for line in reversed(lines) if line.record is not None), None)
        where = "nothing is left of it" if last is None else f"it ends in line {lines[-1].number}, step {_step(last)}"
        return Problem(
            "damaged",
            f"{FILE} is {len(data):,} bytes long and was {wrong.length:,} at step {wrong.step:,}: its end is missing; {where}",
            step=wrong.step,
            file=FILE,
        )
    meant = _meant(lines, wrong, proved)
    if not meant:
        where = "all of its lines are gone"
    elif len(meant) == 1:
        where = f"in line {meant[0].number}{_of_steps(meant)}"
    else:
        where = f"in lines {meant[0].number} to {meant[-1].number}{_of_steps(meant)}"
    again = f"; so it was when the run went on to step {later.step:,}" if later is not None else ""
    return Problem(
        "damaged",
        f"{FILE} is not what it was at step {wrong.step:,}: it was changed {between}, {where}{again}",
        step=wrong.step,
        file=FILE,
    )


def _meant(lines: Sequence[Line], wrong: Noted, proved: int) -> list[Line]:
    """The lines among which the change is: by their places, and by their steps where it moved those that follow."""
    after = [line for line in lines if line.stop > proved]
    count = sum(line.start < wrong.length for line in after)
    while count and after[count - 1].record is not None and _step(after[count - 1]) > wrong.step:
        count -= 1
    while count < len(after) and 0 <= _step(after[count]) <= wrong.step and after[count].record["kind"] != "resumed":  # type: ignore[index]
        count += 1
    return after[:count]


def _is_prefix(data: bytes, lines: Sequence[Line], proved: int) -> bool:
    """Whether what is left reads like the beginning of the file: all lines whole but the last."""
    return len(data) >= proved and all(line.record is not None for line in lines[:-1])


def _of_steps(lines: Sequence[Line]) -> str:
    steps = [_step(line) for line in lines if line.record is not None]
    if not steps:
        return ""
    if len(lines) == 1:
        return f", the record of step {steps[0]}"
    of = f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)} to {max(steps)}"
    return f", {counted(len(steps), 'record')} of {of}"


def _step(line: Line) -> int:
    return -1 if line.record is None else int(line.record["step"])


def _unreadable(lines: Sequence[Line]) -> list[Problem]:
    """Lines that are no records, but for one that a kill has cut off: the last, or one that a resume follows."""
    wrong = []
    for place, line in enumerate(lines):
        after = lines[place + 1].record if place + 1 < len(lines) else {"kind": "resumed"}
        if line.record is None and (after is None or after["kind"] != "resumed"):
            wrong.append(line.number)
    if not wrong:
        return []
    more = f", nor are {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [Problem("inconsistent", f"{FILE}: line {wrong[0]} is no record{more}, and no resume follows it", file=FILE)]
