"""Ranges of steps that a run passes over, such as the steps of damaged data. Imports no torch.

A range is two lines of the journal: from its first step on the run skips, and behind its last step
it goes on. The index, the schedule and the order of samples go on all the while.
"""

import re
from collections.abc import Sequence
from typing import Any

from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.errors import ConfigError, Setting, out_of_range

SKIP_STEPS = "skip_steps"
_RANGE = re.compile(r"([0-9][0-9_]*)\s*\.\.\s*([0-9][0-9_]*)")


def steps_in(text: str) -> range:
    """Return the indexes of the steps from 0 in a range of steps as records number them, from 1,
    both included.

    >>> steps_in("400..420")
    range(399, 420)
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise out_of_range(SKIP_STEPS, text, "the first and the last step, such as 400..420")
    return range(int(match[1]) - 1, int(match[2]))


def changes_of_skips(
    value: Any,
    changes: Sequence[SettingChange],
    *,
    step: int,
    steps: int,
    because: str = "",
) -> list[SettingChange]:
    """Return the lines for "400..420", for several ranges with commas between them, or for None:
    nothing is skipped any more. Ranges that are to come already stay, and a range of the journal is
    not added again.

    `changes` is the journal, `step` the number of finished steps, and `steps` the length of the
    run. Raises `ConfigError` for steps that are completed, and for a range that leaves no step.
    """
    known = _ranges(changes)
    to_come = [range(max(step, each.start), each.stop) for each in known if each.stop > step]
    wanted: list[range] = []
    if value is not None:
        new = []
        for text in str(value).split(","):
            steps_of_text = steps_in(text)
            if not any(_covers(each, steps_of_text) for each in known):
                new.append(steps_of_text)
        for each in new:
            _refuse_out_of_run(each, step=step, steps=steps)
        wanted = _merged([*to_come, *new])
    if wanted == to_come:
        return []
    present = _begins(to_come)
    begins = _begins(wanted) or {step: None}
    # the lines before this step stay, and the first new one supersedes the others
    first = min(begin for begin, now in begins.items() if present.get(begin, "") != now)
    is_skipping = any(step in each for each in known)
    was = _in_words(to_come[0]) if is_skipping else None
    lines = []
    for begin, now in sorted(begins.items()):
        if begin >= first:
            lines.append(SettingChange(0, begin, SKIP_STEPS, was, now, because=because))
        was = now
    return lines


def _begins(ranges: Sequence[range]) -> dict[int, str | None]:
    """Return what holds from each step on at which a range begins or has ended."""
    begins: dict[int, str | None] = {}
    for each in ranges:
        begins[each.start] = _in_words(each)
        begins[each.stop] = None
    return begins


def end_of_range(changes: Sequence[SettingChange], *, step: int) -> list[SettingChange]:
    """Return the line that ends the range of a run that goes back to `step`, if it skips the step
    before: going back supersedes the one that its journal has.
    """
    last = None
    for change in in_effect(changes):
        if SKIP_STEPS in change.names and change.from_step < step:
            last = change
    if last is None or last.now is None:
        return []
    end = steps_in(last.now).stop
    return [SettingChange(0, end, SKIP_STEPS, last.now, None, because=last.because)]


def skipped_count(changes: Sequence[SettingChange], *, after: int, until: int) -> int:
    """Return how many of the steps behind the first `after` and up to `until` a journal skips."""
    return sum(max(0, min(each.stop, until) - max(each.start, after)) for each in _ranges(changes))


def in_words(was: Any, now: Any) -> str:
    """Return what a line of the journal does to the steps from there on."""
    if now is not None:
        return f"steps {now} are skipped"
    return "no step is skipped" if was is None else f"steps are made again, after {was}"


def _ranges(changes: Sequence[SettingChange]) -> list[range]:
    """Return the ranges that a journal skips."""
    ranges: list[range] = []
    begin: int | None = None
    for change in in_effect(changes):
        if SKIP_STEPS not in change.names:
            continue
        if begin is not None:
            ranges.append(range(begin, change.from_step))
        begin = None if change.now is None else change.from_step
    return _merged(ranges)


def _merged(ranges: Sequence[range]) -> list[range]:
    """Return ranges in order, with those that touch each other put together.

    >>> _merged([range(8, 9), range(1, 3), range(3, 5), range(2, 4)])
    [range(1, 5), range(8, 9)]
    """
    merged: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if merged and each.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
        else:
            merged.append(each)
    return merged


def _covers(whole: range, part: range) -> bool:
    return whole.start <= part.start and part.stop <= whole.stop


def _in_words(steps: range) -> str:
    return f"{steps.start + 1}..{steps.stop}"


def _refuse_out_of_run(each: range, *, step: int, steps: int) -> None:
    if each.start < step:
        raise ConfigError(
            "skipped-steps-completed",
            problem=f"skip_steps = {_in_words(each)}: {step:,} steps are completed already",
            reason="steps that were made cannot be skipped",
            remedy=f"go back first: surefoot resume RUN --from-step {each.start} --skip-steps"
            f" {_in_words(each)}",
            setting=SKIP_STEPS,
            value=_in_words(each),
            step=step,
        )
    if each.start >= steps:
        raise ConfigError(
            "skipped-steps-after-end",
            problem=f"skip_steps = {_in_words(each)}: the run ends with step {steps:,}",
            setting=SKIP_STEPS,
            value=_in_words(each),
            steps=steps,
        )
    if each.stop >= steps:
        raise ConfigError(
            "skipped-steps-beyond-length",
            problem=f"skip_steps = {_in_words(each)}: the run has {steps:,} steps",
            reason="a step must follow; to leave out the last ones, make the run shorter",
            remedy=Setting("length", f"{each.start} steps"),
            setting=SKIP_STEPS,
            value=_in_words(each),
            steps=steps,
        )
