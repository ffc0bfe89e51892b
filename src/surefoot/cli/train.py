"""`surefoot train RECIPE|FILE.py:build`: start a run, or resume it from its newest checkpoint."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.cli.diagnose import AlertOption, alert_of
from surefoot.cli.options import ProgramOptions
from surefoot.cli.processes import Several, program_options, settled, start_several
from surefoot.cli.settings import program_settings
from surefoot.errors import ConfigError
from surefoot.recipes.program import Program, build_run


@dataclass(frozen=True, kw_only=True)
class AcceptChange:
    """Program changes to accept on a resume."""

    accept_change: str | None = None
    """Resume although the program's loss, model, collate, data or optimizer has changed. Name one
    change, or several as "loss,data".
    """


@dataclass(frozen=True, kw_only=True)
class Train(AcceptChange, AlertOption, Several, ProgramOptions):
    """Train a run, or resume it if --run-dir holds its checkpoint. Recipes are
    gpt, translation, images and finetune. Every setting is a flag and a key of a
    TOML file; surefoot train gpt --help lists them. Flags override --config,
    --config overrides --preset, and --preset overrides defaults. Ctrl-C saves and
    stops; the same command resumes. In FILE.py, build() may take one dataclass
    argument; its fields become settings.

      surefoot train gpt --data.path my.txt --run-dir runs/mine
      surefoot train gpt --preset gpt2-124m --data.path shards/ --nproc 8
      surefoot train images --preset fashion-mnist --data.path DIR
    """


def train(arguments: list[str]) -> None:
    """Run `surefoot train`: start the run of a recipe or program."""
    program, options, flags = program_options(Train, arguments, verb="train")
    config, origins = program_settings(program, options, flags, verb="train")
    start(
        program,
        config,
        origins,
        flags,
        command=["train", *arguments],
        several=options,
        accepted=options.accept_change,
        alerts=options,
    )


def start(
    program: Program,
    config: Any,
    origins: Mapping[str, str],
    flags: Sequence[str],
    *,
    command: list[str],
    several: Several,
    accepted: str | None,
    alerts: AlertOption,
    only: Path | None = None,
) -> None:
    """Build and train a run, or run `command` in several processes. `only` is the required
    directory of a resumed run.
    """
    if only is not None:
        program.refuse_changed_files(config, run=only, resuming=True)
    run_dir = getattr(config, "run_dir", None)
    alert_of(alerts, run=only or run_dir or Path())  # refused before anything is read
    program.check(config)
    accept_change: tuple[str, ...] = ()
    if accepted is not None:
        from surefoot.checkpoint.changes import change_names  # imports torch

        accept_change = change_names(accepted)
    start_several(command, settled(several, config), config=config, flags=flags, out=only)
    run = build_run(program, config, of=only)
    run.configuration = program.config_text(
        config or NoSettings(), origins, program.described | several.recorded()
    )
    if only is not None and (
        run.parts.directory is None or run.parts.directory.path.resolve() != only.resolve()
    ):
        raise ConfigError(
            f"resuming {only}, but its program now has the run in {run.parts.directory.shown if run.parts.directory else 'no directory'}\n"
            "  was `run_dir` changed, or is it relative to another directory?"
        )
    run.parts = dataclasses.replace(
        run.parts,
        example="INPUT"
        if run.parts.example is None and {"predict", "Predict"} <= program.names.keys()
        else run.parts.example,
        alert=alerts.alert,
        accept_change=(*run.parts.accept_change, *accept_change),
    )
    run.train()


@dataclass(frozen=True)
class NoSettings:
    """The configuration of a program without settings."""
