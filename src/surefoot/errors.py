"""The exceptions of surefoot, one class per exit status: what an error says is data, and one
function makes the message.
"""

import contextlib
import functools
import json
import math
import os
import re
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self, TypeGuard, TypeVar, cast

# flags of commands that are no keyword of a function
_NO_KEYWORDS = {
    "nproc",
    "nnodes",
    "max_restarts",
    "preset",
    "config",
    "json",
    "all",
    "speedups",
    "tries",
    "port",
    "traceback",
}
# --schedule.name cosine is sf.schedules.cosine(...)
_NAMESPACES = {"optimizer": "optim", "schedule": "schedules"}
_MOST_PROBLEMS = 16  # of several, in one message
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # terminal control characters
_speech = {"flags": False}  # True: messages name command-line flags; False: keyword arguments
_frames = {"all": False}  # True: tracebacks keep surefoot's own frames, as --traceback asks
_PACKAGE = Path(__file__).parent


class Absent(Enum):
    """The value of a `Setting` that is named without one; None is a value."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_HOOKS = ("sys", "torch.distributed.distributed_c10d")  # the hooks of Python and torch


@dataclass(frozen=True)
class Setting:
    """A setting to type, with its value, or without one if a sentence has more to say of it.

    `name` is dotted, as in config.toml. An error shows it as a keyword in Python, as a flag on the
    command line.

    >>> str(Setting("schedule.warmup", "5%")), str(Setting("length"))
    ('warmup="5%"', 'length')
    """

    name: str
    value: Any = ABSENT

    def __str__(self) -> str:
        return self.as_flag() if _speech["flags"] else self.as_keyword()

    def as_flag(self) -> str:
        flag = flag_of(self.name)
        if self.value is ABSENT:
            return flag
        values = self.value if isinstance(self.value, tuple | list) else (self.value,)
        quoted = [shlex.quote(str(value)) for value in values]
        return " ".join([flag, *quoted])

    def as_keyword(self) -> str:
        namespace, _, leaf = self.name.rpartition(".")
        if self.name.replace("-", "_") in _NO_KEYWORDS:
            return self.as_flag()
        if self.value is ABSENT:
            return leaf
        if leaf == "name" and namespace in _NAMESPACES:
            return f"{namespace}=sf.{_NAMESPACES[namespace]}.{self.value}(...)"
        is_text = isinstance(self.value, str)
        value = json.dumps(self.value, ensure_ascii=False) if is_text else repr(self.value)
        return f"{leaf}={value}"


def flag_of(name: str) -> str:
    """Return the flag of a setting. A trailing underscore stays, as the command line reads it.

    >>> flag_of("optimizer.weight_decay"), flag_of("lambda_")
    ('--optimizer.weight-decay', '--lambda_')
    """
    words = name.rstrip("_")
    return f"--{words.replace('_', '-')}{name[len(words) :]}"


@dataclass(frozen=True)
class Command:
    """A command line to type, shown unchanged everywhere."""

    line: str

    def __str__(self) -> str:
        return self.line


Remedy = Setting | Command | str | tuple[str | Setting | Command, ...]
"""Something to type or to do. A tuple is a phrase, such as `("a longer", Setting("length"))`."""


class SurefootError(Exception):
    """The base class of surefoot's errors. Once a script has called `Run(...)`, an uncaught error
    ends it with its message and the class's `exit_status`.

    An error is data: a stable `code`, the `problem`, its `reason`, and alternative remedies.
    `fields` are the values that the error is about: setting, value, step, sample, path, line, rank,
    and what else a program may want to read. The message is made of these when it is shown. An
    error of your own code may have a finished text alone, and then has no code.

    >>> SurefootError("the disk is full").exit_status, issubclass(DataError, SurefootError)
    (1, True)
    >>> error = ConfigError(
    ...     "batch-size-not-divisible",
    ...     problem="batch_size = 6 cannot be split evenly over 4 ranks",
    ...     remedy=[Setting("batch_size", 4), Setting("batch_size", 8)],
    ...     setting="batch_size",
    ...     value=6,
    ... )
    >>> print(error)
    batch_size = 6 cannot be split evenly over 4 ranks
      try: batch_size=4, or batch_size=8
      [batch-size-not-divisible]
    >>> error.code, error.fields
    ('batch-size-not-divisible', {'setting': 'batch_size', 'value': 6})
    """

    exit_status = 1
    of_user = False  # True if user code in a loader worker raised the error: the chain is lost

    def __init__(
        self,
        code: str = "",
        *,
        problem: str | None = None,
        reason: str | None = None,
        remedy: Remedy | Sequence[Remedy] | None = None,
        **fields: Any,
    ) -> None:
        if problem is None and (reason is not None or remedy is not None or fields):
            raise TypeError("an error with a finished text has no reason, no remedy and no fields")
        super().__init__(code)
        self.code = code if problem is not None else None
        self.problem = problem
        self.reason = reason
        self.remedies: tuple[Remedy, ...] = ()
        if isinstance(remedy, list):
            self.remedies = tuple(remedy)
        elif remedy is not None:
            self.remedies = (remedy,)  # type: ignore[assignment]
        self.fields = {name: _plain_value(value) for name, value in fields.items()}
        self.places: tuple[str, ...] = ()  # outermost first, such as "joined at step 5 of 10"
        self.problems: tuple[SurefootError, ...] = ()  # of an error that stands for several

    def __str__(self) -> str:
        return message(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the error without its constructor, whose arguments differ by class."""
        return _error_again, (type(self), self.args), self.__dict__

    def inside(self, place: str) -> Self:
        """Return the error with the place that it happened in, shown before the problem."""
        error = copy(self)
        error.places = (place, *self.places)
        return error

    def to_dict(self) -> dict[str, Any]:
        """Return the error as JSON: class, exit status, code, message and fields."""
        described: dict[str, Any] = {
            "error": type(self).__name__,
            "exit_status": self.exit_status,
            "code": self.code,
            "message": str(self),
        }
        if self.places:
            described["places"] = list(self.places)
        if self.problems:
            described["problems"] = [problem.to_dict() for problem in self.problems]
        if self.problem is not None:
            described |= {"problem": self.problem, "reason": self.reason}
            described["remedies"] = [_remedy_as_json(remedy) for remedy in self.remedies]
        if self.fields:
            described["fields"] = {name: _as_json(value) for name, value in self.fields.items()}
        return described


