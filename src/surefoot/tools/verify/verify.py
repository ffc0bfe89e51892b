"""Verification of a run: files, records, data, then replayed steps."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, Literal

from surefoot.checkpoint.reader import interpreted
from surefoot.checkpoint.state_json import SavedState
from surefoot.config.accepted_changes import CHANGES
from surefoot.config.setting_change import in_effect
from surefoot.errors import CheckpointError, DataError, SurefootError, first_line
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
from surefoot.train.plan import Segment
from surefoot.train.run_identity import differences, with_changed

Steps = int | Literal["auto", "all"]
Watching = Callable[[int, int], None]
"""A callback for each replayed step, with the number of replayed steps and the total."""
Rebuild = Callable[[int], Run]
"""A function that builds the run with the settings that it had after so many steps."""

_SOON_S = 120.0  # maximum time of a complete replay with "auto"


def verify(
    run: Run,
    files: Files,
    *,
    rebuild: Rebuild,
    steps: Steps,
    windows: int,
    seed: int | None,
    tolerance: float,
    say: Callable[[str], None] | None,
    progress_fn: Watching | None,
) -> Verdict:
    """Check all files of a run directory, replay steps from its checkpoints, and compare every bit.

    `run` is built like the run in the directory and must not be open; its state is restored at the
    end. Steps before a change of settings are repeated by a run that `rebuild` builds. `files` is
    the result of `check_files`. See `SavedRun.verify` for the other arguments. Raises `ConfigError` for a run on several ranks.
    """
    # replay also from checkpoints older than a change
    parts = replace(run.parts, accept_change=CHANGES)
    refuse_ranks(parts)
    verdict = _check_files(files)
    if not files.checkpoints:
        return verdict
    with parts.snapshot():
        why = _why_not_replayed(parts, files, verdict.problems)
        if why is not None:
            verdict.not_proved.append(f"no step was repeated: {why}")
            return verdict
        _add_rates(verdict, parts, files)
        consistency.add_beginning(verdict, parts, files)
        accepted_at = [change["step"] for change in files.newest.state.fingerprints["accepted"]]
        changed_at = max(accepted_at, default=0)
        if changed_at:
            verdict.not_proved.append(
                f"steps 0 to {changed_at:,}: trained by another program, before the change that was accepted at step {changed_at:,}"
            )
        dropped_until = _check_tape(verdict, parts, files)
        # those that the current program computes from rows that are still there
        starts = [step for step in files.checkpoints if step >= max(changed_at, dropped_until)]
        records = files.log.of("train")
        points = {*files.checkpoints, *(int(record["step"]) for record in records)}
        end = max(points)  # nothing can be compared after the last point
        step_s = pace_s(records)
        if steps == "auto":
            all_steps = end - min(files.checkpoints)
            is_soon = step_s is not None and all_steps * step_s <= _SOON_S
            steps = "all" if is_soon else STEPS
        chosen = plan_windows(
            sorted(starts),
            sorted(points),
            steps=None if steps == "all" else int(steps),
            windows=windows,
            seed=seed,
            begins=[segment.begin for segment in parts.plan.segments],
        )
        with interpreted(files.newest.path):
            chosen = _without_body_changes(verdict, parts, chosen, files)
        if chosen and say is not None:
            say(sentences.cost(chosen, files, end=end, step_s=step_s))
        outcomes: list[Outcome] = []
        explained = [Window(0, max(changed_at, dropped_until))]  # why they are not repeated
        watch = _counting(progress_fn, sum(window.steps for window in chosen))
        for segment in parts.plan.segments:
            of_segment = [
                window for window in chosen if parts.plan.segment_at(window.start) == segment
            ]
            if not of_segment:
                continue
            repeated, why = _parts_of(segment, parts, rebuild)
            if repeated is None:
                explained.append(Window(segment.begin, segment.end))
                verdict.not_proved.append(f"steps {segment.begin:,} to {segment.end:,}: {why}")
                continue
            _replay_segment(
                repeated,
                segment,
                files,
                of_segment,
                verdict,
                outcomes,
                tolerance=tolerance,
                watch=watch,
            )
        verdict.not_proved.extend(
            sentences.unproved_steps(
                outcomes,
                files,
                explained=explained,
                begins=[segment.begin for segment in parts.plan.segments],
                end=end,
                step_s=step_s,
            )
        )
    covered = sum(outcome.window.steps for outcome in outcomes if outcome.lost is None)
    complete = bool(outcomes) and covered == end and end in files.checkpoints
    hints = sentences.hints(outcomes, files.notes)
    return replace(verdict, outcomes=outcomes, hints=hints, whole=complete)


def verify_files(files: Files, *, why: str, problem: DataError | None = None) -> Verdict:
    """Return the facts that files and records prove. `why` is the reason why no step is replayed;
    `problem` is a data error.
    """
    verdict = _check_files(files)
    verdict.not_proved.append(f"no step was repeated: {why}")
    if problem is not None:
        lines = [line.strip() for line in str(problem).splitlines()]
        verdict.problems.append(_data_problem(lines, "the data"))
    return verdict


def _check_files(files: Files) -> Verdict:
    problems = consistency.shortened(consistency.in_order(files.log))
    problems += consistency.shortened(consistency.speeds(files.log))
    for _, checkpoint in sorted(files.checkpoints.items()):
        with interpreted(checkpoint.path):
            problems += consistency.times(files.log, checkpoint)
            problems += consistency.best_metric(files.log, checkpoint)
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
    if parts.task.loss is None:
        return "this run has no loss function, its script computes each step itself"
    return None


def _changed_data(parts: RunComponents, files: Files) -> list[Problem]:
    saved = files.newest.state
    now, scored = json.loads(json.dumps([parts.plan.identity, parts.plan.splits]))
    problems = []
    since = parts.changes_since(files.newest.checkpoint)
    of_training = with_changed(saved.identity, now, since)["data"]
    lines = differences({"data": of_training}, {"data": now["data"]})
    if lines:
        problems.append(_data_problem(lines[:3], "training data"))
    for name, before in saved.splits.items():
        lines = [f"{name} is no longer evaluated"]
        if name in scored:
            lines = differences(before, scored[name])
        if lines:
            problems.append(_data_problem(lines[:3], f"data of split {name}"))
    return problems


def _data_problem(lines: Sequence[str], what: str) -> Problem:
    return Problem("data", f"{what}: {'; '.join(lines)}", quantity=what)


def _check_tape(verdict: Verdict, parts: RunComponents, files: Files) -> int:
    """Check all rows of a stream's tape, and return the step of the first checkpoint behind which
    all rows are on it.
    """
    tape = parts.pipeline.tape
    if tape is None:
        return 0
    rows, problem = tape.shards.intact()
    if problem is not None:
        verdict.problems.append(
            Problem("damaged", f"the tape is damaged: {problem}", file=str(tape.directory))
        )
    else:
        verdict.proved.append(f"the tape of {rows:,} rows: every row on it matches its hash")
    first = tape.first_step(parts.pipeline.sizes.batch_size)
    if not first:
        return 0
    usable = [step for step in files.checkpoints if step >= first]
    since = min(usable) if usable else max(files.checkpoints)
    verdict.not_proved.append(
        f"steps 0 to {since:,}: cannot be repeated, because the tape has dropped rows of steps before {first:,} (tape_size)"
    )
    return since


def _add_rates(verdict: Verdict, parts: RunComponents, files: Files) -> None:
    initial = next(iter(parts.state.optimizers.values())).rates.initial[0]
    rates = [change for change in in_effect(parts.changes) if change.setting == "optimizer.lr"]

    def planned(step: int, plateau_factor: float) -> float:
        rate = initial
        for change in reversed(rates):
            if step < change.from_step:
                rate = change.was if rate == change.now else rate * (change.was / change.now)
        return rate * (parts.task.factors(step) * plateau_factor)

    wrong = consistency.shortened(consistency.rates(files.log, planned))
    verdict.problems.extend(wrong)
    recorded = len(files.log.lines_of("train", "lr"))
    if recorded and not wrong:
        verdict.proved.append(f"learning rates of {recorded:,} records: they match the schedule")


def _without_body_changes(
    verdict: Verdict, parts: RunComponents, windows: Sequence[Window], files: Files
) -> list[Window]:
    """Cut out of the windows the steps between two checkpoints in which the loop's body changed
    what a step depends on.
    """
    for start, stop in pairwise(sorted(files.checkpoints)):
        before = files.checkpoints[start].state
        after = files.checkpoints[stop].state
        if before.changes != after.changes:  # its settings were changed, not by the loop's body
            continue
        if before.trainable != after.trainable:
            what = "froze or unfroze parameters"
        elif _bases(before) != _bases(after):
            what = "changed learning rates"
        elif _group_values(before, parts) != _group_values(after, parts):
            what = "changed values of parameter groups"
        else:
            continue
        remaining = []
        for window in windows:
            remaining.append(Window(window.start, min(window.stop, start)))
            remaining.append(Window(max(window.start, stop), window.stop))
        windows = [window for window in remaining if window.start < window.stop]
        verdict.not_proved.append(
            f"steps {start:,} to {stop:,}: your own loop {what}, which is not repeated"
        )
    return list(windows)


def _bases(saved: SavedState) -> dict[str, Any]:
    """Return the base learning rates by optimizer."""
    rates = saved.rates or {}
    return {name: saved_rates["dict"]["bases"] for name, saved_rates in rates.items()}


def _group_values(saved: SavedState, parts: RunComponents) -> dict[str, Any]:
    """Return the values of parameter groups that no step changes, of known optimizers."""
    changing = {"lr", "initial_lr", APART}
    if parts.task.momentum is not None:
        changing |= {"momentum", "betas"}
    values: dict[str, Any] = {}
    for name, trained in parts.state.optimizers.items():
        if kind_of(trained.optimizer) is None:
            continue
        values[name] = []
        for group in saved.param_groups[name]["list"]:
            of_group = group["dict"].items()
            values[name].append({key: value for key, value in of_group if key not in changing})
    return values


def _parts_of(
    segment: Segment, parts: RunComponents, rebuild: Rebuild
) -> tuple[RunComponents | None, str]:
    """Return a run with the settings of a segment of steps, or None and why there is none."""
    if segment.begin == parts.settings_begin:
        return parts, ""
    try:
        earlier = rebuild(segment.begin).parts
    except SurefootError as problem:
        return (
            None,
            f"the run cannot be built with the settings of these steps: {first_line(problem)}",
        )
    if earlier.settings_begin != segment.begin:
        return None, "trained with other settings, and only functions build models a second time"
    return replace(earlier, accept_change=CHANGES), ""


def _counting(progress_fn: Watching | None, total: int) -> Callable[[], None]:
    """Return a function to call after each repeated step."""
    done = count(1)

    def step_is_done() -> None:
        if progress_fn is not None:
            progress_fn(next(done), total)

    return step_is_done


def _replay_segment(
    parts: RunComponents,
    segment: Segment,
    files: Files,
    windows: Sequence[Window],
    verdict: Verdict,
    outcomes: list[Outcome],
    *,
    tolerance: float,
    watch: Callable[[], None],
) -> None:
    """Repeat windows of a segment, and add what they prove to the verdict and to the outcomes."""
    of_segment = []
    try:
        for window in windows:
            outcome = replay_window(parts, files, window, tolerance=tolerance, watch=watch)
            of_segment.append(outcome)
    except CheckpointError as problem:  # tensors that do not fit the rebuilt run
        verdict.problems.append(Problem("inconsistent", first_line(problem)))
    for outcome in of_segment:
        verdict.problems.extend(outcome.problems)
        verdict.proved.extend(sentences.window_facts(outcome))
    known = {(problem.step, problem.quantity) for problem in verdict.problems}
    for found in _check_targets(parts, segment, files, of_segment):
        if (found.step, found.quantity) not in known:
            verdict.problems.append(found)
    outcomes += of_segment


def _check_targets(
    parts: RunComponents, segment: Segment, files: Files, outcomes: Sequence[Outcome]
) -> list[Problem]:
    of_samples = parts.pipeline.count is None and parts.pipeline.plan.steps is None
    if not outcomes or not of_samples or any(outcome.loss_counts for outcome in outcomes):
        return []
    batch_size = float(parts.pipeline.sizes.batch_size)
    wrong = consistency.targets(files.log, batch_size, since=segment.begin, until=segment.end)
    return consistency.shortened(wrong)
