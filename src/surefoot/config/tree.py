"""Conversion between configuration dataclasses and values by dotted name ("optimizer.lr"), as in
flags and files. One error lists all problems."""

import contextlib
import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from surefoot.config.closest import closest
from surefoot.config.keywords import same_as, text_for
from surefoot.config.paths import path_text
from surefoot.errors import ABSENT, ConfigError, Remedy, Setting, together

T = TypeVar("T")
LEADS: dict[str, Any] = {"leads": True}
"""Field metadata: if a layer changes this field, values of its sibling fields in lower layers are
dropped.
"""
STAYS: dict[str, Any] = {"stays": True}
"""Field metadata: a change of a sibling `LEADS` field does not drop values of this field."""
SWITCHES = "switches"
"""Key of field metadata, names of siblings: if a layer sets this field back to its default, their
values in lower layers are dropped.
"""

PATH: dict[str, Any] = {"path": True}
"""Field metadata: a text is a path, in which `~` is the home directory, and which is not empty."""

MOST_USED: dict[str, Any] = {"most_used": True}
"""Field metadata: `--help` shows this setting; `--help-all` shows all."""

When = Literal["step", "epoch", "never"]
"""From when on a run that has begun could take another value of a setting and stay exact."""

# Field metadata. Nothing reads it yet: what a resume accepts today is the role of a setting.
AT_STEP: dict[str, Any] = {"changes_at": "step"}
"""Another value can hold from any step on."""
AT_EPOCH: dict[str, Any] = {"changes_at": "epoch"}
"""Another value can hold from the next epoch on."""
NEVER: dict[str, Any] = {"changes_at": "never"}
"""Another value makes another run."""


@dataclass(frozen=True)
class Leaf:
    """A setting: a field of a configuration that holds a value, not a table of settings."""

    name: str
    """Dotted, such as "optimizer.lr"."""
    hint: Any
    field: dataclasses.Field[Any]
    owner: type[Any]
    """The class that has the field."""
    value: Any
    """The value in a configuration or by default; `dataclasses.MISSING` if it has no default."""
    group: str
    """The section of the help."""
    changes_at: When | None
    """None for a setting of a user's program, which does not say it."""


def leaves(
    kind: type[Any],
    config: Any = None,
    *,
    prefix: str = "",
    group: str = "settings",
    changes_at: When | None = None,
) -> Iterator[Leaf]:
    """Yield the settings of a class in the order of its fields, with the values of `config`, or the
    default values. A table has its own group, and its fields change when the table does unless
    they say otherwise.

    >>> from surefoot.recipes.gpt.config import Config
    >>> [(leaf.name, leaf.changes_at) for leaf in leaves(Config) if leaf.group == "optimizer"][:2]
    [('optimizer.name', 'never'), ('optimizer.lr', 'step')]
    """
    hints = type_hints(kind)
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        hint = hints[field.name]
        value = _default(field) if config is None else getattr(config, field.name)
        group = field.metadata.get("group") or group
        when = field.metadata.get("changes_at", changes_at)
        if dataclasses.is_dataclass(hint):
            yield from leaves(
                typing.cast("type[Any]", hint),
                None if value is dataclasses.MISSING else value,
                prefix=f"{name}.",
                group=name,
                changes_at=when,
            )
        else:
            yield Leaf(name, hint, field, kind, value, group, when)


