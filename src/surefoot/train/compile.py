"""Models as torch.compile makes them, and whether a run's are: as was asked for, or as "auto" came to.

What "auto" comes to is looked up in `train/auto_precision.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from surefoot.errors import ConfigError

Asked = bool | Literal["auto"]


@dataclass
class Compiling:
    """Whether a run's models are compiled; `open` where that is "auto" and the run has not begun."""

    asked: Asked
    on: bool = False
    open: bool = False

    def settle(self, on: bool) -> None:
        """Compile from now on, or do not, if that was left open; else nothing changes."""
        if self.open:
            self.on, self.open = on, False

    @property
    def late(self) -> bool:
        """Whether the models were put together as they are, and are to be compiled now."""
        return self.on and self.asked == "auto"


def compiling(asked: object) -> Compiling:
    """What the setting `compile` means: True, False, or "auto".

    >>> compiling(True).on, compiling("auto").on, compiling("auto").open
    (True, False, True)
    """
    if isinstance(asked, bool):
        return Compiling(asked, on=asked)
    if asked == "auto":
        return Compiling("auto", open=True)
    raise ConfigError(f"compile = {asked!r}: True, False, or 'auto', which looks it up in a table")


def compiled(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The models as torch compiles them for training; their random numbers are those of the models as they are.

    The compiler's own generator draws by how a graph falls to pieces, and FSDP2 cuts it at every block.
    """
    as_uncompiled: dict[str, Any] = {"fallback_random": True}
    return {name: torch.compile(model, dynamic=False, options=as_uncompiled) for name, model in models.items()}