class ConfigError(SurefootError):
    """An invalid setting or combination of settings.

    >>> import surefoot
    >>> surefoot.ddp(sync="never")
    Traceback (most recent call last):
    surefoot.errors.ConfigError: sync = "never": expected one of "auto", "last", "every"
      try: sync="every"
      [setting-of-wrong-type]
    """

    exit_status = 2


class DataError(SurefootError):
    """An unusable data set, file or sample.

    >>> import surefoot
    >>> try:
    ...     surefoot.data.load_documents("missing.txt")
    ... except DataError as problem:
    ...     print(problem.exit_status)
    3
    """

    exit_status = 3


class CheckpointError(SurefootError):
    """A failure to write, read or resume from a checkpoint.

    >>> import tempfile
    >>> import surefoot
    >>> try:
    ...     surefoot.load(tempfile.mkdtemp()).load_model()
    ... except CheckpointError as problem:
    ...     print(problem.code)
    run-without-checkpoint
    """

    exit_status = 4


class DivergedError(SurefootError):
    """A divergence: too many consecutive steps were not finite. `step` is the first of these steps;
    `seen` (JSON) and `text` describe it.

    >>> DivergedError("a-code", problem="loss not finite", step=412).step
    412
    """

    exit_status = 5

    def __init__(
        self,
        code: str = "",
        *,
        step: int | None = None,
        seen: Any = None,
        text: str | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(code, **parts)
        self.step = step
        self.seen = seen
        self.text = text
        if step is not None:
            self.fields |= {"step": step, "seen": seen}


class RankLostError(SurefootError):
    """The loss of a rank: the rank died, hung, or stopped before the other ranks. The message names
    the rank and its last step.

    >>> RankLostError("a-code", problem="rank 2 died after step 40").exit_status
    7
    """

    exit_status = 7


@contextlib.contextmanager
def speaking_in_flags() -> Iterator[None]:
    """Make messages inside the block name command-line flags instead of keyword arguments."""
    before = _speech["flags"]
    _speech["flags"] = True
    try:
        yield
    finally:
        _speech["flags"] = before


def message(error: SurefootError) -> str:
    """Return the message of an error: its problem, its reason, what to type, and its code.

    Settings are keywords, or flags inside `speaking_in_flags`.
    """
    places = "".join(f"{place}: " for place in error.places)
    if error.problems:
        texts = [str(problem) for problem in error.problems[:_MOST_PROBLEMS]]
        more = len(error.problems) - len(texts)
        if more:
            texts.append(f"and {more} more problems")
        return places + "\n".join(texts)
    if error.problem is None:
        return places + Exception.__str__(error)
    lines = [places + error.problem]
    if error.reason is not None:
        lines.append(error.reason)
    to_try = []
    for remedy in error.remedies:
        if isinstance(remedy, Setting):
            to_try.append(str(remedy))
        elif isinstance(remedy, tuple):
            to_try.append(" ".join(str(part) for part in remedy))
        elif isinstance(remedy, Command):
            lines.append(f"type: {remedy.line}")
        else:
            lines.append(remedy)
    if to_try:
        lines.append(f"try: {', or '.join(to_try)}")
    lines.append(f"[{error.code}]")
    return "\n  ".join("\n".join(lines).split("\n"))


def together(problems: Sequence[SurefootError]) -> SurefootError:
    """Return the only problem, or one `ConfigError` that stands for all of them."""
    if len(problems) == 1:
        return problems[0]
    singles: list[SurefootError] = []
    for problem in problems:
        singles += _singles(problem)
    error = ConfigError("several-problems", problem="several settings are wrong")
    error.problems = tuple(singles)
    return error


def _singles(problem: SurefootError) -> list[SurefootError]:
    """Return the problems that an error stands for, each in the places of that error."""
    if not problem.problems:
        return [problem]
    singles = []
    for single in problem.problems:
        placed = copy(single)
        placed.places = (*problem.places, *single.places)
        singles.append(placed)
    return singles


def end_scripts_without_traceback() -> None:
    """Install the hook that prints uncaught errors, unless it is there. `Run(...)` and commands
    call this; making an error changes nothing.
    """
    module = str(getattr(sys.excepthook, "__module__", ""))
    if not module.startswith("surefoot."):
        sys.excepthook = _Refusals(sys.excepthook)


def ending_scripts(kind: type[T]) -> type[T]:
    """Make the constructor of a class install that hook before anything is checked."""
    construct = vars(kind)["__init__"]

    @at_boundary
    @functools.wraps(construct)
    def init(self: T, *arguments: Any, **keywords: Any) -> None:
        end_scripts_without_traceback()
        construct(self, *arguments, **keywords)

    setattr(kind, "__init__", init)  # noqa: B010 (mypy)
    return kind


def keep_all_frames(value: bool) -> None:
    """Keep surefoot's own frames in tracebacks from now on, or cut them."""
    _frames["all"] = value


def _error_again(kind: type[SurefootError], arguments: tuple[Any, ...]) -> SurefootError:
    return kind.__new__(kind, *arguments)


def at_boundary(function: F) -> F:
    """Make a public function cut surefoot's frames from the errors that leave it.

    >>> @at_boundary
    ... def read(path):
    ...     raise DataError("empty")
    >>> try:
    ...     read("a.txt")
    ... except DataError as problem:
    ...     print(problem)
    empty
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as problem:
            cut_frames(problem)
            raise

    return cast("F", call)


def cut_frames(problem: BaseException) -> None:
    """Remove surefoot's frames from the tracebacks of an error and of its causes, as Keras does.
    Another error that surefoot's own code raised may be a bug, and keeps its frames.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = problem
    while cause is not None and cause not in chain and not _frames["all"]:
        cause.__traceback__ = _cut(cause)
        chain.append(cause)
        cause = behind(cause)


def _cut(problem: BaseException) -> TracebackType | None:
    """Return the traceback of an error without surefoot's frames."""
    entries: list[TracebackType] = []
    entry = problem.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    is_ours = [_is_ours(entry.tb_frame) for entry in entries]
    if not isinstance(problem, SurefootError) and is_ours[-1:] == [True]:
        return problem.__traceback__
    trace: TracebackType | None = None
    for index in reversed(range(len(entries))):
        frame = entries[index].tb_frame
        # the standard library calls our context managers
        is_between = frame.f_code.co_filename == contextlib.__file__ and any(is_ours[:index])
        if not is_ours[index] and not is_between:
            trace = TracebackType(trace, frame, entries[index].tb_lasti, entries[index].tb_lineno)
    return trace


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))  # a dataclass has no file
    path = Path(frame.f_code.co_filename)
    return module.startswith("surefoot.") or path.is_relative_to(_PACKAGE)


