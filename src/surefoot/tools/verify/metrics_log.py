"""Checks of metrics.jsonl, by line and byte offset, against the hashes in checkpoints."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from itertools import pairwise

from surefoot.tools.verify.verdict import Problem
from surefoot.tracking.format import counted
from surefoot.tracking.jsonl import parse_lines
from surefoot.tracking.record import Record

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class LogLine:
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

    lines: list[LogLine]
    proved_bytes: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def curve(self) -> list[LogLine]:
        return curve(self.lines)

    def lines_of(self, kind: str, name: str = "step") -> list[LogLine]:
        """Return the lines of one kind that contain `name` and that no resume has superseded."""
        return [line for line in self.curve if line.kind == kind and name in line.record]

    def of(self, kind: str) -> list[Record]:
        """Return the records of one kind that no resume has superseded."""
        return [line.record for line in self.lines_of(kind)]

    def up_to(self, length: int) -> list[LogLine]:
        """Return the lines in the first `length` bytes, including lines that a resume has
        superseded.
        """
        return [line for line in self.lines if line.stop <= length]


def read(data: bytes, noted: Iterable[Noted]) -> Log:
    """Parse metrics.jsonl, and compare its bytes with the hashes in `noted`. Invalid lines are
    problems.
    """
    lines = split(data)
    changed, proved = _changed(data, lines, sorted(noted, key=lambda entry: entry.length))
    return Log(lines, proved, (*changed, *_unreadable(lines)))


def split(data: bytes) -> list[LogLine]:
    """Return every line of the file with its byte offsets. The last line may be incomplete.

    >>> first, last = split(b'{"kind": "event", "step": 1}' + bytes([10]) + b"{")
    >>> first.start, first.stop, first.record
    (0, 29, {'kind': 'event', 'step': 1})
    >>> last.number, last.start, last.stop, last.record
    (2, 29, 30, {})
    """
    lines = list[LogLine]()
    start = 0
    for number, (text, record) in enumerate(zip(BytesIO(data), parse_lines(data), strict=True), 1):
        lines.append(LogLine(number, start, start + len(text), record or {}))
        start += len(text)
    return lines


def curve(lines: Iterable[LogLine]) -> list[LogLine]:
    """Return the lines with records that no later resume has superseded."""
    current: list[LogLine] = []
    for line in lines:
        if line.kind == "resume":
            current = [before for before in current if before.step <= line.step]
        if line.record:
            current.append(line)
    return current


def _changed(
    data: bytes, lines: Sequence[LogLine], noted: Sequence[Noted]
) -> tuple[list[Problem], int]:
    """Return a problem if the bytes differ from an entry of `noted`, and the number of bytes that
    match before it.
    """
    digest = sha256()
    hashed = 0
    before = Noted(0, 0, "")  # the last entry before the first that differs
    wrong = None
    later = []  # matching entries after it
    for entry in noted:
        digest.update(data[hashed : entry.length])
        hashed = entry.length
        if len(data) < entry.length or digest.hexdigest() != entry.digest:
            wrong = wrong or entry
        elif wrong is None:
            before = entry
        else:
            later.append(entry)
    if wrong is None:
        return [], before.length
    return [_problem(data, lines, wrong, before, later)], before.length


def _problem(
    data: bytes, lines: Sequence[LogLine], wrong: Noted, before: Noted, later: Sequence[Noted]
) -> Problem:
    is_short = before.length <= len(data) < wrong.length
    if is_short and not later and all(line.record for line in lines[:-1]):
        where = "no record is left"
        steps = [line.step for line in lines if line.record]
        if steps:
            where = f"it ends in line {lines[-1].number}, step {steps[-1]}"
        how = f"is {len(data):,} bytes long, but was {wrong.length:,} at step {wrong.step:,}: its end is missing; {where}"
    else:
        between = f"before step {wrong.step:,}"
        if before.length:
            between = f"between the checkpoints of steps {before.step:,} and {wrong.step:,}"
        where = "all of its lines are gone"
        affected = _affected_lines(lines, wrong, before.length)
        if affected:
            where = f"in {line_numbers(affected)}{_of_steps(affected)}"
        how = f"differs from its content at step {wrong.step:,}: it was changed {between}, {where}"
        if later:
            how += f"; the change was already there at step {later[-1].step:,}"
    return Problem("damaged", f"{FILE} {how}", step=wrong.step, file=FILE)


def _affected_lines(lines: Sequence[LogLine], wrong: Noted, proved: int) -> list[LogLine]:
    """Return the lines after the `proved` bytes that were there at the step of `wrong`: by their
    bytes and, because these may have moved, by their steps.
    """
    after = [line for line in lines if line.stop > proved]
    count = sum(line.start < wrong.length for line in after)
    while count and after[count - 1].step > wrong.step:
        count -= 1
    for line in after[count:]:
        if line.kind == "resume" or not 0 <= line.step <= wrong.step:
            break
        count += 1
    return after[:count]


def _of_steps(lines: Sequence[LogLine]) -> str:
    steps = [line.step for line in lines if line.record]
    if not steps:
        return ""
    which = "the record" if len(lines) == 1 else counted(len(steps), "record")
    first = min(steps)
    last = max(steps)
    return (
        f", {which} of step {first}" if first == last else f", {which} of steps {first} to {last}"
    )


def line_numbers(lines: Sequence[LogLine]) -> str:
    """Return the first and the last line number as text.

    >>> line_numbers([LogLine(3, 0, 9)]), line_numbers([LogLine(3, 0, 9), LogLine(4, 9, 12)])
    ('line 3', 'lines 3 to 4')
    """
    first, last = lines[0].number, lines[-1].number
    return f"line {first:,}" if first == last else f"lines {first:,} to {last:,}"


def _unreadable(lines: Sequence[LogLine]) -> list[Problem]:
    """Return problems for invalid lines, except a line cut off by a kill: the last line, or a line
    before a resume.
    """
    numbers = []
    for line, after in pairwise(lines):
        if not line.record and after.kind != "resume":
            numbers.append(line.number)
    if not numbers:
        return []
    more = f", nor are {len(numbers) - 1} more" if len(numbers) > 1 else ""
    text = f"{FILE}: line {numbers[0]} is not a record{more}, and no resume follows it"
    return [Problem("inconsistent", text, file=FILE)]
