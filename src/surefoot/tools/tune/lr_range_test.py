"""The curve of a learning rate range test, and the suggested learning rate, as pure arithmetic on
losses.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import ConfigError, Setting, out_of_range, together

Curve = NDArray[np.float64]
End = Literal["highest", "diverged", "not finite"]

_WIDTH = 0.3  # decades of learning rate over which the weight of a neighboring loss falls to 1/e
_DIVERGED = 4.0  # times the best running average
_NOISE = 3.5  # standard deviations: a smaller fall of the smoothed loss counts as noise
_LEAST = 1e-3  # of the first loss: the minimum fall, even without noise
_ROOM = 4.0  # minimum ratio of the diverged learning rate to the suggestion
_SPIKE = 6.0  # standard deviations of one loss from the median of the five around it
_ROWS = 12  # maximum rows of the printed table
_FEW = 5  # minimum number of losses for a curve


@dataclass(frozen=True)
class LRRangeTest:
    """The losses and the suggested learning rate of a range test. `print` shows a table.

    `rates` and `losses`, both (n,), end before the loss diverged; `losses[i]` follows the update
    with `rates[i]`. `end` is "highest" if the test reached the highest learning rate. It is
    "diverged" if the running average of the losses (`averaged`) exceeded 4 times its best. It is
    "not finite" if a loss or gradient was not finite. `diverged_at` is the learning rate of the
    divergence or of the first value that is not finite. `suggested` has two digits, or is None if
    the curve allows no suggestion.

    >>> rates = np.geomspace(1e-5, 1.0, 50)
    >>> test = suggest(rates, 2 - 1.5 / (1 + (1e-2 / rates) ** 2), end="highest")
    >>> (
    ...     isinstance(test, LRRangeTest),
    ...     len(test.losses),
    ...     test.suggested == test.to_dict()["suggested"],
    ... )
    (True, 50, True)
    """

    rates: Curve
    losses: Curve
    smoothed: Curve
    end: End
    diverged_at: float | None
    reason: str
    steepest: float | None = None
    minimum: float | None = None
    suggested: float | None = None

    @property
    def ended(self) -> str:
        """A sentence with the reason why the test ended."""
        if self.end == "highest":
            return f"the test reached the highest learning rate, {as_text(float(self.rates[-1]))}"
        if self.diverged_at is None:
            return "the test stopped before any learning rate was tried: a loss or gradient was not finite"
        wild = "the running average of the losses exceeded 4 times its minimum"
        why = wild if self.end == "diverged" else "a loss or gradient was not finite"
        return f"the test stopped at {as_text(self.diverged_at)}: {why}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    def __str__(self) -> str:
        rows = [
            f"  {as_text(float(self.rates[index])):<8} {self.losses[index]:<10.4g} {self.smoothed[index]:.4g}"
            for index in range(0, len(self.rates), max(1, -(-len(self.rates) // _ROWS)))
        ]
        suggested = (
            "no suggestion"
            if self.suggested is None
            else f"suggested  learning rate {as_text(self.suggested)}"
        )
        table = ["  lr       loss       smoothed", *rows] if rows else []
        return "\n".join(
            [
                *table,
                suggested,
                f"  {self.reason}",
                f"  {self.ended}; {len(rows)} of {len(self.rates)} learning rates are shown",
            ]
        )


def suggest(
    rates: Curve, losses: Curve, *, end: End, diverged_at: float | None = None
) -> LRRangeTest:
    """Suggest the learning rate at which the smoothed loss falls steepest over the logarithm of the
    learning rate.

    This is fastai's suggestion, after Smith 2017, section 3.3 (https://arxiv.org/abs/1506.01186).
    If the steepest fall is within a factor of 4 of the diverged learning rate, the suggestion is
    the learning rate of the lowest loss, divided by 10.

    >>> rates = np.geomspace(1e-5, 1, 101)
    >>> test = suggest(rates, 2 - 1.5 / (1 + (1e-2 / rates) ** 2), end="highest")
    >>> round(test.steepest, 3), test.suggested
    (0.01, 0.01)
    """
    if len(losses) < _FEW:
        reason = _too_few(len(losses), diverged_at)
        return LRRangeTest(rates, losses, losses, end, diverged_at, reason)
    curve = smoothed(rates, without_spikes(losses))
    lowest = int(curve.argmin())
    if not _falls(rates, losses, curve, lowest):
        return LRRangeTest(rates, losses, curve, end, diverged_at, _without_fall(rates, end))
    slope = np.gradient(curve, np.log10(rates))[: lowest + 1]
    steepest = float(rates[slope.argmin()])
    minimum = float(rates[lowest])
    reason = f"the smoothed loss falls steepest at {as_text(steepest)}"
    its_minimum = f"its minimum is {curve[lowest]:.4g}, at {as_text(minimum)}"
    if diverged_at is not None and steepest * _ROOM > diverged_at:
        suggested = minimum / 10
        reason += f"; {its_minimum}"
        reason += (
            f"\n  the loss diverged at {as_text(diverged_at)}, too close to that:"
            f" the suggestion is {as_text(minimum)} / 10 = {as_text(suggested)}"
        )
    else:
        suggested = steepest
        reason += f", which is suggested; {its_minimum}"
        if end == "highest" and minimum * 10**_WIDTH >= rates[-1]:
            reason += (
                f"\n  the loss was still falling at {as_text(float(rates[-1]))}, the highest learning rate tried: a higher one may be better"
                f"\n  try: --max-lr {as_text(float(rates[-1]) * 100)}"
            )
        else:
            reason += (
                f"\n  the other common choice is {as_text(minimum)} / 10 = {as_text(minimum / 10)}"
            )
    return LRRangeTest(
        rates, losses, curve, end, diverged_at, reason, steepest, minimum, float(f"{suggested:.1e}")
    )


def check_range(min_lr: float, max_lr: float, steps: int) -> None:
    """Raise one `ConfigError` that lists all problems of a range of learning rates.

    >>> check_range(1e-6, 10.0, 100)
    """
    problems = [
        out_of_range(name, rate, "a number above 0")
        for name, rate in (("min_lr", min_lr), ("max_lr", max_lr))
        if not 0 < rate < math.inf
    ]
    if not problems and min_lr >= max_lr:
        lowest = 1e-6
        highest = 10.0
        if min_lr > max_lr:  # they were swapped
            lowest = max_lr
            highest = min_lr
        empty = ConfigError(
            "lr-range-empty",
            problem=f"min_lr = {as_text(min_lr)} is not below max_lr = {as_text(max_lr)}",
            remedy=(Setting("min_lr", lowest), Setting("max_lr", highest)),
            min_lr=min_lr,
            max_lr=max_lr,
        )
        problems.append(empty)
    if steps < 10:
        problems.append(out_of_range("steps", steps, "10 learning rates or more, such as 100"))
    if problems:
        raise together(problems)


def without_spikes(losses: Curve) -> Curve:
    """Replace isolated outliers by the median of five losses, so that the loss after one bad batch
    is not the steepest fall.

    >>> without_spikes(np.array([2.0, 2.1, 9.0, 1.9, 2.0, 1.8, 1.9])).tolist()
    [2.0, 2.1, 2.0, 1.9, 2.0, 1.8, 1.9]
    """
    medians = [np.median(losses[max(0, index - 2) : index + 3]) for index in range(len(losses))]
    around = np.array(medians)
    is_spike = np.abs(losses - around) > _SPIKE * _noise_of_one(losses)
    return np.where(is_spike, around, losses)


def smoothed(rates: Curve, losses: Curve) -> Curve:
    """Return the weighted mean of the losses around each learning rate, with normalized weights
    exp(-decades / 0.3).

    This is a bias-corrected exponential moving average over both sides; an average of past losses
    alone would shift the curve to higher learning rates. Losses are capped at `far`, so that
    divergence at the end does not hide the rest.

    >>> smoothed(np.geomspace(1e-3, 1, 4), np.full(4, 2.5)).round(12).tolist()
    [2.5, 2.5, 2.5, 2.5]
    """
    return np.asarray(_weights(rates) @ np.minimum(losses, far(rates, losses)))


def far(rates: Curve, losses: Curve) -> float:
    """Return the cap for losses before smoothing: the first loss plus its distance to the lowest
    loss.
    """
    first = float((_weights(rates)[0] * losses).sum())
    return float(max(first, losses[0]) + (first - losses.min()))


def averaged(losses: Curve) -> Curve:
    """Return the bias-corrected running average of past losses, with decay 0.8. This average
    decides when the test ends.

    >>> averaged(np.array([2.0, 1.0])).round(4).tolist()
    [2.0, 1.4444]
    """
    total = 0.0
    weight = 0.0
    means = []
    for loss in losses.tolist():
        total = 0.8 * total + 0.2 * loss
        weight = 0.8 * weight + 0.2
        means.append(total / weight)
    return np.array(means)


def diverged(losses: Curve) -> int | None:
    """Return the index of the first loss at which the running average (`averaged`) exceeds 4 times
    its best, or None.

    >>> diverged(np.array([2.0, 1.0, 1.0, 2.0, 60.0, 90.0])), diverged(np.array([2.0, 1.0, 3.0]))
    (4, None)
    """
    means = averaged(losses)
    best = np.minimum.accumulate(means)
    far = np.flatnonzero(means > best + (_DIVERGED - 1) * np.abs(best))
    return int(far[0]) if len(far) else None


def as_text(rate: float) -> str:
    """Format a learning rate with two digits, as a user types it.

    >>> as_text(0.00213), as_text(0.05), as_text(2e-3), as_text(100.0)
    ('2.1e-3', '0.05', '2e-3', '100')
    """
    if 0.01 <= rate < 1000:
        return f"{float(f'{rate:.1e}'):g}"
    digits, _, power = f"{rate:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _too_few(losses: int, diverged_at: float | None) -> str:
    if diverged_at is None:
        return (
            "the loss or a gradient is not finite at the start, before any learning rate was tried: the cause is not the learning rate\n"
            "  check the first batch and the model's initial weights"
        )
    return (
        f"the loss diverged at once: at {as_text(diverged_at)}, after {losses} learning rates, too few for a curve\n"
        f"  try: --min-lr {as_text(diverged_at / 10_000)}"
    )


def _without_fall(rates: Curve, end: End) -> str:
    lowest = as_text(float(rates[0]))
    highest = as_text(float(rates[-1]))
    if end == "highest":
        return (
            f"the loss fell by no more than its noise at any learning rate from {lowest} to {highest}: it stays flat\n"
            f"  try: --max-lr {as_text(float(rates[-1]) * 100)}, or more --steps; does the loss depend on a trained parameter?"
        )
    return (
        f"the loss rose after {highest} and did not fall before: no fall from {lowest} on exceeds its noise\n"
        f"  try: more --steps, so that neighboring learning rates are closer, a larger --batch-size, or a lower --min-lr"
    )


def _weights(rates: Curve) -> Curve:
    decades = np.log10(rates)
    weights = np.exp(-np.abs(decades[:, None] - decades[None, :]) / _WIDTH)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _falls(rates: Curve, losses: Curve, curve: Curve, lowest: int) -> bool:
    weights = _weights(rates)
    noise = _noise_of_one(losses)

    def exceeds_noise(level: float, level_weights: Curve) -> bool:
        apart = level_weights - weights[lowest]  # a fall's noise depends on its averaging weights
        noise_of_fall = _NOISE * noise * math.sqrt(float((apart**2).sum()))
        return bool(level - curve[lowest] > max(noise_of_fall, _LEAST * abs(curve[0])))

    from_start = exceeds_noise(float(curve[0]), weights[0])
    before = slice(0, lowest + 1)
    from_most = exceeds_noise(float(np.median(curve[before])), weights[before].mean(axis=0))
    return from_start or from_most


def _noise_of_one(losses: Curve) -> float:
    # a robust standard deviation
    return float(np.median(np.abs(np.diff(losses)))) / (0.6745 * math.sqrt(2))
