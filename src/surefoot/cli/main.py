"""The `surefoot` command: its subcommands and error output. This module imports torch and tyro only
if a subcommand needs them.
"""

import importlib
import json
import os
import platform
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType

from surefoot.distributed.environment import (
    leave_error,
    shorten_spinning,
    started_by_launcher,
)
from surefoot.errors import (
    ConfigError,
    RankLostError,
    SurefootError,
    end_scripts_without_traceback,
    error_as_json,
    error_lines,
    keep_all_frames,
    speaking_in_flags,
    visible,
    wait_for_first_rank,
)
from surefoot.recipes import NAMES

VERBS = (
    *(
        "train",
        "plan",
        "find-lr",
        "find-batch-size",
        "profile",
        "resume",
        "change",
        "submit",
        "evaluate",
        "predict",
        "compare",
    ),
    *("diagnose", "report", "replay", "verify", "export", "data", "completion"),
)
"""The names of the subcommands. Each is a function in the module of the same name, imported when
called.
"""
_HELP = ("-h", "--help", "--help-all")
OVERVIEW = f"""surefoot trains PyTorch models without losing its footing.

  surefoot train RECIPE           train {", ".join(NAMES)}
  surefoot train FILE.py:build    train your own: build() returns a Run
  surefoot plan ...               show what train would run; draw schedules
  surefoot find-lr ...            try learning rates and suggest one
  surefoot find-batch-size ...    measure micro-batch sizes and recommend one
  surefoot profile RECIPE         measure the time of each part of a step
  surefoot resume RUN             continue from the newest intact checkpoint
  surefoot change RUN SETTING=... change settings of a run from here on
  surefoot submit ...             train as a job of Slurm that requeues itself
  surefoot evaluate RUN           evaluate a checkpoint: newest, best, or a step
  surefoot predict RUN INPUT...   use a trained model
  surefoot compare RECIPE ...     train variants and compare them
  surefoot diagnose RUN           report problems of a run, and settings to try
  surefoot report RUN...          write a page about one run or several
  surefoot replay RUN --step N    repeat a past step and inspect it
  surefoot verify RUN             check files, repeat steps, compare bits
  surefoot export RUN             write a run's weights for other programs
  surefoot data look PATH         show what each recipe would make of a path
  surefoot data prepare OUT TEXT  write token shards from text, JSONL or Parquet
  surefoot completion SHELL       print completion for bash, zsh or fish

RUN is a run's directory, its name under runs/, or latest. For the options of a
subcommand: surefoot SUBCOMMAND --help; for the settings of a recipe: surefoot
train RECIPE --help, or --help-all. --traceback prints an error's traceback.
Exit status: 0 done, 2 settings, 3 data, 4 checkpoint, 5 diverged, 6 out of
memory, 7 another process of the run was lost, 8 repeated steps differ (verify),
130 and 143 saved after a signal (not saved after a second one).
"""


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand and exit with its status, or 141 (SIGPIPE) if the reader of standard
    output has closed the pipe.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    words = [argument for argument in typed if argument != "--traceback"]
    try:
        try:
            if not words or words[0] in (*_HELP, "help"):
                print(OVERVIEW, end="")
                sys.exit(0 if words else 2)
            end_scripts_without_traceback()
            keep_all_frames("--traceback" in typed)
            with speaking_in_flags():
                run_or_exit(
                    lambda: _verb(words),
                    with_traceback="--traceback" in typed,
                    as_json="--json" in words,
                )
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _unread():
            raise
        sys.exit(128 + 13)  # SIGPIPE, which Windows does not have


def _unread() -> bool:
    """Return True if nobody reads standard output any more, and let it lead nowhere."""
    if sys.stdout is None or not hasattr(select, "poll"):  # not on Windows
        return False
    look = select.poll()
    look.register(sys.stdout, 0)
    if not look.poll(0):
        return False
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def run_or_exit(call: Callable[[], None], *, with_traceback: bool, as_json: bool = False) -> None:
    """Call a function. If the function raises an error, print its message, or one JSON object if
    `as_json`, and exit with its status.
    """
    try:
        call()
    except KeyboardInterrupt:
        # otherwise the session reports it for all ranks
        if "surefoot.run.session" not in sys.modules and not started_by_launcher():
            print("\ninterrupted before the start", file=sys.stderr)
        sys.exit(130)
    except Exception as raised:
        from surefoot.config.paths import unusable_path_of  # --help needs no settings

        problem = unusable_path_of(raised) or raised
        # other ranks exist only if this module, which imports torch, is loaded
        rendezvous = sys.modules.get("surefoot.distributed.rendezvous")
        error = problem
        if rendezvous is not None:
            error = rendezvous.report_to_ranks(problem) or problem
        if not isinstance(error, SurefootError) and not _is_out_of_memory(error):
            raise raised
        if not isinstance(error, RankLostError):
            leave_error(error_as_json(error))
        if _speaks_of(error, rendezvous):
            if with_traceback:
                traceback.print_exception(error)
            _print_error(error, as_json=as_json)
        sys.exit(error.exit_status if isinstance(error, SurefootError) else 6)


def _is_out_of_memory(error: Exception) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch may not be imported


def _print_error(error: Exception, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(error_as_json(error), allow_nan=False), file=sys.stderr)
        return
    print(visible(error_lines(error)), file=sys.stderr)
    if _is_out_of_memory(error):
        print(
            "  try: a smaller --micro-batch-size or --activation-checkpointing blocks (the result"
            " stays the same), or --precision bf16",
            file=sys.stderr,
        )


def _speaks_of(problem: Exception, rendezvous: ModuleType | None) -> bool:
    # a launcher has an error file for each rank
    if started_by_launcher() and not isinstance(problem, RankLostError):
        return True
    if rendezvous is not None and rendezvous.is_connected():
        return bool(rendezvous.speaks_of(problem))
    wait_for_first_rank(problem)
    return True


def _verb(words: list[str]) -> None:
    if words[0] == "--version":
        from importlib.metadata import version

        print(
            f"surefoot {version('surefoot')} (torch {version('torch')}, Python {platform.python_version()})"
        )
        return
    if words[0] not in VERBS:
        raise unknown_subcommand(words[0], VERBS, command="surefoot")
    if not {*_HELP}.intersection(words):
        shorten_spinning()
    from surefoot.cli.word_order import words_first

    verb_function(words[0])(words_first(words[0], words[1:]))


def unknown_subcommand(word: str, known: Sequence[str], *, command: str) -> ConfigError:
    """Return the error for a word that is no subcommand of a command."""
    from surefoot.config.tree import did_you_mean

    return ConfigError(
        "subcommand-unknown",
        problem=f"{command} has no subcommand {word!r}",
        remedy=did_you_mean(word, known, otherwise=f"choose from {', '.join(known)}"),
        value=word,
    )


def verb_function(verb: str) -> Callable[[list[str]], None]:
    """Return the function of a subcommand, for example `surefoot.cli.find_lr.find_lr` for
    `find-lr`.
    """
    name = verb.replace("-", "_")
    function: Callable[[list[str]], None] = getattr(
        importlib.import_module(f"surefoot.cli.{name}"), name
    )
    return function
