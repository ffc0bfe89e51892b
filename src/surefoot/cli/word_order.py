"""The order of a command's arguments: words such as RUN may stand before, between or behind
flags.
"""

import importlib
import types
import typing
from collections.abc import Sequence
from typing import Any

from tyro.conf import UseAppendAction

from surefoot.cli.options import HELP, by_flag
from surefoot.config.tree import field_hints
from surefoot.errors import ConfigError
from surefoot.recipes import NAMES

_UNKNOWN = object()  # the type of a setting of the user's program
_TRUTHS = ("true", "false", "none")


def option_kinds(verb: str) -> list[type[Any]]:
    """Return the dataclasses of a subcommand's options."""
    module = importlib.import_module(f"surefoot.cli.{verb.replace('-', '_')}")
    if verb == "data":
        from surefoot.cli.data_look import DataLook

        return [module.Prepare, DataLook]
    return [getattr(module, verb.title().replace("-", ""))]


def words_first(verb: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a subcommand with the words that no flag takes before the flags.

    >>> words_first("diagnose", ["--all", "runs/a"])
    ['runs/a', '--all']
    >>> words_first("evaluate", ["--split", "val", "--workers=2", "runs/a"])
    ['runs/a', '--split', 'val', '--workers=2']

    As in other commands, -- ends the flags: what follows are words. Raises `ConfigError` for a word
    there that would be read as a flag.
    """
    after: Sequence[str] = ()
    if "--" in arguments:
        end = arguments.index("--")
        after = arguments[end + 1 :]
        _refuse_flags(after)
        arguments = arguments[:end]
    (_, leading), *groups = by_flag(arguments)
    hints: dict[str, Any] = dict.fromkeys(HELP, bool)
    for kind in option_kinds(verb):
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            hints[name] = hint
    switches = {name for name, hint in hints.items() if hint is bool}
    if any(name not in hints for name, _ in groups):
        # only predict takes words behind a recipe's settings, those of its own
        if verb == "predict":
            hints = _hints_of_recipes("predict", "Predict") | hints
        elif not leading:
            hints = _hints_of_recipes("config", "Config") | hints
    words = list(leading)
    flags: list[str] = []
    for name, (flag, *values) in groups:
        count = 0
        if name not in switches and "=" not in flag:
            count = _count_taken(values, hints.get(name, _UNKNOWN), has_words=bool(words))
        flags += [flag, *values[:count]]
        words += values[count:]
    return [*words, *after, *flags]


def _refuse_flags(words: Sequence[str]) -> None:
    for word in words:
        if word == "-h" or word.startswith("--"):
            raise ConfigError(
                "word-like-a-flag",
                problem=f"{word!r} behind -- begins like a flag",
                reason="such a word cannot be told from a flag",
                remedy=[
                    "a file or directory: ./NAME",
                    "an input of predict: on standard input, with - in its place",
                ],
                value=word,
            )


def _hints_of_recipes(module: str, kind: str) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for recipe in NAMES:
        imported = importlib.import_module(f"surefoot.recipes.{recipe}.{module}")
        hints |= field_hints(getattr(imported, kind))
    return hints


def _count_taken(values: Sequence[str], hint: Any, *, has_words: bool) -> int:
    """Return how many of the words behind a flag are its values."""
    if typing.get_origin(hint) is typing.Annotated:
        if UseAppendAction in hint.__metadata__:
            return 1
        hint = typing.get_args(hint)[0]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    if bool in members:
        return 1 if values and _is_choice(values[0], members) else 0
    lists = [member for member in members if typing.get_origin(member) in (tuple, Sequence)]
    if hint is _UNKNOWN or (lists and str in members):
        # it may be a list, but not while RUN is still to come
        return len(values) if has_words else 1
    if not lists:
        return 1
    elements = typing.get_args(lists[0])
    is_pair = typing.get_origin(lists[0]) is tuple and Ellipsis not in elements
    return len(elements) if is_pair else len(values)


def _is_choice(word: str, members: Sequence[Any]) -> bool:
    choices = [str(choice) for member in members for choice in typing.get_args(member)]
    return word.lower() in _TRUTHS or word in choices or (int in members and word.isdigit())
