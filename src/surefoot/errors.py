"""What surefoot raises: one class per exit status, and what it repeats of others' exceptions.

A message says what was found, where, the likely cause, and what to type next, in at most five lines. The command line
prints it without a traceback; a library user catches `SurefootError`, or one of its kinds.
"""

from __future__ import annotations

from typing import Any


class SurefootError(Exception):
    """Anything surefoot refuses or gives up on; `exit_status` is what the command line ends with."""

    exit_status = 1


class ConfigError(SurefootError):
    """A setting, or a combination of settings, that cannot be run."""

    exit_status = 2


class DataError(SurefootError):
    """A data set, file or sample that cannot be used as it is."""

    exit_status = 3


class CheckpointError(SurefootError):
    """A checkpoint that cannot be written, read, or continued from."""

    exit_status = 4


class DivergedError(SurefootError):
    """Too many steps in a row had a loss or a gradient that was not finite: the first is `step`, where that is known.

    `seen` is what was seen when that step was made again, as JSON, and `text` the same for people.
    """

    exit_status = 5

    def __init__(self, message: str, *, step: int | None = None, seen: Any = None, text: str | None = None) -> None:
        super().__init__(message)
        self.step, self.seen, self.text = step, seen, text


class RankLostError(SurefootError):
    """Another rank of this run died, hangs, or went a way of its own: which one, and how far it was."""

    exit_status = 7


def first_line(problem: BaseException) -> str:
    """The first line of what an exception says, which may be nothing: messages of torch go on with pages.

    >>> first_line(ValueError("too long" + chr(10) + "in the third row")), first_line(AssertionError())
    ('too long', '')
    """
    return (str(problem).splitlines() or [""])[0]


def error_lines(problem: BaseException) -> str:
    """What is printed of an error that needs no traceback; what is said of it further is indented."""
    return "\n".join(line if line.startswith(" ") else f"error: {line}" for line in str(problem).splitlines())
