"""What changes will do to the length of a run and to its learning rates: as lines of text, before
anything is written. Imports no torch.
"""

from collections.abc import Mapping, Sequence

from surefoot.config.setting_change import SettingChange
from surefoot.schedules.joined import Continued
from surefoot.tracking.format import counted, drawn_in_line, text_table, three_digits
from surefoot.train.recorded_settings import Course

_WIDTH = 60  # letters of a drawing
_SHOWN = 4  # significant digits of a rate


def are_equal(now: Course | None, then: Course | None, step: int) -> bool:
    """Return True if two courses have the same rates from a step on, up to the same end."""
    if now is None or then is None or now.length.steps != then.length.steps:
        return False
    steps = now.length.steps
    looked_at = range(step, steps, max(1, (steps - step) // 1000))
    return now.rates(looked_at) == then.rates(looked_at)


def preview(
    now: Course | None, then: Course | None, step: int, changes: Sequence[SettingChange]
) -> list[str]:
    """Return lines about a run before and after changes: the steps and samples left, its learning
    rates, and whether its steps so far are those of a run that had the new length from the start.

    `changes` are those of the journal and the new ones.
    """
    if now is None or then is None:
        return ["only the program knows how many steps are left, and their rates: surefoot plan"]
    lines = []
    steps = then.length.steps
    if now.length.steps != steps:
        lines.append(f"length: {now.length.steps:,} -> {steps:,} steps")
    left = steps - step
    amount = f"{left:,} steps"
    if then.counts_samples:
        samples = then.samples(step, steps)
        epochs = three_digits(samples / then.length.samples_per_epoch)
        amount += f" with {samples:,} samples, {epochs} epochs,"
    lines.append(f"{amount} are left from step {step:,} on")
    if left > 0:
        lines += drawing({"now": now, "then": then}, step)
        at_step = [change for change in changes if change.from_step == step]
        lines += _about_schedule(now, then, step, at_step)
    return lines


def drawing(courses: Mapping[str, Course], step: int) -> list[str]:
    """Draw the rates of courses over the whole run, on one scale, with those of the step after
    `step` finished ones and of the last.
    """
    longest = max(course.length.steps for course in courses.values())
    columns = min(_WIDTH, longest)
    at = [column * longest // columns for column in range(columns)]
    drawn = {}
    top = 0.0
    word = "lr"
    for name, course in courses.items():
        drawn[name] = course.rates(each for each in at if each < course.length.steps)
        top = max(top, *drawn[name])
        if course.rate(step) is None:
            word = "factor"
    rows = [(word, f"at {step:,}", "last", "over the run")]
    for name, course in courses.items():
        last = course.length.steps - 1
        next_rate, last_rate = (f"{rate:.{_SHOWN}g}" for rate in course.rates([step, last]))
        if step > last:
            next_rate = "ended"
        rows.append((name, next_rate, last_rate, drawn_in_line(drawn[name], top=top)))
    return text_table(rows, left=(0, 3))


def _about_schedule(
    now: Course, then: Course, step: int, changes: Sequence[SettingChange]
) -> list[str]:
    """Return a line about how the schedule goes on, if it was changed or has another length."""
    steps = then.length.steps
    if any(change.begins_schedule for change in changes):
        return [f"the new schedule begins at step {step:,}, and ends after {steps - step:,} steps"]
    from_start = f"those of a run that had {counted(steps, 'step')} from the start"
    if any(change.stretches for change in changes):
        return [f"from step {step:,} on the rates are {from_start}, so they may jump there"]
    if now.length.steps == steps:
        return []
    if isinstance(then.schedule, Continued) and then.schedule.at >= step:
        return ["the schedule goes on from its present rate in the same shape, without a jump"]
    return [f"exact: the rates so far are {from_start}"]
