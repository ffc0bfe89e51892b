"""The text of `--help`, 80 columns wide, derived from dataclasses of options and settings. Imports
no torch.
"""

import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.config.setting import texts_of
from surefoot.config.tree import leaves
from surefoot.errors import flag_of

_WIDTH = 80
_INDENT = 26
_FIRST = 10  # settings that `--help` shows of a program that marks none
_LONGEST_CHOICE = 40  # characters of choices beside a flag; a longer list is in the text
_PLAIN = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Flag:
    """A flag or positional argument, as declared by its dataclass. `default` is `MISSING` if a
    value is required.
    """

    name: str
    hint: Any
    default: Any
    text: str
    group: str
    metavar: str = ""
    """Name of a positional argument in the help; "" for a flag."""
    is_switch: bool = False
    """Whether the flag takes no value; True for boolean options of a subcommand."""
    most_used: bool = False
    """Whether `--help` shows it; `--help-all` shows every flag."""
    origin: str = "default"
    """Where the default comes from: the dataclass ("default"), a preset or a file."""

    @property
    def typed(self) -> str:
        return self.metavar or flag_of(self.name)

    @property
    def summary(self) -> str:
        """The first sentence of the text."""
        first, stop, _ = self.text.partition(". ")
        return first + stop.strip()

    @property
    def choices(self) -> list[str]:
        """The allowed values; an empty list if any value is allowed."""
        values: list[Any] = []
        for member in _members(self.hint):
            if member is bool:
                values += [True, False]
            elif _is_choice(member):
                values += typing.get_args(member)
        return [str(value) for value in values if value is not None]


def flags_of(kind: type[Any], config: Any = None, *, switches: bool = False) -> Iterator[Flag]:
    """Yield the flags of a dataclass and its nested dataclasses, with defaults from `config`. With
    `switches`, boolean flags take no value.

    >>> from surefoot.recipes.gpt.config import Config
    >>> [(flag.typed, flag.default) for flag in flags_of(Config) if flag.group == "data"][-1]
    ('--data.cache', True)
    """
    metavars = _metavars(kind)
    for leaf in leaves(kind, config):
        yield Flag(
            leaf.name,
            leaf.hint,
            leaf.value,
            texts_of(leaf.owner).get(leaf.field.name, ""),
            leaf.group,
            metavar=metavars.get(leaf.name, ""),
            is_switch=switches and leaf.hint is bool,
            most_used=leaf.field.metadata.get("most_used", False),
        )


def _metavars(kind: type[Any]) -> dict[str, str]:
    """Return the names of the positional arguments in the help."""
    metavars = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if getattr(mark, "metavar", None):
                metavars[name] = mark.metavar
    return metavars


def most_used(flags: Sequence[Flag]) -> list[Flag]:
    """Return the flags that the declarations mark, or the first ten of a program that marks none."""
    return [flag for flag in flags if flag.most_used] or list(flags[:_FIRST])


def most_used_page(flags: Sequence[Flag]) -> str:
    """Format the most used flags, each with the first sentence of its text."""
    names = [flag.name for flag in flags]
    first = [replace(flag, text=flag.summary) for flag in most_used(flags)]
    return section("most used", first, names=names)


def settings_page(flags: Sequence[Flag]) -> str:
    """Format all flags in their groups, below the most used ones."""
    names = [flag.name for flag in flags]
    groups: dict[str, list[Flag]] = {}
    if any(flag.most_used for flag in flags):
        groups["most used"] = []  # comes first
    for flag in flags:
        group = "most used" if flag.most_used else flag.group
        groups.setdefault(group, []).append(flag)
    return "\n".join(section(name, members, names=names) for name, members in groups.items())


def section(title: str, flags: Sequence[Flag], *, names: Collection[str] = ()) -> str:
    """Return a titled section of the help text with a line or more per flag."""
    lines = [f"{title.replace('_', ' ')}:"]
    for flag in flags:
        lines += _lines(flag, names)
    return "\n".join([*lines, ""])


def _lines(flag: Flag, names: Collection[str]) -> list[str]:
    value, choices = _value(flag)
    text = f"{flag.text} {choices}"
    if flag.default is None:
        text = re.sub(r"\bNone: ", "Default: ", text)
    text = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda word: _as_flag(word[0], names), text)
    text = f"{text.strip()} {_default(flag)}".strip()
    left = f"  {flag.typed} {value}".rstrip()
    rows = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False) or [""]
    first = left
    if len(left) < _INDENT - 1:  # the text begins beside the flag
        first = f"{left:<{_INDENT}}{rows[0]}".rstrip()
        rows = rows[1:]
    return [first, *(f"{'':<{_INDENT}}{row}" for row in rows)]


def _as_flag(word: str, names: Collection[str]) -> str:
    return flag_of(word) if word in names else word


def _value(flag: Flag) -> tuple[str, str]:
    """Return the placeholder of a flag's value, and its choices as text if they are too long for a
    placeholder.
    """
    if flag.metavar or flag.is_switch:
        return "", ""
    if not all(map(_is_choice, _members(flag.hint))):
        return value_of(flag.hint), ""
    choices = "{" + ",".join(flag.choices) + "}"
    if len(choices) <= _LONGEST_CHOICE:
        return choices, ""
    return "NAME", f"One of {', '.join(flag.choices)}."


def value_of(hint: Any) -> str:
    """Return the placeholder that the help text prints for values of a type.

    >>> value_of(int | str | None), value_of(tuple[float, float] | None), value_of(str | Path)
    ('INT|TEXT', 'FLOAT FLOAT', 'PATH')
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        values = list(dict.fromkeys(map(value_of, _members(hint))))
        if "TEXT" in values and ("PATH" in values or "TEXT ..." in values):
            values.remove("TEXT")  # which the other says too
        return "|".join(values)
    if origin is Sequence or (origin is tuple and Ellipsis in arguments):
        return f"{value_of(arguments[0])} ..."
    if origin is tuple:
        return " ".join(map(value_of, arguments))
    return _PLAIN.get(hint, "NAME")


def _members(hint: Any) -> list[Any]:
    """Return the types of a union without None, or the one type."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint]
    return [member for member in typing.get_args(hint) if member is not types.NoneType]


def _is_choice(hint: Any) -> bool:
    return hint is bool or typing.get_origin(hint) is Literal


def _default(flag: Flag) -> str:
    if flag.default is MISSING:
        return "" if flag.metavar else "(required)"
    if flag.default is None or flag.default == () or (flag.is_switch and not flag.default):
        return ""
    text = str(flag.default)
    if isinstance(flag.default, tuple | list):
        text = " ".join(map(str, flag.default))
    return f"({flag.origin}: {text})"
