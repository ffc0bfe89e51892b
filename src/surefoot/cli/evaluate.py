"""`surefoot evaluate RUN`: the metrics of a checkpoint on splits or question files, and the panels
of the report.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import UseAppendAction

from surefoot.cli import processes
from surefoot.cli.options import (
    WHICH_RUN,
    SavedRunOptions,
    check_excluded,
    find_run,
    flag_text,
    not_of,
    verb_options,
    without,
)
from surefoot.cli.settings import saved_settings
from surefoot.config.paths import write_whole
from surefoot.errors import CheckpointError, ConfigError, out_of_range
from surefoot.program import (
    Program,
    build_run,
    choose_checkpoint,
    in_directory,
    step_of_settings,
)
from surefoot.recipes.gpt.questions import named_files
from surefoot.recipes.optimizer_settings import note
from surefoot.tracking.format import number
from surefoot.tracking.run_reader import run_file_not_written

if TYPE_CHECKING:
    from surefoot.checkpoint import Checkpoint
    from surefoot.run.run import Run


@dataclass(frozen=True, kw_only=True)
class Evaluate(processes.Several, SavedRunOptions):
    """Evaluate a checkpoint on the splits of its run without changing the run.
    --split NAME evaluates only that split. --questions NAME=FILE (or only FILE)
    evaluates a gpt run on all questions of a file: HellaSwag, ARC, PIQA,
    OpenBookQA, COPA, WinoGrande or LAMBADA as JSON lines, gzipped or not.

      surefoot evaluate runs/mine --checkpoint best
      surefoot evaluate runs/mine --checkpoint "average 5" --split val
      surefoot evaluate runs/mine --questions hellaswag=hellaswag_val.jsonl
    """

    split: UseAppendAction[tuple[str, ...]] = ()
    """Name of a split to evaluate. Repeatable."""
    questions: UseAppendAction[tuple[str, ...]] = ()
    """A file of multiple-choice questions for a gpt run. Repeatable."""
    panels: bool = False
    """Compute the panels of the run's report with its best checkpoint, and write them into the
    run's directory.
    """


def evaluate(arguments: list[str]) -> None:
    """Run `surefoot evaluate`: score a checkpoint on the splits of its run."""
    options, flags = verb_options(Evaluate, arguments, verb="evaluate", missing=WHICH_RUN)
    run_path = find_run(options.run)
    splits = options.split
    program, config = saved_settings(run_path, options, flags, verb="evaluate")
    config_here = in_directory(config, run_path)  # for the tokenizer; nothing is opened or written
    if options.panels:
        others = [name for name in ("split", "questions", "checkpoint") if getattr(options, name)]
        check_excluded("panels", others, reason="it uses the best checkpoint, or the newest")
        processes.refuse_several(arguments, verb="evaluate --panels")
        _write_panels(program, config_here, run_path)
        return
    files = named_files(options.questions, setting="--questions")
    if files and "evaluate_questions" not in program.names:
        raise not_of("questions", "gpt runs", run_path)
    if files:
        processes.refuse_several(arguments, verb="evaluate --questions FILE", or_launched=True)
    processes.start_several(
        ["evaluate", *without(arguments, processes.NAMES)],
        options,
        config=config,
        flags=arguments,
        out=run_path,
    )
    chosen = choose_checkpoint(run_path, options.checkpoint)
    from surefoot.checkpoint import Store
    from surefoot.checkpoint.average import last_steps

    key = f"step={chosen.step}"
    whose = f"step {chosen.step} of {run_path}"
    if options.checkpoint == "best":
        whose = f"step {chosen.step} (the best) of {run_path}"
    elif options.checkpoint is not None and options.checkpoint.startswith("average"):
        count = int(options.checkpoint.split()[1])
        steps = [str(step) for step in last_steps(Store(run_path / "checkpoints"), count)]
        key = f"mean_of_steps={','.join(steps)}"
        whose = f"the average of steps {', '.join(steps)} of {run_path}"
    if splits or not files:
        run = build_run(program, config_here, of=run_path, step=step_of_settings(chosen))
        _evaluate_splits(run, splits, chosen, whose=whose, key=key)
    if files:
        if flag_text(flags, "precision") is None:  # it may have changed on the way
            precision = chosen.saved.identity["precision"]
            config_here = replace(config_here, precision=precision)
        note(f"evaluating {whose} on {', '.join(files)}")
        answer = program.names["evaluate_questions"]
        for name, value in answer(config_here, files, run=run_path, checkpoint=chosen):
            print(f"{key} {name}={_shown(value)}", flush=True)


def _evaluate_splits(
    run: "Run", only: Sequence[str], chosen: "Checkpoint", *, whose: str, key: str
) -> None:
    scoring = run.parts.evaluator
    for name in only:
        if name not in scoring.splits:
            splits = ", ".join(scoring.splits) or "none"
            meaning = f"a split of this run: {splits}; a file is for questions = NAME=FILE"
            raise out_of_range("split", name, meaning)
    at_end = scoring.names(at_end=True)
    names = only or scoring.names(at_end=False) or at_end
    note(f"evaluating {whose} on {', '.join(names) or 'nothing'}")
    if at_end and not only and names != at_end:
        note(
            f"note: left out for the end of the run: {', '.join(at_end)};"
            f" to evaluate it now: --split {at_end[0]}"
        )
    if run.load_checkpoint(chosen):
        note(
            "warning: the data set has changed since training:"
            " these metrics are for the changed data"
        )
    for name, value in run.evaluate(*names).items():
        if run.parts.world.is_main:
            print(f"{key} {name}={_shown(value)}")


def _shown(value: Any) -> str:
    """Return a number with the digits that a run prints; a text or a matrix as it is."""
    return number(value) if isinstance(value, float) else repr(value)


def _write_panels(program: Program, config: Any, run_path: Path) -> None:
    from surefoot.tracking.panels_file import FILE
    from surefoot.tracking.run_reader import is_running

    if is_running(run_path):
        raise ConfigError(
            "run-is-training",
            problem=f"{run_path} is training: it writes its panels when it ends",
            path=run_path,
        )
    try:
        chosen = choose_checkpoint(run_path, "best")
    except CheckpointError:  # the run has no best checkpoint, or it is damaged
        chosen = choose_checkpoint(run_path, "newest")
    run = build_run(program, config, of=run_path, step=step_of_settings(chosen))
    if run.parts.settings.panels_fn is None:
        raise ConfigError(
            "panels-without-function",
            problem=f"the program of {run_path} has no panels_fn",
            remedy="add Run(panels_fn=...)",
            path=run_path,
        )
    run.load_checkpoint(chosen)
    try:
        write_whole(run_path / FILE, run.make_panels().to_json().encode())
    except OSError as problem:
        raise run_file_not_written(run_path / FILE, problem) from problem
    print(
        f"written: {run_path / FILE}, with the weights of step {chosen.step:,};"
        f" to see them: surefoot report {shlex.quote(str(run_path))}"
    )
