"""A sitting that fails: the other ranks are told, what happened is kept, and what stands is said."""

from __future__ import annotations

from surefoot import crash, narration
from surefoot.errors import CheckpointError, DivergedError, RankLostError, SurefootError
from surefoot.parts import Parts


def told_to_others(problem: BaseException | None, parts: Parts) -> RankLostError | None:
    """Tell the other ranks that this one begins no further step, for a `problem` or without one; which of them was lost, where
    that is what ended it.
    """
    heart = parts.world.heart
    if not isinstance(problem, Exception):
        heart.goodbye()
        return None
    lost = heart.cause(problem)
    if lost is None and isinstance(problem, DivergedError):
        heart.goodbye()  # as all of them do
    elif lost is None:
        heart.failed(problem)
        if parts.saving is not None:
            parts.saving.writer.hurry()
    return lost


def reported(problem: Exception, parts: Parts, *, step: int) -> None:
    """Keep a report in the run's directory, where there is one, once no save is in flight."""
    if parts.directory is None:
        return
    _wait_for_save(parts)
    seen = text = None
    if isinstance(problem, DivergedError) and problem.step is not None:
        step, seen, text = problem.step, problem.seen, problem.text
    try:
        crash.write_report(
            problem,
            step=step,
            samples=parts.supply.samples(step),
            how_to_go_on=narration.standing(parts),
            directory=parts.directory,
            rank=parts.world.rank,
            seen=seen,
            text=text,
        )
        if not isinstance(problem, SurefootError):  # which says by itself what stands
            parts.say(f"\n{narration.standing(parts)}\n  what happened is in {parts.directory.path / 'crash'}")
    except (OSError, CheckpointError) as another:  # the error that ended the run must not be hidden by this one
        parts.say(f"warning: {another}")


def left(parts: Parts, *, step: int) -> None:
    """Say where a sitting was left by what is no error, such as sys.exit() in the loop's body."""
    _wait_for_save(parts)
    if parts.saved_step != parts.state.step:
        parts.say(f"left in step {step}, which is not saved\n{narration.standing(parts)}")


def _wait_for_save(parts: Parts) -> None:
    """Wait for the save in flight, where there is one, and say so where it failed."""
    if parts.saving is not None:
        parts.saving.writer.wait()
        parts.saving.say_failure()
