"""Sentences of the verdict: proved and unproved facts, and the likely cause of differences."""

from collections.abc import Sequence
from itertools import pairwise

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
    facts = []
    if manifests:
        count = 0
        total_bytes = 0
        for manifest in manifests:
            count += len(manifest.files) + 1
            total_bytes += sum(length for length, _ in manifest.files.values())
        facts.append(
            f"{_checkpoints_of(sorted(files.checkpoints))}: every byte matches its manifest"
            f" ({in_words(total_bytes)} in {counted(count, 'file')})"
        )
    covered = files.log.up_to(files.log.proved_bytes)
    if covered and not files.log.problems:
        steps = [step for step, checkpoint in files.checkpoints.items() if checkpoint.manifest.log]
        facts.append(
            f"{FILE}: {line_numbers(covered)}, as the checkpoint of step {max(steps):,} recorded it"
        )
    return facts


def _checkpoints_of(steps: Sequence[int]) -> str:
    checkpoints = "the checkpoint" if len(steps) == 1 else "the checkpoints"
    return f"{checkpoints} of {steps_in_words(steps)}"


def record_facts(files: Files) -> str:
    """Describe in one line what the checks of the records have proved."""
    fact = "the records: in order; their speeds agree with their times"
    checkpoints = files.checkpoints.values()
    later = [checkpoint for checkpoint in checkpoints if checkpoint.step > 0]  # with records before
    timed = sum(has_times(files.log, checkpoint) for checkpoint in later)
    if timed:
        whose = "every checkpoint"
        if timed < len(later):
            whose = f"{timed} of {counted(len(later), 'checkpoint')}"
        fact += f", and their times with the clock of {whose}"
    if any(has_best(checkpoint) for checkpoint in checkpoints):
        fact += "; the best metric agrees with the recorded metrics"
    return fact


def unproved_lines(files: Files) -> list[str]:
    """Return a line about records after the newest checkpoint, which no hash covers."""
    after = [line for line in files.log.lines if line.stop > files.log.proved_bytes]
    if not after or files.log.problems:
        return []
    return [
        f"{FILE}: {line_numbers(after)}, written after the newest checkpoint: no hash covers this"
        " part, only repeated steps do"
    ]


def window_facts(outcome: Outcome) -> list[str]:
    """Describe the executed steps and, if they differ by rounding, the largest differences. Empty
    if nothing was compared.
    """
    matching = []
    count = len(outcome.records)
    if count:
        records = counted(outcome.met_records, "record")
        matching.append(records if count == outcome.met_records else f"{count:,} of {records}")
    if outcome.checkpoints:
        matching.append(_checkpoints_of(outcome.checkpoints))
    if not matching:
        return []
    reached = _reached(outcome)
    how = "bit for bit" if outcome.exact else "up to rounding"
    lines = [f"steps {reached.start:,} to {reached.stop:,}: {' and '.join(matching)}, {how}"]
    what = {"records": "value", "tensors": "tensor"}
    for kind, largest in sorted(outcome.largest.items()):
        lines.append(
            f"  largest relative difference of a {what[kind]}: {largest.relative:.2g},"
            f" {largest.where}: {largest.saved}, now {largest.computed}"
        )
    if not outcome.exact:
        lines.append(f"  {outcome.unlike}")
    return lines


def unproved_steps(
    outcomes: Sequence[Outcome],
    files: Files,
    *,
    explained: Sequence[Window],
    begins: Sequence[int],
    end: int,
    step_s: float | None,
) -> list[str]:
    """Return the steps that were not replayed, except the `explained` ones, with the cost of their
    replay, and the facts that no replay proves. `begins` are the steps at which settings change.
    """
    lines = []
    for gap in gaps([*explained, *(_reached(outcome) for outcome in outcomes)], end=end):
        for begin, next_begin in pairwise([*begins, max(end, *begins) + 1]):
            of_segment = Window(max(gap.start, begin), min(gap.stop, next_begin))
            if of_segment.steps > 0:
                starts = sorted(step for step in files.checkpoints if begin <= step < next_begin)
                lines.append(_gap(of_segment, starts, files, step_s))
    for outcome in outcomes:
        if outcome.lost is not None:
            lines.append(
                f"steps {outcome.window.start:,} to {outcome.window.stop:,}: the run is still"
                " training, and has removed a checkpoint"
            )
    if outcomes:
        lines += _beyond_any_replay(outcomes, files, end)
    return lines


