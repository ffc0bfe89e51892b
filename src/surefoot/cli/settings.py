"""Flags over files over defaults: the configuration that a command line means, and the origin of every value."""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

from surefoot.config import flatten, layered, nearest
from surefoot.errors import ConfigError

_WORDS = {  # how tyro and Python say it -> how a person does
    r"could not convert string to float: ('[^']*')": r"\1 is not a number",
    r"invalid literal for int\(\) with base 10: ('[^']*')": r"\1 is not a whole number",
    r"Missing value for argument '?(--[\w.-]+)'?\.? Expected \d+ values?\.?": r"\1 needs a value",
    r"Unrecognized options?: ": "what is meant by: ",
}
Layer = tuple[str, Mapping[str, Any]]  # origin, values by dotted name


def configured(
    kind: type[Any], layers: Sequence[Layer], arguments: Sequence[str], *, verb: str, own: Sequence[str] = ()
) -> tuple[Any, dict[str, str]]:
    """An instance of `kind` from its defaults, the layers and last the flags; and where each value came from.

    `own` are options of the verb's own, which may have been meant by one that is unknown.

    Raises `ConfigError` in at most five lines. `--help` prints all settings and leaves with 0.
    """
    flags = [argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")]
    known = dict(_names(kind))
    unknown = [name for name in flags if name not in known and name != "help"]
    if unknown:
        raise ConfigError(
            "\n  ".join(_unknown(name, [*own, *known]) for name in unknown[:3]) + f"\n  all settings: {verb} --help"
        )
    below = {name: value for _, values in layers for name, value in values.items()}
    asked = [name for name, required in known.items() if required and name in flags and name not in below]
    base = _with_gaps(kind, below) if asked else layered(kind, layers)[0]  # a gap is filled by its flag
    parsed = flatten(_parsed(kind, base, _with_truth(arguments, set(_truths(kind))), verb))
    return layered(kind, [*layers, ("flag", {name: value for name, value in parsed.items() if name in flags})])


def typed(kind: type[Any], setting: str, text: str) -> list[str]:
    """The arguments that give a setting the value that one text is; the parts of a list stand in it between blanks.

    >>> from surefoot.recipes.gpt import Config
    >>> typed(Config, "optimizer.betas", "0.9 0.95"), typed(Config, "length", "20 steps")
    (['--optimizer.betas', '0.9', '0.95'], ['--length', '20 steps'])
    """
    hint = dict(_hints(kind)).get(setting.replace("-", "_"))
    members = [hint, *typing.get_args(hint)]
    many = any(typing.get_origin(member) is tuple for member in members) and text != "None"
    return [f"--{setting}", *(text.split() if many else [text])]


def _hints(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _hints(typing.cast("type[Any]", hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def _with_truth(arguments: Sequence[str], truths: set[str]) -> list[str]:
    """The arguments with True and False as tyro writes them: `--compile` alone and `--compile=true` mean `--compile True`.

    >>> _with_truth(["--compile", "--tied=false", "--seed", "true"], {"compile", "tied"})
    ['--compile', 'True', '--tied=False', '--seed', 'true']
    """
    found: list[str] = []
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        before = found[-1] if found else ""
        if name[2:].replace("-", "_") in truths and argument.startswith("--"):
            found.append(f"{name}={_as_truth(value)}" if equals else name)
            alone = place + 1 == len(arguments) or arguments[place + 1].startswith("--")
            found += ["True"] if alone and not equals else []
        else:
            of_truth = before.startswith("--") and "=" not in before and before[2:].replace("-", "_") in truths
            found.append(_as_truth(argument) if of_truth else argument)
    return found


def _as_truth(value: str) -> str:
    return value.capitalize() if value.lower() in ("true", "false", "none") else value


def _parsed(kind: type[Any], base: Any, arguments: Sequence[str], verb: str) -> Any:
    import tyro

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, args=list(arguments), default=base, prog=verb, config=(tyro.conf.FlagConversionOff,))
    except SystemExit as end:
        if not end.code:
            raise
        raise ConfigError(f"{_unboxed(said.getvalue())}\n  all settings: {verb} --help") from None


def _unboxed(text: str) -> str:
    """What tyro says in the first part of its box, as one line; the box is of dashes where the terminal knows ASCII alone."""
    lines = [line.strip().strip("│|").strip() for line in text.splitlines()]
    edges = [place for place, line in enumerate(lines) if line.startswith(("─", "╭", "╰", "---", "+--"))]
    first, last = (*edges, len(lines))[:2] if edges else (-1, len(lines))
    found = " ".join(lines[first + 1 : last]) or text.strip()
    for pattern, words in _WORDS.items():
        found = re.sub(pattern, words, found)
    choice = re.search(r"invalid choice '([^']*)' for argument .* Expected one of \((.*)\)", found)
    if choice is not None:
        meant = difflib.get_close_matches(choice[1].replace("_", "-"), re.findall(r"'([^']*)'", choice[2]), n=1)
        found += f" Did you mean {meant[0]}?" if meant else ""
    return found


def _unknown(name: str, known: Sequence[str]) -> str:
    meant = nearest(name, known)
    dashed = name.replace("_", "-")
    return f"unknown setting --{dashed}" + (f": did you mean --{meant.replace('_', '-')}?" if meant else "")


def _names(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Dotted names of all settings, and whether each must be given."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _names(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _has_no_default(field)


def _truths(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings that are true or false."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _truths(typing.cast("type[Any]", hint), f"{prefix}{name}.")
        elif hint is bool or bool in typing.get_args(hint):
            yield f"{prefix}{name}"


def _with_gaps(kind: type[Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    import tyro

    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            given[field.name] = _with_gaps(hints[field.name], values, f"{name}.")
        elif name in values:
            given[field.name] = values[name]
        elif _has_no_default(field):
            given[field.name] = tyro.MISSING
    return kind(**given)


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