def type_hints(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of a class's fields. They are kept: a command asks for them a hundred
    times.
    """
    if kind not in _type_hints:
        _type_hints[kind] = typing.get_type_hints(kind)
    return _type_hints[kind]


_type_hints: dict[type[Any], Mapping[str, Any]] = {}


def flatten(config: Any) -> dict[str, Any]:
    """Return the values of a configuration by dotted name, in the order of its fields.

    >>> from surefoot.config.train_settings import TrainSettings
    >>> flatten(TrainSettings(length="2 epochs", batch_size=8))["length"]
    '2 epochs'
    """
    return {leaf.name: leaf.value for leaf in leaves(type(config), config)}


def default_values(kind: type[Any]) -> dict[str, Any]:
    """Return the default values by dotted name; `dataclasses.MISSING` for a setting without a
    default.
    """
    return {leaf.name: leaf.value for leaf in leaves(kind)}


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested tables to values by dotted name, and tuples to lists.

    >>> flat({"optimizer": {"lr": 0.1}, "seed": 0})
    {'optimizer.lr': 0.1, 'seed': 0}
    """
    by_name: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            by_name |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            by_name[f"{prefix}{name}"] = list(value)
        else:
            by_name[f"{prefix}{name}"] = value
    return by_name


def layered(
    kind: type[T], layers: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[T, dict[str, str]]:
    """Return a configuration from layers of (origin, values by dotted name), and the origin of each
    value. Later layers override earlier ones.

    Raises one `ConfigError` for all unknown names, values of a wrong type, and settings with
    neither value nor default. If a later layer changes a `LEADS` field, earlier values of its
    sibling fields are dropped: a preset's optimizer settings apply to its own optimizer only.

    >>> from surefoot.config.train_settings import TrainSettings
    >>> layers = [("preset", {"length": "1 epochs", "batch_size": 8}), ("flag", {"seed": 3})]
    >>> config, origins = layered(TrainSettings, layers)
    >>> config.seed, origins["seed"], origins["length"], origins["clip"]
    (3, 'flag', 'preset', 'default')
    """
    known = field_hints(kind)
    problems: list[ConfigError] = []
    for origin, values in layers:
        for name, value in values.items():
            if name in known:
                problem = wrong_type(name, value, known[name])
            else:
                problem = unknown_setting(name, known)
            if problem is not None:
                problems.append(problem.inside(origin))
    by_name, origins = merged(kind, layers)
    config = None
    if not problems:
        config = _build(by_name, kind, None, "", problems)
    if problems:
        raise together(problems)
    return typing.cast("T", config), dict.fromkeys(known, "default") | origins


def merged(
    kind: type[Any], layers: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that remain of the layers by dotted name, unchecked, and the origin of
    each.
    """
    by_name: dict[str, Any] = {}
    origins: dict[str, str] = {}
    leaders = _leaders(kind)
    for origin, values in layers:
        for leader in leaders:
            value_below = by_name.get(leader.name, leader.default)
            value = values.get(leader.name, value_below)
            if leader.drops(value, value_below):
                for name in leader.followers & by_name.keys():
                    del by_name[name]
                    del origins[name]
        by_name |= values
        origins |= dict.fromkeys(values, origin)
    return by_name, origins


def field_hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of all settings by dotted name, in the order of the fields."""
    return {leaf.name: leaf.hint for leaf in leaves(kind)}


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise `ConfigError` if a setting's value has another type.

    >>> check_type("seed", "3", int)
    Traceback (most recent call last):
    surefoot.errors.ConfigError: seed = "3": expected a whole number
      write it without quotes: 3
      [setting-of-wrong-type]
    """
    problem = wrong_type(name, value, hint)
    if problem is not None:
        raise problem


def wrong_type(name: str, value: Any, hint: Any) -> ConfigError | None:
    """Return the error of `check_type`, or None."""
    try:
        _checked(value, hint)
    except _WrongTypeError:
        return ConfigError(
            "setting-of-wrong-type",
            problem=f"{name} = {_quoted_value(value)}: expected {_expected(hint)}",
            remedy=_meant(name, value, hint),
            setting=name,
            value=value,
        )
    return None


def unknown_setting(
    name: str,
    known: Iterable[str],
    *,
    value: str = "",
    kind: str = "setting",
    reason: str | None = None,
) -> ConfigError:
    """Return the error for a name that is none of the `known` ones, with the probable match; the
    `value` is then suggested in its form.
    """
    meant = nearest(name, known)
    remedy = None
    if meant is not None:
        remedy = Setting(meant, text_for(name, meant, value) or ABSENT)
    return ConfigError(
        "setting-unknown",
        problem=f"unknown {kind} {name}",
        reason=reason,
        remedy=remedy,
        setting=name,
    )


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the probable match among `names`, or None.

    >>> names = ("seed", "optimizer.lr", "optimizer.name", "schedule.name")
    >>> nearest("optimizer.lrr", names), nearest("lr", names), nearest("--Seed", names)
    ('optimizer.lr', 'optimizer.lr', 'seed')
    >>> nearest("optimizer.learning_rate", names), nearest("learning_rate", names)
    ('optimizer.lr', 'optimizer.lr')
    >>> nearest("colour", names) is None
    True
    """
    plain = {known.lower(): known for known in names}
    sought = name.lower().lstrip("-").replace("-", "_")
    table, _, leaf = sought.rpartition(".")
    same_leaf = []
    beside = {}  # in the same table, by the last part of the name
    for known in plain:
        known_table, _, known_leaf = known.rpartition(".")
        if known_leaf == leaf:
            same_leaf.append(known)
        if not table or known_table == table:
            beside[known_leaf] = known
    if len(same_leaf) == 1:
        return plain[same_leaf[0]]
    keyword = same_as(leaf, beside)
    if keyword is not None:
        return plain[beside[keyword]]
    close = closest(sought, plain)
    return None if close is None else plain[close]


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str = "") -> str:
    """Return a question with the probable match among `names`, or `otherwise` if no name is
    similar.
    """
    meant = nearest(name, names)
    return f"did you mean {meant}?" if meant else otherwise


def _build(
    values: Mapping[str, Any], kind: Any, base: Any, prefix: str, problems: list[ConfigError]
) -> Any:
    hints = type_hints(kind)
    keywords: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        hint = hints[field.name]
        default = _default(field) if base is None else getattr(base, field.name)
        if dataclasses.is_dataclass(hint):
            keywords[field.name] = _build(
                values,
                hint,
                None if default is dataclasses.MISSING else default,
                f"{name}.",
                problems,
            )
        elif name in values:
            value = _checked(values[name], hint)
            if field.metadata.get("path") and isinstance(value, str):
                value = path_text(value, setting=name)
            keywords[field.name] = value
        elif default is dataclasses.MISSING:
            problems.append(
                ConfigError(
                    "setting-missing",
                    problem=f"{name} is not set and has no default; expected {_expected(hint)}",
                    setting=name,
                )
            )
        else:
            keywords[field.name] = default
    return None if problems else kind(**keywords)


class _WrongTypeError(Exception):
    """The value has a wrong type."""


def _checked(value: Any, hint: Any) -> Any:
    """Return a value as its type wants it: a number as a float, a list as a tuple."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        own_type_first = sorted(arguments, key=lambda member: type(value) is not member)
        for member in own_type_first:
            with contextlib.suppress(_WrongTypeError):
                return _checked(value, member)
    elif origin is Literal:
        for choice in arguments:
            if type(value) is type(choice) and value == choice:
                return value
    elif origin in (tuple, Sequence) and isinstance(value, list | tuple):
        element_hints = _of_elements(hint, len(value))
        if len(element_hints) == len(value):
            return tuple(map(_checked, value, element_hints))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value) is hint or (hint is Path and isinstance(value, Path)):
        return value
    raise _WrongTypeError


def _of_elements(hint: Any, length: int) -> Sequence[Any]:
    """Return the types of the elements of a sequence or tuple, which has any length or its own."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Sequence or arguments[1:] == (Ellipsis,):
        return [arguments[0]] * length
    return arguments


def _expected(hint: Any) -> str:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in arguments if member is not types.NoneType]
        return " or ".join(map(_expected, members))
    if origin is Literal:
        choices = ", ".join(map(_quoted_value, arguments))
        return f"one of {choices}" if len(arguments) > 1 else choices
    if origin in (tuple, Sequence):
        has_any_length = origin is Sequence or Ellipsis in arguments
        size = "" if has_any_length else f" of {len(arguments)}"
        return f"a list{size}, each {_expected(arguments[0])}"
    plain = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text in quotes",
        Path: "a path",
        types.NoneType: "nothing",
    }
    return plain.get(hint, str(hint))