def _beyond_any_replay(outcomes: Sequence[Outcome], files: Files, end: int) -> list[str]:
    """Return the facts that no replay proves."""
    lines = []
    newest = max(files.checkpoints, default=0)
    if end > newest:
        lines.append(
            f"the weights after step {newest:,}: there is no later checkpoint, so only records were compared"
        )
    unmatched = 0
    wrong: set[int | None] = set()  # steps of records that differ
    unknown: set[str] = set()
    for outcome in outcomes:
        unmatched += outcome.met_records - len(outcome.records)
        wrong.update(problem.step for problem in outcome.problems if problem.file == FILE)
        unknown |= outcome.unknown
    unread = unmatched - len(wrong)
    if unread > 0:
        lines.append(
            f"{counted(unread, 'record')} with steps before a checkpoint that does not hold them, as after a divergence"
        )
    if unknown:
        lines.append(
            f"{', '.join(sorted(unknown))} in the records: logged by your own loop, which cannot be repeated"
        )
    if any(outcome.has_user_state for outcome in outcomes):
        lines.append(
            "state registered with run.register_state: changed by your own loop, which cannot be repeated"
        )
    kinds = {line.kind for line in files.log.curve}
    others = [name for kind, name in _OTHERS.items() if kind in kinds]
    if others:
        line = f"{', '.join(others)}: not recomputed"
        lines.append(line + _EVALUATE if "eval" in kinds else line)
    return lines


def hints(outcomes: Sequence[Outcome], notes: Sequence[str]) -> list[str]:
    """Return the likely causes of differences, without repetitions; [] if nothing differs."""
    wrong = [outcome for outcome in outcomes if outcome.problems]
    if not wrong:
        return []
    lines = []
    for outcome in wrong:
        lines += _why(outcome)
    inexact = [outcome for outcome in wrong if not outcome.exact]
    if inexact:
        lines.append(
            f"not the machine that trained the run ({inexact[0].unlike}): rounding differences grow"
            " from step to step; try fewer --steps"
        )
    return list(dict.fromkeys([*lines, *notes]))


def cost(windows: Sequence[Window], files: Files, *, end: int, step_s: float | None) -> str:
    """Return the estimated cost of repeating these windows and of repeating all steps."""
    steps = sum(window.steps for window in windows)
    all_steps = end - min(files.checkpoints)
    text = f"repeating {steps:,} of {counted(end, 'step')}, in {counted(len(windows), 'window')}{_took(steps, step_s)}"
    if steps >= all_steps:
        return text
    return f"{text}; all steps (--all): {all_steps:,}{_took(all_steps, step_s)}"


def _reached(outcome: Outcome) -> Window:
    """Return the steps of a window that were compared: fewer if a checkpoint was lost."""
    if outcome.lost is None:
        return outcome.window
    start = outcome.window.start
    return Window(start, max([start, *outcome.records, *outcome.checkpoints]))


def _gap(gap: Window, starts: Sequence[int], files: Files, step_s: float | None) -> str:
    """Describe steps that were not replayed. `starts` are the checkpoints with their settings."""
    takes = cost_steps(gap, starts)
    at_end = f" and the checkpoint of step {gap.stop:,}" if gap.stop in files.checkpoints else ""
    what = f"steps {gap.start:,} to {gap.stop:,}{at_end}: not repeated"
    if takes is None:
        return f"{what}, because no checkpoint precedes them"
    return f"{what}; repeating them takes {counted(takes, 'step')}, from the checkpoint of step {gap.stop - takes:,}{_took(takes, step_s)}"


def _why(outcome: Outcome) -> list[str]:
    """Return the likely cause of the differences of a window."""
    records = set()  # steps of records that differ
    checkpoints = set()
    count = 0
    for problem in outcome.problems:
        if problem.step is None:
            continue
        count += 1
        if problem.file == FILE:
            records.add(problem.step)
        else:
            checkpoints.add(problem.step)
    first = min(records | checkpoints)
    last = max(records | checkpoints)
    later_matches = any(step > last for step in (*outcome.records, *outcome.checkpoints))
    if len(checkpoints) == 1 and not records and later_matches:
        return [
            f"later steps match the recomputed state: the checkpoint of step {first:,} was changed after it was saved"
        ]
    if records and not checkpoints and any(step >= max(records) for step in outcome.checkpoints):
        return [
            "the next checkpoint matches the recomputed state: the record was changed, not the run"
        ]
    if count == 1:
        return []
    return [
        f"from step {outcome.window.start:,} on, the run and the repeated steps differ, first at step {first:,}; possible causes: changed"
        " code, data or libraries, a checkpoint",
        "  that was changed before that step, your own loop changing weights (which cannot be repeated), or a faulty machine",
    ]


def _took(steps: int, step_s: float | None) -> str:
    if step_s is None:
        return ""
    return f", about {duration(max(1.0, steps * step_s))} at the run's own pace"
