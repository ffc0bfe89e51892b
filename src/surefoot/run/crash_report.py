"""The report of a failed run: the step, its samples, and the command that resumes the run."""

import json
import signal
import traceback

from surefoot.checkpoint.module_state import OtherModelError
from surefoot.config.paths import make_no_follow
from surefoot.errors import CheckpointError, ConfigError, DivergedError, SurefootError, first_line
from surefoot.run import messages
from surefoot.run.components import RunComponents
from surefoot.run.history import OtherSettings
from surefoot.run.stop_requests import StopRequests
from surefoot.tracking.record import AT_CHANGE


def tell_others(problem: BaseException | None, parts: RunComponents) -> None:
    """Notify the other ranks that this rank stops. Raises `RankLostError` if the loss of another
    rank caused the `problem`.
    """
    heartbeat = parts.world.heartbeat
    if not isinstance(problem, Exception):
        heartbeat.goodbye()
        return
    lost = heartbeat.cause(problem)
    if lost is not None:
        raise lost from problem
    is_of_change = parts.follows and isinstance(problem, ConfigError | OtherModelError)
    if is_of_change or isinstance(problem, DivergedError | OtherSettings):  # on all ranks
        heartbeat.goodbye()
        return
    heartbeat.failed(problem)
    if parts.checkpointing is not None:
        parts.checkpointing.writer.hurry()


def write_report(problem: Exception, parts: RunComponents, *, step: int) -> None:
    """Wait for pending saves, then write an error to crash/step-N.json in the run's directory, if
    the run has a directory.

    The report lists the samples of this rank's micro-batches. Samples are not read again, because
    reading may have failed. A rank above 0 writes crash/step-N-rank-R.json. For a diverged step,
    crash/step-N.txt describes the inspection of the step.
    """
    if parts.directory is None:
        return
    if parts.checkpointing is not None:
        parts.checkpointing.wait()
    standing = messages.standing(parts)
    text = None
    seen = None
    if isinstance(problem, DivergedError) and problem.step is not None:
        step = problem.step
        text = problem.text
        seen = problem.seen
    name = f"crash/step-{step:08d}"
    if parts.world.rank:
        name += f"-rank-{parts.world.rank}"
    try:
        report = {
            "error": f"{type(problem).__name__}: {problem}",
            "step": step,
            "samples": [list(ids) for ids in parts.pipeline.samples(step)],
            "traceback": traceback.format_exception(problem),
            "how_to_go_on": standing,
        }
        if seen is not None:
            report["seen"] = seen
        make_no_follow(parts.directory.path / "crash")
        parts.directory.write_text(f"{name}.json", json.dumps(report, indent=1))
        if text is not None:
            parts.directory.write_text(f"{name}.txt", f"{problem}\n\n{text}\n")
        if not isinstance(problem, SurefootError):  # its message names the newest checkpoint
            parts.say(f"\n{standing}\n  the crash report is in {parts.directory.shown / 'crash'}")
    except (OSError, CheckpointError) as another:
        # this error must not hide the error that ended the run
        parts.say(f"warning: {another}")


def report_left(parts: RunComponents, *, step: int) -> None:
    """Print the unsaved step of a session that ended without an error, such as by sys.exit() in the
    loop body.
    """
    if parts.checkpointing is not None:
        parts.checkpointing.wait()
    if parts.saved_step != parts.state.step:
        parts.say(f"the run ended in step {step}, which is not saved\n{messages.standing(parts)}")


def ended(parts: RunComponents, stop_requests: StopRequests) -> str:
    """Return the reason for the end of a session without an error."""
    if stop_requests.ended_by is not None:
        where = f" on rank {stop_requests.signal_rank}" if stop_requests.signal_rank else ""
        return f"stopped by {signal.Signals(stop_requests.ended_by).name}{where}"
    if not parts.finished:
        return f"stopped by {stop_cause(parts, stop_requests)}"
    return "finished" if parts.state.step >= parts.length.steps else "stopped early"


def stop_cause(parts: RunComponents, stop_requests: StopRequests) -> str:
    """Return what stopped a session before the end of its run, as its last line names it."""
    if stop_requests.stopped_by is not None:
        return stop_requests.stopped_by
    causes = {
        AT_CHANGE: parts.is_at_change or stop_requests.has_change,
        "stop_after": parts.state.step >= parts.plan.times.stop_step,
        "time_limit": stop_requests.out_of_time,
        "run.stop()": stop_requests.run_stop,
        "another rank": stop_requests.stop_agreed,
    }
    if stop_requests.out_of_time or stop_requests.run_stop or stop_requests.stop_agreed:
        del causes[AT_CHANGE]
    return next((cause for cause, holds in causes.items() if holds), "break")


def failed(problem: BaseException) -> str:
    """Describe the exception that ended a session in one line.

    >>> (
    ...     failed(ValueError("no such thing\\nat all")),
    ...     failed(DivergedError("a-code", problem="loss became non-finite")),
    ... )
    ('failed: ValueError: no such thing', 'diverged')
    """
    if isinstance(problem, DivergedError):
        return "diverged"
    if isinstance(problem, Exception):
        return f"failed: {type(problem).__name__}: {first_line(problem)}"
    return f"left by {type(problem).__name__}"
