"""The options of a subcommand: parsing with tyro, help and error messages. `cli/settings.py` parses
the settings of a run.
"""

import dataclasses
import inspect
import io
import math
import re
import shlex
import sys
import typing
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Positional, arg

from surefoot.cli.help import Flag, flags_of, most_used_page, section
from surefoot.config.closest import closest
from surefoot.config.paths import run_path
from surefoot.config.setting import number
from surefoot.config.tree import nearest, unknown_setting
from surefoot.errors import ConfigError, Setting, out_of_range, together
from surefoot.tracking.run_reader import missing_run, refuse_other_format

T = TypeVar("T")
_WORDS = {  # messages of tyro and Python -> plain wording
    r"Error parsing (--[\w.-]+): ": r"\1 ",
    r"no type matching .*- <class '\w+'>: ": "",  # from the last type of a union
    r"could not convert string to float: ('[^']*')": r"\1 is not a number",
    r"invalid literal for int\(\) with base 10: ('[^']*')": r"\1 is not a whole number",
    r"Missing value for argument '?(--[\w.-]+)'?\.? Expected \d+ values?\.?": r"\1 needs a value",
    r"Unrecognized options?: ": "unknown argument: ",
}
HELP = ("help", "help_all")
"""The flags that print a help: a short one, and one with all settings."""
_HELP_WITH = {"options": "--help", "settings": "--help-all"}  # which flag prints all of them
WHICH_RUN = "which run? give its directory, its name under runs/, or latest"


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """The RUN argument of a subcommand."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """A run's directory, its name under runs/, or latest."""


@dataclass(frozen=True, kw_only=True)
class ChangedProgramOption:
    """The option of subcommands that execute the program of an existing run."""

    run_changed_program: bool = False
    """Execute the run's program even if it has changed since the start, or if other users can write
    to it.
    """


@dataclass(frozen=True, kw_only=True)
class SavedRunOptions(ChangedProgramOption, RunOption):
    """The run and checkpoint of a subcommand that executes the run's program."""

    checkpoint: str | None = None
    """Checkpoint to use: newest, best, or a step. "average 5" averages the weights of the last
    five.
    """


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """The program to run, and a file of its settings."""

    what: Positional[Annotated[str, arg(metavar="RECIPE|FILE.py:build")]]
    """gpt, translation, images or finetune; or your own function that returns a surefoot.Run."""
    config: str | None = None
    """A TOML file of settings."""


def limited(default: Any, *, min_value: int, most_used: bool = False) -> Any:
    """Return an option field for an integer of at least `min_value`."""
    metadata = {"check": number(min_value=min_value), "most_used": most_used}
    return dataclasses.field(default=default, metadata=metadata)


