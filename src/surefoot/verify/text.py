"""What was found, in plain sentences: what is proved, what is not, and what the differences say about their cause."""

from collections.abc import Sequence

from surefoot.memory import in_words
from surefoot.tracking.format import counted, duration
from surefoot.verify.files import Files
from surefoot.verify.metrics_log import FILE, line_numbers
from surefoot.verify.records import has_best, has_times
from surefoot.verify.rerun import cost_steps, gaps
from surefoot.verify.verdict import Outcome, Window, steps_in_words

_OTHERS = {
    "scores": "scores",
    "end": "scores at the end",
    "sample": "samples",
    "layers": "records of layers",
    "data": "what was seen of the data",
}
_EVALUATE = " (surefoot evaluate RUN --checkpoint STEP computes the scores of a checkpoint)"


def of_files(files: Files) -> list[str]:
    """What the files prove of themselves."""
    checkpoints = list(files.checkpoints.values())
    number = sum(len(checkpoint.manifest.files) + 1 for checkpoint in checkpoints)
    size = in_words(sum(length for checkpoint in checkpoints for length, _ in checkpoint.manifest.files.values()))
    said = []
    if checkpoints:
        steps = steps_in_words(sorted(files.checkpoints))
        kinds = f"the checkpoint{'s' * (len(checkpoints) > 1)} of"
        said.append(f"{kinds} {steps}: every byte is as its manifest tells ({size} in {counted(number, 'file')})")
    covered = files.log.up_to(files.log.proved_bytes)
    if covered and not files.log.problems:
        last = max(files.checkpoints[step].step for step in files.checkpoints if files.checkpoints[step].manifest.log)
        said.append(f"{FILE}: {line_numbers(covered)}, as the checkpoint of step {last:,} has noted it")
    return said


def of_records(files: Files) -> str:
    """What the records prove of themselves, where nothing in them is wrong."""
    said = "the records: in order; their speeds agree with their times"
    every = sum(checkpoint.step > 0 for checkpoint in files.checkpoints.values())  # before step 0 there are no records
    timed = sum(has_times(files.log, checkpoint) for checkpoint in files.checkpoints.values() if checkpoint.step > 0)
    if timed:
        whose = "every checkpoint" if timed == every else f"{timed} of {counted(every, 'checkpoint')}"
        said = f"{said}, and these with the clock of {whose}"
    best = any(has_best(checkpoint) for checkpoint in files.checkpoints.values())
    return f"{said}; the best score follows from the scores" if best else said


def not_of_files(files: Files) -> list[str]:
    """What no checkpoint has noted of the records."""
    after = [line for line in files.log.lines if line.stop > files.log.proved_bytes]
    if not after or files.log.problems:
        return []
    return [
        f"{FILE}: {line_numbers(after)}, written after the newest checkpoint: no hash covers that,"
        " only steps that are made again do"
    ]


def of_windows(outcomes: Sequence[Outcome]) -> list[str]:
    return [line for outcome in outcomes for line in _proved(outcome)]


def not_of_windows(outcomes: Sequence[Outcome], files: Files, *, end: int, step_s: float | None) -> list[str]:
    """Which steps were not made again and what that would cost, and what making steps again cannot prove."""
    starts = sorted(files.checkpoints)
    made = [_reached(outcome) for outcome in outcomes]
    said = [_gap(gap, starts, step_s) for gap in gaps(made, end=end)]
    said += [
        f"steps {outcome.window.start:,} to {outcome.window.stop:,}: a checkpoint was let go meanwhile by the run, which goes on"
        for outcome in outcomes
        if outcome.lost is not None
    ]
    newest = max(starts, default=0)
    if outcomes and end > newest:
        said.append(f"the weights after step {newest:,}: there is no later checkpoint, so only records were compared")
    wrong = {problem.step for outcome in outcomes for problem in outcome.problems if problem.file == FILE}
    unread = sum(outcome.met_records - len(outcome.records) for outcome in outcomes) - len(wrong)
    if unread > 0:
        why = "over steps before a checkpoint that does not hold them, as after a divergence"
        said.append(f"{counted(unread, 'record')}: {why}")
    unknown = sorted(set().union(*(outcome.unknown for outcome in outcomes)))
    if unknown:
        said.append(f"{', '.join(unknown)} in the records: logged by a loop's own body, which cannot be done again")
    if any(outcome.kept for outcome in outcomes):
        said.append("what was given to run.register_state: a loop's own body changes it, which cannot be done again")
    kinds = {line.kind for line in files.log.curve}
    others = [name for kind, name in _OTHERS.items() if kind in kinds]
    if outcomes and others:
        said.append(f"{', '.join(others)}: not computed again{_EVALUATE if 'scores' in kinds else ''}")
    return said


