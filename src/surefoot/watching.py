"""One step, watched while it is made: the sizes of each parameter's gradient, weights and update, on the device.

The loop hands a `Watch` what there is to see; `UNWATCHED` sees nothing, and most steps have that. Nothing here waits for the
device, and nothing changes what it sees. What was seen is read in `layers.py`, when the step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.activity import Activity
from surefoot.means import Mean
from surefoot.micro_batch import MicroBatch
from surefoot.optim.clipping import gradient_norm

Loss = Callable[[Any, Any], Any]
Named = dict[str, Tensor]  # numbers on the device, by parameter


class Watch(Protocol):
    """What looks at a step while it is made."""

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:
        """The loss as it is to be called for each of the micro-batches of one pass over the step."""
        ...

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """These optimizers are about to step: their gradients are whole, and neither limited nor multiplied by `factor`."""
        ...

    def after(self, names: Iterable[str]) -> None:
        """These optimizers have taken their step, or were made to skip it."""
        ...


class Unwatched:
    """Nothing is looked at."""

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:  # noqa: ARG002
        """The loss itself."""
        return loss

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Nothing."""

    def after(self, names: Iterable[str]) -> None:
        """Nothing."""


UNWATCHED = Unwatched()


class Watched:
    """What is seen of one step. Of several updates of one optimizer in a step (a loop of one's own) it is the last.

    parameters: those of each optimizer, by name, as this rank holds them.
    local_times: what the gradient of a first micro-batch is multiplied by on this rank; None where it is not whole here then.
    """

    def __init__(
        self,
        index: int,
        parameters: Mapping[str, Mapping[str, nn.Parameter]],
        *,
        activity: Activity | None,
        local_times: float | None,
    ) -> None:
        self.index, self.parameters, self.activity = index, parameters, activity
        self.local_times = local_times if len(parameters) == 1 else None  # else it is not said whose gradient it is
        self.gradients: dict[str, Named] = {}  # by optimizer; as backward left them
        self.factors: dict[str, Tensor | float] = {}
        self.weights: Named = {}  # before the update
        self.updates: Named = {}
        self.rows_used: dict[
            str, tuple[Tensor, int]
        ] = {}  # of how many: rows of a matrix's gradient that are not all zero
        self.first: tuple[Tensor | float, Tensor] | None = (
            None  # targets of the first micro-batch, and norm of its gradient
        )
        self.passes = 0
        self._copies: dict[str, list[Tensor]] = {}

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:
        """The loss under the eyes of `activity`; before its second call the gradient is that of the first micro-batch."""
        self.passes += 1
        self.first = None
        several = self.local_times is not None and not self._gradients()
        counted: list[Tensor | float] = []

        def watched(model: Any, batch: Any) -> Any:
            if several and len(counted) == 1:
                self.first = counted[0], gradient_norm(self._gradients(), factor=1.0)
            if self.activity is None:
                result = loss(model, batch)
            else:
                with self.activity:
                    result = loss(model, batch)
            counted.append(_count(result, next(held.count for held in micro_batches if held.batch is batch)))
            return result

        return watched

    @torch.no_grad()
    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """The norms of gradients and weights, and a copy of the weights until `after`."""
        for name in names:
            parameters = self.parameters[name]
            weights = [held.detach() for held in parameters.values()]
            graded = {called: held.grad for called, held in parameters.items() if held.grad is not None}
            self.gradients[name] = dict(zip(graded, _norms(list(graded.values())), strict=True))
            self.factors[name] = factor
            self.weights |= zip(parameters, _norms(weights), strict=True)
            self.rows_used |= {called: _rows_used(held) for called, held in graded.items() if held.ndim > 1}
            self._copies[name] = [held.clone() for held in weights]

    @torch.no_grad()
    def after(self, names: Iterable[str]) -> None:
        """The norm of what changed since `before`: 0 where the update was not applied."""
        for name in names:
            changes = self._copies.pop(name)
            torch._foreach_sub_(changes, [held.detach() for held in self.parameters[name].values()])
            self.updates |= zip(self.parameters[name], _norms(changes), strict=True)

    def _gradients(self) -> list[Tensor]:
        return [held.grad for named in self.parameters.values() for held in named.values() if held.grad is not None]


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Of each; in float32 at least, whatever the tensors are in."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(held.dtype for held in tensors):
        places = [place for place, held in enumerate(tensors) if held.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        found |= zip(places, torch._foreach_norm([tensors[place] for place in places], 2, wide), strict=True)
    return [found[place] for place in range(len(tensors))]


def _rows_used(gradient: Tensor) -> tuple[Tensor, int]:
    rows = len(gradient)
    return torch.count_nonzero(gradient.detach().reshape(rows, gradient[:1].numel() if rows else 1).any(dim=1)), rows


def _count(result: Any, of_batch: int) -> Tensor | float:
    """Over how much a loss was taken: what it says itself, or else its micro-batch."""
    part = result[0] if isinstance(result, tuple) else result
    return part.detached().count if isinstance(part, Mean) else of_batch
