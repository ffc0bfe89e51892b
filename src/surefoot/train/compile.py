"""The compilation (`torch.compile`) of a run's models and the memory format of their images.

Both settings may stay open ("auto") until a run begins; `train/auto_precision.py` then decides.
Channels-last convolutions are much faster on GPUs and on processors with bfloat16 instructions. The
memory format of weights is unchanged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.data.buckets import varied_batches
from surefoot.errors import ConfigError, Setting


@dataclass
class Layout:
    """The memory format of image inputs; an "auto" setting stays `open` until a run begins or
    resumes.
    """

    channels_last: bool = False
    open: bool = False

    def settle(self, channels_last: bool) -> None:
        """Set the memory format if it is still open; otherwise do nothing."""
        if self.open:
            self.channels_last, self.open = channels_last, False

    def before(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Convert images (B, C, H, W) among a model's inputs to channels last. Returns None if
        channels last is off.
        """
        if not self.channels_last:
            return None
        from surefoot.models.layers import channels_side_by_side

        return tuple(
            channels_side_by_side(each)
            if isinstance(each, Tensor) and each.ndim == 4 and torch.is_floating_point(each)
            else each
            for each in inputs
        )


def layout(channels_last: bool | Literal["auto"], models: Iterable[nn.Module]) -> Layout:
    """Return the memory format of a run's images, and register its conversion on each model with
    convolutions.

    >>> convolution = nn.Conv2d(2, 3, 1)
    >>> layout(True, [convolution]).channels_last, convolution(torch.zeros(1, 2, 4, 5)).stride()
    (True, (60, 1, 15, 3))
    """
    with_images = [
        model for model in models if any(isinstance(part, nn.Conv2d) for part in model.modules())
    ]
    # "auto" stays open even if the precision is named: a resumed run may restore an automatic
    # choice
    chosen = Layout(
        channels_last is True and bool(with_images),
        open=channels_last == "auto" and bool(with_images),
    )
    for model in with_images if channels_last else ():
        model.register_forward_pre_hook(chosen.before)
    return chosen


@dataclass
class Compiling:
    """The compilation setting of a run's models; an "auto" setting stays `open` until a run begins
    or resumes.
    """

    on: bool = False
    open: bool = False
    late: bool = False  # `Components.compile` has to compile the models after `settle`

    def settle(self, on: bool) -> None:
        """Turn compilation on or off if the setting is still open; otherwise do nothing."""
        if self.open:
            self.on, self.late, self.open = on, on, False


def compiling(setting: bool | Literal["auto"]) -> Compiling:
    """Parse the setting `compile`.

    >>> compiling(True).on, compiling("auto").on, compiling("auto").open
    (True, False, True)
    """
    return Compiling(on=setting is True, open=setting == "auto")


def compiled(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Compile the models for training; their random numbers equal those of the uncompiled
    models.
    """
    # the compiler's own random numbers would depend on graph breaks, and FSDP2 breaks the graph at
    # every block
    as_uncompiled: dict[str, Any] = {"fallback_random": True}
    return {
        name: torch.compile(model, dynamic=False, options=as_uncompiled)
        for name, model in models.items()
    }


def sole_or_all(named: Mapping[str, Any]) -> Any:
    """Return the loss function's first argument: a single model called "model", otherwise a
    dictionary of all models.
    """
    return named["model"] if list(named) == ["model"] else dict(named)


def refuse_compiled(plan: Any, data: Any, *, compiled: bool) -> None:
    """Raise `ConfigError` if compiled code would get a new shape in almost every step."""
    if compiled and (whose := varied_batches(plan, data)):
        raise ConfigError(
            "compile-of-many-shapes",
            problem=f"compile: {whose} change shape in almost every step",
            reason="each shape would be compiled",
            remedy=Setting("compile", False),
            setting="compile",
            value=True,
            batches=whose,
        )
