"""The setting `order`: the order in which a run reads its training samples. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError

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
                f"Weighted(weights={type(self.weights).__name__}): weights must be one number for each sample\n"
                "  write sf.data.Weighted([1.0, 0.5, ...]), or pass a tensor or an array of shape (samples,)"
            ) from problem
        wrong = [index for index, weight in enumerate(weights) if not 0 <= weight < math.inf]
        if wrong or not any(weights):
            what = (
                f"weights[{wrong[0]}] = {weights[wrong[0]]}"
                if wrong
                else f"the sum of {len(weights)} weights is 0"
            )
            raise ConfigError(
                f"Weighted: {what}\n  weights must be finite and at least 0, and one of them above 0\n"
                "  leave a sample out by the weight 0"
            )
        possible = math.inf if self.replacement else sum(weight > 0 for weight in weights)
        count = self.num_samples
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, int) or count < 1
        ):
            raise ConfigError(
                f"Weighted(num_samples={count!r}): an epoch needs a whole number of draws, 1 or more"
            )
        if (len(weights) if count is None else count) > possible:
            raise ConfigError(
                f"Weighted(replacement=False): an epoch of {len(weights) if count is None else count} draws needs as many"
                f" different samples, but {possible} weights are above 0\n  write num_samples={possible}, or replacement=True"
            )
        object.__setattr__(self, "weights", weights)


if TYPE_CHECKING:
    Order = Name | Weighted
else:
    Order = Name  # only code can pass an object, so a flag or a file takes a name


def check_order(value: Any, *, setting: str) -> None:
    """Raise `ConfigError` for anything but a name of an order or `Weighted`."""
    if not isinstance(value, Weighted) and not (isinstance(value, str) and value in get_args(Name)):
        text = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
        raise ConfigError(
            f"{setting} = {text} is not an order of samples\n"
            f"  choose one of {', '.join(get_args(Name))}; in code also {setting}=sf.data.Weighted(weights)"
        )
