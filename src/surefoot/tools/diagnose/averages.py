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
    end = history.step if history.over else described.steps
    if end is None:
        return Unknown("the length of the run is not known")
    need(end > 0, "no step is completed")
    share = averaging.share_of_start(end)
    began = "initial weights" if averaging.start == 0 else f"weights of step {averaging.start:,}"
    well(
        share <= MUCH_OF_THE_START,
        f"the {began} have {share:.1%} of the average after {end:,} steps",
    )
    is_older = averaging.is_older
    return wrong(
        "warning",
        f"The evaluated weights are an average that is too slow for this run: {share:.0%} of it are"
        f" the {began}.",
        (
            f"ema is {averaging.decay:g}; the {began} have {share:.1%} of the average after"
            f" {end:,} steps",
            _scores(history),
        ),
        causes=(
            "a decay that was chosen for a longer run",
            "a run of an older version, whose decay does not rise" if is_older else "",
            "" if averaging.ramp or is_older else "a decay that does not rise (ema_ramp is False)",
            f"an average that moves only every {averaging.every:,} steps"
            if averaging.every > 1
            else "",
        ),
        try_=(
            "" if averaging.ramp or is_older else described.typed("ema_ramp", True),
            described.typed("ema", float(f"{averaging.decay_for(end):.3g}")),
            "load_model(weights='trained') for the trained weights of this run",
        ),
        numbers={"share": share},
    )


def _scores(history: History) -> str:
    losses = history.loss
    for split, series in history.splits.items():
        if len(losses):
            return (
                f"{split}/loss of the average is {series.value[-1]:.4g}, the last training loss of"
                f" the trained weights {losses.value[-1]:.4g}"
            )
    return ""