def _plain_value(value: Any) -> Any:
    """Return a value that can be pickled: anything else than plain values as its text."""
    if value is None or isinstance(value, bool | int | float | str | Path):
        return value
    if type(value) in (tuple, list):
        return type(value)(map(_plain_value, value))
    if isinstance(value, tuple | list):  # of a class of its own, such as a torch.Size
        return str(value)
    if isinstance(value, dict):
        return {_plain_value(key): _plain_value(entry) for key, entry in value.items()}
    return repr(value)


def _as_json(value: Any) -> Any:
    """Return a plain value as JSON: numbers that are not finite, and paths, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_as_json(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): _as_json(entry) for key, entry in value.items()}
    return value


def _remedy_as_json(remedy: Remedy) -> dict[str, Any]:
    match remedy:
        case Setting(name, value):
            if value is ABSENT:
                return {"setting": name}
            return {"setting": name, "value": _as_json(value)}
        case Command(line):
            return {"command": line}
        case tuple():
            parts = [part if isinstance(part, str) else _remedy_as_json(part) for part in remedy]
            return {"text": " ".join(str(part) for part in remedy), "parts": parts}
    return {"text": remedy}


def error_of_dict(
    described: Mapping[str, Any], *, kind: type[SurefootError] | None = None
) -> SurefootError:
    """Return an error of another process, as its `to_dict` described it; `kind` is a class of which
    the exit status does not tell.

    >>> error = DataError("a-code", problem="wrong", remedy=("a lower", Setting("lr")), row=3)
    >>> str(error_of_dict(error.to_dict())) == str(error), error_of_dict(error.to_dict()).fields
    (True, {'row': 3})
    """
    if kind is None:
        kind = SurefootError
        for subclass in (ConfigError, DataError, CheckpointError, DivergedError, RankLostError):
            if subclass.exit_status == described["exit_status"]:
                kind = subclass
    error = kind(described["message"])
    error.places = tuple(described.get("places", ()))
    error.problems = tuple(error_of_dict(problem) for problem in described.get("problems", ()))
    if described["code"] is not None:
        error.code = described["code"]
        error.problem = described["problem"]
        error.reason = described["reason"]
        error.remedies = tuple(_remedy_of_json(remedy) for remedy in described["remedies"])
    error.fields = dict(described.get("fields", {}))
    if isinstance(error, DivergedError):
        error.step = error.fields.get("step")
        error.seen = error.fields.get("seen")
    return error


def _named_of_json(described: Mapping[str, Any]) -> Setting | Command:
    if "command" in described:
        return Command(described["command"])
    return Setting(described["setting"], described.get("value", ABSENT))


def _remedy_of_json(described: Mapping[str, Any]) -> Remedy:
    if "setting" in described or "command" in described:
        return _named_of_json(described)
    if "parts" in described:
        phrase = list[str | Setting | Command]()
        for part in described["parts"]:
            phrase.append(part if isinstance(part, str) else _named_of_json(part))
        return tuple(phrase)
    return str(described["text"])


def out_of_range(setting: str, value: Any, meaning: str) -> ConfigError:
    """Return the refusal of a value; `meaning` says what it must be.

    >>> out_of_range("patience", 0, "1 evaluation or more").problem
    'patience = 0 must be 1 evaluation or more'
    """
    return ConfigError(
        "setting-out-of-range",
        problem=f"{setting} = {value!r} must be {meaning}",
        setting=setting,
        value=value,
    )


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message, or "" if the message is empty. Messages of
    torch can span pages.

    >>> (
    ...     first_line(ValueError("too long" + chr(10) + "in the third row")),
    ...     first_line(AssertionError()),
    ... )
    ('too long', '')
    """
    lines = str(problem).splitlines()
    return lines[0] if lines else ""


