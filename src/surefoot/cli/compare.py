"""`surefoot compare`: train the variants of a run, search settings, or compare existing runs."""

from collections.abc import Sequence
from pathlib import Path

from surefoot.cli.compare_plan import Compare, planned_of
from surefoot.cli.options import (
    by_flag,
    needs_option,
    not_of,
    option_names,
    refuse_misspelled,
    verb_options,
)
from surefoot.config.extras import refuse_missing
from surefoot.config.keywords import parse_score
from surefoot.config.paths import run_path
from surefoot.errors import ConfigError, out_of_range
from surefoot.program import find_program
from surefoot.tools.compare.plan import FILE

_OUT = "runs/compare"


def compare(arguments: list[str]) -> None:
    """Run `surefoot compare`: train variants on the same data, or compare finished runs."""
    missing = (
        "compare needs settings to vary, surefoot compare gpt --vary optimizer.lr=1e-3,3e-3,"
        " or several runs, surefoot compare RUN RUN"
    )
    options, flags = verb_options(Compare, arguments, verb="compare", missing=missing)
    what = options.what
    typed = {name for name, _ in by_flag(arguments)} & set(option_names(Compare))
    _check_score(options.metric)
    plan = None
    path = run_path(what[0], setting="the run or recipe")
    if len(what) > 1:
        of_runs = {"target", "baseline", "metric", "out", "paired", "run_changed_program"}
        _refuse_others(flags, typed - of_runs, what=what[0])
    elif (path / FILE).is_file():
        of_session = {"jobs", "threads", "target", "baseline", "metric", "trials"}
        _refuse_others(flags, typed - of_session - {"run_changed_program"}, what=path)
    else:
        if (path / "config.toml").is_file():
            raise ConfigError(
                "run-alone",
                problem=f"{path} is one run",
                remedy="name another run to compare it with, or a recipe to train",
                path=path,
            )
        if options.paired:  # new runs are always evaluated batch by batch
            raise not_of("paired", "existing runs", what[0])
        if options.trials is None:
            for name in sorted(typed & {"sampler", "pruner"}):
                raise needs_option(name, "trials", 20)
        else:
            refuse_missing("trials", "optuna")  # before the plan is written
        plan = planned_of(find_program(what[0]), flags, options, verb=f"compare {what[0]}")
        path = run_path(_OUT if options.out is None else options.out, setting="--out")
    from surefoot.cli import compare_runs  # imports torch

    if len(what) > 1:
        compare_runs.compare_existing(options)
    else:
        compare_runs.train_variants(plan, path, options, typed=typed)


def _refuse_others(flags: Sequence[str], options: set[str], *, what: Path | str) -> None:
    refuse_misspelled(flags, Compare, verb="compare")
    names = [name for name, _ in by_flag(flags) if name]
    for name in [*names, *sorted(options)]:
        raise not_of(name, "new comparisons", what)


def _check_score(text: str | None) -> None:
    if text is None:
        return
    direction, score = parse_score(text, setting="metric")
    if not all(score.partition("/")):
        meaning = f"a direction, a split and its metric, as in '{direction} val/loss'"
        raise out_of_range("metric", text, meaning)
