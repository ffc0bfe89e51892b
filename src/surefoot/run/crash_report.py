"""What a run says when it dies: which step, which samples, and what to type next; and the report that it writes."""

import json
import signal
import traceback
from collections.abc import Sequence
from typing import Any

from surefoot.config.paths import make_no_follow
from surefoot.errors import CheckpointError, DivergedError, RankLostError, SurefootError, first_line
from surefoot.run import messages
from surefoot.run.components import RunComponents
from surefoot.run.stop_requests import Wishes
from surefoot.tracking.run_directory import RunDirectory


def write_report(
    problem: BaseException,
    *,
    step: int,
    samples: Sequence[Sequence[int]],
    how_to_go_on: str,
    directory: RunDirectory,
    rank: int = 0,
    seen: Any = None,
    text: str | None = None,
) -> None:
    """Keep an error in the run's directory, as crash/step-N.json; `OSError` or `CheckpointError` where that fails.

    samples: of each micro-batch that this rank makes in the step; none is read again, for that may be what failed.
    That of a rank above 0 is crash/step-N-rank-R.json: several may fail of the same at once, or one after another.
    seen: of a step that was made again, what was seen, as JSON; `text` is the same for people, as crash/step-N.txt.
    """
    found = {
        "error": f"{type(problem).__name__}: {problem}",
        "step": step,
        "samples": [list(ids) for ids in samples],
        "traceback": traceback.format_exception(problem),
        "how_to_go_on": how_to_go_on,
        **({} if seen is None else {"seen": seen}),
    }
    make_no_follow(directory.path / "crash")
    name = f"step-{step:08d}" + (f"-rank-{rank}" if rank else "")
    directory.write_text(f"crash/{name}.json", json.dumps(found, indent=1))
    if text is not None:
        directory.write_text(f"crash/{name}.txt", f"{problem}\n\n{text}\n")


def told_to_others(problem: BaseException | None, parts: RunComponents) -> RankLostError | None:
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


def reported(problem: Exception, parts: RunComponents, *, step: int) -> None:
    """Keep a report in the run's directory, where there is one, once no save is in flight."""
    if parts.directory is None:
        return
    _wait_for_save(parts)
    seen = text = None
    if isinstance(problem, DivergedError) and problem.step is not None:
        step, seen, text = problem.step, problem.seen, problem.text
    try:
        write_report(
            problem,
            step=step,
            samples=parts.supply.samples(step),
            how_to_go_on=messages.standing(parts),
            directory=parts.directory,
            rank=parts.world.rank,
            seen=seen,
            text=text,
        )
        if not isinstance(problem, SurefootError):  # which says by itself what stands
            parts.say(f"\n{messages.standing(parts)}\n  what happened is in {parts.directory.path / 'crash'}")
    except (OSError, CheckpointError) as another:  # the error that ended the run must not be hidden by this one
        parts.say(f"warning: {another}")


def left(parts: RunComponents, *, step: int) -> None:
    """Say where a sitting was left by what is no error, such as sys.exit() in the loop's body."""
    _wait_for_save(parts)
    if parts.saved_step != parts.state.step:
        parts.say(f"left in step {step}, which is not saved\n{messages.standing(parts)}")


def _wait_for_save(parts: RunComponents) -> None:
    if parts.saving is not None:
        parts.saving.writer.wait()
        parts.saving.say_failure()


def ended(parts: RunComponents, wishes: Wishes) -> str:
    """How a sitting ended that did not fail."""
    if wishes.ended_by is not None:
        where = f" on rank {wishes.told_rank}" if wishes.told_rank else ""
        return f"stopped by {signal.Signals(wishes.ended_by).name}{where}"
    if parts.state.step >= parts.length.steps:
        return "finished"
    if parts.out_of_patience:
        return "stopped early"
    if parts.state.step >= parts.timetable.stop_step:
        return "stopped by stop_after"
    if wishes.out_of_time:
        return "stopped by time_limit"
    if wishes.asked_to_stop:
        return "stopped by run.stop()"
    return "stopped by another rank" if wishes.stop_agreed else "stopped by break"


def failed(problem: BaseException) -> str:
    """What a sitting failed of.

    >>> failed(ValueError("no such thing\\nat all")), failed(DivergedError("loss became non-finite"))
    ('failed: ValueError: no such thing', 'diverged')
    """
    if isinstance(problem, DivergedError):
        return "diverged"
    if isinstance(problem, Exception):
        return f"failed: {type(problem).__name__}: {first_line(problem)}"
    return f"left by {type(problem).__name__}"
