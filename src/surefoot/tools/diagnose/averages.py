"""The check of a moving average of weights: whether it has left the weights with which it began."""

from surefoot.config.averaging import MUCH_OF_THE_START
from surefoot.tools.diagnose.finding import Unknown, Verdict, check, need, well, wrong
from surefoot.tools.diagnose.history import History


@check("average-too-slow")
def average_too_slow(history: History) -> Verdict:
    """Compute the share of the evaluated average that its first weights have at the end of the
    run.
    """
    described = history.described
    averaging = described.averaging
    if averaging is None:
        well(described.identity, "no weights are averaged by ema")
        return Unknown("the settings of the run are not known")
    need(not described.changed_at("ema"), "the decay of the average was changed on the way")
    end = history.step if history.over else described.steps
    if end is None:
        return Unknown("the length of the run is not known")
    need(end > 0, "no step is completed")
    share = averaging.share_of_start(end)
    began = "initial weights" if averaging.start == 0 else f"weights of step {averaging.start:,}"
    of_average = f"the {began} have {share:.1%} of the average after {end:,} steps"
    well(share <= MUCH_OF_THE_START, of_average)
    causes = ["a decay that was chosen for a longer run"]
    remedies = []
    if averaging.is_older:
        causes.append("a run of an older version, whose decay does not rise")
    elif not averaging.ramp:
        causes.append("a decay that does not rise (ema_ramp is False)")
        remedies.append(described.typed("ema_ramp", True))
    if averaging.every > 1:
        causes.append(f"an average that moves only every {averaging.every:,} steps")
    remedies += [
        described.typed("ema", float(f"{averaging.decay_for(end):.3g}")),
        "load_model(weights='trained') for the trained weights of this run",
    ]
    return wrong(
        "warning",
        f"The evaluated weights are an average that is too slow for this run: {share:.0%} of it are"
        f" the {began}.",
        (f"ema is {averaging.decay:g}; {of_average}", _losses(history)),
        causes=causes,
        try_=remedies,
        numbers={"share": share},
    )


def _losses(history: History) -> str:
    """Say the loss of the average in the first split, and that of the trained weights."""
    if not len(history.loss) or not history.splits:
        return ""
    split, series = next(iter(history.splits.items()))
    return (
        f"{split}/loss of the average is {series.value[-1]:.4g}, the last training loss of"
        f" the trained weights {history.loss.value[-1]:.4g}"
    )
