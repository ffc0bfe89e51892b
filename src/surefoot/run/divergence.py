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
    known = [stands]
    text = None
    look = after.look_at_diverged_step(parts, in_a_row or [first])
    if isinstance(look, str):
        seen: dict[str, Any] = {"not_looked_at": look}
    else:
        seen = look.plain
        if look.sentence:
            known.insert(0, look.sentence)
        if parts.world.is_main:
            text = look.text
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
    """Return True if the state is that after `step`, but for counters of skipped steps."""
    run_state = parts.run_state
    if len(parts.state.optimizers) > 1 or parts.task.loss is None:
        return False  # another update may be applied
    if run_state.precision.loss_scale or run_state.user_state.objects:
        return False
    scored_steps = [watch.step or 0 for watch in run_state.watches]
    if run_state.best is not None:
        scored_steps += run_state.best.steps
    if run_state.feedback is not None:
        scored_steps.append(run_state.feedback.standing.step)
    return all(scored <= step for scored in scored_steps)


def _remedies(parts: RunComponents, step: int, samples: list[int]) -> list[Remedy]:
    remedies: list[Remedy] = []
    if samples:
        names = ", ".join(str(sample) for sample in samples[:5])
        if len(samples) > 5:
            names += " ..."
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
