"""How images lie in memory when a run's models are given them: as they come, or with the channels of a pixel side by side.

Convolutions keep to the layout of what they are given, and on processors that multiply bfloat16 in hardware, and on GPUs, they are
much faster with the channels side by side (torch's `channels_last`). Weights stay as they are, so nothing that is saved changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError


@dataclass
class Layout:
    """Whether images are laid out with their channels last before a model has them; `open` until a run begins or goes on."""

    channels_last: bool = False
    open: bool = False

    def settle(self, channels_last: bool) -> None:
        """Lay them out so from now on, or do not, if that was left open; else nothing changes."""
        if self.open:
            self.channels_last, self.open = channels_last, False

    def before(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What a model is called with: images (B, C, H, W) in the layout that was chosen, all else as it is."""
        if not self.channels_last:
            return None
        from surefoot.models.layers import channels_side_by_side

        return tuple(channels_side_by_side(held) if _is_images(held) else held for held in inputs)


def layout(asked: bool | Literal["auto"], models: Iterable[nn.Module]) -> Layout:
    """The layout that a run's models will find their images in; "auto" is looked up beside the precision, else as they come.

    It is open too where the precision is named: a run that began with both left open may go on so. Models without a
    2-dimensional convolution are left alone.

    >>> convolution = nn.Conv2d(2, 3, 1)
    >>> layout(True, [convolution]).channels_last, convolution(torch.zeros(1, 2, 4, 5)).stride()
    (True, (60, 1, 15, 3))
    """
    if not isinstance(asked, bool) and asked != "auto":
        raise ConfigError(
            f"channels_last = {asked!r}: True, False, or 'auto', which is looked up beside precision = 'auto'"
        )
    with_images = [model for model in models if asked and any(isinstance(part, nn.Conv2d) for part in model.modules())]
    found = Layout(asked is True and bool(with_images), open=asked == "auto" and bool(with_images))
    for model in with_images if found.channels_last or found.open else ():
        model.register_forward_pre_hook(found.before)
    return found


def _is_images(held: Any) -> bool:
    return isinstance(held, Tensor) and held.ndim == 4 and torch.is_floating_point(held)
