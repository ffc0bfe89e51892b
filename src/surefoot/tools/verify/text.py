"""Sentences of the verdict: proved and unproved facts, and the likely cause of differences."""

from collections.abc import Sequence

from surefoot.memory import in_words
from surefoot.tools.verify.files import Files
from surefoot.tools.verify.metrics_log import FILE, line_numbers
from surefoot.tools.verify.records import has_best, has_times
from surefoot.tools.verify.rerun import cost_steps, gaps
from surefoot.tools.verify.verdict import Outcome, Window, steps_in_words
from surefoot.tracking.format import counted, duration

_OTHERS = {
    "eval": "evaluations",
    "final_eval": "final evaluations",
    "sample": "samples",
    "layer_stats": "layer statistics",
    "data": "data statistics",
}
_EVALUATE = " (evaluate a checkpoint to compute its metrics again)"


def file_facts(files: Files) -> list[str]:
    """Describe the checked files, one line each: checkpoints, and the part of metrics.jsonl that a
    checkpoint covers.
    """
    manifests = [checkpoint.manifest for checkpoint in files.checkpoints.values()]
    number = sum(len(manifest.files) + 1 for manifest in manifests)
    size = in_words(sum(length for manifest in manifests for length, _ in manifest.files.values()))
    facts = []
    if manifests:
        which = f"the checkpoint{'s' * (len(manifests) > 1)} of {steps_in_words(sorted(files.checkpoints))}"
        facts.append(
            f"{which}: every byte matches its manifest ({size} in {counted(number, 'file')})"
        )
    covered = files.log.up_to(files.log.proved_bytes)
    if covered and not files.log.problems:
        last = max(
            step for step, checkpoint in files.checkpoints.items() if checkpoint.manifest.log
        )
        facts.append(
            f"{FILE}: {line_numbers(covered)}, as the checkpoint of step {last:,} recorded it"
        )
    return facts


def record_facts(files: Files) -> str:
    """Describe in one line what the checks of the records have proved."""
    fact = "the records: in order; their speeds agree with their times"
    every = sum(
        checkpoint.step > 0 for checkpoint in files.checkpoints.values()
    )  # no records exist before step 0
    timed = sum(
        has_times(files.log, checkpoint)
        for checkpoint in files.checkpoints.values()
        if checkpoint.step > 0
    )
    if timed:
        whose = (
            "every checkpoint" if timed == every else f"{timed} of {counted(every, 'checkpoint')}"
        )
        fact = f"{fact}, and their times with the clock of {whose}"
    if any(map(has_best, files.checkpoints.values())):
        fact += "; the best metric agrees with the recorded metrics"
    return fact


def unproved_lines(files: Files) -> list[str]:
    """Return a line about records after the newest checkpoint, which no hash covers."""
    after = [line for line in files.log.lines if line.stop > files.log.proved_bytes]
    text = f"{FILE}: {{}}, written after the newest checkpoint: no hash covers this part, only repeated steps do"
    return [text.format(line_numbers(after))] if after and not files.log.problems else []


def window_facts(outcome: Outcome) -> list[str]:
    """Describe the executed steps and, if they differ by rounding, the largest differences. Empty
    if nothing was compared.
    """
    reached, how = _reached(outcome), "bit for bit" if outcome.exact else "up to rounding"
    of = "" if len(outcome.records) == outcome.met_records else f" of {outcome.met_records:,}"
    parts = (
        [f"{len(outcome.records):,}{of} record{'s' * (outcome.met_records != 1)}"]
        if outcome.records
        else []
    )
    if outcome.checkpoints:
        parts.append(
            f"the checkpoint{'s' * (len(outcome.checkpoints) > 1)} of {steps_in_words(outcome.checkpoints)}"
        )
    if not parts:
        return []
    what = {"records": "value", "tensors": "tensor"}
    return [
        f"steps {reached.start:,} to {reached.stop:,}: {' and '.join(parts)}, {how}",
        *(
            f"  largest relative difference of a {what[kind]}: {each.relative:.2g}, {each.where}: {each.saved}, now {each.computed}"
            for kind, each in sorted(outcome.largest.items())
        ),
        *([] if outcome.exact else [f"  {outcome.unlike}"]),
    ]


