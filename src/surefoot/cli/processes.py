"""`--nproc` and `--max-restarts`: start the same command in several processes on this machine."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.cli.options import T, flag_text, target, verb_options, without
from surefoot.config import parallel
from surefoot.config.durations import seconds
from surefoot.config.paths import run_path
from surefoot.config.ramps import first_value
from surefoot.config.setting import number
from surefoot.config.tree import field_hints, flatten
from surefoot.distributed.environment import placed, started_by_launcher
from surefoot.distributed.process_count import ProcessCount, Sizes, Slots, parse_nproc
from surefoot.errors import ConfigError, Setting
from surefoot.program import Program, find_program
from surefoot.tracking.run_reader import read_beginning

NAMES = ("nproc", "max_restarts")


@dataclass(frozen=True, kw_only=True)
class Several:
    """The number of processes that a command starts, and their restarts."""

    nproc: int | str = 1
    """Processes on this machine. "1:4" starts up to 4, at most one for each micro-batch of a step,
    fewer after one dies. A resume keeps the previous number."""
    max_restarts: int = 0
    """Maximum number of restarts of all processes after one dies."""

    def recorded(self) -> dict[str, int | str]:
        """Return the non-default values by name, as config.toml records them for a resume.

        >>> Several(nproc=2).recorded(), Several().recorded()
        ({'nproc': 2}, {})
        """
        recorded = {}
        for name in NAMES:
            value = getattr(self, name)
            if value != getattr(Several, name):
                recorded[name] = value
        return recorded


def among_settings(program: Program) -> tuple[str, ...]:
    """Return the names of these options that are also settings of the program."""
    if program.config is not None and "nproc" in field_hints(program.config):
        return NAMES
    return ()


def program_options(
    kind: type[T], arguments: Sequence[str], *, verb: str
) -> tuple[Program, T, list[str]]:
    """Return the recipe or program, the verb's own options, and the arguments that are left for its
    settings.
    """
    missing = (
        f"{verb} needs a recipe or a program: surefoot {verb} gpt, or surefoot {verb} FILE.py:build"
    )
    program = find_program(target(kind, arguments, verb=verb, missing=missing))
    options, flags = verb_options(
        kind, arguments, verb=verb, but=among_settings(program), help_goes_on=True
    )
    return program, options, flags


def settled(several: Several, config: Any) -> Several:
    """Return the options with the values of the configuration, if the configuration has these
    settings.
    """
    if config is None or "nproc" not in flatten(config):
        return several
    return Several(nproc=config.nproc, max_restarts=config.max_restarts)


def as_before(several: Several, arguments: Sequence[str], before: Mapping[str, Any]) -> Several:
    """Use the values recorded `before` for options that the arguments do not set.

    >>> as_before(Several(), ["runs/mine"], {"nproc": 2})
    Several(nproc=2, max_restarts=0)
    """
    absent = {}
    for name in NAMES:
        if name in before and flag_text(arguments, name) is None:
            absent[name] = before[name]
    return dataclasses.replace(several, **absent)


def refuse_several(arguments: Sequence[str], *, verb: str, or_launched: bool = False) -> None:
    """Raise if a single-process subcommand has options for several processes or, with
    `or_launched`, runs in several processes.
    """
    given = [name for name in NAMES if flag_text(arguments, name) is not None]
    is_launched = or_launched and placed(os.environ).world_size > 1
    if given or is_launched:
        raise _one_process(verb, given, is_launched=is_launched)


def _one_process(what: str, given: Sequence[str], *, is_launched: bool = False) -> ConfigError:
    elsewhere = ["start it without torchrun or srun"] if is_launched else []
    return ConfigError(
        "one-process-only",
        problem=f"{what} runs in one process",
        remedy=[*(("leave out", Setting(name)) for name in given), *elsewhere],
        what=what,
    )


def start_several(
    command: Sequence[str],
    several: Several,
    *,
    config: Any,
    flags: Sequence[str],
    out: Path | None = None,
    numbered: Path | None = None,
) -> None:
    """Run the command in several processes if requested, and exit with their status. Return inside
    these processes, or if one is enough. `numbered` is the directory that was chosen for the run.
    """
    wanted = _wanted(several)
    if "WORLD_SIZE" in os.environ:
        if not started_by_launcher() and flag_text(flags, "nproc") is not None:
            world_size = os.environ["WORLD_SIZE"]
            raise ConfigError(
                "nproc-under-launcher",
                problem=f"nproc = {wanted.text} in a process that a launcher has started"
                f" (WORLD_SIZE={world_size})",
                remedy=[("leave out", Setting("nproc")), "start it without that launcher"],
                setting="nproc",
                value=wanted.text,
            )
        return
    if wanted.max_count == 1 and not several.max_restarts:
        return
    settings = {} if config is None else flatten(config)
    places = _places(wanted, settings, out=out)
    places.size()  # before anything is started
    from surefoot.distributed.launcher import launch  # imports torch

    limit_s = None
    if settings.get("time_limit") is not None:
        limit_s = seconds(settings["time_limit"], setting="time_limit")

    def arguments(elapsed_s: float) -> list[str]:
        words = list(command)
        if limit_s is not None and elapsed_s > 1:  # the remaining time for a restarted group
            left_s = max(1, round(limit_s - elapsed_s))
            words = [*without(words, ["time_limit"]), "--time-limit", f"{left_s} s"]
        return ["-P", "-m", "surefoot", *words]  # -P: import nothing from the working directory

    again = "the same command"
    if numbered is not None:
        again = f"surefoot resume {shlex.quote(str(numbered))}"
        print(f"run_dir {numbered}; resume with: {again}")
    sys.stdout.flush()
    sys.exit(launch(arguments, places=places, max_restarts=several.max_restarts, again=again))


def planned(several: Several, config: Any) -> int:
    """Return the number of processes that the command would start. Raises `ConfigError` if the
    command would be refused.
    """
    wanted = _wanted(several)
    if wanted.max_count == 1:
        return 1
    settings = {} if config is None else flatten(config)
    return _places(wanted, settings).size()


def refuse_tasks(tasks: int, several: Several, config: Any, *, local: bool) -> None:
    """Raise if the run cannot train in this number of Slurm tasks, or if a task would start further
    processes.
    """
    if several.recorded() and (tasks > 1 or local):
        raise _one_process(f"each of {tasks} tasks", [*several.recorded()])
    settings = {} if config is None else flatten(config)
    # only the job's machines know their GPUs
    sizes = _places(parse_nproc(tasks), settings | {"device": "cpu"}).sizes()
    if sizes is not None:
        sizes.refuse(tasks)
    if tasks > 1 and settings.get("parallel") == "none":
        parallel.strategy_for("none", ranks=tasks)


def _wanted(several: Several) -> ProcessCount:
    number(min_value=0)(several.max_restarts, setting="max_restarts")
    return parse_nproc(several.nproc)


def _places(wanted: ProcessCount, settings: Mapping[str, Any], *, out: Path | None = None) -> Slots:
    run_dir = out
    in_settings = settings.get("run_dir")
    if run_dir is None and isinstance(in_settings, str) and in_settings:
        run_dir = run_path(in_settings, setting="run_dir")

    def sizes() -> Sizes | None:
        batch_size = first_value(settings.get("batch_size"), setting="batch_size")
        if batch_size is None:
            return None
        return sizes_of(batch_size, settings.get("micro_batch_size"), run_dir=run_dir)

    return Slots(wanted, sizes=sizes, gpus=_gpus(settings.get("device", "auto")))


def sizes_of(
    batch_size: int | str, micro_batch_size: int | str | None, *, run_dir: Path | None
) -> Sizes:
    """Return the sizes of a step from a run's settings. An existing run keeps its micro-batch
    size.
    """
    began = None
    if run_dir is not None:
        began = read_beginning(run_dir).micro_batch_size_for(batch_size)
    return Sizes(
        batch_size,
        began if micro_batch_size is None else micro_batch_size,
        is_resumed=began is not None,
    )


def _gpus(device: Any) -> list[str] | None:
    import torch

    on_gpus = isinstance(device, str) and (device == "auto" or device.startswith("cuda"))
    if not on_gpus or not torch.cuda.is_available():  # the ranks report a missing GPU
        return None
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(count)]
    return visible.split(",")[:count]
