"""From a program and its settings to what it builds: a run to be started, or one that is there."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import programs
from surefoot.cli.flags import configured
from surefoot.cli.options import file_text, option
from surefoot.cli.programs import Program
from surefoot.config import Settings, flatten, values
from surefoot.config import program as program_of
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError, DataError

if TYPE_CHECKING:
    from surefoot.run import Run

_SHARED = ("auto", "ddp", "fsdp")  # by several processes


def from_file(program: Program, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without --config, and the values in the file that it names."""
    rest, file = option(arguments, "--config")
    if program.config is None:
        refuse_settings(program, arguments)
    return rest, values(file_text(local_path(file, setting="--config")), where=file) if file else {}


def layers_below(program: Program, in_file: dict[str, Any], flags: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """What stands below the flags: the preset that the flags or the file name, and the file."""
    _, flagged = option(flags, "--preset")
    name = in_file.get("preset") if flagged is None else flagged
    preset = program.preset(name if isinstance(name, str) else None)
    return [("preset", preset)] * bool(preset) + [("file", in_file)] * bool(in_file)


def built(program: Program, config: Any, *, of: Path | None = None) -> Run:
    """What a program builds; a terminal is told that this may take seconds. `of` is the run that it is built for again."""
    shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print("reading the data and building the model ...", end="", file=sys.stderr, flush=True)
    try:
        return program.run() if config is None else program.run(config)
    except DataError as problem:
        from surefoot.directory import directory_of_start

        begun_in = None if of is None else directory_of_start(of)
        if begun_in in (None, os.getcwd()):
            raise
        raise DataError(f"{problem}\n  this run was started in {begun_in}: a relative path is from there") from problem
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def of_run(
    run: Path, flags: Sequence[str], *, verb: str, own: Sequence[str] = ("checkpoint",), run_changed: bool = False
) -> tuple[Program, Any]:
    """What made a run, and its configuration with some flags changed (None where it takes none).

    A program that has changed since, or that others could have changed, is refused unless `run_changed`.
    """
    text = file_text(run / "config.toml")
    program = programs.again(program_of(text, where=str(run / "config.toml")), run=run, run_changed=run_changed)
    if program.config is None:
        refuse_settings(program, flags)
        return program, None
    config = configured(program.config, [("file", values(text))], list(flags), verb=verb, own=own)[0]
    if not run_changed:
        program.refuse_changed_files(config, run=run)
    return program, config


def alone(config: Any, run: Path) -> Any:
    """The settings of a run as one process holds it, its weights whole, and its directory the one that was named."""
    if config is None:
        return None
    own = flatten(config)
    changes: dict[str, Any] = {"out": str(run)} if "out" in own else {}
    if own.get("parallel") in _SHARED:  # a program's own setting of that name may be something else
        changes["parallel"] = "none"
    if isinstance(config, Settings):
        changes["sharding"] = type(config.sharding)()
    return dataclasses.replace(config, **changes) if changes else config


def refuse_settings(program: Program, arguments: Sequence[str]) -> None:
    """Raise where there are settings for a program that takes none."""
    if arguments:
        raise ConfigError(
            f"{program.described.get('path')}: build() takes no settings, but there are: {' '.join(arguments)}"
        )


def refuse_fp16_on_a_cpu(run: Run) -> None:
    """Raise where the library lets pass, for tests, what nobody who trains can want."""
    if run.parts.whole.precision.name == "fp16" and run.parts.device.type == "cpu":
        raise ConfigError("precision = fp16 is slow and overflows on a CPU\n  try: --precision bf16, or fp32")
