"""`surefoot verify RUN`: check files against their hashes, then repeat steps and compare the
results.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.cli.options import (
    WHICH_RUN,
    ChangedProgramOption,
    RunOption,
    by_flag,
    check_excluded,
    find_run,
    limited,
    option_names,
    refuse_unknown,
    verb_options,
)
from surefoot.cli.processes import refuse_several
from surefoot.cli.settings import saved_settings
from surefoot.config.setting import checked, number
from surefoot.program import status_line
from surefoot.saved_run import SavedRun
from surefoot.tracking.run_reader import read_run

if TYPE_CHECKING:
    from surefoot.tools.verify.verify import Steps

_BETWEEN_S = 0.2  # between updates of the progress line


@dataclass(frozen=True, kw_only=True)
class Verify(ChangedProgramOption, RunOption):
    """Verify a run. Check checkpoints and records against their hashes, records
    against each other and the schedule, and data against their fingerprints. Then
    repeat steps from checkpoints and compare losses, norms and tensors: bit for bit
    on the same machine, up to rounding on others. The estimated cost is printed
    first. Nothing is written, and the run may be training. If a script built the
    run, only files are checked; the script can call surefoot.load(run).verify().

    The exit status is 0 if nothing is wrong, 4 if files are damaged or contradict
    each other, 3 if the data set has changed, 8 if steps differ.

      surefoot verify latest
      surefoot verify runs/mine --steps 200 --windows 3
    """

    all: bool = False
    """Repeat all steps. This is the default if it takes at most two minutes."""
    steps: int | None = limited(None, min_value=1)
    """Steps per window; each window starts at a checkpoint. Default: 100."""
    windows: int | None = limited(None, min_value=0)
    """Number of windows: the first, the last, and others spaced evenly; 0 checks only files.
    Default: 5.
    """
    seed: int | None = limited(None, min_value=0)
    """Seed to choose the windows at random."""
    tolerance: float | None = None
    """Allowed relative difference on another machine. Default: 0.01."""
    json: bool = False
    """Print the result as JSON."""


def verify(arguments: list[str]) -> None:
    """Run `surefoot verify`: check the files of a run, and repeat some of its steps."""
    options, flags = verb_options(Verify, arguments, verb="verify", missing=WHICH_RUN)
    refuse_several(arguments, verb="verify", or_launched=True)
    run = find_run(options.run)
    saved = SavedRun(run, read_program=lambda: saved_settings(run, options, flags, verb="verify"))
    some = [name for name in ("steps", "windows", "seed") if getattr(options, name) is not None]
    tolerance = 0.0 if options.tolerance is None else options.tolerance
    excluded = some if options.all else []
    checked(
        lambda: check_excluded("all", excluded, reason="it repeats all steps"),
        lambda: number(min_value=0, kind=float)(tolerance, setting="tolerance"),
    )
    if flags:  # an unknown one is refused before any work
        if read_run(run).config.script:
            groups = [group for group in by_flag(flags) if group[0]]
            refuse_unknown(groups, option_names(Verify), verb="verify", flags="options")
        saved_settings(run, options, flags, verb="verify")
    from surefoot.tools.verify.rerun import STEPS

    steps: Steps = "auto"
    if options.all:
        steps = "all"
    elif some:
        steps = options.steps or STEPS
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        try:
            with status_line() as show:
                verdict = saved.verify(
                    steps=steps,
                    windows=options.windows,
                    seed=options.seed,
                    tolerance=options.tolerance,
                    say=lambda text: print(text, flush=True),
                    progress_fn=progress(show),
                )
        except Exception as problem:
            # user code may raise: the results of the file checks are its notes
            for note in vars(problem).pop("__notes__", ()):
                print(note, file=sys.stderr, flush=True)
            raise
    print(json.dumps(verdict.to_dict(), indent=1) if options.json else str(verdict), flush=True)
    if verdict.exit_status:
        sys.exit(verdict.exit_status)


def progress(
    show: Callable[[str], None], now: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Return a callback that shows the number of repeated steps and the remaining time, a few times
    per second.
    """
    from surefoot.tracking.format import duration

    start_s = now()
    drawn = -math.inf

    def watch(done: int, total: int) -> None:
        nonlocal drawn
        time_s = now()
        if time_s - drawn >= _BETWEEN_S:
            drawn = time_s
            left = duration((time_s - start_s) / max(done, 1) * (total - done))
            show(f"{done:,} of {total:,} steps repeated, {left} left")

    return watch