def _meant(name: str, value: Any, hint: Any) -> Remedy | None:
    if isinstance(value, str) and typing.get_origin(hint) is Literal:
        close = closest(value, [str(choice) for choice in typing.get_args(hint)])
        return None if close is None else Setting(name, close)
    if isinstance(value, str) and hint in (int, float) and re.fullmatch(r"[-+0-9.eE_]+", value):
        return f"write it without quotes: {value}"
    return None


@dataclass(frozen=True)
class _Leader:
    """A setting whose change drops the values of its followers in lower layers."""

    name: str
    default: Any
    followers: set[str]
    is_switch: bool
    """Only a change back to the default drops them."""

    def drops(self, value: Any, value_below: Any) -> bool:
        if value == value_below:
            return False
        return value == self.default or not self.is_switch


def _leaders(kind: Any) -> list[_Leader]:
    settings = list(leaves(kind))
    leaders = []
    for setting in settings:
        metadata = setting.field.metadata
        table = _table_of(setting.name)
        if SWITCHES in metadata:
            followers = {table + sibling for sibling in metadata[SWITCHES]}
            leaders.append(_Leader(setting.name, setting.value, followers, is_switch=True))
        if metadata.get("leads"):
            followers = set()
            for other in settings:
                is_beside = _table_of(other.name) == table and other.name != setting.name
                if is_beside and not other.field.metadata.get("stays"):
                    followers.add(other.name)
            leaders.append(_Leader(setting.name, setting.value, followers, is_switch=False))
    return leaders


def _table_of(name: str) -> str:
    """Return the part of a dotted name up to its last point: "optimizer." of "optimizer.lr"."""
    return name[: name.rfind(".") + 1]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _quoted_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
