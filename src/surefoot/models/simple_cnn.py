"""A small convolutional network for small images: three blocks, each of two convolutions that halve its height and width once.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.models.layers import channels_side_by_side, check_shape


class SimpleCNN(nn.Module):
    """Images (B, C, H, W) of any height and width to logits (B, K).

    `width`: channels after the first block; each later block has twice as many. `dropout`: the fraction of the last features that
    are dropped. `channels_last` puts the channels of a pixel side by side, which only changes speed and rounding.

    >>> import torch
    >>> model = SimpleCNN(channels=1, classes=10, width=8)
    >>> model(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self, *, channels: int, classes: int, width: int = 32, dropout: float = 0.0, channels_last: bool = False
    ) -> None:
        super().__init__()
        check_shape(
            (
                min(channels, classes, width) >= 1,
                f"channels = {channels}, classes = {classes}, width = {width}: each must be 1 or more",
            ),
            (0.0 <= dropout < 1.0, f"dropout = {dropout} must be a fraction, at least 0 and below 1"),
        )
        self.channels_last = channels_last
        sizes = [channels, width, 2 * width, 4 * width]
        self.blocks = nn.ModuleList(Block(before, after) for before, after in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(sizes[-1], classes)
        # all classes equally likely: the first loss is exactly ln K
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x_BCHW = channels_side_by_side(images_BCHW) if self.channels_last else images_BCHW
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(self.dropout(x_BCHW.mean(dim=(2, 3))))


class Block(nn.Module):
    """Convolution, halving, norm, ReLU, convolution, norm, ReLU; halved before the norm, which then has 25% of the work."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.widening = _convolution(before, after)
        self.halving = nn.MaxPool2d(2, ceil_mode=True)
        self.first_norm = nn.BatchNorm2d(after)
        self.mixing = _convolution(after, after)
        self.second_norm = nn.BatchNorm2d(after)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.first_norm(self.halving(self.widening(x_BCHW))), inplace=True)
        return F.relu(self.second_norm(self.mixing(x_BCHW)), inplace=True)


def _convolution(before: int, after: int) -> nn.Conv2d:
    """3 x 3, without a bias, which the norm behind it would take away again; He et al. 2015 (https://arxiv.org/abs/1502.01852)."""
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution
