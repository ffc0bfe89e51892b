"""`surefoot replay RUN --step N`: repeat a past step and inspect it. `--bisect-nan` finds the first
bad step.
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

from surefoot.cli.options import (
    WHICH_RUN,
    ChangedProgramOption,
    RunOption,
    find_run,
    limited,
    verb_options,
)
from surefoot.cli.processes import refuse_several
from surefoot.cli.settings import saved_settings
from surefoot.errors import ConfigError, Setting
from surefoot.recipes.optimizer_settings import note
from surefoot.saved_run import SavedRun
from surefoot.tracking.run_reader import newest_state


@dataclass(frozen=True, kw_only=True)
class Replay(ChangedProgramOption, RunOption):
    """Repeat step N of a run, counted from 0, from the nearest earlier
    checkpoint. Show the loss of each sample, the output of every module, the
    gradient of every parameter, and the first non-finite value with its module
    and sample. The step is identical bit for bit on the same machine; a
    recorded loss is compared. The run's directory is only read. The number of
    repeated steps and the estimated time are printed first.

      surefoot replay runs/mine --step 412
      surefoot replay latest --bisect-nan
    """

    step: int | None = limited(None, min_value=0)
    """Index of the step, from 0, as in Step.index. Records and the console count completed steps:
    their step 413 is --step 412.
    """
    bisect_nan: bool = False
    """Find and show the first step with a non-finite value."""
    samples: int = limited(8, min_value=0)
    """Number of samples shown; 0 skips the forward passes of single samples."""
    json: bool = False
    """Print the result as JSON."""


def replay(arguments: list[str]) -> None:
    """Run `surefoot replay`: repeat one step of a run and show its values and gradients."""
    options, flags = verb_options(Replay, arguments, verb="replay", missing=WHICH_RUN)
    refuse_several(arguments, verb="replay")
    path = find_run(options.run)
    step = options.step
    saved = SavedRun(path, read_program=lambda: saved_settings(path, options, flags, verb="replay"))
    if (step is None) is not options.bisect_nan:
        if flags:  # --stp is a misspelled --step
            saved_settings(path, options, flags, verb="replay")
        raise ConfigError(
            "step-or-search",
            problem="replay needs either step or bisect_nan, which finds the first bad step",
            remedy=[Setting("step", "N"), Setting("bisect_nan")],
            setting="step",
            value=step,
        )
    if not saved.checkpoints:
        from surefoot.checkpoint.store import without_checkpoint

        raise without_checkpoint(path)
    from surefoot.tools.replay.bisect_nan import first_bad
    from surefoot.tools.replay.replay import records_of, refuse_step
    from surefoot.tracking.console import TextWriter

    state = newest_state(path)[1]
    if step is not None and state is not None:  # before the run's program is executed
        refuse_step(step, state.planned_steps, where=path)
    with redirect_stdout(sys.stderr):  # messages of the build are not part of the output
        searched = None
        if step is None:
            run = saved.rebuild(one_process=True)
            step, searched = first_bad(run.parts, records_of(path), out=path, say=note)
            saved = SavedRun(path, built=run)
        page = None if step is None else saved.replay(step, samples=options.samples, say=note)
    if options.json:
        values = {} if searched is None else {"bisected": searched}
        if page is not None:
            values |= page.to_dict()
        text = json.dumps(values, allow_nan=False, indent=1)
    else:
        text = "\n".join(str(part) for part in (searched, page) if part is not None)
    TextWriter(None).put(f"{text}\n")
