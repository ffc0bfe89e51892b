"""The end of a diverged run: a checkpoint of the last good step, and an error with the likely
cause.
"""

from typing import Any

from surefoot.errors import Command, DivergedError, Remedy, Setting
from surefoot.run import after, messages
from surefoot.run.components import RunComponents
from surefoot.run.saves import Saves
from surefoot.tracking import commands
from surefoot.train import error_causes


def diverged(parts: RunComponents, saves: Saves | None) -> DivergedError:
    """Inspect the first non-finite step and return the error to raise. Saves the state if it is
    unchanged since that step. Collective.
    """
    meter = parts.run_state.meter
    in_a_row = list(meter.skipped_in_a_row)
    first = in_a_row[0] if in_a_row else parts.state.step
    strange = error_causes.strange_samples(parts.pipeline.again(first))
    stands = messages.standing(parts)
    if saves is not None and _nothing_changed_since(parts, first):
        checkpointing = saves.checkpointing
        checkpointing.writer.wait()
        newest = checkpointing.started_step or 0
        if newest <= first:  # else a later checkpoint would be the newest
            parts.state.step = first
        meter.skipped_in_a_row = []
        for trained in parts.state.optimizers.values():
            trained.bad_in_a_row.zero_()
        # also if this step is saved: its saved counter of bad steps is not 0
        checkpointing.started_step = None
        saves.finish(parts.state.step)
        path = checkpointing.store.path(parts.state.step)
        stands = f"the weights after step {first} are saved as {path}"
    look = after.look_at_diverged_step(parts, in_a_row or [first])
    known = [stands]
    seen: dict[str, Any] = {"not_looked_at": look}
    text = None
    if not isinstance(look, str):
        known = [*([look.sentence] if look.sentence else []), stands]
        seen = look.plain
        text = look.text if parts.world.is_main else None
    stayed = "and stayed non-finite; none of these steps was applied"
    if parts.settings.max_bad_steps == 0:  # later steps were skipped unconditionally
        stayed = "(max_bad_steps is 0); neither this step nor a later one was applied"
    return DivergedError(
        "steps-not-finite",
        problem=f"loss or gradient became non-finite at step {first} {stayed}",
        reason="\n".join(known),
        remedy=_remedies(parts, first, strange),
        step=first,
        seen=seen,
        text=text,
        samples=strange,
        saved_step=parts.saved_step,
    )


def _nothing_changed_since(parts: RunComponents, step: int) -> bool:
    # else another update may be applied
    alone = len(parts.state.optimizers) == 1 and parts.task.loss is not None
    best, feedback = parts.run_state.best, parts.run_state.feedback
    watched_steps = [each.step or 0 for each in parts.run_state.watches]
    if best is not None:
        watched_steps += best.steps
    evaluated = any(watched > step for watched in watched_steps) or (
        feedback is not None and feedback.standing.step > step
    )
    return alone and not (
        parts.run_state.precision.loss_scale or parts.run_state.user_state.objects or evaluated
    )


def _remedies(parts: RunComponents, step: int, samples: list[int]) -> list[Remedy]:
    remedies: list[Remedy] = []
    if samples:
        names = ", ".join(map(str, samples[:5])) + " ..." * (len(samples) > 5)
        remedies.append(
            f"the data is the cause: NaN or infinity in the inputs of the samples {names}: fix or"
            " drop them"
        )
    elif step == 0:
        remedies.append(
            "the model had not been updated yet, so neither the learning rate nor the warm-up is the"
            " cause: check the data, the\ninitial weights, the loss (log of 0?) and the labels (all"
            " ignored?)"
        )
    else:
        lower: tuple[str | Setting, ...] = ("a lower", Setting("optimizer.lr"))
        rate = parts.plan.identity["optimizer"].get("lr")
        if isinstance(rate, float):
            lower = (*lower, f"(now {rate:g})")
        warmup = f"(now {parts.plan.schedule.warmup})"
        remedies += [lower, ("a longer", Setting("schedule.warmup"), warmup)]
    if parts.directory is not None:
        remedies.append(Command(commands.replay_command(parts.directory.shown, step)))
    return remedies
