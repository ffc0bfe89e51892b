"""The loss of a step, added up over its micro-batches: what a loss function returned, as parts of one counted mean."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.mean import Mean
from surefoot.tracking.record import refuse_own


class LossSum:
    """`total` is the sum over what was passed here, divided by `nominal`; `counted` by how much it really was taken over.

    `counted` is None as long as the host's own counts hold: they are `plain`, and together they are `nominal`.

    >>> import torch
    >>> weight = torch.ones((), requires_grad=True)
    >>> sums = LossSum(nominal=4)
    >>> parts = [sums.add(weight * 3, count=1), sums.add(weight * 1, count=3)]
    >>> float(sums.total), sums.counted
    (1.5, None)
    """

    def __init__(self, nominal: float) -> None:
        self.nominal = nominal
        self.total: Tensor | None = None
        self.plain = 0  # counted on the host alone
        self._counted: Tensor | float | None = None  # by the loss itself

    def add(self, result: Any, count: int) -> tuple[Tensor, Mapping[str, Mean]]:
        """The part of the total that a backward pass starts from, and the means that the loss returned beside it, to be logged.

        What counts nothing adds nothing: its backward pass is made only to keep step with other ranks.
        """
        result, further, _ = loss_parts(result)
        loss_total = scalar(result.total if isinstance(result, Mean) else result)
        if count == 0:
            return loss_total, {}
        if isinstance(result, Mean):
            part = loss_total / self.nominal
            self._counted = result.count if self._counted is None else self._counted + result.count
        else:
            share = count / self.nominal
            part = loss_total if share == 1.0 else loss_total * share
            self.plain += count
        self.total = part.detach() if self.total is None else self.total + part.detach()
        return part, further

    @property
    def counted(self) -> Tensor | float | None:
        """How much was counted, where that need not be `nominal`."""
        return self._counted + self.plain if self._counted is not None and self.plain else self._counted


def loss_parts(returned: Any) -> tuple[Any, Mapping[str, Mean], tuple[Any, Any] | None]:
    """A loss; the means that stand beside it, to be logged; and (outputs, targets) for metrics, if it stands beside it.

    `ConfigError` for a tuple of anything else.

    >>> loss_parts((0.5, ("outputs", "targets")))
    (0.5, {}, ('outputs', 'targets'))
    """
    if not isinstance(returned, tuple):
        return returned, {}, None
    if len(returned) == 2 and isinstance(returned[1], tuple) and len(returned[1]) == 2:
        return returned[0], {}, returned[1]
    if len(returned) == 2 and isinstance(returned[1], Mapping):
        wrong = [name for name, mean in returned[1].items() if not isinstance(mean, Mean)]
        if not wrong:
            refuse_own(returned[1])
            return returned[0], returned[1], None
        what = f"{wrong[0]!r} as {type(returned[1][wrong[0]]).__name__}"
    else:
        what = f"({', '.join(type(part).__name__ for part in returned)})"
    raise ConfigError(
        f"the loss returned {what}: beside its mean only (outputs, targets) or a dictionary of surefoot.Mean may stand\n"
        "  for the metrics of a split: return loss, (outputs, targets)\n"
        '  for the records of training: return loss, {"accuracy": surefoot.Mean(right, count)}'
    )


def scalar(loss: Any) -> Tensor:
    """A loss that a step can start from: one number that depends on a parameter; anything else is a `ConfigError`."""
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"the loss returned {type(loss).__name__}, not a tensor: return F.cross_entropy(...) or the like"
        )
    if loss.ndim > 0:
        raise ConfigError(
            f"the loss is not one number but a tensor of shape {tuple(loss.shape)}: return its mean,\n"
            "  or surefoot.Mean(total, count) where targets are not one per sample"
        )
    raise ConfigError(
        "the loss does not depend on any trainable parameter: was it detached, or computed under no_grad?"
    )
