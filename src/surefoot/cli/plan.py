"""`surefoot plan`: the run that `train` would start; with `--world-size N`, its needs on N GPUs,
computed from shapes.
"""

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.cli.options import (
    ProgramOptions,
    asks_for_help,
    by_flag,
    check_excluded,
    limited,
    needs_option,
    option_names,
)
from surefoot.cli.plan_run import names_a_run, plan_run
from surefoot.cli.plan_schedules import PlanSchedules, plan_schedules
from surefoot.cli.processes import Several, planned, program_options, settled
from surefoot.cli.settings import layers_below, program_settings, read_settings
from surefoot.config.paths import local_path
from surefoot.config.tree import MOST_USED, flatten
from surefoot.errors import ConfigError, Setting, SurefootError, out_of_range, together
from surefoot.program import Program, build_run

if TYPE_CHECKING:
    from surefoot.tools.plan.network_model import Machine

_H100 = "H100 SXM data sheet"
_USUAL = {
    "mfu": (0.4, "as Grattafiori et al. 2024 report, table 4"),
    "gpu_memory": (80e9, _H100),
    "bandwidth": (50e9, "one 400 Gb/s adapter per GPU"),
    "node_bandwidth": (450e9, f"{_H100}, NVLink one way"),
    "node_size": (8, "usual"),
}
_FRACTIONS = (
    ("flops", math.inf, "a number of FLOP per second, such as 989e12"),
    ("mfu", 1.0, "a fraction of the FLOP/s, above 0 and at most 1"),
)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The GPUs that a plan assumes. Memory and bandwidth are text with a unit."""

    world_size: int | None = limited(None, min_value=1, most_used=True)
    """Number of GPUs to plan for: memory per GPU, bytes sent and step time. They are computed from
    shapes, for the run's --parallel and for alternatives; nothing is allocated, and recipes read no
    data.
    """
    flops: float | None = None
    """Peak FLOP/s of one GPU. Default: 989e12, the peak of an H100 in bf16."""
    mfu: float | None = None
    """Fraction of the peak FLOP/s that training uses. Default: 0.4."""
    gpu_memory: str | None = None
    """Memory of one GPU. Default: "80 GB"."""
    bandwidth: str | None = None
    """Bandwidth of one GPU to other nodes. Default: "50 GB/s"."""
    node_bandwidth: str | None = None
    """Bandwidth of one GPU within its node. Default: "450 GB/s"."""
    node_size: int | None = limited(None, min_value=1)
    """GPUs per node. Default: 8."""


@dataclass(frozen=True, kw_only=True)
class Plan(MachineOptions, Several, ProgramOptions):
    """Show the run that train would start with the same arguments: settings and their
    origins, parameters, micro-batches, learning rates, and memory and time measured
    with one micro-batch. Check that the loss is a mean over samples or targets.
    Nothing is trained or written. Of an existing run, what is still to come.

      surefoot plan gpt --batch-size 64 --micro-batch-size 8
      surefoot plan gpt --preset gpt2-1558m --world-size 512 --parallel fsdp
      surefoot plan --schedules cosine,linear:min_lr_ratio=0.1,wsd:cooldown=30%
      surefoot plan gpt --schedules all --preset shakespeare --out rates
      surefoot plan runs/mine --schedules
    """

    schedules: str | None = field(default=None, metadata=MOST_USED)
    """LIST of learning-rate schedules to draw side by side instead, as PATH.svg and PATH.png
    (--out PATH). The peak, the minimum, the end of warm-up and the mean factor of each are printed.
    LIST separates schedules by commas, settings by colons and milestones by slashes, as in
    multistep:milestones=30%/60%. A+B@50% switches from A to B halfway; all draws every shape. The
    run has 1,000 steps, or --length. A recipe supplies its own length, base learning rate and
    schedule settings.
    """


def plan(arguments: list[str]) -> None:
    """Run `surefoot plan`: print what a run would do, and train nothing."""
    (_, words), *_ = by_flag(arguments)
    if names_a_run(words) and not asks_for_help(arguments):
        plan_run(arguments)
        return
    if "schedules" in dict(by_flag(arguments)) and not asks_for_help(arguments):
        plan_schedules(
            arguments, foreign=set(option_names(Plan)) - set(option_names(PlanSchedules))
        )
        return
    program, options, flags = program_options(Plan, arguments, verb="plan")
    numbers = _numbers(options)
    if options.world_size is not None:
        check_excluded("world_size", [*options.recorded()], reason="it starts no processes")
    config, origins = program_settings(program, options, flags, verb="plan")
    if options.world_size is not None:
        from surefoot.distributed.world import on_meta
        from surefoot.tools.plan import cluster_text

        _print_configuration(config, origins)
        with on_meta(options.world_size):
            arguments_of_build = [] if config is None else [config]
            parts = program.on_meta(*arguments_of_build).parts
            machine = _assumed(numbers, precision=parts.plan.precision)
            for section in cluster_text.sections(parts, machine):
                print(f"\n{section}")
        return
    program.check(config)
    ranks = planned(settled(options, config), config)
    from surefoot.distributed.world import planned_for
    from surefoot.tools.plan import summary
    from surefoot.train.loss_contract import refused_loss
    from surefoot.train.state_check import loss_contract, refuse_scored_sums

    with planned_for(ranks if ranks > 1 else 0):
        run = build_run(program.for_plan(), config)
    if config is not None:
        _print_configuration(config, origins)
    for section in summary.sections(run.parts):
        print(f"\n{section}")
    if program.described.get("kind") == "recipe" and _is_there(config.data.path):
        print(f"\nsamples\n  as the model will see them: {_look_at(program, config)}")
    contract = loss_contract(run.parts)
    refuse_scored_sums(run.parts, contract)
    if not contract.holds:
        raise refused_loss(contract)
    print(f"\nloss contract\n  {contract.description}")


def _is_there(path: str | None) -> bool:
    """Return True for a path, and False for a name of data such as synthetic."""
    return path is not None and local_path(path, setting="data.path").exists()


def _look_at(program: Program, config: Any) -> str:
    """Return the command that shows the samples of a configuration, with the settings of it that
    say how the data are read, unless the command has them by itself.
    """
    path = shlex.quote(str(config.data.path))
    words = [f"surefoot data look {path} --recipe {program.described['recipe']}"]
    by_itself, _ = read_settings(program, layers_below(program, {}, []), [], verb="data look")
    known = flatten(by_itself)
    for name, value in flatten(config).items():
        is_of_data = name.startswith("data.") and name != "data.path"
        if (is_of_data or name == "model") and value != known[name]:
            words.append(Setting(name, value).as_flag())
    return " ".join(words)


def _print_configuration(config: Any, origins: Mapping[str, str]) -> None:
    if config is None:
        return
    print("configuration")
    for name, value in flatten(config).items():
        if value is not None:
            print(f"  {name} = {value!r}  [{origins[name]}]")


def _assumed(numbers: Mapping[str, float], *, precision: str) -> "Machine":
    from surefoot.tools.plan.network_model import Machine
    from surefoot.train.precision import FORMATS

    usual = {"flops": (FORMATS[precision].h100_flops, f"{_H100}, dense {precision}"), **_USUAL}
    values: dict[str, Any] = {}
    origins = {}
    for name, (value, source) in usual.items():
        flag = f"--{name.replace('_', '-')}"
        if name in numbers:
            values[name] = numbers[name]
            origins[name] = flag
        else:
            values[name] = value
            origins[name] = f"{flag} default: {source}"
    values["memory_bytes"] = int(values.pop("gpu_memory"))
    values["node_size"] = int(values["node_size"])
    return Machine(**values, origins=origins)


def _numbers(options: MachineOptions) -> dict[str, float]:
    """Return the given numbers of the machine in plain units, by the names of their options."""
    given = {}
    for name in ("flops", *_USUAL):
        value = getattr(options, name)
        if value is not None:
            given[name] = value
    if given and options.world_size is None:
        raise needs_option(next(iter(given)), "world_size", 8)
    numbers = dict[str, float]()
    problems = list[SurefootError]()
    if not given:
        return numbers
    from surefoot.memory import parsed_bytes  # imports torch

    for name, value in given.items():
        try:
            if not isinstance(value, str):
                numbers[name] = value
            elif name == "gpu_memory":
                numbers[name] = parsed_bytes(value, setting=name)
            else:
                numbers[name] = bytes_per_s(value, setting=name)
        except ConfigError as problem:
            problems.append(problem)
    for name, max_fraction, meaning in _FRACTIONS:
        if not 0 < numbers.get(name, 1.0) <= max_fraction:
            problems.append(out_of_range(name, numbers[name], meaning))
    if problems:
        raise together(problems)
    return numbers


def bytes_per_s(text: str, *, setting: str) -> float:
    """Parse a bandwidth with its unit to bytes per second; b stands for bits.

    >>> (
    ...     bytes_per_s("50 GB/s", setting="bandwidth"),
    ...     bytes_per_s("400 Gb/s", setting="bandwidth"),
    ... )
    (50000000000.0, 50000000000.0)
    """
    speed = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(b|B|bit)/s", text.strip(), re.ASCII)
    if speed is None or not float(speed[1]):
        meaning = "a bandwidth with its unit, such as '50 GB/s', or '400 Gb/s' in bits"
        raise out_of_range(setting, text, meaning)
    units_per_byte = 1 if speed[3] == "B" else 8
    return float(speed[1]) * _UNITS[speed[2].lower()] / units_per_byte
