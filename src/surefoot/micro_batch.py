"""What one forward and backward pass is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples for one forward and backward pass: tensors on the device, and which samples they are."""

    batch: Any
    count: int
    """Over how many things the loss is a mean; known to the host."""
    index: int
    """Within the global batch of its step."""
    ids: NDArray[np.int64]
    """The samples, by their place in the data set."""
    epochs: NDArray[np.int64]
    """The pass over the data that each belongs to."""
    void: bool = False
    """Read only to keep step with other ranks: what is found of it is dropped."""
