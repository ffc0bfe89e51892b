"""`surefoot verify RUN`: is what lies there what was trained? Files against hashes, then steps made again."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli.building import alone, built, of_run
from surefoot.cli.options import RUN_CHANGED, file_text, number, option, run_directory, switch, whole
from surefoot.cli.processes import refuse_several
from surefoot.config import program as program_of
from surefoot.errors import ConfigError, DataError
from surefoot.placement import placed

if TYPE_CHECKING:
    from surefoot.verifying.files import Files
    from surefoot.verifying.verdict import Verdict

_BETWEEN_S = 0.2  # drawings of the line that tells how far it is
_OWN = ("steps", "windows", "all", "seed", "tolerance", "json")


def verify(arguments: list[str]) -> None:
    """`surefoot verify RUN [--steps N] [--windows K] [--all] [--seed S] [--tolerance X] [--json] [--run-changed-program] [settings]`.

    Leaves with 0 where nothing is wrong, 4 for damaged files, 3 for other data, 8 where steps come out otherwise.
    """
    run_path = run_directory(arguments)
    refuse_several(arguments, verb="verify")
    if placed(os.environ).world_size > 1:
        raise ConfigError("verify works in one process: start it without torchrun or srun")
    rest, run_changed = switch(arguments[1:], RUN_CHANGED)
    rest, asked = _asked(rest)
    rest, as_json = [argument for argument in rest if argument != "--json"], "--json" in rest
    from surefoot.verifying.files import checked  # imports torch

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        files = checked(run_path)
        try:
            verdict = _verdict(run_path, files, rest, asked, run_changed=run_changed)
        except _NotBuiltError as problem:
            _told(problem.verdict, as_json=False, stream=sys.stderr)
            raise problem.cause from None
    _told(verdict, as_json=as_json, stream=sys.stdout)
    if verdict.exit_status:
        sys.exit(verdict.exit_status)


class _NotBuiltError(Exception):
    """The run cannot be built again, and why; the files are checked all the same."""

    def __init__(self, verdict: Verdict, cause: Exception) -> None:
        self.verdict, self.cause = verdict, cause


def _asked(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without the verb's own options, and what these ask for."""
    rest, steps = option(arguments, "--steps")
    rest, windows = option(rest, "--windows")
    rest, seed = option(rest, "--seed")
    rest, tolerance = option(rest, "--tolerance")
    everything = "--all" in rest
    rest = [argument for argument in rest if argument != "--all"]
    if everything and (steps is not None or windows is not None or seed is not None):
        raise ConfigError("--all makes all steps again: leave --steps, --windows and --seed out")
    asked: dict[str, Any] = {}
    if steps is not None or windows is not None or seed is not None:
        from surefoot.verifying.windows import STEPS, WINDOWS

        asked["steps"] = STEPS if steps is None else whole("--steps", steps)
        asked["windows"] = WINDOWS if windows is None else whole("--windows", windows, least=0)
        asked["seed"] = None if seed is None else whole("--seed", seed, least=0)
    if everything:
        asked["steps"] = "all"
    if tolerance is not None:
        asked["tolerance"] = number("--tolerance", tolerance, example="0.01")
        if asked["tolerance"] < 0:
            raise ConfigError(f"--tolerance {tolerance}: a relative difference is 0 or more")
    return rest, asked


def _verdict(run_path: Path, files: Files, flags: list[str], asked: dict[str, Any], *, run_changed: bool) -> Verdict:
    from surefoot.verifying.sentences import as_problem_of_data
    from surefoot.verifying.whole import verify, verify_files

    made_by = program_of(file_text(run_path / "config.toml"), where=str(run_path / "config.toml"))
    if made_by.get("kind") == "script":
        why = "a script has made this run, and only that can build it again; there: print(surefoot.verify(run))"
        return verify_files(run_path, why=why, files=files)
    try:
        program, config = of_run(run_path, flags, verb="surefoot verify RUN", own=_OWN, run_changed=run_changed)
        run = built(program, alone(config, run_path), of=run_path)
    except DataError as problem:
        verdict = verify_files(run_path, why="the data cannot be read as they were", files=files)
        told = as_problem_of_data([line.strip() for line in str(problem).splitlines()], "the data")
        return dataclasses.replace(verdict, problems=[*verdict.problems, told])
    except Exception as problem:  # of the user's own code too: what is known of the files is told all the same
        raise _NotBuiltError(verify_files(run_path, why="it cannot be built again", files=files), problem) from problem
    if run.parts.directory is None:
        raise ConfigError(f"what made {run_path} builds a run without a directory now: was `out` changed?")
    line = _Line()
    try:
        return verify(run, files=files, say=lambda text: print(text, flush=True), watch=line.show, **asked)
    finally:
        line.clear()


class _Line:
    """How far it is, drawn again and again on one line of a terminal; elsewhere nothing."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.now, self.begun, self.drawn = now, now(), -_BETWEEN_S

    def show(self, made: int, of: int) -> None:
        """So many of the steps are made."""
        if not self.shown or self.now() - self.drawn < _BETWEEN_S:
            return
        from surefoot.tracking.format import duration

        self.drawn = self.now()
        left_s = (self.drawn - self.begun) / max(made, 1) * (of - made)
        print(
            f"\r\x1b[2K{made:,} of {of:,} steps made again, {duration(left_s)} left",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        """Take the line away."""
        if self.shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _told(verdict: Verdict, *, as_json: bool, stream: Any) -> None:
    print(json.dumps(verdict.as_json(), indent=1) if as_json else str(verdict), file=stream, flush=True)
