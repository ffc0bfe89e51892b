"""The verbs that train, or say what would be trained: train, plan, resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import paper, processes, programs
from surefoot.cli.building import built, from_file, layers_below, refuse_fp16_on_a_cpu, refuse_settings
from surefoot.cli.flags import configured
from surefoot.cli.options import file_text, option, run_directory
from surefoot.cli.processes import Several, settled, start_several
from surefoot.cli.programs import Program
from surefoot.config import Settings, flatten, origins, to_toml, values_of_run
from surefoot.config import program as program_of
from surefoot.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from surefoot.run import Run


def train(arguments: list[str]) -> None:
    """`surefoot train RECIPE|FILE.py:build [--config FILE.toml] [settings]`: a run from its start, or from where it stands."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("train what? surefoot train gpt, or surefoot train FILE.py:build")
    program = programs.found(arguments[0])
    given, several = processes.taken(program, arguments[1:])
    given, accepted = option(given, "--accept-change")
    rest, in_file = from_file(program, given)
    layers, verb = layers_below(program, in_file, rest), f"surefoot train {arguments[0]}"
    _start(program, layers, rest, verb=verb, command=["train", *arguments], several=several, accepted=accepted)


def plan(arguments: list[str]) -> None:
    """`surefoot plan RECIPE|FILE.py:build [--config FILE.toml] [settings]`: what `train` would run; trains and writes nothing.

    With `--world N` what it would need on so many GPUs: `cli/paper.py`.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("plan what? surefoot plan gpt, or surefoot plan FILE.py:build")
    if paper.asked(arguments):
        paper.plan_on_paper(arguments)
        return
    program = programs.found(arguments[0])
    given, several = processes.taken(program, arguments[1:])
    rest, in_file = from_file(program, given)
    if program.config is None:
        run = _planned(program, None, several)
    else:
        verb = f"surefoot plan {arguments[0]}"
        config, found = configured(program.config, layers_below(program, in_file, rest), rest, verb=verb)
        program.check(config)
        run = _planned(program, config, settled(several, config))
        refuse_fp16_on_a_cpu(run)
        lines = [
            f"  {name} = {value!r}  [{found[name]}]" for name, value in flatten(config).items() if value is not None
        ]
        print("\n".join(["configuration", *lines]))
    from surefoot import plan as planning
    from surefoot.loss_contract import loss_contract

    for section in planning.sections(run.parts):
        print(f"\n{section}")
    holds, words = loss_contract(run.parts)
    if not holds:
        raise ConfigError(words)
    print(f"\nloss contract\n  {words}")


def resume(arguments: list[str]) -> None:
    """`surefoot resume RUN [settings]`: go on from the newest intact checkpoint; settings that change no result may change."""
    run = run_directory(arguments)
    text = file_text(run / "config.toml")
    made_by = program_of(text, where=str(run / "config.toml"))
    program = programs.again(made_by, run=run, resuming=True)
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{run} holds no checkpoint to go on from: start it with surefoot train")
    flags, several = processes.taken(program, arguments[1:], made_by)
    flags, accepted = option(flags, "--accept-change")
    of_recipes = ("--preset", "--init") if program.config is not None and issubclass(program.config, Settings) else ()
    for name in of_recipes:
        if option(flags, name)[1] is not None:
            raise ConfigError(
                f"{name} is for the start of a run, and {run} has begun\n  another run: surefoot train ... {name} ... --out DIR"
            )
    of_one_sitting = ("stop_after", "time_limit")  # what ended the last one would end this one at once
    before = values_of_run(text, where=str(run / "config.toml"))
    held = {name: value for name, value in before.items() if name not in of_one_sitting}
    layers = [("file", held | ({"out": str(run)} if "out" in held or of_recipes else {}))]
    _start(
        program,
        layers,
        flags,
        verb="surefoot resume RUN",
        command=["resume", *arguments],
        several=several,
        accepted=accepted,
        only=run,
        held=origins(text),
    )


def _planned(program: Program, config: Any, several: Several) -> Run:
    """The run that one of so many processes would train; raises `ConfigError` where they would be refused."""
    ranks = processes.planned(several, config)
    if ranks == 1:
        return built(program, config)
    from surefoot.world import planned_for

    with planned_for(ranks):
        return built(program, config)


def _start(
    program: Program,
    layers: list[tuple[str, dict[str, Any]]],
    arguments: list[str],
    *,
    verb: str,
    command: list[str],
    several: Several,
    accepted: str | None,
    only: Path | None = None,
    held: Mapping[str, str] | None = None,
) -> None:
    """Build and train, or have `command` do so in several processes; `accepted` are changes that the run goes on with.

    `only` is the directory that a resumed run must have, `held` the origins its values had before.
    """
    described = program.described | several.recorded()
    if program.config is None:
        refuse_settings(program, arguments)
        accept_change = _accepted(accepted)
        start_several(command, several, config=None, flags=arguments, out=only)
        run = built(program, None, of=only)
        run.configuration = to_toml(Nothing(), {}, described)
    else:
        config, found = configured(program.config, layers, arguments, verb=verb)
        if only is not None:
            program.refuse_changed_files(config, run=only, resuming=True)
        program.check(config)
        accept_change = _accepted(accepted)
        start_several(command, settled(several, config), config=config, flags=arguments, out=only)
        kept = {name: (held or {}).get(name, origin) if origin == "file" else origin for name, origin in found.items()}
        run = built(program, config, of=only)
        run.configuration = to_toml(config, kept, described)
    if only is not None and (run.parts.directory is None or run.parts.directory.path.resolve() != only.resolve()):
        raise ConfigError(
            f"resuming {only}, but what made it now builds a run in {run.parts.directory.path if run.parts.directory else 'no directory'}\n"
            "  was `out` changed, or is it relative to another directory than this one?"
        )
    refuse_fp16_on_a_cpu(run)
    if run.parts.example is None and {"predict", "Predict"} <= program.names.keys():
        run.parts = dataclasses.replace(run.parts, example="INPUT")
    run.parts = dataclasses.replace(run.parts, accept_change=(*run.parts.accept_change, *accept_change))
    run.train()


def _accepted(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    from surefoot.checkpoint.changes import change_names  # imports torch

    return change_names(text)


@dataclasses.dataclass(frozen=True)
class Nothing:
    """The configuration of a program that takes none."""
