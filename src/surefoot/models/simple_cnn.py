"""A small convolutional network for small images, and the mean of a model's logits over views of an
image.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.models.layers import channels_side_by_side, check_shape


class SimpleCNN(nn.Module):
    """A convolutional network that maps images (B, C, H, W) of any height and width to logits (B,
    K).

    `width`: channels of the first block; each later block doubles the number. `dropout`: dropped
    fraction of the last features. `channels_last` uses torch's memory format of that name, which
    only changes speed and rounding.

    >>> import torch
    >>> model = SimpleCNN(channels=1, classes=10, width=8)
    >>> model(torch.zeros(3, 1, 28, 28)).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        *,
        channels: int,
        classes: int,
        width: int = 32,
        dropout: float = 0.0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        check_shape(
            (
                min(channels, classes, width) >= 1,
                f"channels = {channels}, classes = {classes}, width = {width}: each must be 1 or more",
            ),
            (
                0.0 <= dropout < 1.0,
                f"dropout = {dropout} must be a fraction, at least 0 and below 1",
            ),
        )
        self.channels_last = channels_last
        sizes = [channels, width, 2 * width, 4 * width]
        self.blocks = nn.ModuleList(Block(before, after) for before, after in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(sizes[-1], classes)
        nn.init.zeros_(self.head.weight)  # the first loss is exactly ln K
        nn.init.zeros_(self.head.bias)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the logits, (B, K), of float images (B, C, H, W)."""
        x_BCHW = channels_side_by_side(images_BCHW) if self.channels_last else images_BCHW
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(self.dropout(x_BCHW.mean(dim=(2, 3))))


class Block(nn.Module):
    """Convolution, pooling, norm, ReLU, convolution, norm, ReLU. Pooling before the norm saves 75%
    of the norm's work.
    """

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
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)  # the norm would remove a bias
    # He et al. 2015: https://arxiv.org/abs/1502.01852
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


class AveragedViews(nn.Module):
    """Maps images (B, C, H, W) to a model's mean logits, (B, K), over views: the images, mirrored,
    shifted by one pixel, and both.

    `flip` adds mirrored views. `border`, the value of a channel outside of the image, adds shifts
    to both diagonal sides.

    >>> AveragedViews(nn.Flatten(), flip=True)(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[2., 2.]])
    """

    def __init__(
        self, model: nn.Module, *, flip: bool, border: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.flip = flip
        self.border = border

    def forward(self, images_BCHW: Tensor) -> Tensor:
        views = [images_BCHW]
        if self.border is not None:
            border_C11 = images_BCHW.new_tensor(self.border)[:, None, None]
            padded = F.pad(images_BCHW - border_C11, (1, 1, 1, 1)) + border_C11
            views += [padded[..., :-2, :-2], padded[..., 2:, 2:]]
        if self.flip:
            views += [view.flip(-1) for view in views]
        return torch.stack([self.model(view).float() for view in views]).mean(dim=0)
