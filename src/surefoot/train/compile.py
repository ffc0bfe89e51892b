"""Whether a run's models are compiled, and whether images lie in memory with their channels last.

Both may be left open ("auto") until a run begins: `train/auto_precision.py` looks up what "auto" comes to. Convolutions are much
faster with the channels of a pixel side by side on GPUs, and on processors that multiply bfloat16. Weights stay as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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

        return tuple(
            channels_side_by_side(each)
            if isinstance(each, Tensor) and each.ndim == 4 and torch.is_floating_point(each)
            else each
            for each in inputs
        )


def layout(channels_last: object, models: Iterable[nn.Module]) -> Layout:
    """The layout that a run's models will find their images in; "auto" is looked up beside the precision, else as they come.

    It is open too if the precision is named: a run that began with both left open may go on so.

    >>> convolution = nn.Conv2d(2, 3, 1)
    >>> layout(True, [convolution]).channels_last, convolution(torch.zeros(1, 2, 4, 5)).stride()
    (True, (60, 1, 15, 3))
    """
    if not isinstance(channels_last, bool) and channels_last != "auto":
        raise ConfigError(
            f"channels_last = {channels_last!r}: True, False, or 'auto', which is looked up beside precision = 'auto'"
        )
    with_images = [model for model in models if any(isinstance(part, nn.Conv2d) for part in model.modules())]
    chosen = Layout(channels_last is True and bool(with_images), open=channels_last == "auto" and bool(with_images))
    for model in with_images if channels_last else ():
        model.register_forward_pre_hook(chosen.before)
    return chosen


@dataclass
class Compiling:
    """Whether a run's models are compiled; `open` until a run begins or goes on."""

    on: bool = False
    open: bool = False
    late: bool = False  # the models were put together as they are, and are to be compiled when it is settled

    def settle(self, on: bool) -> None:
        """Compile from now on, or do not, if that was left open; else nothing changes."""
        if self.open:
            self.on, self.late, self.open = on, on, False


def compiling(setting: object) -> Compiling:
    """What the setting `compile` means: True, False, or "auto".

    >>> compiling(True).on, compiling("auto").on, compiling("auto").open
    (True, False, True)
    """
    if not isinstance(setting, bool) and setting != "auto":
        raise ConfigError(f"compile = {setting!r}: True, False, or 'auto', which looks it up in a table")
    return Compiling(on=setting is True, open=setting == "auto")


def compiled(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The models as torch compiles them for training; their random numbers are those of the models as they are.

    The compiler's own generator draws by how a graph falls to pieces, and FSDP2 cuts it at every block.
    """
    as_uncompiled: dict[str, Any] = {"fallback_random": True}
    return {name: torch.compile(model, dynamic=False, options=as_uncompiled) for name, model in models.items()}


def sole_or_all(named: Mapping[str, Any]) -> Any:
    """What a loss is called with: the model where one stands alone, as "model"; else all of them by name."""
    return named["model"] if list(named) == ["model"] else dict(named)