def hints(outcomes: Sequence[Outcome], notes: Sequence[str]) -> list[str]:
    """What differences say about their cause."""
    wrong = [outcome for outcome in outcomes if outcome.problems]
    if not wrong:
        return []
    said = [line for outcome in wrong for line in _why(outcome)]
    inexact = next((outcome for outcome in wrong if not outcome.exact), None)
    if inexact is not None:
        why = "differences of rounding grow from step to step; try fewer --steps"
        said.append(f"not the machine that made it ({inexact.unlike}): {why}")
    return list(dict.fromkeys([*said, *notes]))


def cost(windows: Sequence[Window], files: Files, *, end: int, step_s: float | None) -> str:
    """What making these steps again takes, and what making all of them would; said before it is begun."""
    steps = sum(window.steps for window in windows)
    first = min(files.checkpoints)
    whole = end - first
    many = counted(len(windows), "window")
    said = f"making {steps:,} of {counted(end, 'step')} again, in {many}{_took(steps, step_s)}"
    return said if steps >= whole else f"{said}; all of them (--all): {whole:,}{_took(whole, step_s)}"


def _proved(outcome: Outcome) -> list[str]:
    made, how = _reached(outcome), "bit for bit" if outcome.exact else "to rounding"
    of = "" if len(outcome.records) == outcome.met_records else f" of {outcome.met_records:,}"
    parts = []
    if outcome.records:
        parts.append(f"{len(outcome.records):,}{of} record{'s' * (outcome.met_records != 1)}")
    if outcome.checkpoints:
        parts.append(f"the checkpoint{'s' * (len(outcome.checkpoints) > 1)} of {steps_in_words(outcome.checkpoints)}")
    if not parts:
        return []
    said = [f"steps {made.start:,} to {made.stop:,}: {' and '.join(parts)}, {how}"]
    for kind, held in sorted(outcome.largest.items()):
        what = "number" if kind == "records" else "tensor"
        said.append(
            f"  largest relative difference of a {what}: {held.relative:.2g}, {held.where}: {held.saved}, now {held.computed}"
        )
    if not outcome.exact:
        said.append(f"  {outcome.unlike}")
    return said


def _reached(outcome: Outcome) -> Window:
    if outcome.lost is None:
        return outcome.window
    return Window(outcome.window.start, max([outcome.window.start, *outcome.records, *outcome.checkpoints]))


def _gap(gap: Window, starts: Sequence[int], step_s: float | None) -> str:
    takes = cost_steps(gap, starts)
    at_end = f" and the checkpoint of step {gap.stop:,}" if gap.stop in starts else ""
    what = f"steps {gap.start:,} to {gap.stop:,}{at_end}: not made again"
    if takes is None:
        return f"{what}, and there is no checkpoint before them"
    begin = f"from the checkpoint of step {gap.stop - takes:,}"
    return f"{what}; that is {counted(takes, 'step')}, {begin}{_took(takes, step_s)}"


def _why(outcome: Outcome) -> list[str]:
    wrong = [(problem.step, problem.file == FILE) for problem in outcome.problems if problem.step is not None]
    checkpoints = {step for step, of_record in wrong if not of_record}
    records = {step for step, of_record in wrong if of_record}
    first = min([*checkpoints, *records])
    held_later = [step for step in (*outcome.records, *outcome.checkpoints) if step > max([*checkpoints, *records])]
    if len(checkpoints) == 1 and not records and held_later:
        return [
            f"what follows step {first:,} was made from what is computed now: that checkpoint was changed after it was saved"
        ]
    if records and not checkpoints and any(step >= max(records) for step in outcome.checkpoints):
        return ["the next checkpoint is what is computed now: what is on the record was changed, and not the run"]
    if len(wrong) == 1:
        return []
    return [
        f"from step {outcome.window.start:,} on the run came to another state than now, seen first at step {first:,}: other code, data"
        " or libraries than then, a checkpoint",
        "  that was changed before that step, a loop's own body that changes weights (which cannot be done again), or a machine that errs",
    ]


def _took(steps: int, step_s: float | None) -> str:
    return "" if step_s is None else f", about {duration(max(1.0, steps * step_s))} at the run's own pace"
