"""`surefoot compare`: train the variants of a run, search settings, or compare existing runs."""

from collections.abc import Sequence

from surefoot.cli.compare_plan import Compare, planned_of
from surefoot.cli.options import by_flag, option_names, verb_options
from surefoot.compare.plan import FILE
from surefoot.config.extras import refuse_missing
from surefoot.config.keywords import parsed
from surefoot.config.paths import run_path
from surefoot.errors import ConfigError, refuse_all
from surefoot.recipes.program import find_program

_OUT = "runs/compare"


def compare(arguments: list[str]) -> None:
    """Run `surefoot compare`: train variants on the same data, or compare finished runs."""
    options, flags = verb_options(Compare, arguments, verb="compare")
    named, typed = (
        options.what,
        {name for name, _ in by_flag(arguments)} & set(option_names(Compare)),
    )
    _check_score(options.metric)
    if not named:
        raise ConfigError(
            "compare needs settings to vary, or several runs\n"
            "  surefoot compare gpt --vary optimizer.lr=1e-3,3e-3, or surefoot compare RUN RUN"
        )
    plan = None
    path = run_path(named[0], setting="the run or recipe")
    if len(named) > 1:
        _refuse(
            flags, typed - {"target", "baseline", "metric", "out", "paired", "run_changed_program"}
        )
    elif (path / FILE).is_file():
        _refuse(
            flags,
            typed
            - {"jobs", "threads", "target", "baseline", "metric", "trials", "run_changed_program"},
        )
    else:
        refuse_all(
            {
                f"{path} is one run: name another run to compare it with, or a recipe to train": (
                    path / "config.toml"
                ).is_file(),
                "--paired is for existing runs: new runs are always evaluated batch by batch": options.paired,
                "--sampler and --pruner are for a search\n  set the number of trials: --trials 20": (
                    options.trials is None and not typed.isdisjoint({"sampler", "pruner"})
                ),
            }
        )
        if options.trials is not None:
            refuse_missing("--trials", "optuna")  # before the plan is written
        plan = planned_of(find_program(named[0]), flags, options, verb=f"compare {named[0]}")
        path = run_path(_OUT if options.out is None else options.out, setting="--out")
    from surefoot.cli import compare_runs  # imports torch

    if len(named) > 1:
        compare_runs.compare_existing(options)
    else:
        compare_runs.train_variants(plan, path, options, typed=typed)


def _refuse(flags: Sequence[str], options: set[str]) -> None:
    for first in [*flags, *(f"--{name.replace('_', '-')}" for name in sorted(options))][:1]:
        raise ConfigError(
            f"{first} is only for the start of a comparison\n  start another one: surefoot compare RECIPE ... --out DIR"
        )


def _check_score(text: str | None) -> None:
    try:
        direction, score = (None, None) if text is None else parsed(text)
    except ConfigError as problem:
        raise ConfigError(f"--metric {text!r}: {problem}") from problem
    if score is not None and not all(score.partition("/")):
        raise ConfigError(
            f"--metric {text!r}: name a split and its metric, as in '{direction} val/loss'"
        )
