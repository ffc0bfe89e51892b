"""The exceptions of surefoot: one class per exit status, and the text that it prints of other exceptions.

A message says what was found, where, the likely cause, and what to type next; the command line prints it without a traceback.
"""

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeGuard

# A flag with its value, in advice on what to type: --precision fp32, --time-limit "9 min", --optimizer.lr 0.1, --run-dir DIR
_FLAG = re.compile(r"--([a-z][\w-]*)(?:\.([a-z][\w-]*))?(?:[ =](\"[^\"]*\"|'[^']*'|[\w.%*/,]*[\w%*]|\.\.\.))?")
_COMMANDS = re.compile(
    r"\b(surefoot|torchrun|srun|pip|py-spy|python[\d.]*) [\w./-]"
)  # lines that are typed in a shell stay as they are
_NO_KEYWORD = (
    "nproc",
    "nnodes",
    "max-restarts",
    "preset",
    "config",
    "json",
    "all",
    "speedups",
    "tries",
    "port",
    "traceback",
)
_PROSE = (
    "out",
    "and",
    "or",
    "in",
    "is",
    "to",
    "with",
    "as",
    "for",
    "by",
    "has",
    "itself",
    "needs",
    "takes",
    "if",
    "alone",
)
_NAMESPACES = {"optimizer": "optim", "schedule": "schedules"}  # --schedule.name cosine is sf.schedules.cosine(...)
_speech = {"flags": False}  # what this process calls a setting: flags on the command line, keywords in a script

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_HOOKS = ("sys", "torch.distributed.distributed_c10d")  # not the user's: Python's, and torch's, which names the rank


class SurefootError(Exception):
    """Anything surefoot refuses or gives up on; `exit_status` is what the command line ends with, and a script too.

    A script that it ends prints its sentence and the script's own line, without frames.

    >>> ConfigError("batch_size = 0").exit_status, isinstance(DataError(""), SurefootError)
    (2, True)
    """

    exit_status = 1
    of_user = False  # set on an error that another process sends: its chain of exceptions does not travel

    def __init__(self, *parts: Any) -> None:
        super().__init__(*(as_typed_here(part) if isinstance(part, str) else part for part in parts))
        if not isinstance(sys.excepthook, _Refusals):
            sys.excepthook = _Refusals(sys.excepthook)


class ConfigError(SurefootError):
    """A setting, or a combination of settings, that cannot be run.

    >>> import surefoot
    >>> surefoot.ddp(sync="never")
    Traceback (most recent call last):
    surefoot.errors.ConfigError: sync = 'never': auto, last or every
    """

    exit_status = 2


class DataError(SurefootError):
    """A data set, file or sample that cannot be used as it is.

    >>> import surefoot
    >>> try:
    ...     surefoot.data.load_documents("missing.txt")
    ... except DataError as problem:
    ...     print(problem.exit_status)
    3
    """

    exit_status = 3


class CheckpointError(SurefootError):
    """A checkpoint that cannot be written, read, or continued from.

    >>> import surefoot
    >>> surefoot.load("missing").load_model()
    Traceback (most recent call last):
    surefoot.errors.CheckpointError: missing holds no checkpoint
    """

    exit_status = 4


class DivergedError(SurefootError):
    """Too many steps in a row were not finite, the first at `step`; `seen` (JSON) and `text` say what was seen in it.

    >>> DivergedError("loss not finite", step=412).step
    412
    """

    exit_status = 5

    def __init__(self, message: str, *, step: int | None = None, seen: Any = None, text: str | None = None) -> None:
        super().__init__(message)
        self.step, self.seen, self.text = step, seen, text


class RankLostError(SurefootError):
    """Another rank of this run died, hangs, or went a way of its own: which one, and how far it was.

    >>> RankLostError.exit_status
    7
    """

    exit_status = 7


@contextmanager
def speaking_in_flags() -> Iterator[None]:
    """Have messages name flags, as on the command line; elsewhere they name keywords."""
    before, _speech["flags"] = _speech["flags"], True
    try:
        yield
    finally:
        _speech["flags"] = before


def as_typed_here(text: str) -> str:
    """A message whose advice is written in flags, in keywords if a script is running.

    >>> as_typed_here('try: --precision fp32, or leave --compile out')
    'try: precision="fp32", or leave compile out'
    >>> as_typed_here("try: --keep-last 1 --optimizer.lr 0.1, or type surefoot resume RUN --workers 2")
    'try: keep_last=1 lr=0.1, or type surefoot resume RUN --workers 2'
    """
    if _speech["flags"]:
        return text
    return "\n".join("".join(_in_keywords(part) for part in _parts(line)) for line in text.split("\n"))


def _parts(line: str) -> tuple[str, str]:
    """A line up to a command that it says to type, and from there on."""
    command = _COMMANDS.search(line)
    return (line, "") if command is None else (line[: command.start()], line[command.start() :])