def visible(text: str) -> str:
    """Replace terminal control characters, because a model may generate any text.

    >>> visible("so it\\x1b[2J goes\\n")
    'so it\ufffd[2J goes\\n'
    """
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def error_lines(problem: BaseException) -> str:
    """Return an exception's message with the prefix "error:" on each line that is not indented."""
    lines = str(problem).splitlines() or [""]
    return "\n".join(line if line.startswith(" ") else f"error: {line}" for line in lines)


def error_as_json(problem: BaseException) -> dict[str, Any]:
    """Return an error as a JSON object. An error of torch, such as a lack of memory, has no code.

    >>> error_as_json(MemoryError("too large"))
    {'error': 'MemoryError', 'exit_status': 6, 'code': None, 'message': 'too large'}
    """
    if isinstance(problem, SurefootError):
        return problem.to_dict()
    return {
        "error": type(problem).__name__,
        "exit_status": 6,
        "code": None,
        "message": first_line(problem),
    }


def behind(problem: BaseException) -> BaseException | None:
    """Return the cause of an exception, or its context if Python would print the context. Returns
    None if both are absent.
    """
    if problem.__cause__ is not None or problem.__suppress_context__:
        return problem.__cause__
    return problem.__context__


def comes_of_user(problem: BaseException) -> bool:
    """Return True if the error or an exception in its chain passed through user code. Returns False
    for `RankLostError`.
    """
    if isinstance(problem, RankLostError):
        return False
    if isinstance(problem, SurefootError):
        is_of_user = problem.of_user
    else:
        is_of_user = line_of_user(problem.__traceback__) != ""
    if is_of_user:
        return True
    cause = behind(problem)
    return cause is not None and comes_of_user(cause)


