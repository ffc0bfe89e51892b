"""Which steps are made again: windows that begin where a checkpoint is and end where something can be compared."""

import random
from collections.abc import Sequence

from surefoot.checkpoint import state_dict
from surefoot.replay.rerun import unlike
from surefoot.run.components import RunComponents
from surefoot.train.model_weights import file_name
from surefoot.verify.compare import TOLERANCE, drawn_anew, tensor
from surefoot.verify.files import Files
from surefoot.verify.verdict import Problem, Verdict, Window, as_problem

STEPS, WINDOWS = 100, 5  # where nobody says otherwise


def planned(
    starts: Sequence[int], points: Sequence[int], *, steps: int | None, windows: int, seed: int | None = None
) -> list[Window]:
    """At most so many windows of about so many steps; with `steps` None one of all steps after the first checkpoint.

    `starts` are the steps whose checkpoints can be begun with, `points` those at which there is something to compare, a record
    or a checkpoint. A window ends at the last point within `steps` of its start, or else at the next one. No two overlap; the
    first and the last possible are among them and the others lie evenly between, or all are drawn with `seed`.

    >>> planned([0, 80, 90, 100], range(10, 101, 10), steps=20, windows=2)
    [Window(start=0, stop=20), Window(start=80, stop=100)]
    >>> planned([0, 80], [10, 80, 85], steps=None, windows=5)
    [Window(start=0, stop=85)]
    """
    begun = [start for start in sorted(starts) if any(point > start for point in points)]
    if not begun or windows < 1:
        return []
    if steps is None:
        return [Window(begun[0], max(points))]
    possible = _apart([_from(start, points, steps) for start in begun], end=max(points))
    if len(possible) <= windows:
        return possible
    if seed is not None:
        return sorted(random.Random(seed).sample(possible, windows), key=lambda window: window.start)
    if windows == 1:
        return possible[-1:]
    places = [round(place * (len(possible) - 1) / (windows - 1)) for place in range(windows)]
    return [possible[place] for place in places]


def gaps(windows: Sequence[Window], *, end: int) -> list[Window]:
    """The stretches up to `end` that no window covers.

    >>> gaps([Window(0, 20), Window(80, 100)], end=110)
    [Window(start=20, stop=80), Window(start=100, stop=110)]
    """
    found, reached = [], 0
    for window in sorted(windows, key=lambda window: window.start):
        if window.start > reached:
            found.append(Window(reached, window.start))
        reached = max(reached, window.stop)
    return found + ([Window(reached, end)] if end > reached else [])


def cost_steps(gap: Window, starts: Sequence[int]) -> int | None:
    """How many steps must be made to compare all of a gap: those from the checkpoint before it; None where there is none.

    >>> cost_steps(Window(20, 80), [0, 10, 80])
    70
    """
    before = [start for start in starts if start <= gap.start]
    return gap.stop - max(before) if before else None


def _from(start: int, points: Sequence[int], steps: int) -> Window:
    later = [point for point in points if point > start]
    within = [point for point in later if point <= start + steps]
    return Window(start, max(within) if within else min(later))


def _apart(possible: Sequence[Window], *, end: int) -> list[Window]:
    """Windows of which none overlaps another: the last as far to the end as it can be, then from the first on."""
    last = next((window for window in possible if window.stop == end), possible[-1])
    found: list[Window] = []
    for window in possible:
        if window.start >= (found[-1].stop if found else 0) and window.stop <= last.start:
            found.append(window)
    return [*found, last]


def add_beginning(verdict: Verdict, parts: RunComponents, files: Files) -> None:
    """Compare the weights of step 0 with those of the run as it is built now.

    A model that is handed over ready-made, or that was made by another version of torch, comes out of another drawing, which
    proves nothing: then more than half of some tensor differs. One of which a few entries differ was changed.
    """
    if 0 not in files.checkpoints or parts.state.step:
        return
    start = files.checkpoints[0]
    init = start.described["init"]
    if init is not None:
        verdict.not_proved.append(f"the weights of step 0: they came from {init}, and are taken as they are saved")
        return
    then = start.found.saved.machine
    other = unlike(then, parts.machine() | {"threads": then["threads"]})  # no weight is drawn by several
    problems, drawn = list[Problem](), False
    for name, model in parts.state.models.items():
        file = file_name("model", name)
        saved = start.found.tensors(file) if file in start.found.files else {}
        for key, built in state_dict.model_tensors(model)[0].items():
            difference = tensor(f"{file}.safetensors, {key}", saved[key], built) if key in saved else None
            if difference is None:
                continue
            rounded = bool(other) and difference.relative <= TOLERANCE
            if rounded or drawn_anew(saved[key], built):
                drawn = True
            else:
                problems.append(as_problem(difference, step=0, what=start.path.name))
    if drawn:
        why = other or "a model that is not built under the run's seed, or from a file, or by code that has changed"
        what = "they are not those that are built now, and are taken as they are saved"
        verdict.not_proved.append(f"the weights of step 0: {what} ({why})")
    elif problems:
        verdict.problems.extend(problems)
    else:
        verdict.proved.append(f"step 0: the weights are those that seed {start.described['seed']} builds")
