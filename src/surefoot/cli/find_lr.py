"""`surefoot find-lr`: a learning-rate range test. This module also builds the run that other
subcommands measure.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

import surefoot as sf
from surefoot.cli.options import (
    ChangedProgramOption,
    ProgramOptions,
    T,
    find_run,
    flag_text,
    limited,
    not_of,
    verb_options,
)
from surefoot.cli.processes import Several, refuse_several, start_several
from surefoot.cli.settings import program_settings, saved_settings
from surefoot.config.paths import file_text, run_path
from surefoot.config.toml import values
from surefoot.config.train_settings import TrainSettings
from surefoot.config.tree import flatten
from surefoot.errors import out_of_range
from surefoot.program import build_run, choose_checkpoint, find_program, in_directory
from surefoot.recipes import NAMES

if TYPE_CHECKING:
    from surefoot.tools.tune.lr_range_test import LRRangeTest

_SHOWN = 20  # approximate rows of the printed table


@dataclass(frozen=True, kw_only=True)
class TriedRunOptions(ChangedProgramOption, ProgramOptions):
    """The run to measure: a new run, or an existing run at a checkpoint."""

    what: Positional[Annotated[str, arg(metavar="RECIPE|FILE.py:build|RUN")]]
    """gpt, translation, images or finetune; your own function that returns a surefoot.Run; or an
    existing run.
    """
    checkpoint: str | None = None
    """Checkpoint of an existing run: newest, best, or a step."""


@dataclass(frozen=True, kw_only=True)
class FindLr(Several, TriedRunOptions):
    """Train one step at each learning rate, from the lowest to the highest, on the
    data that training would read next. Suggest the learning rate at which the loss
    falls steepest. surefoot train has the same settings. For a RUN, the steps start
    at its newest checkpoint. The run is not changed; only --out is written. The
    exit status is 1 if no learning rate can be suggested.

      surefoot find-lr images --optimizer.name sgd --out pictures/
      surefoot find-lr gpt --batch-size 32 --min-lr 1e-5 --max-lr 1 --steps 60
    """

    min_lr: float = 1e-6
    """Lowest learning rate."""
    max_lr: float = 10.0
    """Highest learning rate. The test ends earlier if the loss diverges."""
    steps: int = limited(100, min_value=1)
    """Number of learning rates to try."""
    out: str | None = None
    """Draw the curve as DIR/find-lr.svg, and with the extra plots as DIR/find-lr.png."""


def find_lr(arguments: list[str]) -> None:
    """Run `surefoot find-lr`: raise the learning rate step by step, and suggest one."""
    options, flags = tried_options(FindLr, arguments, verb="find-lr")
    lowest = options.min_lr
    highest = options.max_lr
    count = options.steps
    from surefoot.tools.report import figures
    from surefoot.tools.tune import lr_search
    from surefoot.tools.tune.lr_range_test import as_text, check_range

    check_range(lowest, highest, count)
    directory = None if options.out is None else run_path(options.out, setting="--out")
    run, settings = tried_run(options, flags, verb="find-lr", command=arguments)
    if directory is not None and run.rank == 0:
        figures.make_directory(directory)  # fail before the long test

    stride = max(1, count // _SHOWN)
    rates_read = 0

    def watch(rate: float, loss: float) -> None:
        nonlocal rates_read
        if rates_read == 0:  # errors come before the table
            print(
                f"{count} learning rates from {as_text(lowest)} to {as_text(highest)},"
                f" one per step, from step {start:,}"
            )
            print("  lr       loss after the step")
        if rates_read % stride == 0:
            print(f"  {as_text(rate):<8} {loss:.4g}", flush=True)
        rates_read += 1

    start = run.state.step
    test = lr_search.find_lr(run, min_lr=lowest, max_lr=highest, steps=count, progress_fn=watch)
    if run.rank == 0:
        _present(test, settings, shown=-(-rates_read // stride))
        if directory is not None:
            title = f"surefoot find-lr {options.what}"
            chart = lr_search.chart_of(test)
            drawn = figures.draw([chart], directory / "find-lr", title=title)
            print(figures.drawn_line(drawn))
    if test.suggested is None:
        sys.exit(1)


def _present(test: "LRRangeTest", settings: set[str], *, shown: int) -> None:
    from surefoot.tools.tune.lr_range_test import as_text

    print(f"{test.ended}; the table shows {shown} of {len(test.rates)} learning rates")
    if test.suggested is None:
        print("no suggestion")
    else:
        what = "--optimizer.lr" if "optimizer.lr" in settings else "learning rate"
        print(f"suggested  {what} {as_text(test.suggested)}")
    print(f"  {test.reason}")


def tried_options(kind: type[T], arguments: Sequence[str], *, verb: str) -> tuple[T, list[str]]:
    """Return the options of a subcommand that measures a run, and the settings among the
    arguments.
    """
    missing = (
        f"{verb} needs a recipe, a program or a run: surefoot {verb} gpt,"
        f" surefoot {verb} FILE.py:build, or surefoot {verb} RUN"
    )
    options, flags = verb_options(kind, arguments, verb=verb, missing=missing, help_goes_on=True)
    refuse_several(flags, verb=verb)
    return options, flags


def tried_run(
    options: TriedRunOptions, flags: Sequence[str], *, verb: str, command: Sequence[str] = ()
) -> "tuple[sf.Run, set[str]]":
    """Return the run to measure, without opening its directory, and the names of its settings. An
    existing run gets the state of a checkpoint. With `Several` options, the verb's arguments
    `command` may be run in several processes instead."""
    what = options.what
    if _is_run(what):
        return _saved_run(find_run(what), options, flags, verb=verb, command=command)
    program = find_program(what)
    for name in ("checkpoint", "run_changed_program"):
        if getattr(options, name):
            raise not_of(name, "existing runs", what)
    config, _ = program_settings(program, options, flags, verb=verb)
    if isinstance(config, TrainSettings):  # ignore files of another run, such as a tokenizer
        config = replace(config, run_dir=None, trackers=None, tensorboard=False, text_log=False)
    if isinstance(options, Several):
        start_several([verb, *command], options, config=config, flags=command)
    run = build_run(program, config)
    return run, _names_of(config)


def _is_run(what: str) -> bool:
    """Return True for an existing run. A recipe or a program of that name comes first."""
    path = run_path(what, setting="the run or recipe")
    if what in NAMES or ":" in what or what.endswith(".py"):
        return False
    if what == "latest":
        return True
    return any((run / "config.toml").is_file() for run in (path, Path("runs") / what))


def _saved_run(
    path: Path,
    options: TriedRunOptions,
    flags: Sequence[str],
    *,
    verb: str,
    command: Sequence[str],
) -> "tuple[sf.Run, set[str]]":
    if options.config is not None:
        raise not_of("config", "new runs", path)
    optimizer = flag_text(flags, "optimizer.name")
    if verb == "find-lr" and optimizer is not None:
        trained_with = values(file_text(path / "config.toml")).get("optimizer.name")
        if trained_with not in (None, optimizer):
            meaning = f"{trained_with}, whose state the checkpoint has; or test a new run"
            raise out_of_range("optimizer.name", optimizer, meaning)
    program, config = saved_settings(path, options, flags, verb=verb)
    if isinstance(options, Several):
        start_several([verb, *command], options, config=config, flags=command, out=path)
    run = build_run(program, in_directory(config, path), of=path)
    run.load_checkpoint(choose_checkpoint(path, options.checkpoint))
    return run, _names_of(config)


def _names_of(config: Any) -> set[str]:
    return set() if config is None else set(flatten(config))
