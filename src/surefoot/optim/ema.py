"""An exponential moving average of a model's weights, held in a second model; nothing is ever swapped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError
from surefoot.optim.averages import Twin, copy_buffers


def check_decay(decay: float) -> None:
    """Raise `ConfigError` for what is no decay of an average."""
    if not 0.0 <= decay < 1.0:
        raise ConfigError(f"ema = {decay!r}: a number from 0 to below 1 is needed, such as 0.999")


class Ema:
    """A twin of a model (`twin_of`), whose parameters are moving averages of the model's.

    After n updates they are decay^n * start + (1 - decay) * (sum over k of decay^(n - k) * weights after
    update k). `model` is the twin: score it, sample from it, save it, but do not train it. Its buffers are
    those of the live model as of the last `refresh` (batch statistics are averages already). Averaged are the parameters that
    are `trained`, frozen for a while or not; None: those that have `requires_grad` now.

    >>> from surefoot.optim.averages import twin_of
    >>> live = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(live.weight)
    >>> average = Ema(twin_of(live), decay=0.75)
    >>> _ = nn.init.ones_(live.weight)
    >>> average.update(torch.tensor(True)), average.model.weight.item()
    (None, 0.25)
    """

    def __init__(self, twin: Twin, decay: float, *, trained: set[nn.Parameter] | None = None) -> None:
        check_decay(decay)
        self.decay, self.twin, self.model = decay, twin, twin.model
        # all others stay as they are; they may be infinite (a mask), whose average would not be a number
        averaged = {live for live, _ in twin.pairs if live.requires_grad} if trained is None else trained
        self._live = [live.detach() for live, _ in twin.pairs if live in averaged]
        self._averages = [average.detach() for live, average in twin.pairs if live in averaged]
        # Adding 0 * difference changes no finite number but -0.0, so there must be none at the start; a sum
        # is -0.0 only where both terms are, so there is none later either.
        torch._foreach_add_(self._averages, 0.0)

    def restart(self, live: nn.Module) -> None:
        """Begin again at the model's weights, such as those that were loaded into it."""
        self.twin.copy_parameters()
        torch._foreach_add_(self._averages, 0.0)
        copy_buffers(live, self.model)

    def update(self, applied: Tensor) -> None:
        """Move the averages towards the live weights, unless `applied` (a boolean, or 0 or 1) is 0.

        Then no bit of them changes, as long as the weights are finite. `applied` is not read by the host.
        """
        difference = torch._foreach_sub(self._live, self._averages)
        torch._foreach_mul_(difference, applied.to(difference[0].dtype) * (1.0 - self.decay))
        torch._foreach_add_(self._averages, difference)

    def refresh(self, live: nn.Module) -> None:
        """Take over the buffers of the live model; to be called before the twin is scored or saved."""
        copy_buffers(live, self.model)
