"""What changes will do to the length of a run and to its learning rates: as lines of text, before
anything is written. Imports no torch.
"""

from collections.abc import Sequence

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
    return all(_rate(now, each) == _rate(then, each) for each in looked_at)


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
    samples = then.samples(step, steps)
    epochs = three_digits(samples / then.length.samples_per_epoch)
    lines.append(
        f"{left:,} steps with {samples:,} samples, {epochs} epochs, are left from step {step:,} on"
    )
    if left > 0:
        lines += _drawing(now, then, step)
        at_step = [change for change in changes if change.from_step == step]
        lines += _about_schedule(now, then, step, at_step)
    return lines


def _drawing(now: Course, then: Course, step: int) -> list[str]:
    """Draw the rates over the run before and after changes, on one scale, with those of the next
    step and of the last.
    """
    longest = max(now.length.steps, then.length.steps)
    columns = min(_WIDTH, longest)
    at = [column * longest // columns for column in range(columns)]
    rates = {}
    for name, course in {"now": now, "then": then}.items():
        rates[name] = [_rate(course, each) for each in at if each < course.length.steps]
    top = max(*rates["now"], *rates["then"])
    word = "factor" if then.rate(step) is None else "lr"
    rows = [(word, f"at {step:,}", "last", "over the run")]
    for name, course in {"now": now, "then": then}.items():
        last = course.length.steps - 1
        next_rate = f"{_rate(course, step):.{_SHOWN}g}" if step <= last else "ended"
        last_rate = f"{_rate(course, last):.{_SHOWN}g}"
        rows.append((name, next_rate, last_rate, drawn_in_line(rates[name], top=top)))
    return text_table(rows, left=(0, 3))


def _about_schedule(
    now: Course, then: Course, step: int, changes: Sequence[SettingChange]
) -> list[str]:
    """Return a line about how the schedule goes on, if it was changed or has another length."""
    steps = then.length.steps
    if any(change.setting == "schedule" and not change.stretches for change in changes):
        return [f"the new schedule begins at step {step:,}, and ends after {steps - step:,} steps"]
    from_start = f"those of a run that had {counted(steps, 'step')} from the start"
    if any(change.stretches for change in changes):
        return [f"from step {step:,} on the rates are {from_start}, so they may jump there"]
    if now.length.steps == steps:
        return []
    if isinstance(then.schedule, Continued) and then.schedule.at >= step:
        return ["the schedule goes on from its present rate in the same shape, without a jump"]
    return [f"exact: the rates so far are {from_start}"]


def _rate(course: Course, step: int) -> float:
    """Return the learning rate of a step, or its factor if no optimizer of ours has one rate."""
    rate = course.rate(step)
    return course.factors(step) if rate is None else rate
