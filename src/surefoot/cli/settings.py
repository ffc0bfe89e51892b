"""The settings of a run on the command line: flags override files, files override defaults. The
origin of each value is recorded.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import tyro
from tyro.conf import arg

from surefoot.cli.help import flags_of, most_used, most_used_page, settings_page
from surefoot.cli.options import (
    HELP,
    ChangedProgramOption,
    ProgramOptions,
    asks_for_help,
    asks_for_whole_help,
    by_flag,
    flag_text,
    option_names,
    parse,
    print_options,
    refuse_misspelled,
    refuse_unknown,
)
from surefoot.config.paths import file_text, local_path
from surefoot.config.toml import values
from surefoot.config.tree import field_hints, layered
from surefoot.errors import ConfigError, Remedy
from surefoot.program import Program, read_program

_TRUTHS = {"true": "True", "false": "False", "none": "None"}
Layer = tuple[str, Mapping[str, Any]]  # origin, values by dotted name


def program_settings(
    program: Program,
    options: ProgramOptions,
    flags: Sequence[str],
    *,
    verb: str,
    own: Sequence[type[Any]] = (),
) -> tuple[Any, dict[str, str]]:
    """Return a program's configuration and the origin of each value, or (None, {}) if the program
    takes no settings.
    """
    layers = layers_below(program, file_values(options.config), flags)
    return read_settings(
        program, layers, flags, verb=f"{verb} {options.what}", own=[*own, type(options)]
    )


def file_values(file: str | None) -> dict[str, Any]:
    """Return the settings of a TOML file by dotted name; without a file, none."""
    return (
        {} if file is None else values(file_text(local_path(file, setting="--config")), where=file)
    )


def layers_below(program: Program, in_file: dict[str, Any], flags: Sequence[str]) -> list[Layer]:
    """Return the preset and the file as layers below the flags. A flag or the file names the
    preset; "None" leaves it out.
    """
    if program.config is None:
        return [("file", in_file)]
    flagged = flag_text(flags, "preset")
    name = in_file.get("preset") if flagged is None else flagged
    is_unset = in_file.get("preset", "") is None if flagged is None else flagged == "None"
    preset = {} if is_unset else program.preset(name if isinstance(name, str) else None)
    return [layer for layer in (("preset", preset), ("file", in_file)) if layer[1]]


def saved_settings(
    run: Path, options: ChangedProgramOption, flags: Sequence[str], *, verb: str
) -> tuple[Program, Any]:
    """Return a run's program and its configuration changed by flags. A changed program requires
    --run-changed-program.
    """
    program, in_file = read_program(run, run_changed=options.run_changed_program)
    config, _ = read_settings(
        program, [("file", in_file)], flags, verb=f"{verb} RUN", own=[type(options)]
    )
    if not options.run_changed_program:
        program.refuse_changed_files(config, run=run)
    return program, config


def read_settings(
    program: Program,
    layers: Sequence[Layer],
    flags: Sequence[str],
    *,
    verb: str,
    own: Sequence[type[Any]] = (),
) -> tuple[Any, dict[str, str]]:
    """Return the result of `configured`. If the program takes no settings, return (None, {}), or
    print a help text that says so.
    """
    if program.config is not None:
        return configured(program.config, layers, flags, verb=verb, own=own)
    if asks_for_help(flags):
        print("build() takes no settings.\n")
        print_options(own, verb.split(maxsplit=1)[0], is_whole=asks_for_whole_help(flags))
        sys.exit(0)
    for kind in own:
        refuse_misspelled(flags, kind, verb=verb)
    given = [*flags, *(f"config ({origin})" for origin, layer in layers if layer)]
    if given:
        raise without_settings(program, reason=f"the command has {' '.join(given)}")
    return None, {}


def without_settings(program: Program, *, reason: str, remedy: Remedy | None = None) -> ConfigError:
    """Return the error for a program that takes no settings where it needs them."""
    path = program.described.get("path")
    return ConfigError(
        "program-without-settings",
        problem=f"{path}: build() takes no settings",
        reason=reason,
        remedy=remedy,
        path=path,
    )


def configured(
    kind: type[Any],
    layers: Sequence[Layer],
    arguments: Sequence[str],
    *,
    verb: str,
    own: Sequence[type[Any]] = (),
) -> tuple[Any, dict[str, str]]:
    """Return an instance of `kind` from defaults, layers and flags, and the origin of each value.
    `own` has the option classes for the help."""
    flags = [name for name, _ in by_flag(arguments) if name]
    known = dict(field_hints(kind))
    unknown = [flag for flag in by_flag(arguments) if flag[0] not in {*known, *HELP, ""}]
    refuse_unknown(
        unknown, [*(name for each in own for name in option_names(each)), *known], verb=verb
    )
    if asks_for_help(arguments):
        _print_help(kind, layers, verb, own, is_whole=asks_for_whole_help(arguments))
    typed_here = [
        (f"setting_{name.replace('.', '_')}", Annotated[known[name], arg(name=name)])
        for name in set(flags)
    ]
    written = _with_truth(
        arguments, {name for name, hint in known.items() if hint is bool or bool in get_args(hint)}
    )
    parsed: Any = parse(
        make_dataclass("Flags", typed_here),
        written,
        verb=verb,
        config=(tyro.conf.FlagConversionOff,),
    )
    typed = {name: getattr(parsed, f"setting_{name.replace('.', '_')}") for name in flags}
    return layered(kind, [*layers, ("flag", typed)])


def typed(kind: type[Any], setting: str, text: str) -> list[str]:
    """Return the arguments that set a setting to a text. Blanks separate the elements of a list.

    >>> from surefoot.recipes.gpt.config import Config
    >>> typed(Config, "optimizer.betas", "0.9 0.95"), typed(Config, "length", "20 steps")
    (['--optimizer.betas', '0.9', '0.95'], ['--length', '20 steps'])
    """
    hint = dict(field_hints(kind)).get(setting.replace("-", "_"))
    members = [hint, *get_args(hint)]
    is_list = (
        any(get_origin(member) in (tuple, Sequence) for member in members) and str not in members
    )
    return [f"--{setting}", *(text.split() if is_list and text != "None" else [text])]


def _print_help(
    kind: type[Any],
    layers: Sequence[Layer],
    verb: str,
    own: Sequence[type[Any]],
    *,
    is_whole: bool,
) -> None:
    """Print the settings of a command below its description, and exit: all of them, or the most
    used ones of a training and how to see all.
    """
    try:
        config, origins = layered(kind, layers)
    except ConfigError:  # a setting has no value yet
        config, origins = None, {}
    settings = [
        replace(flag, origin=origins.get(flag.name, "default")) for flag in flags_of(kind, config)
    ]
    names = [flag.name for flag in settings]
    subcommand = verb.split(maxsplit=1)[0]
    title = f"Settings of surefoot {verb}, each also a key of a --config file\n"
    all_settings = f"All {len(settings)} settings: surefoot {verb} --help-all"
    if is_whole or len(settings) <= len(most_used(settings)):
        if subcommand not in ("train", "resume"):
            print_options(own, subcommand, is_whole=is_whole, but=names)
        print(f"{title}\n{settings_page(settings)}")
        if subcommand in ("train", "resume"):  # whose options are used less than the settings
            print_options(own, subcommand, is_whole=is_whole, but=names)
    elif subcommand == "train":
        print(f"{title}\n{most_used_page(settings)}")
        print(f"{all_settings}\nOptions of train: surefoot train --help")
    else:
        print_options(own, subcommand, is_whole=is_whole, but=names)
        print(all_settings)
    sys.exit(0)


def _with_truth(arguments: Sequence[str], truths: set[str]) -> list[str]:
    """Write booleans for tyro: `--compile` alone and `--compile=true` become `--compile True`.

    >>> _with_truth(["--compile", "--tied=false", "--seed", "true"], {"compile", "tied"})
    ['--compile', 'True', '--tied', 'False', '--seed', 'true']
    """
    written: list[str] = []
    for name, words in by_flag(arguments):
        if name not in truths:
            written += words
        else:
            flag, *values = words[0].split("=", 1) + words[1:]
            written += [flag, *(_TRUTHS.get(word.lower(), word) for word in values or ["True"])]
    return written
