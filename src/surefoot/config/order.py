"""The setting `order`: the order in which a run reads its training samples. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from surefoot.config.keywords import known_keywords
from surefoot.config.setting import number
from surefoot.errors import ConfigError, Setting, out_of_range

Name = Literal["shuffled", "sequential", "lanes"]


@known_keywords
@dataclass(frozen=True)
class Weighted:
    """Order that draws samples at random, each with a probability proportional to its weight.

    `weights` has one number, 0 or more, for each sample. An epoch has `num_samples` draws (None: as
    many as samples). If `replacement` is false, an epoch draws no sample twice. Every draw has its
    own augmentation. `torch.utils.data.WeightedRandomSampler` has the same arguments.

    >>> Weighted([1, 1, 2], num_samples=100)
    Weighted(num_samples=100, replacement=True)
    """

    weights: Sequence[float] = field(repr=False)
    num_samples: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        try:
            weights = tuple(float(weight) for weight in self.weights)
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                "weights-not-numbers",
                problem=f"weights is a {type(self.weights).__name__}, not one number for each"
                " sample",
                remedy="write sf.data.Weighted([1.0, 0.5, ...]), or pass a tensor or an array of"
                " shape (samples,)",
                setting="weights",
            ) from problem
        for index, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise out_of_range(f"weights[{index}]", weight, "a finite number, 0 or more")
        different = sum(weight > 0 for weight in weights)
        if different == 0:
            raise out_of_range("sum(weights)", 0.0, "above 0")
        draws = len(weights)
        if self.num_samples is not None:
            number(min_value=1)(self.num_samples, setting="num_samples")
            draws = self.num_samples
        if not self.replacement and draws > different:
            raise ConfigError(
                "draws-exceed-samples",
                problem=f"an epoch of {draws} draws without replacement needs as many different"
                f" samples, and {different} weights are above 0",
                remedy=[Setting("num_samples", different), Setting("replacement", True)],
                setting="num_samples",
                value=self.num_samples,
                samples=different,
            )
        object.__setattr__(self, "weights", weights)


if TYPE_CHECKING:
    Order = Name | Weighted
else:
    Order = Name  # only code can pass an object, so a flag or a file takes a name


def check_order(value: Any, *, setting: str) -> None:
    """Raise `ConfigError` for anything but a name of an order or `Weighted`."""
    if isinstance(value, Weighted):
        return
    names = get_args(Name)
    if isinstance(value, str) and value in names:
        return
    shown = value if isinstance(value, str | int | float) else type(value)
    meaning = f"one of {', '.join(names)}, or in code sf.data.Weighted(weights)"
    raise out_of_range(setting, shown, meaning)


def draws_as_many(weighted: Weighted) -> bool:
    """Return True if an epoch has as many draws as the data set has samples.

    >>> draws_as_many(Weighted([1, 1, 2])), draws_as_many(Weighted([1, 1, 2], num_samples=100))
    (True, False)
    """
    return weighted.num_samples in (None, len(weighted.weights))
