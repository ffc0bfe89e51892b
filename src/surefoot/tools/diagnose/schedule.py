"""Checks of run length and schedule: an early end, a long warm-up, a high final learning rate, a
still falling loss.
"""

from surefoot.schedules.curves import SHAPES
from surefoot.tools.diagnose.finding import Unknown, Verdict, check, need, well, wrong
from surefoot.tools.diagnose.history import History

LONG_WARMUP = 0.25
"""Fraction of a run above which a warm-up is too long. Usual warm-ups are 1% to 10% (Vaswani et al.
2017: 4%; Brown et al. 2020: 0.1%). One-cycle schedules use 30%."""
HIGH = 0.5
"""Ratio of the last to the highest learning rate that is too high. All schedules that fall end
below half. A fall to near 0 lowers the final loss (Hägele et al. 2024, section 3,
https://arxiv.org/abs/2405.18392)."""
LEAST_STEPS = 50
"""Minimum number of steps. In a shorter run, the last record says little about the end of the
schedule.
"""
STILL = 0.02
"""Minimum relative fall of a split's loss over the last fifth of a run. A loss proportional to
steps ** -0.1 falls as much (Kaplan et al. 2020, section 3: exponents of 0.05 to 0.1). Such a loss
falls by 7% if the run is twice as long."""
EVALUATIONS = 4
"""Minimum number of evaluations, of which two or more lie at the end."""
# schedules whose run can be extended with bitwise-equal results
EXACT = ("constant", "inverse_sqrt")


@check("ended-early")
def ended_early(history: History) -> Verdict:
    """Check for a run that ended before the last step of its schedule."""
    described = history.described
    steps = described.steps
    step = history.last_step
    saved_step = described.saved_step
    need(history.over, "the run is still training")
    if steps is None:
        return Unknown("the length of the run is not known")
    need(
        step < steps or history.step >= steps,
        f"the checkpoint at step {saved_step:,} completes the run, but the records end at step"
        f" {history.step:,}: some are missing (surefoot verify {described.in_shell})",
    )
    well(
        history.complete,
        f"all {steps:,} steps are completed" if step >= steps else "the run ended by itself",
    )
    outcome = history.ended_by or ""  # "" if it was killed
    well(outcome.startswith("diverged"), "the run diverged, which is a separate finding")

    evidence = [f"{step:,} of {steps:,} steps; {outcome or 'killed, or the machine failed'}"]
    if saved_step != history.step:
        evidence.append(
            f"the records end at step {history.step:,}; the newest checkpoint has step {saved_step:,}"
        )
    rate, rate_step, highest = _rates(history)
    if highest > 0 and history.has_trained:
        evidence.append(
            f"the learning rate at step {rate_step:,} was {rate:g}, {rate / highest:.0%} of its maximum:"
            " the schedule was not over"
        )

    stop_after = described.present("stop_after")
    if stop_after:
        causes = [f"stop_after is {stop_after}"]
    else:
        causes = [outcome or "a killed process, or a failure of the machine"]
        if not outcome or outcome.startswith("stopped by SIGTERM"):
            causes.append("a time limit shorter than the run")
    was_requested = outcome.startswith("stopped") if outcome else stop_after is not None

    if saved_step:
        effect = f"continues bit for bit from step {saved_step:,}"
    else:
        effect = "no training is saved: starts at step 0"
    remedies = [f"{described.go_on()}  # {effect}"]
    if outcome.startswith("failed"):
        remedies = [f"correct the error, then {remedies[0]}"]
    if history.has_trained:
        shorter = described.typed("length", f"{step} steps")
        remedies.append(f"for a run of this length, start a new one: {shorter}")
    return wrong(
        "note" if was_requested else "warning",
        f"The run ended early, at step {step:,} of {steps:,}.",
        evidence,
        causes=causes,
        try_=remedies,
        step=step,
        numbers={"made": step, "steps": steps},
    )


@check("long-warm-up")
def long_warmup(history: History) -> Verdict:
    """Measure the warm-up as a fraction of the schedule."""
    described = history.described
    warmup, steps = described.last_warmup
    if steps is None or described.shape is None:
        return Unknown("the schedule is not known")
    shape = SHAPES.get(described.shape)
    rises_on_purpose = shape is not None and shape.own_rise
    well(
        warmup <= LONG_WARMUP * steps or rises_on_purpose,
        f"the warm-up is {warmup:,} of {steps:,} steps",
    )
    return wrong(
        "warning",
        f"The warm-up takes {warmup / steps:.0%} of the run.",
        (f"{warmup:,} of {steps:,} steps; usual: 1% to 10%",),
        causes=("a warm-up in steps that was chosen for a longer run",),
        try_=(described.typed("schedule.warmup", "5%"),),
        numbers={"share": warmup / steps},
    )


def _end(history: History) -> None:
    steps = history.described.steps
    is_longer = steps is not None and history.step < steps and not history.was_stopped_early
    need(history.over and history.complete and not is_longer, "the run is not finished")


