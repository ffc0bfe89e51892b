"""`surefoot VERB ...`: which verb, and what an error looks like. Verbs import torch only where they need it."""

from __future__ import annotations

import sys
import traceback

from surefoot.cli import verbs
from surefoot.errors import ConfigError, SurefootError

_HELP = """surefoot trains PyTorch models without losing its footing.

  surefoot train RECIPE           a ready-made run: gpt      (surefoot train gpt --help: all settings)
  surefoot train FILE.py:build    a run of your own: build() or build(config: YourDataclass) returns a surefoot.Run
  surefoot plan ...               what train would run, with the same arguments; trains nothing
  surefoot resume RUN             go on from the newest intact checkpoint
  surefoot evaluate RUN           score a checkpoint (--checkpoint newest, best, or a step)
  surefoot predict RUN INPUT...   use the trained model: continue a prompt

RUN is a run's directory, its name under runs/, or latest. --traceback shows where an error came from.
Exit status: 0 done, 2 settings, 3 data, 4 checkpoint, 5 diverged, 6 out of memory, 130 and 143 stopped by a signal, saved.
"""

_VERBS = {
    "train": verbs.train,
    "plan": verbs.plan,
    "resume": verbs.resume,
    "evaluate": verbs.evaluate,
    "predict": verbs.predict,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and leave with its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    shown = "--traceback" in given
    given = [argument for argument in given if argument != "--traceback"]
    if not given or given[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        sys.exit(0 if given else 2)
    try:
        if given[0] == "--version":
            from importlib.metadata import version

            print(version("surefoot"))
            return
        if given[0] not in _VERBS:
            raise ConfigError(f"no verb {given[0]!r}: one of {', '.join(_VERBS)}")
        _VERBS[given[0]](given[1:])
    except SurefootError as problem:
        _say(problem, shown)
        sys.exit(problem.exit_status)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as problem:
        if type(problem).__name__ == "OutOfMemoryError":
            _say(problem, shown)
            print(
                "  try: a smaller --micro-batch-size (the result stays the same), or --precision bf16",
                file=sys.stderr,
            )
            sys.exit(6)
        raise


def _say(problem: BaseException, with_traceback: bool) -> None:
    if with_traceback:
        traceback.print_exception(problem)
    print(f"error: {problem}", file=sys.stderr)