def by_flag(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (name, arguments) of each flag: the flag as typed, then its values. Leading arguments
    have the name "".

    >>> by_flag(["gpt", "--seed", "3", "--optimizer.weight-decay=0.1"])
    [('', ['gpt']), ('seed', ['--seed', '3']), ('optimizer.weight_decay', ['--optimizer.weight-decay=0.1'])]
    """
    groups: list[tuple[str, list[str]]] = [("", [])]
    for argument in arguments:
        if argument == "-h" or argument.startswith("--"):
            flag = "--help" if argument == "-h" else argument
            groups.append((flag[2:].partition("=")[0].replace("-", "_"), [flag]))
        else:
            groups[-1][1].append(argument)
    return groups


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return True for arguments with --help, -h or --help-all."""
    return any(name in HELP for name, _ in by_flag(arguments))


def asks_for_whole_help(arguments: Sequence[str]) -> bool:
    """Return True for arguments with --help-all."""
    return "help_all" in dict(by_flag(arguments))


def without(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the arguments without some flags and their values.

    >>> without(["gpt", "--seed", "3", "--report=False"], ["seed"])
    ['gpt', '--report=False']
    """
    return [word for name, words in by_flag(arguments) if name not in names for word in words]


def flag_text(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of a flag as typed; the last occurrence counts. Returns None if the flag is
    absent.

    >>> flag_text(["gpt", "--optimizer.betas", "0.9", "0.95", "--seed=3"], "optimizer.betas")
    '0.9 0.95'
    """
    text = None
    for flag, words in by_flag(arguments):
        if flag == name:
            _, equals, value = words[0].partition("=")
            text = value if equals else " ".join(words[1:])
    return text


def target(
    kind: type[Any], arguments: Sequence[str], *, verb: str, missing: str = WHICH_RUN
) -> str:
    """Return the first argument. Without arguments, print the help if requested, else raise
    `ConfigError`.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0]
    if asks_for_help(arguments):
        print(f"{inspect.cleandoc(kind.__doc__ or '')}\n")
        print_options([kind], verb, is_whole=asks_for_whole_help(arguments))
        sys.exit(0)
    if arguments and not arguments[0].startswith("--"):
        raise ConfigError(
            "argument-unknown",
            problem=f"unknown argument: {arguments[0]}",
            reason=f"all options: surefoot {verb} --help",
            value=arguments[0],
        )
    refuse_misspelled(arguments, kind, verb=verb)
    raise missing_argument(missing, arguments, verb=verb)


def missing_argument(missing: str, arguments: Sequence[str], *, verb: str) -> ConfigError:
    """Return the error for arguments without the word that a subcommand needs."""
    values = [" ".join(words) for name, words in by_flag(arguments) if name and len(words) > 1]
    return ConfigError(
        "argument-missing",
        problem=missing,
        reason=f"read as flags with their values: {', '.join(values)}" if values else None,
        remedy=f"give it before the flags: surefoot {verb} ..." if values else None,
        verb=verb,
    )


def verb_options(
    kind: type[T],
    arguments: Sequence[str],
    *,
    verb: str,
    missing: str | None = None,
    but: Collection[str] = (),
    help_goes_on: bool = False,
) -> tuple[T, list[str]]:
    """Parse the options of a subcommand, except those in `but`, and return the other arguments as
    settings. A missing first argument raises the error `missing`. The process exits after printing
    help, unless `help_goes_on` is True."""
    if missing is not None:
        target(kind, arguments, verb=verb, missing=missing)
    names = {"", *option_names(kind)} - set(but)
    if asks_for_help(arguments):
        print(f"{inspect.cleandoc(kind.__doc__ or '')}\n")
        if not help_goes_on:
            print_options([kind], verb, is_whole=asks_for_whole_help(arguments))
            sys.exit(0)
    words: list[str] = []
    others: list[str] = []
    for name, group in by_flag(arguments):
        if name in names:
            words += group
        else:
            others += group
    options: Any = parse(
        kind, words, verb=verb, flags="options", config=(tyro.conf.FlagCreatePairsOff,)
    )
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise out_of_range(field.name, value, "a finite number")
        check = field.metadata.get("check")
        if check is not None and value is not None:
            check(value, setting=field.name)
    return options, others


def only_options(
    kind: type[T], arguments: Sequence[str], *, verb: str, missing: str = WHICH_RUN
) -> T:
    """Parse the arguments of a verb that takes no settings of a run; refuse all other flags."""
    options, rest = verb_options(kind, arguments, verb=verb, missing=missing)
    refuse_unknown(
        [group for group in by_flag(rest) if group[0]],
        option_names(kind),
        verb=verb,
        flags="options",
    )
    return options


def option_names(kind: type[Any]) -> list[str]:
    """Return the names of a subcommand's flags."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = []
    for field in dataclasses.fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Positional not in marks:
            names.append(field.name)
    return names


def print_options(
    kinds: Sequence[type[Any]], verb: str, *, is_whole: bool, but: Collection[str] = ()
) -> None:
    """Print the arguments and flags of a subcommand once, except the names in `but`. Unless
    `is_whole`, a subcommand that marks flags as most used prints these, and how to see all.
    """
    by_name: dict[str, Flag] = {}
    for kind in kinds:
        for flag in flags_of(kind, switches=True):
            by_name.setdefault(flag.name, flag)
    flags = [flag for name, flag in by_name.items() if name not in but]
    arguments = [flag for flag in flags if flag.metavar]
    options = [flag for flag in flags if not flag.metavar]
    if arguments:
        print(section("arguments", arguments))
    if any(flag.most_used for flag in options) and not is_whole:
        print(f"{most_used_page(options)}\nAll {len(options)} options: surefoot {verb} --help-all")
    elif options:
        print(section(f"options of {verb}", options))


def find_run(name: str, *, others: Sequence[str] = ()) -> Path:
    """Return the directory of a run from its path, its name below runs/, or latest. The error for a
    missing run says the order of the arguments if one of the `others` is a run.
    """
    directory = run_path(name, setting="the run")
    if name == "latest":
        runs = sorted(Path("runs").glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
        if runs:
            newest = runs[-1].parent
            refuse_other_format(newest)
            return newest
        raise missing_run(directory, Path("runs"))
    for path in (directory, Path("runs") / name):
        if (path / "config.toml").is_file():
            refuse_other_format(path)
            return path
    if directory.parent.name == "checkpoints" and directory.is_dir():
        step = int("".join(filter(str.isdigit, directory.name)) or 0)
        run = directory.parent.parent
        raise ConfigError(
            "checkpoint-in-place-of-run",
            problem=f"{name} is a checkpoint, not a run",
            remedy=(f"name its run, {run}, and add", Setting("checkpoint", step)),
            path=directory,
            run=run,
            step=step,
        )
    for other in others:
        if any((path / "config.toml").is_file() for path in (Path(other), Path("runs") / other)):
            raise ConfigError(
                "run-not-first",
                problem=f"no run {name}, but {other} is a run",
                remedy=f"name the run first: {other} {shlex.quote(name)}",
                run=other,
                value=name,
            )
    raise missing_run(directory, Path("runs"))


def parse(
    kind: type[T], arguments: Sequence[str], *, verb: str, flags: str = "settings", **more: Any
) -> T:
    """Parse the arguments with tyro. Raises `ConfigError` with tyro's first sentence in plain
    wording and the help command of `flags`.
    """
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            options: T = tyro.cli(kind, args=list(arguments), prog=f"surefoot {verb}", **more)
            return options
    except SystemExit as end:
        if not end.code:
            raise
        help_flag = _HELP_WITH[flags]
        raise ConfigError(
            "flags-not-understood",
            problem=_unboxed(errors.getvalue()),
            reason=f"all {flags}: surefoot {verb} {help_flag}",
            verb=verb,
            arguments=list(arguments),
        ) from None


def _unboxed(text: str) -> str:
    """Return the problem that tyro's error names, in plain wording.

    This is the only place that reads tyro's text. tyro gives its errors as data only in a private
    module that any release may change, and that older releases lack. What is not recognized here
    is shown as tyro says it, and the error's fields do not come from the text.
    """
    # tyro draws its box with dashes if the terminal supports only ASCII
    lines = [line.strip().strip("│|").strip() for line in text.splitlines()]
    edges = [
        index for index, line in enumerate(lines) if line.startswith(("─", "╭", "╰", "---", "+--"))
    ]
    if edges:  # the text stands between the first two
        first, end = [*edges, len(lines)][:2]
        lines = lines[first + 1 : end]
    problem = " ".join(lines) or text.strip()
    for pattern, words in _WORDS.items():
        problem = re.sub(pattern, words, problem)
    choice = re.search(
        r"invalid choice '([^']*)' for argument '?(--[\w.-]+).* Expected one of \((.*)\)", problem
    )
    if choice is not None:
        choices = re.findall(r"'([^']*)'", choice[3])
        meant = closest(choice[1], choices)
        question = f". Did you mean {meant}?" if meant else ""
        return f"{choice[2]} {choice[1]!r} is not one of {', '.join(choices)}{question}"
    return problem


def refuse_unknown(
    groups: Sequence[tuple[str, list[str]]],
    known: Sequence[str],
    *,
    verb: str,
    flags: str = "settings",
) -> None:
    """Raise `ConfigError` if `groups` (of `by_flag`) is not empty, with the nearest known name and
    its value for each.
    """
    help_flag = _HELP_WITH[flags]
    problems = []
    for name, words in groups:
        problem = unknown_setting(
            name,
            known,
            value=flag_text(words, name) or "",
            kind=flags.removesuffix("s"),
            reason=f"all {flags}: surefoot {verb} {help_flag}",
        )
        problems.append(problem)
    if problems:
        raise together(problems)


def refuse_misspelled(arguments: Sequence[str], kind: type[Any], *, verb: str) -> None:
    """Raise `ConfigError` if an unknown flag is near an option of the subcommand. What follows the
    flag may be the run's name.
    """
    known = option_names(kind)
    misspelled = []
    for name, words in by_flag(arguments):
        if name and name not in known and nearest(name, known) is not None:
            misspelled.append((name, words[:1]))
    refuse_unknown(misspelled, known, verb=verb, flags="options")


def check_excluded(option: str, others: Sequence[str], *, reason: str) -> None:
    """Raise `ConfigError` if there are `others`, which were given together with an option that
    leaves them without effect.
    """
    if others:
        raise ConfigError(
            "option-excluded",
            problem=f"{option} excludes {', '.join(others)}",
            reason=reason,
            remedy=[("leave out", Setting(name)) for name in others],
            setting=option,
            others=list(others),
        )


def needs_option(what: str, option: str, example: str | int) -> ConfigError:
    """Return the error for something that needs an option."""
    return ConfigError(
        "option-missing",
        problem=f"{what} needs {option}",
        remedy=("add", Setting(option, example)),
        setting=option,
    )


def not_of(option: str, kind: str, what: Path | str) -> ConfigError:
    """Return the error for an option of another `kind` of thing than the one that is named."""
    return ConfigError(
        "option-of-other-kind",
        problem=f"{option} is for {kind}, and {what} is none",
        remedy=("leave out", Setting(option)),
        setting=option,
        what=what,
    )