def unproved_steps(
    outcomes: Sequence[Outcome], files: Files, *, since: int, end: int, step_s: float | None
) -> list[str]:
    """Return the steps from `since` on that were not replayed, the cost of their replay, and the
    facts that no replay proves.
    """
    starts = sorted(files.checkpoints)
    newest = max(starts, default=0)
    wrong = {
        problem.step for outcome in outcomes for problem in outcome.problems if problem.file == FILE
    }
    unread = sum(outcome.met_records - len(outcome.records) for outcome in outcomes) - len(wrong)
    unknown = sorted(set().union(*(outcome.unknown for outcome in outcomes)))
    kinds = {line.kind for line in files.log.curve}
    others = [name for kind, name in _OTHERS.items() if kind in kinds]
    notes = {
        f"the weights after step {newest:,}: there is no later checkpoint, so only records were compared": end
        > newest,
        f"{counted(unread, 'record')} with steps before a checkpoint that does not hold them, as after a divergence": unread
        > 0,
        f"{', '.join(unknown)} in the records: logged by your own loop, which cannot be repeated": bool(
            unknown
        ),
        "state registered with run.register_state: changed by your own loop, which cannot be repeated": any(
            outcome.has_user_state for outcome in outcomes
        ),
        f"{', '.join(others)}: not recomputed{_EVALUATE if 'eval' in kinds else ''}": bool(others),
    }
    return [
        *(
            _gap(gap, starts, step_s)
            for gap in gaps([Window(0, since), *map(_reached, outcomes)], end=end)
        ),
        *(
            f"steps {outcome.window.start:,} to {outcome.window.stop:,}: the run is still training, and has removed a checkpoint"
            for outcome in outcomes
            if outcome.lost is not None
        ),
        *(note for note, holds in notes.items() if holds and outcomes),
    ]


def hints(outcomes: Sequence[Outcome], notes: Sequence[str]) -> list[str]:
    """Return the likely causes of differences, without repetitions; [] if nothing differs."""
    wrong = [outcome for outcome in outcomes if outcome.problems]
    inexact = [
        f"not the machine that trained the run ({outcome.unlike}): rounding differences grow from step to step; try fewer --steps"
        for outcome in wrong
        if not outcome.exact
    ]
    return (
        list(
            dict.fromkeys([*(line for each in wrong for line in _why(each)), *inexact[:1], *notes])
        )
        if wrong
        else []
    )


def cost(windows: Sequence[Window], files: Files, *, end: int, step_s: float | None) -> str:
    """Return the estimated cost of repeating these windows and of repeating all steps."""
    steps = sum(window.steps for window in windows)
    all_steps = end - min(files.checkpoints)
    text = f"repeating {steps:,} of {counted(end, 'step')}, in {counted(len(windows), 'window')}{_took(steps, step_s)}"
    return (
        text
        if steps >= all_steps
        else f"{text}; all steps (--all): {all_steps:,}{_took(all_steps, step_s)}"
    )


def _reached(outcome: Outcome) -> Window:
    start, compared = outcome.window.start, (*outcome.records, *outcome.checkpoints)
    return outcome.window if outcome.lost is None else Window(start, max([start, *compared]))


def _gap(gap: Window, starts: Sequence[int], step_s: float | None) -> str:
    takes = cost_steps(gap, starts)
    at_end = f" and the checkpoint of step {gap.stop:,}" if gap.stop in starts else ""
    what = f"steps {gap.start:,} to {gap.stop:,}{at_end}: not repeated"
    if takes is None:
        return f"{what}, because no checkpoint precedes them"
    return f"{what}; repeating them takes {counted(takes, 'step')}, from the checkpoint of step {gap.stop - takes:,}{_took(takes, step_s)}"


def _why(outcome: Outcome) -> list[str]:
    wrong = [
        (problem.step, problem.file == FILE)
        for problem in outcome.problems
        if problem.step is not None
    ]
    checkpoints = {step for step, of_record in wrong if not of_record}
    records = {step for step, of_record in wrong if of_record}
    first = min([*checkpoints, *records])
    held_later = [
        step
        for step in (*outcome.records, *outcome.checkpoints)
        if step > max([*checkpoints, *records])
    ]
    if len(checkpoints) == 1 and not records and held_later:
        return [
            f"later steps match the recomputed state: the checkpoint of step {first:,} was changed after it was saved"
        ]
    if records and not checkpoints and any(step >= max(records) for step in outcome.checkpoints):
        return [
            "the next checkpoint matches the recomputed state: the record was changed, not the run"
        ]
    several = [
        f"from step {outcome.window.start:,} on, the run and the repeated steps differ, first at step {first:,}; possible causes: changed"
        " code, data or libraries, a checkpoint",
        "  that was changed before that step, your own loop changing weights (which cannot be repeated), or a faulty machine",
    ]
    return several if len(wrong) > 1 else []


def _took(steps: int, step_s: float | None) -> str:
    return (
        ""
        if step_s is None
        else f", about {duration(max(1.0, steps * step_s))} at the run's own pace"
    )
