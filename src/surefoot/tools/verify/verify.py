"""Verification of a run: files, records, data, then replayed steps."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, Literal

from surefoot.checkpoint.reader import interpreted
from surefoot.checkpoint.state_json import SavedState
from surefoot.config.accepted_changes import CHANGES
from surefoot.errors import CheckpointError, DataError, first_line
from surefoot.optim.flat_parameters import APART
from surefoot.optim.kinds.kind import kind_of
from surefoot.run.components import RunComponents
from surefoot.run.run import Run
from surefoot.tools.replay.replay import pace_s
from surefoot.tools.replay.rerun import refuse_ranks
from surefoot.tools.verify import records as consistency
from surefoot.tools.verify import text as sentences
from surefoot.tools.verify.files import Files
from surefoot.tools.verify.rerun import STEPS, plan_windows, replay_window
from surefoot.tools.verify.verdict import Outcome, Problem, Verdict, Window
from surefoot.train.run_identity import differences

Steps = int | Literal["auto", "all"]
Watching = Callable[[int, int], None]
"""A callback for each replayed step, with the number of replayed steps and the total."""

_SOON_S = 120.0  # maximum time of a complete replay with "auto"


def verify(
    run: Run,
    files: Files,
    *,
    steps: Steps,
    windows: int,
    seed: int | None,
    tolerance: float,
    say: Callable[[str], None] | None,
    progress_fn: Watching | None,
) -> Verdict:
    """Check all files of a run directory, replay steps from its checkpoints, and compare every bit.

    `run` is built like the run in the directory and must not be open; its state is restored at the
    end. `files` is the result of `check_files`. See `SavedRun.verify` for the other arguments.
    Raises `ConfigError` for a run on several ranks.
    """
    parts = replace(
        run.parts, accept_change=CHANGES
    )  # replay also from checkpoints older than a change
    refuse_ranks(parts)
    verdict = _check_files(files)
    if not files.checkpoints:
        return verdict
    with parts.snapshot():
        if (why := _why_not_replayed(parts, files, verdict.problems)) is not None:
            verdict.not_proved.append(f"no step was repeated: {why}")
            return verdict
        _add_rates(verdict, parts, files)
        consistency.add_beginning(verdict, parts, files)
        since = max(
            (each["step"] for each in files.newest.state.fingerprints["accepted"]), default=0
        )
        if since:
            verdict.not_proved.append(
                f"steps 0 to {since:,}: trained by another program, before the change that was accepted at step {since:,}"
            )
        since, dropped = max(since, on_tape := _check_tape(verdict, parts, files)), on_tape
        points = {*files.checkpoints, *(int(record["step"]) for record in files.log.of("train"))}
        end, step_s = (
            max(points),
            pace_s(files.log.of("train")),
        )  # nothing can be compared after the last point
        if steps == "auto":
            steps = (
                "all"
                if step_s is not None and (end - min(files.checkpoints)) * step_s <= _SOON_S
                else STEPS
            )
        chosen = plan_windows(
            sorted(
                step for step in files.checkpoints if step >= since
            ),  # computed by the current program
            sorted(points),
            steps=None if steps == "all" else int(steps),
            windows=windows,
            seed=seed,
        )
        with interpreted(files.newest.path):
            chosen = _without_body_changes(verdict, parts, chosen, files)
        if chosen and say is not None:
            say(sentences.cost(chosen, files, end=end, step_s=step_s))
        outcomes: list[Outcome] = []
        try:
            outcomes = _replay_windows(parts, files, chosen, tolerance=tolerance, watch=progress_fn)
        except CheckpointError as problem:  # tensors that do not fit the rebuilt run
            verdict.problems.append(Problem("inconsistent", first_line(problem)))
        verdict.problems.extend(problem for outcome in outcomes for problem in outcome.problems)
        known = {(problem.step, problem.quantity) for problem in verdict.problems}
        verdict.problems.extend(
            each
            for each in _check_targets(parts, files, outcomes)
            if (each.step, each.quantity) not in known
        )
        verdict.proved.extend(
            line for outcome in outcomes for line in sentences.window_facts(outcome)
        )
        verdict.not_proved.extend(
            sentences.unproved_steps(outcomes, files, since=dropped, end=end, step_s=step_s)
        )
    covered = sum(outcome.window.steps for outcome in outcomes if outcome.lost is None)
    complete = bool(outcomes) and covered == end and end in files.checkpoints
    return replace(
        verdict, outcomes=outcomes, hints=sentences.hints(outcomes, files.notes), whole=complete
    )


def verify_files(files: Files, *, why: str, problem: DataError | None = None) -> Verdict:
    """Return the facts that files and records prove. `why` is the reason why no step is replayed;
    `problem` is a data error.
    """
    verdict = _check_files(files)
    verdict.not_proved.append(f"no step was repeated: {why}")
    if problem is not None:
        verdict.problems.append(
            _data_problem([line.strip() for line in str(problem).splitlines()], "the data")
        )
    return verdict


def _check_files(files: Files) -> Verdict:
    kinds: list[Iterable[Problem]] = [
        consistency.in_order(files.log),
        consistency.speeds(files.log),
    ]
    for _, checkpoint in sorted(files.checkpoints.items()):
        with interpreted(checkpoint.path):
            kinds += [
                consistency.times(files.log, checkpoint),
                consistency.best_metric(files.log, checkpoint),
            ]
    problems = [problem for each in kinds for problem in consistency.shortened(each)]
    proved = sentences.file_facts(files)
    if files.log.of("train") and not problems:
        proved.append(sentences.record_facts(files))
    return Verdict(
        str(files.path),
        proved,
        [*files.notes, *sentences.unproved_lines(files)],
        [*files.problems, *problems],
    )


def _why_not_replayed(parts: RunComponents, files: Files, problems: list[Problem]) -> str | None:
    others = _changed_data(parts, files)
    problems += others
    if any(problem.quantity == "training data" for problem in others):
        return "the training data set has changed"
    try:  # for errors in config.toml, in the script, or in the model
        parts.refuse_other_settings(files.newest.checkpoint)
        parts.refuse_another_architecture(files.newest.checkpoint)
    except CheckpointError as problem:
        what = f"config.toml or the program no longer builds the run in {files.newest.path.name}"
        problems.append(Problem("inconsistent", f"{what}: {problem.problem}"))
        return "config.toml or the program no longer builds this run"
    if parts.pipeline.tape is not None:
        try:
            parts.pipeline.tape.require(files.newest.state.tape)
        except DataError as problem:
            problems.append(Problem("data", first_line(problem), quantity="training data"))
            return "the tape is not that of this run"
    return (
        None
        if parts.task.loss is not None
        else "this run has no loss function, its script computes each step itself"
    )


def _changed_data(parts: RunComponents, files: Files) -> list[Problem]:
    saved = files.newest.state
    data, scored = json.loads(json.dumps([parts.plan.identity["data"], parts.plan.splits]))
    unlike = {"training data": differences({"data": saved.identity["data"]}, {"data": data})} | {
        f"data of split {name}": differences(before, scored[name])
        if name in scored
        else [f"{name} is no longer evaluated"]
        for name, before in saved.splits.items()
    }
    return [_data_problem(lines[:3], what) for what, lines in unlike.items() if lines]


def _data_problem(lines: Sequence[str], what: str) -> Problem:
    return Problem("data", f"{what}: {'; '.join(lines)}", quantity=what)


def _check_tape(verdict: Verdict, parts: RunComponents, files: Files) -> int:
    """Check all rows of a stream's tape, and return the step of the first checkpoint behind which
    all rows are on it.
    """
    if (tape := parts.pipeline.tape) is None:
        return 0
    rows, problem = tape.shards.intact()
    if problem is not None:
        verdict.problems.append(
            Problem("damaged", f"the tape is damaged: {problem}", file=str(tape.directory))
        )
    else:
        verdict.proved.append(f"the tape of {rows:,} rows: every row on it matches its hash")
    first = tape.first_step(parts.pipeline.sizes.batch_size)
    since = min(
        (step for step in files.checkpoints if step >= first), default=max(files.checkpoints)
    )
    if first:
        verdict.not_proved.append(
            f"steps 0 to {since:,}: cannot be repeated, because the tape has dropped rows of steps before {first:,} (tape_size)"
        )
    return since if first else 0


def _add_rates(verdict: Verdict, parts: RunComponents, files: Files) -> None:
    initial = next(iter(parts.state.optimizers.values())).rates.initial[0]
    rates = consistency.rates(
        files.log, lambda step, lowered: initial * (parts.task.factors(step) * lowered)
    )
    recorded, wrong = len(files.log.lines_of("train", "lr")), consistency.shortened(rates)
    verdict.problems.extend(wrong)
    if recorded and not wrong:
        verdict.proved.append(f"learning rates of {recorded:,} records: they match the schedule")


def _without_body_changes(
    verdict: Verdict, parts: RunComponents, windows: Sequence[Window], files: Files
) -> list[Window]:
    """Cut out of the windows the steps between two checkpoints in which the loop's body changed
    what a step depends on.
    """
    for start, stop in pairwise(sorted(files.checkpoints)):
        before, after = files.checkpoints[start].state, files.checkpoints[stop].state
        if before.trainable != after.trainable:
            what = "froze or unfroze parameters"
        elif _bases(before) != _bases(after):
            what = "changed learning rates"
        elif _group_values(before, parts) != _group_values(after, parts):
            what = "changed values of parameter groups"
        else:
            continue
        remaining = []
        for each in windows:
            remaining.append(Window(each.start, min(each.stop, start)))
            remaining.append(Window(max(each.start, stop), each.stop))
        windows = [part for part in remaining if part.start < part.stop]
        verdict.not_proved.append(
            f"steps {start:,} to {stop:,}: your own loop {what}, which is not repeated"
        )
    return list(windows)


def _bases(saved: SavedState) -> dict[str, Any]:
    """Return the base learning rates by optimizer."""
    rates = saved.rates or {}
    return {name: each["dict"]["bases"] for name, each in rates.items()}


def _group_values(saved: SavedState, parts: RunComponents) -> dict[str, Any]:
    """Return the values of parameter groups that no step changes, of known optimizers."""
    changing = {"lr", "initial_lr", APART}
    if parts.task.momentum is not None:
        changing |= {"momentum", "betas"}
    values: dict[str, Any] = {}
    for name, trained in parts.state.optimizers.items():
        if kind_of(trained.optimizer) is not None:
            groups = [group["dict"] for group in saved.param_groups[name]["list"]]
            values[name] = [
                {key: each for key, each in group.items() if key not in changing}
                for group in groups
            ]
    return values


def _replay_windows(
    parts: RunComponents,
    files: Files,
    chosen: Sequence[Window],
    *,
    tolerance: float,
    watch: Watching | None,
) -> list[Outcome]:
    done, total = count(1), sum(window.steps for window in chosen)
    tell: Watching = watch or (lambda *_: None)
    return [
        replay_window(
            parts, files, window, tolerance=tolerance, watch=lambda: tell(next(done), total)
        )
        for window in chosen
    ]


def _check_targets(
    parts: RunComponents, files: Files, outcomes: Sequence[Outcome]
) -> list[Problem]:
    of_samples = parts.pipeline.count is None and parts.pipeline.plan.steps is None
    if not outcomes or not of_samples or any(outcome.loss_counts for outcome in outcomes):
        return []
    return consistency.shortened(
        consistency.targets(files.log, float(parts.pipeline.sizes.batch_size))
    )
