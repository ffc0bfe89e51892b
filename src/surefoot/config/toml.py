"""Configurations as TOML files. The table [program] names the program. TOML has no null: a setting
set to None is written as "None", as on the command line. A setting that is None is left out if it
is None by default and in the preset."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config.tree import default_values, flat, flatten, merged
from surefoot.errors import ConfigError, out_of_range

_NONE = "None"
_PROGRAM = "program"


def to_toml(
    config: Any,
    origins: Mapping[str, str],
    program: Mapping[str, Any],
    *,
    preset: Mapping[str, Any] | None = None,
) -> str:
    """Return the configuration as TOML with the table [program]. A comment on each line names the
    value's origin, by default "default".

    `--config` reads the file on top of `preset`: a value of the preset that is None in the
    configuration is written as "None".
    """
    import tomlkit  # takes 30 ms

    defaults = default_values(type(config))
    by_name = flatten(config)
    # what a reader would have if no None were written
    in_file = {name: value for name, value in by_name.items() if value is not None}
    below, _ = merged(type(config), [("preset", preset or {}), ("file", in_file)])
    tables: dict[str, list[str]] = {"": []}  # TOML needs plain keys before tables
    for name, value in by_name.items():
        if value is None and defaults[name] is None and below.get(name) is None:
            continue
        _refuse_unwritable(name, value)
        table, _, leaf = name.rpartition(".")
        text = tomlkit.item(_in_toml(value)).as_string()
        origin = _printable(origins.get(name, "default"))
        tables.setdefault(table, []).append(f"{leaf} = {text} # {origin}")
    lines = []
    for table, settings in tables.items():
        if table:
            lines.append(f"[{table}]")
        lines += [*settings, ""]
    for name, value in program.items():
        _refuse_unwritable(f"{_PROGRAM}.{name}", value)
    return "\n".join([*lines, tomlkit.dumps({_PROGRAM: without_none(dict(program))})])


def _in_toml(value: Any) -> Any:
    if value is None:
        return _NONE
    if isinstance(value, Path):
        return str(value)
    return value


def _printable(origin: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in origin)


def without_none(value: Any) -> Any:
    """Remove None, which TOML cannot express, from nested dictionaries and lists."""
    if isinstance(value, dict):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [without_none(entry) for entry in value if entry is not None]
    return value


def with_choices(text: str, choices: Mapping[str, Any]) -> str:
    """Replace "auto" in a config.toml by the values chosen for the run; their origin is then
    "auto".

    >>> chosen = {"compile": False, "channels_last": True, "precision": "bf16"}
    >>> with_choices("seed = 1 # flag" + chr(10) + 'compile = "auto" # flag', chosen)
    'seed = 1 # flag\\ncompile = false # auto'
    """
    settings, table, rest = text.partition("\n[")
    for name in ("precision", "channels_last", "compile"):
        line = f"{name} = {json.dumps(choices[name])} # auto"
        settings = re.sub(rf'(?m)^{name} = "auto".*$', line, settings)
    return settings + table + rest


def origins(text: str) -> dict[str, str]:
    """Return the origin of every setting in a config.toml, from its comments.

    >>> origins("seed = 1  # flag" + chr(10) + "[optimizer]" + chr(10) + "lr = 0.1 # default")
    {'seed': 'flag', 'optimizer.lr': 'default'}
    """
    by_name: dict[str, str] = {}
    prefix = ""
    for line in text.splitlines():
        heading = re.fullmatch(r"\[([\w.]+)\]\s*", line)
        setting = re.fullmatch(r"(\w+) = .*#\s*([\w ]+)", line)
        if heading is not None:
            prefix = f"{heading[1]}."
        elif setting is not None:
            by_name[prefix + setting[1]] = setting[2]
    return by_name


def values(text: str, *, where: str = "config.toml") -> dict[str, Any]:
    """Return the settings in a file by dotted name, unchecked, for `layered`.

    >>> values('length = "2 epochs"  # file' + chr(10) + "[optimizer]" + chr(10) + "lr = 3e-4")
    {'length': '2 epochs', 'optimizer.lr': 0.0003}
    """
    document = _parsed(text, where)
    document.pop(_PROGRAM, None)
    by_name = flat(document)
    for name, value in by_name.items():
        if value == _NONE:
            by_name[name] = None
    return by_name


def program(text: str, *, where: str = "config.toml") -> dict[str, Any]:
    """Return the table [program] of a file, which names the configuration's program; {} if
    absent.
    """
    table = _parsed(text, where).get(_PROGRAM, {})
    if not isinstance(table, dict):
        raise _not_readable(where, f"{_PROGRAM} is not a table, [program]")
    return table


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))  # the byte order mark of Windows
    except RecursionError:
        raise _not_readable(where, "it is nested too deeply") from None
    except tomllib.TOMLDecodeError as problem:
        at_line = re.search(r"at line (\d+)", str(problem))
        if at_line is None:
            raise _not_readable(where, str(problem)) from problem
        line = int(at_line[1])
        source = text.splitlines()[line - 1].strip()
        raise _not_readable(where, f"{problem}: {source}", line=line) from problem


def _not_readable(where: str, why: str, *, line: int | None = None) -> ConfigError:
    return ConfigError(
        "settings-file-not-readable",
        problem=f"{where} is not a TOML file of settings: {why}",
        remedy='write text in quotes, as in length = "30 epochs"',
        path=where,
        line=line,
    )


def _refuse_unwritable(name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        for element in value:
            _refuse_unwritable(name, element)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            raise out_of_range(name, value, "Unicode text, to be written to a file") from problem
