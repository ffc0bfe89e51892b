"""`surefoot replay RUN --step N`: a past step made again and looked at; with --bisect-nan, the first bad one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.building import alone, built, of_run
from surefoot.cli.options import RUN_CHANGED, file_text, option, run_directory, switch, whole
from surefoot.cli.processes import refuse_several
from surefoot.config import program as program_of
from surefoot.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from surefoot.replay.first_bad import Searched
    from surefoot.replay.replaying import Replay
    from surefoot.run import Run

_OWN = ("step", "samples", "json", "bisect-nan")


def replay(arguments: list[str]) -> None:
    """`surefoot replay RUN --step N|--bisect-nan [--samples K] [--json] [--run-changed-program] [settings]`: what happened in a step.

    The run's directory is only read. What is said beforehand goes to standard error, so that the page can be kept.
    """
    refuse_several(arguments, verb="replay")
    path = run_directory(arguments)
    rest, run_changed = switch(arguments[1:], RUN_CHANGED)
    rest, asked = option(rest, "--step")
    rest, samples = option(rest, "--samples")
    flags = [argument for argument in rest if argument not in ("--json", "--bisect-nan")]
    as_json, bisecting = "--json" in rest, "--bisect-nan" in rest
    if (asked is None) is not bisecting:
        raise ConfigError(
            f"replay what? surefoot replay {arguments[0]} --step N, or --bisect-nan to find the first bad step"
        )
    step = None if asked is None else whole("--step", asked, least=0)
    most = whole("--samples", samples or "8", least=0)
    _refuse_script(path)
    _refuse_early(path, step)
    with redirect_stdout(sys.stderr):  # what a run that is built has to say is no part of the page
        run = _run(path, flags, run_changed=run_changed)
        searched = None if step is not None else _searched(run, path)
        found = None
        if step is None and searched is not None and searched.bad is not None:
            step = searched.bad.step
        if step is not None:
            found = _replayed(run, step, path=path, samples=most)
    _print(searched, found, as_json=as_json)


def _replayed(run: Run, step: int, *, path: Path, samples: int) -> Replay:
    from surefoot.replay.replaying import replayed

    return replayed(run, step, samples=samples, say=_note, path=path)


def _searched(run: Run, path: Path) -> Searched:
    from surefoot.replay.first_bad import first_bad
    from surefoot.replay.replaying import records_of

    return first_bad(run.parts, records_of(path), out=path, say=_note)


def _print(searched: Searched | None, found: Replay | None, *, as_json: bool) -> None:
    from surefoot.sinks.console import Said

    if as_json:
        first = {} if searched is None else {"bisected": str(searched)}
        text = json.dumps(first | ({} if found is None else found.plain()), allow_nan=False, indent=1)
    else:
        text = "\n".join(str(each) for each in (searched, found) if each is not None)
    Said(None).put(f"{text}\n")


def _run(path: Path, flags: Sequence[str], *, run_changed: bool) -> Run:
    program, config = of_run(path, flags, verb="surefoot replay RUN", own=_OWN, run_changed=run_changed)
    return built(program, alone(config, path), of=path)


def _refuse_early(path: Path, step: int | None) -> None:
    """Raise what can be told without the run's data: that there is no checkpoint, or no such step."""
    from surefoot.checkpoint import Store
    from surefoot.replay.replaying import refuse_step

    store = Store(path / "checkpoints")
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint, so none of its steps can be made again")
    newest = store.newest_intact(only=())
    if step is not None and newest is not None:
        refuse_step(step, newest[0].saved.planned_steps, where=path)


def _refuse_script(path: Path) -> None:
    made_by = program_of(file_text(path / "config.toml"), where=str(path / "config.toml"))
    if made_by.get("kind") == "script":
        raise ConfigError(
            f"{path} was made by a script, and only that can build it again; there, in place of run.train() or the loop:\n"
            "  print(surefoot.load(run).replay(N))"
        )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
