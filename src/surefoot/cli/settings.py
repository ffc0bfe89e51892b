"""The settings of a run on the command line: flags override files, files override defaults. The
origin of each value is recorded.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    option_classes: Sequence[type[Any]] = (),
) -> tuple[Any, dict[str, str]]:
    """Return a program's configuration and the origin of each value, or (None, {}) if the program
    takes no settings.
    """
    layers = layers_below(program, file_values(options.config), flags)
    return read_settings(
        program,
        layers,
        flags,
        verb=f"{verb} {options.what}",
        option_classes=[*option_classes, type(options)],
    )


def file_values(file: str | None) -> dict[str, Any]:
    """Return the settings of a TOML file by dotted name; without a file, none."""
    if file is None:
        return {}
    return values(file_text(local_path(file, setting="--config")), where=file)


def layers_below(program: Program, in_file: dict[str, Any], flags: Sequence[str]) -> list[Layer]:
    """Return the preset and the file as layers below the flags. A flag or the file names the
    preset; "None" leaves it out.
    """
    if program.config is None:
        return [("file", in_file)]
    name = flag_text(flags, "preset")
    is_left_out = name == "None"
    if name is None and "preset" in in_file:
        name = in_file["preset"]
        is_left_out = name is None
    layers: list[Layer] = []
    if not is_left_out:
        layers.append(("preset", program.preset(name if isinstance(name, str) else None)))
    layers.append(("file", in_file))
    return [(origin, values) for origin, values in layers if values]


def saved_settings(
    run: Path, options: ChangedProgramOption, flags: Sequence[str], *, verb: str
) -> tuple[Program, Any]:
    """Return a run's program and its configuration changed by flags. A changed program requires
    --run-changed-program.
    """
    program, in_file = read_program(run, run_changed=options.run_changed_program)
    config, _ = read_settings(
        program, [("file", in_file)], flags, verb=f"{verb} RUN", option_classes=[type(options)]
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
    option_classes: Sequence[type[Any]] = (),
) -> tuple[Any, dict[str, str]]:
    """Return the result of `configured`. If the program takes no settings, return (None, {}), or
    print a help text that says so.
    """
    if program.config is not None:
        return configured(program.config, layers, flags, verb=verb, option_classes=option_classes)
    if asks_for_help(flags):
        print("build() takes no settings.\n")
        print_options(
            option_classes, verb.split(maxsplit=1)[0], is_whole=asks_for_whole_help(flags)
        )
        sys.exit(0)
    for kind in option_classes:
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
    option_classes: Sequence[type[Any]] = (),
) -> tuple[Any, dict[str, str]]:
    """Return an instance of `kind` from defaults, layers and flags, and the origin of each value.
    `option_classes` are for the help and for misspelled flags."""
    known = field_hints(kind)
    names = []  # of the settings among the arguments
    unknown = []
    for name, words in by_flag(arguments):
        if name in known:
            names.append(name)
        elif name and name not in HELP:
            unknown.append((name, words))
    options: list[str] = []
    for option_class in option_classes:
        options += option_names(option_class)
    refuse_unknown(unknown, [*options, *known], verb=verb)
    if asks_for_help(arguments):
        _print_help(kind, layers, verb, option_classes, is_whole=asks_for_whole_help(arguments))
    # tyro sees only the settings that are given: it needs no default, and builds no other parser
    field_of = {name: f"setting_{name.replace('.', '_')}" for name in names}
    fields = [(field, Annotated[known[name], arg(name=name)]) for name, field in field_of.items()]
    truths = {name for name, hint in known.items() if hint is bool or bool in get_args(hint)}
    flags: Any = parse(
        make_dataclass("Flags", fields),
        _with_truth(arguments, truths),
        verb=verb,
        config=(tyro.conf.FlagConversionOff,),
    )
    in_flags = {name: getattr(flags, field) for name, field in field_of.items()}
    return layered(kind, [*layers, ("flag", in_flags)])


def arguments_for(kind: type[Any], setting: str, text: str) -> list[str]:
    """Return the arguments that set a setting to a text. Blanks separate the elements of a list.

    >>> from surefoot.recipes.gpt.config import Config
    >>> arguments_for(Config, "optimizer.betas", "0.9 0.95")
    ['--optimizer.betas', '0.9', '0.95']
    >>> arguments_for(Config, "length", "20 steps")
    ['--length', '20 steps']
    """
    hint = field_hints(kind).get(setting.replace("-", "_"))
    members = [hint, *get_args(hint)]
    takes_list = any(get_origin(member) in (tuple, Sequence) for member in members)
    if takes_list and str not in members and text != "None":
        return [f"--{setting}", *text.split()]
    return [f"--{setting}", text]


def _print_help(
    kind: type[Any],
    layers: Sequence[Layer],
    verb: str,
    option_classes: Sequence[type[Any]],
    *,
    is_whole: bool,
) -> None:
    """Print the settings of a command below its description, and exit: all of them, or the most
    used ones of a training and how to see all.
    """
    config = None
    origins: dict[str, str] = {}
    with suppress(ConfigError):  # a setting has no value yet
        config, origins = layered(kind, layers)
    settings = []
    for flag in flags_of(kind, config):
        settings.append(replace(flag, origin=origins.get(flag.name, "default")))
    names = [flag.name for flag in settings]
    subcommand = verb.split(maxsplit=1)[0]
    title = f"Settings of surefoot {verb}, each also a key of a --config file\n"
    all_settings = f"All {len(settings)} settings: surefoot {verb} --help-all"
    if is_whole or len(settings) <= len(most_used(settings)):
        if subcommand not in ("train", "resume"):
            print_options(option_classes, subcommand, is_whole=is_whole, but=names)
        print(f"{title}\n{settings_page(settings)}")
        if subcommand in ("train", "resume"):  # whose options are used less than the settings
            print_options(option_classes, subcommand, is_whole=is_whole, but=names)
    elif subcommand == "train":
        print(f"{title}\n{most_used_page(settings)}")
        print(f"{all_settings}\nOptions of train: surefoot train --help")
    else:
        print_options(option_classes, subcommand, is_whole=is_whole, but=names)
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
            continue
        flag, *values = words[0].split("=", 1) + words[1:]
        if not values:
            values = ["True"]
        written.append(flag)
        written += [_TRUTHS.get(word.lower(), word) for word in values]
    return written
