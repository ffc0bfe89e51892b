"""The loss that a step calls: `in_step` prepares a coupled loss. A `Watch` measures the step and
may wrap the loss.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from surefoot.data.loader import MicroBatch
    from surefoot.distributed.world import World

Loss = Callable[[Any, Any], Any]


@runtime_checkable
class CoupledLoss(Protocol):
    """A loss over the features of the whole batch, such as `sf.losses.whole_batch` returns."""

    encode_fn: Callable[[Any, Any], Any]
    loss_fn: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one batch by itself."""


def in_step(loss: Loss, step: Any) -> Loss:
    """Return the loss that a step calls for each micro-batch. A coupled loss sees the whole batch
    before the first call.
    """
    # the check of a protocol takes 6 us
    if isinstance(loss, FunctionType | MethodType) or not isinstance(loss, CoupledLoss):
        return loss
    from surefoot.train.gradient_cache import CachedLoss

    return CachedLoss(loss.encode_fn, loss.loss_fn, step)


Named = dict[str, Tensor]  # device scalars by parameter name


class Watch(Protocol):
    """An observer of one step."""

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:
        """Return the loss function that `forward_backward` calls for each micro-batch."""

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Measure before the named optimizers update parameters. Gradients are complete, but not
        yet clipped or multiplied by `factor`.
        """

    def after(self, names: Iterable[str]) -> None:
        """Measure after the named optimizers have updated parameters or skipped the update."""


@dataclass(frozen=True)
class LossWatch:
    """An observer that measures nothing, and may wrap the loss."""

    wrap: Callable[[Loss], Loss] = lambda loss: loss

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:  # noqa: ARG002
        return self.wrap(loss)

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Do nothing."""

    def after(self, names: Iterable[str]) -> None:
        """Do nothing."""


UNWATCHED = LossWatch()


@dataclass(frozen=True)
class NamedCalls:
    """The watch `inner` of a step whose calls the user's loop makes. Each call is named to the
    other ranks, since a rank could leave it out.
    """

    inner: Watch
    world: "World"
    index: int

    def over(self, loss: Loss, micro_batches: "Sequence[MicroBatch]") -> Loss:
        self.world.announce(f"in forward_backward of step {self.index}")
        return self.inner.over(loss, micro_batches)

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        self.world.announce(f"in update of step {self.index} for {', '.join(names)}")
        self.inner.before(names, factor)

    def after(self, names: Iterable[str]) -> None:
        self.inner.after(names)
