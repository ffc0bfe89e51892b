"""Checks of metrics.jsonl, by line and byte offset, against the hashes in checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from itertools import compress, pairwise

from surefoot.tools.verify.verdict import Problem
from surefoot.tracking.format import counted
from surefoot.tracking.jsonl import parse_lines
from surefoot.tracking.record import Record

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class Line:
    """A line: its number (from 1), its bytes from `start` to `stop` (exclusive), and its record ({}
    if invalid).
    """

    number: int
    start: int
    stop: int
    record: Record = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.record.get("kind", ""))

    @property
    def step(self) -> int:
        return int(self.record.get("step", -1))


@dataclass(frozen=True)
class Noted:
    """The size in bytes and the SHA-256 of metrics.jsonl at a checkpoint's step."""

    step: int
    length: int
    digest: str


@dataclass(frozen=True)
class Log:
    """A parsed metrics.jsonl: all lines, the lines not superseded by a resume, the number of
    verified bytes, and problems.
    """

    lines: list[Line]
    proved_bytes: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def curve(self) -> list[Line]:
        return curve(self.lines)

    def lines_of(self, kind: str, name: str = "step") -> list[Line]:
        """Return the lines of one kind that contain `name` and that no resume has superseded."""
        return [line for line in self.curve if line.kind == kind and name in line.record]

    def of(self, kind: str) -> list[Record]:
        """Return the records of one kind that no resume has superseded."""
        return [line.record for line in self.lines_of(kind)]

    def up_to(self, length: int) -> list[Line]:
        """Return the lines in the first `length` bytes, including lines that a resume has
        superseded.
        """
        return [line for line in self.lines if line.stop <= length]


def read(data: bytes, noted: Iterable[Noted]) -> Log:
    """Parse metrics.jsonl, and compare its bytes with the hashes in `noted`. Invalid lines are
    problems.
    """
    lines = split(data)
    changed, proved = _changed(data, lines, sorted(noted, key=lambda each: each.length))
    return Log(lines, proved, (*changed, *_unreadable(lines)))


def split(data: bytes) -> list[Line]:
    """Return every line of the file with its byte offsets. The last line may be incomplete.

    >>> [
    ...     (line.number, line.start, line.stop, line.record)
    ...     for line in split(b'{"kind": "event", "step": 1}' + bytes([10]) + b"{")
    ... ]
    [(1, 0, 29, {'kind': 'event', 'step': 1}), (2, 29, 30, {})]
    """
    lines = list[Line]()
    start = 0
    for number, (text, record) in enumerate(zip(BytesIO(data), parse_lines(data), strict=True), 1):
        lines.append(Line(number, start, start + len(text), record or {}))
        start += len(text)
    return lines


def curve(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with records that no later resume has superseded."""
    current: list[Line] = []
    for line in lines:
        if line.kind == "resume":
            current = [before for before in current if before.step <= line.step]
        if line.record:
            current.append(line)
    return current


def _changed(
    data: bytes, lines: Sequence[Line], noted: Sequence[Noted]
) -> tuple[list[Problem], int]:
    digest, hashed, holds = sha256(), 0, list[bool]()
    for each in noted:
        digest.update(data[hashed : each.length])
        hashed = each.length
        holds.append(len(data) >= each.length and digest.hexdigest() == each.digest)
    count = [*holds, False].index(False)  # the number of matching entries before the first mismatch
    before = noted[count - 1] if count else Noted(0, 0, "")
    again = list(compress(noted, holds))[count:]
    return [
        _problem(data, lines, each, before, again) for each in noted[count : count + 1]
    ], before.length


def _problem(
    data: bytes, lines: Sequence[Line], wrong: Noted, before: Noted, later: Sequence[Noted]
) -> Problem:
    if (
        before.length <= len(data) < wrong.length
        and not later
        and all(line.record for line in lines[:-1])
    ):
        last = next((line for line in reversed(lines) if line.record), None)
        where = (
            "no record is left"
            if last is None
            else f"it ends in line {lines[-1].number}, step {last.step}"
        )
        how = f"is {len(data):,} bytes long, but was {wrong.length:,} at step {wrong.step:,}: its end is missing; {where}"
    else:
        between = f"before step {wrong.step:,}"
        if before.length:
            between = f"between the checkpoints of steps {before.step:,} and {wrong.step:,}"
        meant = _affected_lines(lines, wrong, before.length)
        where = (
            f"in {line_numbers(meant)}{_of_steps(meant)}" if meant else "all of its lines are gone"
        )
        again = f"; the change was already there at step {later[-1].step:,}" if later else ""
        how = f"differs from its content at step {wrong.step:,}: it was changed {between}, {where}{again}"
    return Problem("damaged", f"{FILE} {how}", step=wrong.step, file=FILE)


def _affected_lines(lines: Sequence[Line], wrong: Noted, proved: int) -> list[Line]:
    after = [line for line in lines if line.stop > proved]
    count = sum(line.start < wrong.length for line in after)
    while count and after[count - 1].step > wrong.step:
        count -= 1
    while (
        count < len(after)
        and 0 <= after[count].step <= wrong.step
        and after[count].kind != "resume"
    ):
        count += 1
    return after[:count]


def _of_steps(lines: Sequence[Line]) -> str:
    steps = [line.step for line in lines if line.record]
    of = (
        f"step {steps[0]}"
        if len({*steps}) == 1
        else f"steps {min(steps, default=0)} to {max(steps, default=0)}"
    )
    return (
        f", {'the record' if len(lines) == 1 else counted(len(steps), 'record')} of {of}"
        if steps
        else ""
    )


def line_numbers(lines: Sequence[Line]) -> str:
    """Return the first and the last line number as text.

    >>> line_numbers([Line(3, 0, 9)]), line_numbers([Line(3, 0, 9), Line(4, 9, 12)])
    ('line 3', 'lines 3 to 4')
    """
    first, last = lines[0].number, lines[-1].number
    return f"line {first:,}" if first == last else f"lines {first:,} to {last:,}"


def _unreadable(lines: Sequence[Line]) -> list[Problem]:
    """Return problems for invalid lines, except a line cut off by a kill: the last line, or a line
    before a resume.
    """
    wrong = [
        line.number for line, after in pairwise(lines) if not line.record and after.kind != "resume"
    ]
    more = f", nor are {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [
        Problem(
            "inconsistent",
            f"{FILE}: line {number} is not a record{more}, and no resume follows it",
            file=FILE,
        )
        for number in wrong[:1]
    ]
