"""Search for the first bad step of a run: in its records, in its checkpoints, and by replaying
steps.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from surefoot.checkpoint.format import Checkpoint, DamageError
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError, Setting
from surefoot.tools.replay.replay import report_cost
from surefoot.tools.replay.rerun import execution, nearest_checkpoint
from surefoot.tracking.record import Record
from surefoot.train.components import Components


def first_bad(
    parts: Components, known: Sequence[Record], *, out: Path, say: Callable[[str], None]
) -> tuple[int | None, str]:
    """Return the first bad step of a run, or None, and a sentence about the result. Steps are
    replayed with `parts`.

    A bad step has a nonfinite loss, gradient or updated weight. An overflow that a smaller loss
    scale avoids does not count.
    """
    store = Store(out / "checkpoints")
    logged = max((int(record["step"]) for record in known if record["kind"] == "train"), default=0)
    crashed = [path.stem.split("-")[1] for path in (out / "crash").glob("step-*.json")]
    after_crashes = [int(step) + 1 for step in crashed if step.isdigit()]
    reached = min(max([logged, *store.steps(), *after_crashes]), parts.length.steps)
    stretches = [*_skipped(known), *_weights(store, say)]
    if reached > logged:
        stretches.append((logged, reached, "repeated, because no record covers it"))
    for first, until, how in sorted(stretches):
        bad = _in_stretch(parts, known, store, first, min(until, parts.length.steps), say)
        if bad is not None:
            step, what = bad
            return step, f"first bad step: {step}, {what} is not finite ({how})"
    # a loss scale skips such steps too
    if _skipped(known) and parts.run_state.precision.loss_scale is None:
        return None, (
            "no bad step: the records report skipped steps, but all are finite when repeated; they depended on state that no\n"
            "  checkpoint holds (your code between steps, a model's own attributes), or on the machine"
        )
    return (
        None,
        f"no bad step: loss and gradient of steps 0 to {reached - 1} were finite, and so are the weights",
    )


def _skipped(known: Sequence[Record]) -> list[tuple[int, int, str]]:
    """Return the stretches of steps in which the records report skipped ones."""
    stretches = []
    before = 0
    for record in known:
        if record["kind"] != "train":
            continue
        step = int(record["step"])
        named = record.get("skipped_steps") or []
        if named:
            before = int(min(named)) + 1
            stretches.append((before - 1, before, "the records name it, and it was repeated"))
        if record.get("skipped") and len(named) != 1:
            stretches.append(
                (before, step, "the records report skipped steps, which were repeated")
            )
        before = step
    return stretches


def _weights(store: Store, say: Callable[[str], None]) -> list[tuple[int, int, str]]:
    """Return the stretch that ends at the first checkpoint with weights that are not finite, by
    bisection; or nothing.
    """
    steps = store.steps()
    last_sound = None
    low = 0
    high = len(steps)
    while low < high:
        middle = (low + high) // 2
        try:
            is_finite = weights_finite(store.at(steps[middle]))
        except DamageError as error:
            say(f"warning: {error.damage}")
            del steps[middle]
            high -= 1
            continue
        if is_finite:
            last_sound = steps[middle]
            low = middle + 1
        else:
            high = middle
    if low == len(steps):
        return []
    if last_sound is None and steps[low] == 0:
        raise CheckpointError(
            "initial-weights-not-finite",
            problem=f"the weights of step 0 in {store.directory} are not finite",
            reason="the run began with them",
            remedy=("check how the model is built, or", Setting("init_from")),
            path=store.directory,
        )
    why = f"the weights of step-{steps[low]:08d} are not finite"
    return [(last_sound or 0, steps[low], why)]


def weights_finite(checkpoint: Checkpoint) -> bool:
    """Return True if the model weights in a checkpoint are finite. Moving averages and optimizer
    state are ignored.

    >>> weights_finite(Checkpoint(0, {"model": {"weight": torch.tensor([1.0, math.inf])}}, {}))
    False
    """
    for file in checkpoint.files:
        if file.split("-")[0] != "model":
            continue
        for tensor in checkpoint.tensors(file).values():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return False
    return True


def _in_stretch(
    parts: Components,
    known: Sequence[Record],
    store: Store,
    first: int,
    until: int,
    say: Callable[[str], None],
) -> tuple[int, str] | None:
    if first >= until:
        return None
    checkpoint, damaged = nearest_checkpoint(store, first)
    while checkpoint.step > 0 and not weights_finite(checkpoint):
        checkpoint, damaged = nearest_checkpoint(store, checkpoint.step - 1)
    report_cost(checkpoint.step, until, damaged, known, say)
    with execution(parts, checkpoint, records=known) as rerun:
        scale = rerun.parts.run_state.precision.loss_scale
        scale_before = None if scale is None else float(scale.scale)
        for finished in rerun.steps(until):
            numbers = finished.numbers()
            # an overflow that a smaller loss scale avoids
            is_curable = scale_before is not None and scale_before > 1
            if not math.isfinite(numbers.loss):
                return finished.index, "loss or gradient"
            if not math.isfinite(numbers.norm) and not is_curable:
                return finished.index, "loss or gradient"
            for parameter in rerun.parts.state.parameters:
                if not bool(torch.isfinite(parameter).all()):
                    return finished.index, "a weight after the update"
            scale_before = None if scale is None else float(scale.scale)
    return None
