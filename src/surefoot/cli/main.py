"""`surefoot VERB ...`: which verb, and what an error looks like. Verbs import torch only where they need it."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable

from surefoot.cli import (
    compare,
    data,
    diagnose,
    export,
    finders,
    help,
    profiled,
    replay,
    report,
    submit,
    trained,
    verbs,
    verify,
)
from surefoot.errors import ConfigError, RankLostError, SurefootError, error_lines, wait_for_first_rank
from surefoot.launch.rank import started_by_launcher

_VERBS = {
    "train": verbs.train,
    "plan": verbs.plan,
    "find-lr": finders.find_lr,
    "find-batch": finders.find_batch,
    "profile": profiled.profile,
    "resume": verbs.resume,
    "submit": submit.submit,
    "evaluate": trained.evaluate,
    "predict": trained.predict,
    "compare": compare.compare,
    "diagnose": diagnose.diagnose,
    "report": report.report,
    "replay": replay.replay,
    "verify": verify.verify,
    "export": export.export,
    "data": data.data,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and leave with its exit status: 141 where whoever was to read standard output has gone, as a shell has it."""
    try:
        try:
            _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _unread():
            raise
        sys.exit(128 + 13)  # SIGPIPE, which Windows does not have


def _unread() -> bool:
    """Whether nobody reads standard output any more; what is left of it is then dropped."""
    if sys.stdout is None or not hasattr(select, "poll"):  # not on Windows
        return False
    look = select.poll()
    look.register(sys.stdout, 0)
    if not look.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def _run(arguments: list[str] | None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    shown = "--traceback" in given
    given = [argument for argument in given if argument != "--traceback"]
    if not given or given[0] in ("-h", "--help", "help"):
        print(help.WHOLE, end="")
        sys.exit(0 if given else 2)
    if given[1:] in (["-h"], ["--help"]) and given[0] in help.VERBS:
        print(help.VERBS[given[0]], end="")
        sys.exit(0)
    answered(lambda: _verb(given), shown=shown)


def answered(call: Callable[[], None], *, shown: bool) -> None:
    """Call, and leave as the command line does where that fails: with a message, and the exit status of what happened."""
    try:
        call()
    except SurefootError as problem:
        found = _told_to_ranks(problem) or problem
        if _speaks_of(found):
            _say(found, shown)
        sys.exit(found.exit_status)
    except KeyboardInterrupt:
        if "surefoot.sitting" not in sys.modules and not started_by_launcher():  # which says it for all
            print("\nnothing was begun", file=sys.stderr)
        sys.exit(130)
    except Exception as problem:
        lost = _told_to_ranks(problem)
        if lost is not None:
            if _speaks_of(lost):
                _say(lost, shown)
            sys.exit(lost.exit_status)
        if type(problem).__name__ == "OutOfMemoryError":
            if _speaks_of(problem):
                _say(problem, shown)
                print(
                    "  try: a smaller --micro-batch-size or --activation-checkpointing blocks (the result stays the same),"
                    " or --precision bf16",
                    file=sys.stderr,
                )
            sys.exit(6)
        raise


def _told_to_ranks(problem: Exception) -> SurefootError | None:
    """Tell the other ranks, if there are any, of what this one fails; which of them was lost, where that is why."""
    if "surefoot.meeting" not in sys.modules:  # imports torch; without it there are none
        return None
    from surefoot.meeting import told_to_ranks

    return told_to_ranks(problem)


def _speaks_of(problem: Exception) -> bool:
    """Whether this process says of what it ends: one rank does, of several that end of the same."""
    if started_by_launcher() and not isinstance(problem, RankLostError):  # which has a file for each of them
        return True
    if "surefoot.meeting" in sys.modules:
        from surefoot.meeting import has_met, speaks_of

        if has_met():
            return speaks_of(problem)
    wait_for_first_rank()
    return True


def _verb(given: list[str]) -> None:
    if given[0] == "--version":
        from importlib.metadata import version

        print(version("surefoot"))
        return
    if given[0] not in _VERBS:
        raise ConfigError(f"no verb {given[0]!r}: one of {', '.join(_VERBS)}")
    _VERBS[given[0]](given[1:])


def _say(problem: BaseException, with_traceback: bool) -> None:
    if with_traceback:
        traceback.print_exception(problem)
    print(error_lines(problem), file=sys.stderr)