def line_of_user(trace: TracebackType | None) -> str:
    """Return the file and line of the innermost user frame, to append to a message. Returns ""
    without a user frame.
    """
    place = ""
    for frame, line in traceback.walk_tb(trace):
        if _is_users(frame):
            place = f"\n  {frame.f_code.co_filename}, line {line}"
    return place


def print_uncaught(problem: BaseException, trace: TracebackType | None, others: Hook) -> None:
    """Print an uncaught error without a traceback if `is_refusal` is True. Otherwise call the hook
    `others`.
    """
    if is_refusal(problem, others) and sys.stderr is not None:
        print(visible(error_lines(problem) + line_of_user(trace)), file=sys.stderr)
    else:
        others = others.others if isinstance(others, _Refusals) else others
        if others.__module__ in _HOOKS:
            cut_frames(problem)
            trace = problem.__traceback__
        others(type(problem), problem, trace)


def is_refusal(problem: BaseException, others: Hook) -> TypeGuard[SurefootError]:
    """Return True for a `SurefootError` without user code in its chain, unless the user has
    installed a `sys.excepthook`.
    """
    others = others.others if isinstance(others, _Refusals) else others
    return (
        isinstance(problem, SurefootError)
        and others.__module__ in _HOOKS
        and not comes_of_user(problem)
    )


def leave_script(problem: SurefootError) -> None:
    """Exit a script with the error's exit status. Does nothing in an interactive interpreter."""
    if not hasattr(sys, "ps1") and not sys.flags.interactive:
        sys.exit(problem.exit_status)


FIRST_RANK_S = 10.0


def wait_for_first_rank(problem: Exception) -> None:
    """Wait `FIRST_RANK_S` seconds under torchrun on local ranks above 0: rank 0 may print the same
    error before torchrun ends all. Afterwards it is an error of this rank, which it names.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0":
        threading.Event().wait(FIRST_RANK_S)  # this module must not import the clock `time`
        name_rank(problem, os.environ.get("RANK", ""))


def name_rank(problem: Exception, rank: int | str) -> None:
    """Begin an error's message with the rank that raised the error."""
    if isinstance(problem, SurefootError) and not isinstance(problem, RankLostError):
        problem.places = (f"rank {rank}", *problem.places)


class _Refusals:
    """The hook that prints a refusal without its traceback; `others` is the hook before it."""

    def __init__(self, others: Hook) -> None:
        self.others = others

    def __call__(
        self, _kind: type[BaseException], problem: BaseException, trace: TracebackType | None
    ) -> None:
        is_asked_first = sys.excepthook is self  # the hook of ranks knows who speaks
        is_in_charge = self.others.__module__ in _HOOKS
        if is_asked_first and is_in_charge and isinstance(problem, SurefootError):
            wait_for_first_rank(problem)
        print_uncaught(problem, trace, self.others)
        if is_refusal(problem, self.others):
            leave_script(problem)


def passed_others(problem: BaseException) -> bool:
    """Return True if a traceback contains code outside surefoot, torch and the standard library."""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        path = Path(frame.f_code.co_filename).as_posix()
        package = re.search(r"(?:site|dist)-packages/(\w+)", path)
        if package is not None and package[1] not in ("surefoot", "torch"):
            return True
        if package is None and _is_users(frame):
            return True
    return False


def _is_users(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    # `python -c` has no file; `Path.is_file` raises in a directory that cannot be looked into
    is_code = os.path.isfile(path) or frame.f_globals.get("__name__") == "__main__"
    return is_code and is_own(path)


def is_own(path: Path) -> bool:
    """Return True for a file of the user, False for a file of the standard library, an installed
    package or surefoot.
    """
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return False
    standard_library = Path(traceback.__file__).parent
    return not path.is_relative_to(_PACKAGE) and not path.is_relative_to(standard_library)
