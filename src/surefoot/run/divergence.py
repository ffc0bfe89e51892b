"""How a run that has diverged ends: with the weights of its last good step, and words on the likely cause."""

from __future__ import annotations

from collections.abc import Callable

from surefoot.checkpoint.format import Contents
from surefoot.errors import DivergedError
from surefoot.replay.on_divergence import seen_at_hand
from surefoot.run import messages
from surefoot.run.components import RunComponents
from surefoot.tracking import commands
from surefoot.train import error_causes


def ended(parts: RunComponents, packed: Callable[[], Contents], *, protected: tuple[int, ...]) -> DivergedError:
    """Save the state as that of the last good step, where it is that; look at the first bad one, say what happened and what to try.

    Collective.
    """
    bad, in_a_row = parts.whole.bad_steps, list(parts.whole.bad_steps.in_a_row)
    first = in_a_row[0] if in_a_row else parts.state.step
    strange = error_causes.strange_samples(parts.supply.again(first))
    stands = messages.standing(parts)
    if parts.saving is not None and _nothing_changed_since(parts, first):
        parts.saving.writer.wait()
        if (parts.saving.begun_step or 0) <= first:  # else a later checkpoint, latched, would be the newest
            parts.state.step = first
        bad.in_a_row = []
        for trained in parts.state.trained.values():
            trained.bad_in_a_row.zero_()
        parts.saving.begun_step = None  # one of this very step would still be latched
        parts.saving.finish(parts.state.step, packed, protected=protected)
        stands = f"weights are those after step {first}, saved as {parts.saving.store.path(parts.state.step)}"
    seen = seen_at_hand(parts, in_a_row or [first])
    said = messages.divergence(
        first,
        strange,
        stands,
        optimizer=parts.described["optimizer"],
        schedule=parts.schedule,
        most=parts.settings.max_bad_steps,
        seen=None if isinstance(seen, str) else seen.said,
        look=None if parts.directory is None else commands.replay_command(parts.directory, first),
    )
    if isinstance(seen, str):
        return DivergedError(said, step=first, seen={"not_looked_at": seen})
    return DivergedError(said, step=first, seen=seen.plain, text=seen.text if parts.world.is_main else None)


def _nothing_changed_since(parts: RunComponents, step: int) -> bool:
    """Whether the steps skipped from `step` on left everything as it was, so that this is the state of that step."""
    alone = len(parts.state.trained) == 1 and parts.task.loss is not None  # other updates may have been applied
    watch = parts.whole.watch
    feedback = parts.whole.feedback
    evaluated = (watch is not None and (watch.step or 0) > step) or (
        feedback is not None and feedback.standing.step > step
    )
    return alone and not (parts.whole.precision.loss_scale or parts.whole.kept.objects or evaluated)
