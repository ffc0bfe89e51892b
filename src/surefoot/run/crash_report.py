"""What a run says when it dies: which step, which samples, and what to type next; and the report that it writes."""

import json
import signal
import traceback

from surefoot.config.paths import make_no_follow
from surefoot.errors import CheckpointError, DivergedError, SurefootError, first_line
from surefoot.run import messages
from surefoot.run.components import RunComponents
from surefoot.run.stop_requests import StopRequests


def tell_others(problem: BaseException | None, parts: RunComponents) -> None:
    """Tell the other ranks that this one begins no further step. Raises `RankLostError` where the loss of another rank is the `problem`."""
    heart = parts.world.heart
    if isinstance(problem, Exception) and (lost := heart.cause(problem)) is not None:
        raise lost from problem
    if not isinstance(problem, Exception) or isinstance(problem, DivergedError):  # which all ranks meet
        heart.goodbye()
    else:
        heart.failed(problem)
        if parts.checkpointing is not None:
            parts.checkpointing.writer.hurry()


def write_report(problem: Exception, parts: RunComponents, *, step: int) -> None:
    """Keep an error in the run's directory, where there is one, as crash/step-N.json, once no save is in flight.

    Samples are of each micro-batch that this rank makes in the step; none is read again, for that may be what failed. A rank
    above 0 writes crash/step-N-rank-R.json. What was seen of a step made again is in it, and for people in crash/step-N.txt.
    """
    if parts.directory is None:
        return
    if parts.checkpointing is not None:
        parts.checkpointing.wait()
    standing, look, text = messages.standing(parts), {}, None
    if isinstance(problem, DivergedError) and problem.step is not None:
        step, text, look = problem.step, problem.text, {} if problem.seen is None else {"seen": problem.seen}
    name = f"crash/step-{step:08d}" + (f"-rank-{parts.world.rank}" if parts.world.rank else "")
    try:
        report = {
            "error": f"{type(problem).__name__}: {problem}",
            "step": step,
            "samples": [list(ids) for ids in parts.pipeline.samples(step)],
            "traceback": traceback.format_exception(problem),
            "how_to_go_on": standing,
            **look,
        }
        make_no_follow(parts.directory.path / "crash")
        parts.directory.write_text(f"{name}.json", json.dumps(report, indent=1))
        if text is not None:
            parts.directory.write_text(f"{name}.txt", f"{problem}\n\n{text}\n")
        if not isinstance(problem, SurefootError):  # which says by itself what stands
            parts.say(f"\n{standing}\n  what happened is in {parts.directory.path / 'crash'}")
    except (OSError, CheckpointError) as another:  # the error that ended the run must not be hidden by this one
        parts.say(f"warning: {another}")


def report_left(parts: RunComponents, *, step: int) -> None:
    """Say where a session was left by what is no error, such as sys.exit() in the loop's body."""
    if parts.checkpointing is not None:
        parts.checkpointing.wait()
    if parts.saved_step != parts.state.step:
        parts.say(f"left in step {step}, which is not saved\n{messages.standing(parts)}")


def ended(parts: RunComponents, stop_requests: StopRequests) -> str:
    """How a session ended that did not fail."""
    if stop_requests.ended_by is not None:
        where = f" on rank {stop_requests.signal_rank}" if stop_requests.signal_rank else ""
        return f"stopped by {signal.Signals(stop_requests.ended_by).name}{where}"
    reasons = {
        "finished": parts.state.step >= parts.length.steps,
        "stopped early": parts.out_of_patience,
        "stopped by stop_after": parts.state.step >= parts.timetable.stop_step,
        "stopped by time_limit": stop_requests.out_of_time,
        "stopped by run.stop()": stop_requests.run_stop,
        "stopped by another rank": stop_requests.stop_agreed,
    }
    return next((reason for reason, holds in reasons.items() if holds), "stopped by break")


def failed(problem: BaseException) -> str:
    """What a session failed of.

    >>> failed(ValueError("no such thing\\nat all")), failed(DivergedError("loss became non-finite"))
    ('failed: ValueError: no such thing', 'diverged')
    """
    if isinstance(problem, DivergedError):
        return "diverged"
    if isinstance(problem, Exception):
        return f"failed: {type(problem).__name__}: {first_line(problem)}"
    return f"left by {type(problem).__name__}"