def _in_keywords(text: str) -> str:
    if _COMMANDS.match(text):
        return text

    def keyword(flag: re.Match[str]) -> str:
        name, leaf, value = flag.groups()
        if name in _NO_KEYWORD:
            return flag[0]
        own = (leaf or name).replace("-", "_")
        if value is None or value in _PROSE:
            return own + flag[0][flag.end(2 if leaf else 1) - flag.start() :]
        if leaf == "name" and name in _NAMESPACES:
            return f"{name}=sf.{_NAMESPACES[name]}.{value}(...)"
        is_code = re.fullmatch(r"[-\d.e]+|True|False|None|[A-Z_]+|\.\.\.|[\"'].*", value)
        return f"{own}={value}" if is_code else f'{own}="{value}"'

    return _FLAG.sub(keyword, text)


def refuse_all(wrong: Mapping[str, bool]) -> None:
    """Raise one `ConfigError` with each of the problems that holds."""
    if problems := [problem for problem, holds in wrong.items() if holds]:
        raise ConfigError("\n".join(problems))


def first_line(problem: BaseException) -> str:
    """The first line of what an exception says, which may be nothing: messages of torch go on with pages.

    >>> first_line(ValueError("too long" + chr(10) + "in the third row")), first_line(AssertionError())
    ('too long', '')
    """
    return (str(problem).splitlines() or [""])[0]


def error_lines(problem: BaseException) -> str:
    """The printed text of an error without traceback; its further lines are indented."""
    return "\n".join(line if line.startswith(" ") else f"error: {line}" for line in str(problem).splitlines() or [""])


def behind(problem: BaseException) -> BaseException | None:
    """The cause or the hidden context of an exception, as Python prints them; None if it has neither."""
    return problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)


def comes_of_user(problem: BaseException) -> bool:
    """Whether an error comes of an exception that went through the user's own code, or hides one; never of a lost rank's end."""
    if isinstance(problem, RankLostError):
        return False
    own = problem.of_user if isinstance(problem, SurefootError) else line_of_user(problem.__traceback__) != ""
    before = behind(problem)
    return own or (before is not None and comes_of_user(before))


def line_of_user(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code in a traceback, as a further line of a message; "" if it has none."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace) if _is_users(frame)]
    return f"\n  {lines[-1][0]}, line {lines[-1][1]}" if lines else ""


def print_uncaught(problem: BaseException, trace: TracebackType | None, others: Hook) -> None:
    """Print a refusal without frames; `others` takes what comes of the user's own code, or all if it is the user's hook."""
    if is_refusal(problem, others) and sys.stderr is not None:
        print(error_lines(problem) + line_of_user(trace), file=sys.stderr)
    else:
        others = others.others if isinstance(others, _Refusals) else others
        others(type(problem), problem, trace)


def is_refusal(problem: BaseException, others: Hook) -> TypeGuard[SurefootError]:
    """Whether an uncaught error is ours alone, and no hook of the user's wants it."""
    others = others.others if isinstance(others, _Refusals) else others
    return isinstance(problem, SurefootError) and others.__module__ in _HOOKS and not comes_of_user(problem)


def leave_script(problem: SurefootError) -> None:
    """End a script with the exit status of the command line; in an excepthook. At a prompt the person goes on typing."""
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        sys.exit(problem.exit_status)


def wait_for_first_rank() -> None:
    """Under torchrun wait 10 s: local rank 0 may meet the same error and print it, and torchrun then ends this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0":
        threading.Event().wait(10.0)  # `time`, a clock, is out of bounds for all that choices can reach


class _Refusals:
    """A `sys.excepthook` for errors of ours. Notebooks and interactive sessions of IPython do not come this way."""

    def __init__(self, others: Hook) -> None:
        self.others = others

    def __call__(self, _kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        """Print one exception that nobody has caught."""
        if isinstance(problem, SurefootError) and self.others.__module__ in _HOOKS:  # others agree on who prints
            wait_for_first_rank()
        print_uncaught(problem, trace, self.others)
        if is_refusal(problem, self.others):
            leave_script(problem)


def passed_others(problem: BaseException) -> bool:
    """Whether an exception came through code that is neither ours, nor torch's, nor of the standard library."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        package = re.search(r"(?:site|dist)-packages/(\w+)", Path(frame.f_code.co_filename).as_posix())
        if _is_users(frame) if package is None else package[1] not in ("surefoot", "torch"):
            return True
    return False


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's own code, and not made up."""
    path = Path(frame.f_code.co_filename)
    return (path.is_file() or frame.f_globals.get("__name__") == "__main__") and is_own(path)  # `python -c` has no file


def is_own(path: Path) -> bool:
    """Whether code in a file is the user's: neither the standard library's, nor an installed package's, nor surefoot's."""
    others = (Path(__file__).parent, Path(traceback.__file__).parent)
    return {"site-packages", "dist-packages"}.isdisjoint(path.parts) and not any(map(path.is_relative_to, others))
