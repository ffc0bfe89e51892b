"""How images lie in memory: channel after channel, or with the channels of a pixel side by side.

Shapes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channels_side_by_side(images_BCHW: Tensor) -> Tensor:
    """The same images in torch's `channels_last`; convolutions then keep to that layout.

    Of a single channel torch sees both layouts as one, leaves the strides as they are, and goes on in the other one, in which
    pooling is several times slower on a CPU (torch 2.13): the strides are set here.

    >>> channels_side_by_side(torch.zeros(2, 1, 4, 5)).stride()
    (20, 1, 5, 1)
    """
    if images_BCHW.shape[1] != 1:
        return images_BCHW.contiguous(memory_format=torch.channels_last)
    batch, _, height, width = images_BCHW.shape
    return images_BCHW.reshape(batch, height, width, 1).permute(0, 3, 1, 2)
