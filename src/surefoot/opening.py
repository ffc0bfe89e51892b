"""A run's directory opened: the run goes on from the newest intact checkpoint, or commits step 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from surefoot import narration, snapshot
from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.initial import load_initial_weights
from surefoot.config import with_choices
from surefoot.directory import RunDirectory, environment
from surefoot.pace import Chosen, settle_choices
from surefoot.parts import Parts
from surefoot.saving import Saving


@dataclass(frozen=True)
class Opened:
    """The parts of a run where it stands now, the checkpoint that it goes on from, and what was chosen for it, if that was now."""

    parts: Parts
    found: Contents | None = None
    chosen: Chosen = field(default_factory=Chosen)


def opened(parts: Parts, *, configuration: str | None) -> Opened:
    """Open a run, on all its ranks; rank 0 holds the directory and writes what is in it. Collective.

    configuration: config.toml, where it is not to be written for a script.
    """
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
            parts.directory.write_text("config.toml", with_choices(configuration, _choices(now.parts)))
    if parts.rank_log is not None:
        parts.rank_log.open(parts.directory.path / "logs" / f"rank-{parts.world.rank}.log")
    if parts.world.is_main:
        machine, data = now.parts.machine(), now.parts.described["data"]
        parts.directory.add_sitting({"step": parts.state.step, "machine": machine, **environment(), "data": data})
    return now


def _begun(before: Parts) -> Opened:
    """Settle what is left open until a run begins."""
    chosen = settle_choices(before)
    parts = before.with_compiled() if before.compiling.late else before
    if parts.init is not None and parts.state.step == 0:
        parts.say(load_initial_weights(parts.state.models, Path(parts.init), world=parts.world))
        for name, average in parts.state.averages.items():
            average.restart(parts.state.models[name])
    return Opened(parts, None, chosen)


def _begun_in(directory: RunDirectory, saving: Saving, before: Parts, configuration: str | None) -> Opened:
    now = _begun(before)
    parts = now.parts
    if parts.world.is_main:
        text = configuration or narration.script_toml(parts.described)
        directory.write_text("config.toml", with_choices(text, _choices(parts)))
        for name, held in parts.files.items():
            directory.write_bytes(name, held.encode() if isinstance(held, str) else held)
    saving.finish(0, parts.packed)
    return now


def _choices(parts: Parts) -> dict[str, str | bool]:
    """What settings that say "auto" came to, by name."""
    return {"precision": parts.whole.precision.name, "compile": parts.compiling.on}


def _going_on(before: Parts, found: Contents) -> Parts:
    """The run as it goes on from a checkpoint, restored."""
    parts = before.going_on_from(found)
    where, main = f"step-{found.step:08d}", parts.world.is_main
    snapshot.restore(parts.whole, found, where=where, main=main)
    for line in [] if parts.finished else parts.notes(found):
        parts.say(f"note: {line}")
    parts.refuse_another_architecture(found)  # after tensors that do not fit, which are named
    return parts
