"""What surefoot raises: one class per exit status, and what it repeats of others' exceptions.

A message says what was found, where, the likely cause, and what to type next, in at most five lines. The command line
prints it without a traceback; a library user catches `SurefootError`, or one of its kinds.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


class SurefootError(Exception):
    """Anything surefoot refuses or gives up on; `exit_status` is what the command line ends with.

    A script that it ends prints its sentence and the script's own line, without frames.
    """

    exit_status = 1

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        if not isinstance(sys.excepthook, _Refusals):
            sys.excepthook = _Refusals(sys.excepthook)


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


class _Refusals:
    """A `sys.excepthook` for errors of ours; `others` takes the rest.

    One of ours that comes of an exception in the user's own code is left to `others` too: its frames say where. Notebooks and
    interactive sessions of IPython do not come this way.
    """

    def __init__(self, others: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> None:
        self.others = others

    def __call__(self, kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        """Print one exception that nobody has caught."""
        users = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
        cause = problem.__cause__
        of_user = cause is not None and any(
            _is_users(frame.filename) and frame not in users for frame in traceback.extract_tb(cause.__traceback__)
        )
        told_by_others = self.others is not sys.__excepthook__  # several ranks have a hook by which one of them speaks
        if not isinstance(problem, SurefootError) or of_user or sys.stderr is None or told_by_others:
            self.others(kind, problem, trace)
            return
        where = f"\n  {users[-1].filename}, line {users[-1].lineno}" if users else ""
        print(f"error: {problem}{where}", file=sys.stderr)


def passed_others(problem: BaseException) -> bool:
    """Whether an exception came through code that is neither ours, nor torch's, nor of the standard library."""
    files = [frame.filename for frame in traceback.extract_tb(problem.__traceback__)]
    packages = [re.search(r"(?:site|dist)-packages/(\w+)", Path(file).as_posix()) for file in files]
    return any(
        _is_users(file) if package is None else package[1] not in ("surefoot", "torch")
        for file, package in zip(files, packages, strict=True)
    )


def _is_users(file: str) -> bool:
    """Whether a file is the user's own: not of surefoot, nor an installed package, the standard library, or no file."""
    path = Path(file)
    installed = "site-packages" in path.parts or "dist-packages" in path.parts
    ours = path.is_relative_to(Path(__file__).parent)
    return path.is_file() and not installed and not ours and not path.is_relative_to(Path(traceback.__file__).parent)