@check("still-improving", needs=_end)
def still_improving(history: History) -> Verdict:
    """Check for a finished run whose last evaluation is the best, and measure its improvement over
    the last fifth.
    """
    described = history.described
    well(history.was_stopped_early, "early stopping ended the run, by the score that it monitors")
    if described.monitored is not None:
        direction, score = described.monitored
        lacking = f"{score} was not evaluated {EVALUATIONS} times"
    else:
        direction = "min"
        score = _loss_evaluated_often(history)
        lacking = (
            f"no split was evaluated {EVALUATIONS} times, and the training loss falls with the"
            " learning rate in any case"
        )
    series = history.score(score)
    need(len(series) >= EVALUATIONS, lacking)
    since = history.not_finite_since(score)
    need(since is None, f"{score} is not finite since step {since}")

    earlier = int((series.step <= 0.8 * history.step).sum())
    row = max(earlier - 1, 0)  # the last evaluation before the last fifth
    need(
        series.step[row] >= described.steps_changed_at,
        "settings were changed in the last 20% of the run",
    )
    before = float(series.value[row])
    end = float(series.value[-1])
    if direction == "min":
        fell_or_rose = "fell"
        change = before - end
        is_beaten = series.value.min() < end
    else:
        fell_or_rose = "rose"
        change = end - before
        is_beaten = series.value.max() > end
    gained = change / abs(before) if before else 0.0
    well(
        is_beaten or gained < STILL,
        f"{score} improved by {max(gained, 0):.1%} over the last 20% of the run",
    )

    longer = f"{2 * (described.steps or history.step)} steps"
    if described.shape in EXACT:
        effect = f"continues exactly, with the same schedule ({described.shape})"
        remedies = [f"{described.go_on(longer)}  # {effect}"]
    elif described.in_force:
        shape = described.shape if described.shape in SHAPES else "cosine"
        longer_run = described.change({"length": longer, "schedule.name": shape})
        effect = "on from here; the rate begins anew, and falls over the steps left"
        remedies = [
            f"{longer_run}  # {effect}",
            f"or a new run: {described.typed('length', longer)}",
        ]
    elif described.shape == "wsd":
        keep = "keep_every" if described.program == "script" else "--keep-every"
        effect = f"from a checkpoint before the cool-down ({keep} keeps them)"
        remedies = [f"{described.go_on(longer)}  # {effect}"]
    else:
        remedies = [
            f"a new run: {described.typed('length', longer)}",
            f"{described.typed('schedule.name', 'wsd')}: such a run can be extended exactly, from a"
            " checkpoint before its cool-down",
        ]
    return wrong(
        "note",
        f"The run was still improving when it ended: {score} {fell_or_rose} by {gained:.1%} over the last 20%.",
        (
            f"{before:.4g} at step {series.step[row]:,}, {end:.4g} at step {series.step[-1]:,}, the best value",
        ),
        causes=("a run that is too short for this data set and model",),
        try_=remedies,
        numbers={"gained": gained},
    )


def _loss_evaluated_often(history: History) -> str:
    """Return the loss of the first split with enough evaluations, or ""."""
    for split, series in history.splits.items():
        if len(series) >= EVALUATIONS:
            return f"{split}/loss"
    return ""


@check("high-rate-at-end", needs=_end)
def high_rate_at_end(history: History) -> Verdict:
    """Compare the last learning rate of a finished run with its highest."""
    described = history.described
    rate, rate_step, highest = _rates(history)
    need(
        highest > 0 and history.step >= LEAST_STEPS,
        f"no learning rates are recorded, or fewer than {LEAST_STEPS} steps are completed",
    )
    well(
        rate < HIGH * highest or described.optimizer.get("name") == "schedule_free",
        f"the learning rate ended at {rate / highest:.1%} of its maximum",
    )
    if history.was_stopped_early:
        effect = "a schedule that falls until the step at which early stopping ended this run"
        remedy = f"{described.typed('length', f'{history.step} steps')}  # {effect}"
    elif described.shape in EXACT:
        remedy = f"{described.go_on('...')}  # if the run is to continue"
    else:
        remedy = "a run of the length that the schedule was made for"
    return wrong(
        "note",
        f"The learning rate was still at {rate / highest:.0%} of its maximum when the run ended.",
        (
            f"{rate:g} at step {rate_step:,}, maximum {highest:g}; schedule {described.shape or 'not known'}",
        ),
        causes=("a schedule that does not fall, or falls over more steps than the run has",),
        try_=(remedy, described.typed("schedule.name", "wsd")),
        numbers={"share": rate / highest},
    )


def _rates(history: History) -> tuple[float, int, float]:
    """Return the last learning rate, its step, and the highest learning rate."""
    rates = history.column("lr").finite
    if not len(rates):
        return 0.0, 0, 0.0
    return float(rates.value[-1]), int(rates.step[-1]), float(rates.value.max())
