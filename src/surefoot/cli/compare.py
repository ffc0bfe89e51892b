"""`surefoot compare ...`: variants trained side by side, settings searched for, or runs that are there put next to each other."""

from collections.abc import Sequence
from pathlib import Path

from surefoot.cli.compare_plan import Compare, check_score, planned_of
from surefoot.cli.options import by_flag, option_names, verb_options
from surefoot.compare import plan as planned
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError
from surefoot.recipes.program import find_program

_OUT = "runs/compare"


def compare(arguments: list[str]) -> None:
    options, flags = verb_options(Compare, arguments, verb="compare")
    named, given = options.what, {name for name, _ in by_flag(arguments)} & set(option_names(Compare))
    if options.schedules is not None:
        from surefoot.cli.plan_schedules import compare_schedules

        compare_schedules(options, flags, given=given)
        return
    check_score(options.score)
    if not named:
        raise ConfigError(
            "compare what? surefoot compare gpt --vary optimizer.lr=1e-3,3e-3, or surefoot compare RUN RUN"
        )
    plan, path = None, Path(named[0])
    if len(named) > 1:
        _refuse(flags, given - {"target", "reference", "score", "out", "paired", "run_changed_program"})
    elif (path / planned.FILE).is_file():
        _refuse(flags, given - {"jobs", "threads", "target", "reference", "score", "search", "run_changed_program"})
    else:
        if (path / "config.toml").is_file():
            raise ConfigError(f"{path} is one run: name another to compare it with, or what to train")
        if options.paired:
            raise ConfigError(
                "--paired is for runs that are there: those trained here are always scored batch by batch"
            )
        if options.search is None and given & {"sampler", "pruner"}:
            raise ConfigError("--sampler and --pruner are of a search\n  say how many trials: --search 20")
        plan = planned_of(find_program(named[0]), flags, options, verb=f"compare {named[0]}")
        path = local_path(options.out or _OUT, setting="--out")
    from surefoot.cli import compare_runs  # imports torch

    if len(named) > 1:
        compare_runs.there(options)
    else:
        compare_runs.trained_here(plan, path, options, given=given)


def _refuse(flags: Sequence[str], options: set[str]) -> None:
    for first in [*flags, *(f"--{name.replace('_', '-')}" for name in sorted(options))][:1]:
        raise ConfigError(
            f"{first} is for the start of a comparison\n  another one: surefoot compare RECIPE ... --out DIR"
        )
