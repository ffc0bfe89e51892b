"""`surefoot verify RUN`: is what lies there what was trained? Files against hashes, then steps made again."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.options import ChangedProgramOption, RunOption, find_run, limited, run_options
from surefoot.cli.processes import refuse_several
from surefoot.cli.settings import saved_settings
from surefoot.config.paths import file_text
from surefoot.config.toml import program as program_of
from surefoot.distributed.environment import placed
from surefoot.errors import ConfigError, DataError
from surefoot.recipes.program import build_run, for_one_process, status_line

if TYPE_CHECKING:
    from surefoot.verify.files import Files
    from surefoot.verify.verdict import Verdict

_BETWEEN_S = 0.2  # drawings of the line that tells how far it is


@dataclass(frozen=True, kw_only=True)
class Verify(ChangedProgramOption, RunOption):
    """Prove a run: every byte of its checkpoints and its records against their hashes,
    records against each other and the schedule, data against their fingerprints;
    then make steps again from checkpoints and compare losses, norms and tensors:
    bit for bit on the machine that made them, to rounding elsewhere. Says first
    what that costs; writes nothing; a run that goes on may be verified. Of a run
    that a script has made only files are checked; in it: surefoot.load(run).verify().

    Leaves with 0 where nothing is wrong, 4 where files are damaged or contradict
    each other, 3 where data are others, 8 where steps come out otherwise.

      surefoot verify latest
      surefoot verify runs/mine --steps 200 --windows 3
    """

    all: bool = False
    """Make all steps again. Without it: where that takes two minutes."""
    steps: int | None = limited(None, least=1)
    """Steps of a window, from a checkpoint on. Absent: 100."""
    windows: int | None = limited(None, least=0)
    """How many windows: the first, the last, and evenly between; 0: files only. Absent: 5."""
    seed: int | None = limited(None, least=0)
    """Draw the windows instead."""
    tolerance: float | None = None
    """Relative difference allowed on another machine. Absent: 0.01."""
    json: bool = False
    """The verdict for programs."""


def verify(arguments: list[str]) -> None:
    """Print the verdict on a run: leave with 4 for damaged files, 3 for other data, 8 where steps come out otherwise."""
    options, flags = run_options(Verify, arguments, verb="verify")
    run_path = find_run(options.run)
    refuse_several(arguments, verb="verify")
    if placed(os.environ).world_size > 1:
        raise ConfigError("verify works in one process: start it without torchrun or srun")
    asked = _asked(options)
    from surefoot.verify.files import checked  # imports torch

    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        files = checked(run_path)
        try:
            verdict = _verdict(run_path, files, options, flags, asked)
        except _NotBuiltError as problem:
            _told(problem.verdict, as_json=False, stream=sys.stderr)
            raise problem.cause from None
    _told(verdict, as_json=options.json, stream=sys.stdout)
    if verdict.exit_status:
        sys.exit(verdict.exit_status)


class _NotBuiltError(Exception):
    """The run cannot be built again, and why; the files are checked all the same."""

    def __init__(self, verdict: Verdict, cause: Exception) -> None:
        self.verdict, self.cause = verdict, cause


def _asked(options: Verify) -> dict[str, Any]:
    """What is asked of `verify()`: nothing where its defaults are meant."""
    windows = options.steps, options.windows, options.seed
    asked: dict[str, Any] = {}
    if options.all:
        if windows != (None, None, None):
            raise ConfigError("--all makes all steps again: leave --steps, --windows and --seed out")
        asked["steps"] = "all"
    elif windows != (None, None, None):
        from surefoot.verify.windows import STEPS, WINDOWS

        asked["steps"] = STEPS if options.steps is None else options.steps
        asked["windows"] = WINDOWS if options.windows is None else options.windows
        asked["seed"] = options.seed
    if options.tolerance is not None:
        if options.tolerance < 0:
            raise ConfigError(f"--tolerance {options.tolerance:g}: a relative difference is 0 or more")
        asked["tolerance"] = options.tolerance
    return asked


def _verdict(run_path: Path, files: Files, options: Verify, flags: Sequence[str], asked: dict[str, Any]) -> Verdict:
    from surefoot.verify.verify import verify, verify_files, verify_without_data

    made_by = program_of(file_text(run_path / "config.toml"), where=str(run_path / "config.toml"))
    if made_by.get("kind") == "script":
        why = "a script has made this run, and only that can build it again; there: print(surefoot.load(run).verify())"
        return verify_files(files, why=why)
    try:
        program, config = saved_settings(run_path, options, flags, verb="verify")
        run = build_run(program, for_one_process(config, run_path), of=run_path)
    except DataError as problem:
        return verify_without_data(files, problem)
    except Exception as problem:  # of the user's own code too: what is known of the files is told all the same
        raise _NotBuiltError(verify_files(files, why="it cannot be built again"), problem) from problem
    if run.parts.directory is None:
        raise ConfigError(f"what made {run_path} builds a run without a directory now: was `out` changed?")
    with status_line() as show:
        watch = progress(show)
        return verify(run, files=files, say=lambda text: print(text, flush=True), watch=watch, **asked)


def progress(show: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """What shows how many of the steps are made again, and how long the others will take; not each time that it is called."""
    from surefoot.tracking.format import duration

    begun, drawn = now(), -math.inf

    def watch(made: int, total: int) -> None:
        nonlocal drawn
        time_s = now()
        if time_s - drawn >= _BETWEEN_S:
            drawn = time_s
            left_s = (time_s - begun) / max(made, 1) * (total - made)
            show(f"{made:,} of {total:,} steps made again, {duration(left_s)} left")

    return watch


def _told(verdict: Verdict, *, as_json: bool, stream: Any) -> None:
    print(json.dumps(verdict.as_json(), indent=1) if as_json else str(verdict), file=stream, flush=True)
