"""A run's directory opened: the run goes on from the newest intact checkpoint, or commits step 0."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot import narration, snapshot
from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.initial import load_initial_weights
from surefoot.compile_choice import settle_compile
from surefoot.directory import RunDirectory, environment
from surefoot.first_pass import StateCheck
from surefoot.loss_contract import loss_contract
from surefoot.pace import settle_precision
from surefoot.parts import Parts
from surefoot.saving import Saving
from surefoot.sharding import held_of


@dataclass(frozen=True)
class Opened:
    """The parts of a run where it stands now, the checkpoint that it goes on from, and why its precision was chosen, and whether
    to compile, if that was now.
    """

    parts: Parts
    found: Contents | None = None
    precision_chosen: str | None = None
    compile_chosen: str | None = None
    state_check: StateCheck | None = None
    loss_contract: str | None = None  # in words, if the batch is cut and the run began now


def opened(parts: Parts, *, configuration: str | None) -> Opened:
    """Open a run, on all its ranks; rank 0 holds the directory and writes what is in it. Collective.

    configuration: config.toml, where it is not to be written for a script.
    """
    if parts.directory is None or parts.saving is None:
        return _begun(parts)
    if parts.world.is_main:
        parts.directory.open()
        parts.directory.remember("config.toml", *parts.files)
    found = parts.saving.newest()
    if found is None:
        now = _begun_in(parts.directory, parts.saving, parts, configuration)
    else:
        now = Opened(_going_on(parts, found), found, state_check=_state_check(parts))
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
    return Opened(parts, None, precision_chosen, compile_chosen, *_checked(parts))


def _checked(parts: Parts) -> tuple[StateCheck | None, str | None]:
    """What looks at the first steps, after its passes if nothing can be kept any more; and the loss contract's verdict, if the
    batch is cut. Leaves everything as it was. Collective.
    """
    check, verdict = _state_check(parts), None
    if check is not None and parts.whole.kept.is_complete:
        check.check_passes((parts.task.loss, parts.supply.first()))
    if parts.task.loss is not None and parts.supply.sizes.pieces > 1:
        with suppress(Exception):  # it will come again in the first step, where it is explained and reported
            holds, words = loss_contract(parts)
            verdict = f"loss    contract {words}" if holds else f"warning: {words}"
    return check, verdict


def _state_check(parts: Parts) -> StateCheck | None:
    if not parts.check_state or parts.state.step > 0:
        return None
    exact = parts.device.type == "cpu" or parts.deterministic
    return StateCheck(parts.task, parts.state, parts.whole.kept.objects, parts.world, exact)


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
    parts = before.going_on_from(found)
    where, main = f"step-{found.step:08d}", parts.world.is_main
    snapshot.restore(parts.whole, found, where=where, main=main)
    for line in [] if parts.finished else parts.notes(found):
        parts.say(f"note: {line}")
    _warn_of_weights_not_finite(parts, where)
    parts.refuse_another_architecture(found)  # after tensors that do not fit, which are named
    return parts


def _warn_of_weights_not_finite(parts: Parts, checkpoint: str) -> None:
    """Say that weights just restored hold NaN or infinities: no step could mend them. Collective."""
    tensors = [
        (name, held_of(tensor)[0])
        for model in parts.state.models.values()
        for name, tensor in model.named_parameters()
        if tensor.is_floating_point()
    ]
    if not tensors:
        return
    finite = torch.stack([torch.isfinite(local).all() for _, local in tensors]).tolist()
    own = [name for (name, _), is_finite in zip(tensors, finite, strict=True) if not is_finite]
    names = sorted({name for each in parts.world.gathered(own) for name in each})
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        assert parts.directory is not None
        parts.say(
            f"WARNING: {checkpoint} holds weights that are not finite: {names[0]}{more}\n"
            "  every loss from here on is NaN, so no step will be applied\n"
            f"  to go on from an older checkpoint: rm -r {shlex.quote(str(parts.directory.checkpoints / checkpoint))}"
        )
