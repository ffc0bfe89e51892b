"""The interface of step measurements (`Watch`), and `UNWATCHED`, which measures nothing and is used for most steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from surefoot.data.loader import MicroBatch

Loss = Callable[[Any, Any], Any]

Named = dict[str, Tensor]  # device scalars by parameter name


class Watch(Protocol):
    """An observer of one step."""

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:
        """Return the loss function that `forward_backward` calls for each micro-batch."""

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Measure before the named optimizers update parameters. Gradients are complete, but not yet clipped or multiplied by `factor`."""

    def after(self, names: Iterable[str]) -> None:
        """Measure after the named optimizers have updated parameters or skipped the update."""


class Unwatched:
    """An observer that measures nothing."""

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:  # noqa: ARG002
        """Return the loss unchanged."""
        return loss

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Do nothing."""

    def after(self, names: Iterable[str]) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class LossWatch:
    """An observer that wraps the loss and measures nothing else."""

    wrap: Callable[[Loss], Loss]

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:  # noqa: ARG002
        """Return the wrapped loss."""
        return self.wrap(loss)

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Do nothing."""

    def after(self, names: Iterable[str]) -> None:
        """Do nothing."""


UNWATCHED = Unwatched()
