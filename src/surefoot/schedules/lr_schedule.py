"""Learning-rate schedules: pure functions that map a step to a factor on each group's base learning
rate.

A schedule has no state, so a resumed run, a replayed step and a plot all use the same learning
rates. Steps are optimizer updates, counted from 0. Durations are "100 steps", "5%", "2 epochs" or a
number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.config.durations import Length
from surefoot.config.keywords import known_keywords
from surefoot.schedules import curves
from surefoot.schedules.checks import in_a_run, refuse_foreign_or_out_of_range
from surefoot.schedules.curves import SHAPES, Factors, Fall, curve


@dataclass(frozen=True)
class Schedule:
    """A warm-up followed by a shape. Settings that are None take the shape's default; settings of
    other shapes raise `ConfigError`.

    During warm-up the factor is (step + 1) / (warmup + 1): no step has a learning rate of 0, and
    the factor is 1 at step `warmup`. `one_cycle` rises from `start_lr_ratio`. A minimum above 0 is
    reached on the last step. A minimum of 0 is reached one step later, so that no step is wasted.
    Beyond the end the factor stays at the minimum; a shape without a minimum continues its formula.
    """

    shape: str
    warmup: str | int | None = None
    """Duration of the rise. Default 0; "5%" for inverse_sqrt, which also uses it as its time scale;
    "30%" for one_cycle.
    """
    min_lr_ratio: float | None = None
    """The lowest factor. Default 0; 0.01 for exponential. constant, inverse_sqrt and multistep
    ignore 0 and refuse other values.
    """
    power: float | None = None
    """polynomial: the exponent of the remaining fraction of the fall. Default 1, a straight line.
    """
    cooldown: str | int | None = None
    """wsd: the duration of the fall at the end. Default "20%"."""
    cooldown_shape: str | None = None
    """wsd: the shape of the fall, "1-sqrt" or "linear". Default "1-sqrt"."""
    milestones: tuple[str | int, ...] | None = None
    """multistep: the durations from the run's start until the learning rate is multiplied by
    `gamma`. Default ("50%", "75%").
    """
    gamma: float | None = None
    """multistep: the factor applied at each milestone. Default 0.1."""
    start_lr_ratio: float | None = None
    """one_cycle: the factor at step 0. Default 1/25."""
    rise_shape: str | None = None
    """one_cycle: the shape of the rise, "cosine" or "linear". Default "cosine"."""
    momentum_range: tuple[float, float] | None = None
    """one_cycle: the lowest and the highest momentum. By default the momentum does not change."""
    cycle: str | int | None = None
    """cosine_restarts: the duration of the first cycle. Default "25%"."""
    cycle_growth: float | None = None
    """cosine_restarts: the factor by which each cycle is longer than the previous cycle. Default 1.
    """

    def __post_init__(self) -> None:
        refuse_foreign_or_out_of_range(self.shape, self._given)

    @property
    def _given(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name != "shape" and value is not None
        }

    def resolved(self, length: Length) -> "Schedule":
        """Return a copy with durations in steps and defaults filled in; raise `ConfigError` if the
        schedule does not fit into the run.

        >>> cosine("5%").resolved(Length(steps=200, samples_per_epoch=100, batch_size=10)).warmup
        10
        """
        return Schedule(self.shape, **self._in(length).settings)

    def factors(self, length: Length) -> Factors:
        """Return the factor on the base learning rate as a function of the step. A call takes less
        than 1 us.
        """
        return curve(SHAPES[self.shape], self._in(length))

    def group_factors(self, length: Length) -> None:  # noqa: ARG002
        """Return None: all parameter groups have the same factors."""
        return

    def momentum(self, length: Length) -> Factors | None:
        """Return the momentum as a function of the step; None if the optimizer keeps its own
        momentum.
        """
        return curves.momentum(self._in(length))

    def shared_steps(self, length: Length) -> int:
        """Return the number of leading steps whose factors are the same in every longer run.

        >>> wsd(cooldown=20).shared_steps(Length(steps=100, samples_per_epoch=100, batch_size=10))
        81
        """
        return SHAPES[self.shape].shared(self._in(length))

    def _in(self, length: Length) -> Fall:
        return in_a_run(self.shape, self._given, length)

    def to_dict(self) -> dict[str, Any]:
        """Return the shape and the explicit settings as JSON values."""
        values: dict[str, Any] = {"shape": self.shape}
        for name, value in self._given.items():
            values[name] = list(value) if isinstance(value, tuple) else value
        if values.get("rise_shape") == "cosine":  # older runs have no such setting
            del values["rise_shape"]
        return values


@known_keywords
def constant(warmup: str | int = 0) -> Schedule:
    """Rise for `warmup`, then stay at the base learning rate. Extending the run later changes no
    earlier step.

    >>> factor = constant(3).factors(Length(steps=8, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in (0, 1, 2, 3, 7)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return Schedule("constant", warmup=warmup)


@known_keywords
def linear(warmup: str | int = 0, min_lr_ratio: float = 0.0) -> Schedule:
    """Rise for `warmup`, then fall along a straight line to `min_lr_ratio` times the base learning
    rate.

    >>> factor = linear().factors(Length(steps=4, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return Schedule("linear", warmup=warmup, min_lr_ratio=min_lr_ratio)


@known_keywords
def cosine(warmup: str | int = 0, min_lr_ratio: float = 0.0) -> Schedule:
    """Rise for `warmup`, then fall along half a cosine to `min_lr_ratio` times the base learning
    rate.

    Loshchilov and Hutter 2017, equation 5, without restarts: https://arxiv.org/abs/1608.03983

    >>> factor = cosine(1, min_lr_ratio=0.5).factors(
    ...     Length(steps=4, samples_per_epoch=8, batch_size=1)
    ... )
    >>> [round(factor(step), 3) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.5, 0.5]
    """
    return Schedule("cosine", warmup=warmup, min_lr_ratio=min_lr_ratio)


@known_keywords
def polynomial(warmup: str | int = 0, *, power: float = 1.0, min_lr_ratio: float = 0.0) -> Schedule:
    """Rise for `warmup`, then fall to `min_lr_ratio` in proportion to the remaining fraction raised
    to `power`.

    Chen et al. 2017, section 4.1 ("poly", power 0.9): https://arxiv.org/abs/1606.00915

    >>> factor = polynomial(power=2.0).factors(Length(steps=4, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    return Schedule("polynomial", warmup=warmup, power=power, min_lr_ratio=min_lr_ratio)


@known_keywords
def inverse_sqrt(warmup: str | int = "5%") -> Schedule:
    """Rise for `warmup`, then fall as the inverse square root of the step. Extending the run later
    changes no earlier step.

    After warm-up the factor is sqrt(warmup / step); without warm-up it is 1 / sqrt(step + 1).
    Vaswani et al. 2017, section 5.3 (https://arxiv.org/abs/1706.03762), with the base learning rate
    from `sf.optim.noam_lr`.

    >>> factor = inverse_sqrt(4).factors(Length(steps=20, samples_per_epoch=8, batch_size=1))
    >>> [round(factor(step), 2) for step in (0, 3, 4, 16)]
    [0.2, 0.8, 1.0, 0.5]
    """
    return Schedule("inverse_sqrt", warmup=warmup)


@known_keywords
def multistep(
    warmup: str | int = 0,
    *,
    milestones: str | Sequence[str | int] = ("50%", "75%"),
    gamma: float = 0.1,
) -> Schedule:
    """Rise for `warmup`, then multiply the learning rate by `gamma` at each of the `milestones`,
    counted from the run's start.

    `milestones="every 10 epochs"` behaves like torch's StepLR, and a list behaves like MultiStepLR.
    The defaults follow He et al. 2016, section 4.2 (CIFAR-10): https://arxiv.org/abs/1512.03385

    >>> factor = multistep(gamma=0.5).factors(Length(steps=8, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in (0, 3, 4, 5, 6, 7)]
    [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    several = (milestones,) if isinstance(milestones, str) else tuple(milestones)
    return Schedule("multistep", warmup=warmup, milestones=several, gamma=gamma)


@known_keywords
def exponential(warmup: str | int = 0, *, min_lr_ratio: float = 0.01) -> Schedule:
    """Rise for `warmup`, then multiply the learning rate by a constant at each step, to reach
    `min_lr_ratio` on the last step.

    >>> factor = exponential(min_lr_ratio=0.125).factors(
    ...     Length(steps=4, samples_per_epoch=8, batch_size=1)
    ... )
    >>> [round(factor(step), 3) for step in range(5)]
    [1.0, 0.5, 0.25, 0.125, 0.125]
    """
    return Schedule("exponential", warmup=warmup, min_lr_ratio=min_lr_ratio)


@known_keywords
def one_cycle(
    warmup: str | int = "30%",
    *,
    start_lr_ratio: float = 1 / 25,
    min_lr_ratio: float = 0.0,
    momentum_range: tuple[float, float] | None = None,
    rise_shape: Literal["cosine", "linear"] = "cosine",
) -> Schedule:
    """Rise from `start_lr_ratio` for `warmup`, then fall to `min_lr_ratio`, both along half a
    cosine. With `rise_shape="linear"` the rise is a straight line.

    With `momentum_range=(0.85, 0.95)` the momentum (Adam's first beta) falls while the learning
    rate rises, then rises again, like the default of torch's OneCycleLR. By default, the optimizer
    keeps its own momentum. Smith and Topin 2018 (https://arxiv.org/abs/1708.07120), in the two
    phases of torch's OneCycleLR.

    >>> factor = one_cycle(2, start_lr_ratio=0.5).factors(
    ...     Length(steps=6, samples_per_epoch=8, batch_size=1)
    ... )
    >>> [round(factor(step), 2) for step in range(7)]
    [0.5, 0.75, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    return Schedule(
        "one_cycle",
        warmup=warmup,
        start_lr_ratio=start_lr_ratio,
        min_lr_ratio=min_lr_ratio,
        momentum_range=momentum_range,
        rise_shape=rise_shape,
    )


@known_keywords
def wsd(
    warmup: str | int = 0,
    *,
    cooldown: str | int = "20%",
    cooldown_shape: Literal["1-sqrt", "linear"] = "1-sqrt",
    min_lr_ratio: float = 0.0,
) -> Schedule:
    """Rise for `warmup`, stay constant, then fall to `min_lr_ratio` over `cooldown`. A longer run
    has the same steps before the fall.

    The cool-down is linear, or 1 - sqrt(t) with t from 0 (the last step at the full learning rate)
    to 1: Hägele et al. 2024, section 3, https://arxiv.org/abs/2405.18392. The name is from Hu et
    al. 2024, https://arxiv.org/abs/2404.06395.

    >>> factor = wsd(cooldown=4).factors(Length(steps=8, samples_per_epoch=8, batch_size=1))
    >>> [round(factor(step), 2) for step in range(3, 9)]
    [1.0, 1.0, 0.5, 0.29, 0.13, 0.0]
    """
    return Schedule(
        "wsd",
        warmup=warmup,
        cooldown=cooldown,
        cooldown_shape=cooldown_shape,
        min_lr_ratio=min_lr_ratio,
    )


@known_keywords
def cosine_restarts(
    warmup: str | int = 0,
    *,
    cycle: str | int = "25%",
    cycle_growth: float = 1.0,
    min_lr_ratio: float = 0.0,
) -> Schedule:
    """Rise for `warmup`, then fall along half a cosine in each `cycle`. Each cycle starts at the
    full learning rate.

    A minimum above 0 is reached on the last step of each cycle. The last cycle ends with the run. A
    remainder of at least half a cycle becomes a cycle; a shorter remainder lengthens the previous
    cycle. Loshchilov and Hutter 2017, section 3: https://arxiv.org/abs/1608.03983

    >>> factor = cosine_restarts(cycle=2, cycle_growth=2.0).factors(
    ...     Length(steps=6, samples_per_epoch=8, batch_size=1)
    ... )
    >>> [round(factor(step), 2) for step in range(7)]
    [1.0, 0.5, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    return Schedule(
        "cosine_restarts",
        warmup=warmup,
        cycle=cycle,
        cycle_growth=cycle_growth,
        min_lr_ratio=min_lr_ratio,
    )
