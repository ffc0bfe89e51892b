"""What the loop shows of a step to whoever measures it: `Watch`, and `UNWATCHED`, which sees nothing and which most steps have."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from surefoot.data.loader import MicroBatch

Loss = Callable[[Any, Any], Any]

Named = dict[str, Tensor]  # numbers on the device, by parameter


class Watch(Protocol):
    """What looks at a step while it is made."""

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:
        """The loss as it is to be called for each of the micro-batches of one pass over the step."""

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """These optimizers are about to step: their gradients are whole, and neither limited nor multiplied by `factor`."""

    def after(self, names: Iterable[str]) -> None:
        """These optimizers have taken their step, or were made to skip it."""


class Unwatched:
    """Nothing is looked at."""

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:  # noqa: ARG002
        """The loss itself."""
        return loss

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Nothing."""

    def after(self, names: Iterable[str]) -> None:
        """Nothing."""


UNWATCHED = Unwatched()
