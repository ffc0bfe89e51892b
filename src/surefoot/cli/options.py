"""Options of a verb's own among its arguments, their values, and the run that they are about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.config.paths import local_path, read_regular
from surefoot.errors import ConfigError

RUN_CHANGED = "--run-changed-program"
"""Of verbs that run the program of a run that is there: run it even if it has changed since, or others could have changed it."""


def option(arguments: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """The arguments without one option of the verb's own, and its value."""
    rest = list(arguments)
    for place, argument in enumerate(rest):
        if argument == name:
            if place + 1 == len(rest):
                raise ConfigError(f"{name} needs a value")
            return rest[:place] + rest[place + 2 :], rest[place + 1]
        if argument.startswith(f"{name}="):
            return rest[:place] + rest[place + 1 :], argument.partition("=")[2]
    return rest, None


def options(arguments: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """The arguments without an option that may be given several times, and its values."""
    rest, found = list(arguments), list[str]()
    while (taken := option(rest, name))[1] is not None:
        rest, value = taken
        found.append(str(value))
    return rest, found


def switch(arguments: Sequence[str], name: str) -> tuple[list[str], bool]:
    """The arguments without a flag that takes no value, and whether it was there."""
    return [argument for argument in arguments if argument != name], name in arguments


def whole(option: str, text: str, *, least: int = 1) -> int:
    """A whole number of `least` or more.

    >>> whole("--jobs", "2")
    2
    """
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ConfigError(f"{option} {text!r} is not a whole number, {least} or more")
    return int(text)


def number(option: str, text: str, *, example: str) -> float:
    """A finite number; `example` is one as it is typed.

    >>> number("--target", "1.5", example="0.2")
    1.5
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{option} {text!r} is not a number\n  write it as in {option} {example}")
    return found


def one_of(option: str, text: str, choices: tuple[Any, ...]) -> Any:
    """One of some words."""
    if text not in choices:
        raise ConfigError(f"{option} {text!r} is none of {', '.join(choices)}")
    return text


def run_directory(arguments: list[str]) -> Path:
    """The directory of the run that the first argument names: a path, a name below runs/, or latest."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("which run? give its directory, its name under runs/, or latest")
    given = arguments[0]
    local_path(given, setting="the run")
    if given == "latest":
        found = sorted(Path("runs").glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ConfigError(f"no run below {Path('runs').resolve()}")
        return found[-1].parent
    for path in (Path(given), Path("runs") / given):
        if (path / "config.toml").is_file():
            return path
    place = Path(given)
    if place.parent.name == "checkpoints" and place.is_dir():
        step = int("".join(filter(str.isdigit, place.name)) or 0)
        raise ConfigError(f"{given} is a checkpoint: give its run, {place.parent.parent}, and --checkpoint {step}")
    there = ", ".join(sorted(file.parent.name for file in Path("runs").glob("*/config.toml"))) or "none"
    if place.is_dir():
        raise ConfigError(f"{given} is a directory and no run: it holds no config.toml (below runs/: {there})")
    raise ConfigError(f"no run {given!r} here, nor below runs/ (there: {there})")


def file_text(path: Path) -> str:
    """What is in a file of UTF-8; `ConfigError` where it cannot be read."""
    try:
        return (read_regular(path) if path.is_file() else path.read_bytes()).decode()  # --config <(...) is a pipe
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigError(f"cannot read {path}: {why}") from problem
