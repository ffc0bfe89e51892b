"""A run's directory opened: the run goes on from the newest intact checkpoint, or commits step 0."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surefoot import narration, snapshot
from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.initial import load_initial_weights
from surefoot.compile_choice import settle_compile
from surefoot.directory import RunDirectory, environment
from surefoot.pace import settle_precision
from surefoot.parts import Parts
from surefoot.saving import Saving


@dataclass(frozen=True)
class Opened:
    """The parts of a run where it stands now, the checkpoint that it goes on from, and why its precision was chosen, and whether
    to compile, if that was now.
    """

    parts: Parts
    found: Contents | None = None
    precision_chosen: str | None = None
    compile_chosen: str | None = None


def opened(parts: Parts, *, configuration: str | None) -> Opened:
    """Open a run, on all its ranks; rank 0 holds the directory and writes what is in it. Collective.

    configuration: config.toml, where it is not to be written for a script.
    """
    parts.follow_trainable()  # what was frozen since the run was built
    if parts.directory is None or parts.saving is None:
        return _begun(parts)
    if parts.world.is_main:
        parts.directory.open()
    found = parts.saving.newest()
    if found is None:
        now = _begun_in(parts.directory, parts.saving, parts, configuration)
    else:
        now = Opened(_going_on(parts, found), found)
        parts.saving.resumed(found.step)
        if parts.world.is_main and configuration is not None:
            parts.directory.write_text("config.toml", configuration)
    if parts.rank_log is not None:
        parts.rank_log.open(parts.directory.path / "logs" / f"rank-{parts.world.rank}.log")
    if parts.world.is_main:
        machine, data = now.parts.machine(), now.parts.described["data"]
        parts.directory.add_sitting({"step": parts.state.step, "machine": machine, **environment(), "data": data})
    return now


def _begun(before: Parts) -> Opened:
    """Settle what is left open until a run begins."""
    precision_chosen = settle_precision(before)
    parts, compile_chosen = settle_compile(before)
    if parts.init is not None and parts.state.step == 0:
        parts.say(load_initial_weights(parts.state.models, Path(parts.init), world=parts.world))
        for name, average in parts.state.averages.items():
            average.restart(parts.state.models[name])
    return Opened(parts, None, precision_chosen, compile_chosen)


def _begun_in(directory: RunDirectory, saving: Saving, before: Parts, configuration: str | None) -> Opened:
    now = _begun(before)
    parts = now.parts
    if parts.world.is_main:
        directory.write_text("config.toml", configuration or narration.script_toml(parts.described))
        for name, held in parts.files.items():
            directory.write_bytes(name, held.encode() if isinstance(held, str) else held)
    saving.finish(0, parts.packed)
    return now


def _going_on(before: Parts, found: Contents) -> Parts:
    """The run as it goes on from a checkpoint, restored."""
    parts, trainable = before.going_on_from(found), before.state.trainable
    where, main, flags = f"step-{found.step:08d}", parts.world.is_main, trainable.flags
    snapshot.restore(parts.whole, found, where=where, main=main)
    parts.follow_trainable()
    as_saved = [f"{line}, as the checkpoint has it" for line in trainable.changes(flags)]
    for line in [] if parts.finished else [*as_saved, *parts.notes(found)]:
        parts.say(f"note: {line}")
    parts.refuse_another_architecture(found)  # after tensors that do not fit, which are named
    return parts
