"""What a run says in words: its header, its end, how it is to be gone on with, why it diverged."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

from surefoot.directory import RunDirectory
from surefoot.durations import Length
from surefoot.loop import State
from surefoot.precision import Precision
from surefoot.schedules import Schedule
from surefoot.signals import Signals
from surefoot.sinks.console import number
from surefoot.stopping import Watch


class Told(Protocol):
    """What of a run its words are about."""

    state: State
    length: Length
    precision: Precision
    directory: RunDirectory | None
    device: torch.device
    micro_batch_size: int
    first_step: int
    signals: Signals
    watch: Watch | None
    last_scores: dict[str, float]

    @property
    def out_of_patience(self) -> bool: ...  # noqa: D102


def header(run: Told) -> str:
    """Five lines: model, data, plan, device, directory."""
    length = run.length
    sizes = {type(model).__name__: _trainable(model) for model in run.state.models.values()}
    models = ", ".join(f"{name} with {numbers:,} trainable parameters" for name, numbers in sizes.items())
    passes = length.steps * length.batch_size / length.samples_per_epoch
    pieces = length.batch_size // run.micro_batch_size
    cut = f" in {pieces} micro-batches of {run.micro_batch_size}" if pieces > 1 else ""
    start = f"going on at step {run.first_step}" if run.first_step else "from step 0"
    threads = f", {torch.get_num_threads()} threads" if run.device.type == "cpu" else ""
    lines = [
        f"model   {models}",
        f"data    {length.samples_per_epoch:,} samples a pass; {length.steps:,} steps are {passes:.2f} passes",
        f"plan    {length.batch_size:,} samples a step{cut}; {start}",
        f"device  {run.device}, {run.precision.name}{threads}",
        f"out     {run.directory.path if run.directory else 'nothing is saved: no out was given'}",
    ]
    if length.batch_size > length.samples_per_epoch:
        lines.append(
            f"note: a step takes {length.batch_size} samples and there are {length.samples_per_epoch}:"
            " each is seen several times a step"
        )
    return "\n".join(lines)


def ending(run: Told) -> str:
    """How a sitting ended, with its result, and the commands to type next."""
    length, step = run.length, run.state.step
    scores = ", ".join(f"{name} {number(value)}" for name, value in run.last_scores.items())
    if step >= length.steps:
        how = f"finished: {step:,} steps"
    elif run.out_of_patience and run.watch is not None:
        how = f"stopped early at step {step:,}: {run.watch.score} has not improved since step {run.watch.step}"
    else:
        how = f"stopped at step {step:,} of {length.steps:,}"
    lines = [how + (f"; {scores}" if scores else "")]
    if run.watch is not None and run.watch.value is not None:
        lines.append(f"best {run.watch.score}: {number(run.watch.value)} at step {run.watch.step}")
    by_command = Path(sys.argv[0]).name == "surefoot"
    if run.directory is not None and (by_command or step < length.steps):
        done = step >= length.steps or run.out_of_patience
        command = f"surefoot evaluate {shlex.quote(str(run.directory.path))}" if done else resume_command(run.directory)
        lines.append(f"{'score it again' if done else 'saved; go on with'}:  {command}")
    return "\n".join(lines)


def finished(run: Told) -> str:
    """What is said to someone who starts a finished run again."""
    where = f" in {run.directory.path}" if run.directory else ""
    why = (
        "early stopping ended it"
        if run.out_of_patience and run.state.step < run.length.steps
        else f"all {run.length.steps:,} steps are made"
    )
    return f"this run{where} is finished: {why}. Nothing to do; for another run choose another --out"


def resume_command(directory: RunDirectory) -> str:
    """What to type to go on with the run in a directory."""
    if Path(sys.argv[0]).name == "surefoot":
        return f"surefoot resume {shlex.quote(str(directory.path))}"
    return f"python {shlex.join(sys.argv)}"


def standing(directory: RunDirectory | None, saved_step: int | None) -> str:
    """Which checkpoint stands, and how to go on from it."""
    if directory is None or saved_step is None:
        return "nothing was saved"
    return f"the newest checkpoint is of step {saved_step}; go on with: {resume_command(directory)}"


def divergence(step: int, samples: list[int], stands: str, *, optimizer: dict[str, Any], schedule: Schedule) -> str:
    """Why a run was ended after steps that were not finite, and what to try."""
    rate = optimizer.get("lr")
    lines = [
        f"loss or gradient became non-finite at step {step} and stayed so; none of these steps was applied",
        f"  {stands}",
    ]
    if samples:
        shown = ", ".join(str(sample) for sample in samples[:5]) + (" ..." if len(samples) > 5 else "")
        lines.append(
            f"  the data are the cause: NaN or infinity in the inputs of sample{'s' if len(samples) > 1 else ''} {shown}: mend or drop them"
        )
    else:
        now = f" (now {rate:g})" if isinstance(rate, float) else ""
        lines.append(f"  try: a lower optimizer.lr{now}, or a longer schedule.warmup (now {schedule.warmup})")
    return "\n".join(lines)


def script_toml(described: dict[str, Any]) -> str:
    """config.toml of a run that a script of the user's own made: the command that made it, and the resolved settings."""
    import tomlkit

    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            "written by surefoot; this run was made by a script, so `surefoot resume` can only name its command"
        )
    )
    document["program"] = {"kind": "script", "command": ["python", *sys.argv]}
    document["run"] = _without_none(described)
    return tomlkit.dumps(document)


def _trainable(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(held) for key, held in value.items() if held is not None}
    return [_without_none(held) for held in value] if isinstance(value, list | tuple) else value
