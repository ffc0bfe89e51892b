"""The verbs that try settings on a run and leave nothing behind: find-lr and find-batch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.batching import batching
from surefoot.cli import programs
from surefoot.cli.building import built, from_file, layers_below, of_run, refuse_fp16_on_a_cpu, refuse_settings
from surefoot.cli.flags import configured
from surefoot.cli.help import VERBS
from surefoot.cli.options import RUN_CHANGED, file_text, number, option, run_directory, switch, whole
from surefoot.cli.processes import refuse_several
from surefoot.cli.trained import checkpoint_of
from surefoot.config import Settings, flatten, values
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError
from surefoot.recipes import NAMES

if TYPE_CHECKING:
    from surefoot.run import Run

_SHOWN = 20  # rows of losses, of a test of any length


def find_lr(arguments: list[str]) -> None:
    """`surefoot find-lr RECIPE|FILE.py:build|RUN [settings] [--from] [--to] [--steps] [--out DIR]`: a range test.

    Leaves with 1 where no rate can be suggested.
    """
    rest, low = option(arguments, "--from")
    rest, high = option(rest, "--to")
    rest, steps = option(rest, "--steps")
    rest, out = option(rest, "--out")
    lowest = number("--from", low or "1e-6", example="1e-6")
    highest = number("--to", high or "10", example="10")
    count = whole("--steps", steps or "100")
    from surefoot.tune.range_test import check_range, written

    check_range(lowest, highest, count)
    run, settings = meant(rest, "find-lr", own=["from", "to", "steps", "out"])
    from surefoot.drawing import made
    from surefoot.tune.find_lr import find_lr
    from surefoot.tune.range_picture import draw

    if out is not None:
        made(local_path(out, setting="--out"))  # before the test, which may take long

    stride, seen = max(1, count // _SHOWN), 0

    def watch(rate: float, loss: float) -> None:
        nonlocal seen
        if seen == 0:  # what is refused is refused before there is a table
            print(f"{count} rates from {written(lowest)} to {written(highest)}, one a step, from step {start:,}")
            print("  rate     loss after it")
        if seen % stride == 0:
            print(f"  {written(rate):<8} {loss:.4g}", flush=True)
        seen += 1

    start = run.state.step
    found = find_lr(run, low=lowest, high=highest, steps=count, watch=watch)
    flag = "--optimizer.lr " if "optimizer.lr" in settings else "learning rate "
    print(f"{found.ended}; the table shows {-(-seen // stride)} of {len(found.rates)} rates")
    print(f"suggested  {flag}{written(found.suggested)}" if found.suggested is not None else "no suggestion")
    print(f"  {found.reason}")
    if out is not None:
        files = draw(found, Path(out), title=f"surefoot find-lr {rest[0]}")
        print(f"drawn  {', '.join(str(file) for file in files)}")
    if found.suggested is None:
        sys.exit(1)


def find_batch(arguments: list[str]) -> None:
    """`surefoot find-batch RECIPE|FILE.py:build|RUN [settings] [--target-batch N] [--memory 8GB]`: micro-batch sizes measured."""
    rest, target = option(arguments, "--target-batch")
    rest, memory = option(rest, "--memory")
    if target is not None:
        batching(target, None)
    if memory is not None:
        from surefoot.memory import parsed_bytes  # imports torch

        parsed_bytes(memory, setting="memory")
    run, _ = meant(rest, "find-batch", own=["target-batch", "memory"])
    from surefoot.tune.find_batch import find_batch, what_changes_with_it

    shown = sys.stderr is not None and sys.stderr.isatty()

    def watch(text: str) -> None:
        if shown:
            print(f"\r\x1b[2K{text} ...", end="", file=sys.stderr, flush=True)

    try:
        found = find_batch(run, target_batch=target, memory=memory, watch=watch)
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    print(found)
    print(f"  {what_changes_with_it(run)}")


def meant(arguments: Sequence[str], verb: str, *, own: Sequence[str]) -> tuple[Run, set[str]]:
    """The run that the arguments of a verb mean, not opened, and the names of its settings.

    A recipe or a function's run is at its start, whatever its directory holds; that of a directory where a checkpoint is.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(
            f"{verb} of what? surefoot {verb} gpt, or surefoot {verb} FILE.py:build, or surefoot {verb} RUN"
        )
    refuse_several(arguments, verb=verb)
    name, rest = arguments[0], list(arguments[1:])
    if {"-h", "--help"} & set(rest):
        print(f"{VERBS[verb]}\nSettings, which come before or after these:\n", flush=True)
    said = f"surefoot {verb} {name}"
    if name not in NAMES and ":" not in name and not name.endswith(".py") and _is_run(name):
        path = run_directory([name])
        rest, run_changed = switch(rest, RUN_CHANGED)
        rest, which = option(rest, "--checkpoint")
        if verb == "find-lr":
            _refuse_another_optimizer(path, rest)
        program, config = of_run(path, rest, verb=said, own=[*own, "checkpoint"], run_changed=run_changed)
        if config is not None and "out" in flatten(config):
            config = dataclasses.replace(config, out=str(path))
        run = built(program, config, of=path)
        run.load(checkpoint_of(path, which))
        return run, set() if config is None else set(flatten(config))
    program = programs.found(name)
    rest, in_file = from_file(program, rest)
    if program.config is None:
        refuse_settings(program, rest)
        return built(program, None), set()
    config, _ = configured(program.config, layers_below(program, in_file, rest), rest, verb=said, own=own)
    if isinstance(config, Settings):  # what another run has left in the directory, a tokenizer say, is not this one's
        config = dataclasses.replace(config, out=None, trackers=None)
    run = built(program, config)
    refuse_fp16_on_a_cpu(run)
    return run, set(flatten(config))


def _refuse_another_optimizer(run: Path, flags: Sequence[str]) -> None:
    """Raise where a run that is there is to be tried with an optimizer whose state it does not hold."""
    asked = option(flags, "--optimizer.name")[1]
    own = values(file_text(run / "config.toml")).get("optimizer.name")
    if asked is not None and own is not None and asked != own:
        raise ConfigError(
            f"--optimizer.name {asked}: {run} was trained with {own}, and its state is that one's\n"
            "  leave it out, or test a start with the other one: surefoot find-lr RECIPE --optimizer.name ..."
        )


def _is_run(name: str) -> bool:
    return name == "latest" or any((path / "config.toml").is_file() for path in (Path(name), Path("runs") / name))
