"""Residual networks of 18, 34 and 50 layers (He et al. 2016: https://arxiv.org/abs/1512.03385), for
small and large images.

Modules have torchvision's names, so its weights can be loaded. As in torchvision, the 3 x 3
convolution of a bottleneck has the stride. Shapes: B batch, C channels, H height, W width, K
classes.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.models.layers import channels_side_by_side, check_shape

Stem = Literal["cifar", "imagenet"]

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4  # output channels of a bottleneck per unit of its width


class ResNet(nn.Module):
    """A residual network that maps images (B, C, H, W) to logits (B, K).

    The `stem` "imagenet" divides height and width by 4 (7 x 7 convolution, pooling). "cifar" keeps
    both (3 x 3 convolution), for images of about 32 pixels. `zero_init_residual` initializes blocks
    as the identity (Goyal et al. 2017, section 5.1: https://arxiv.org/abs/1706.02677).
    `channels_last` uses torch's memory format of that name, which only changes speed and rounding.

    >>> sum(parameter.numel() for parameter in ResNet(18, channels=3, classes=1000).parameters())
    11689512
    """

    def __init__(
        self,
        layers: Literal[18, 34, 50],
        *,
        channels: int,
        classes: int,
        stem: Stem = "imagenet",
        zero_init_residual: bool = True,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        check_shape(
            (layers in _BLOCKS, f"layers = {layers} must be 18, 34 or 50"),
            (
                min(channels, classes) >= 1,
                f"channels = {channels}, classes = {classes}: each must be 1 or more",
            ),
        )
        self.channels_last = channels_last
        self.stem = stem
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(
            channels, _WIDTHS[0], kernel, stride=stride, padding=kernel // 2, bias=False
        )
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        bottleneck = layers == 50
        channels_so_far = _WIDTHS[0]
        block_counts = _BLOCKS[layers]
        for index, width in enumerate(_WIDTHS):
            stage = nn.Sequential()
            for block in range(block_counts[index]):
                # the first block of each later stage halves height and width
                stride = 2 if index > 0 and block == 0 else 1
                stage.append(Block(channels_so_far, width, stride=stride, bottleneck=bottleneck))
                channels_so_far = _EXPANSION * width if bottleneck else width
            self.add_module(f"layer{index + 1}", stage)
        self.fc = nn.Linear(channels_so_far, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, Block):
                nn.init.zeros_(getattr(module, f"bn{module.convolutions}").weight)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the logits, (B, K), of float images (B, C, H, W)."""
        x_BCHW = channels_side_by_side(images_BCHW) if self.channels_last else images_BCHW
        x_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)), inplace=True)
        if self.stem == "imagenet":
            x_BCHW = F.max_pool2d(x_BCHW, 3, stride=2, padding=1)
        for stage in range(1, len(_WIDTHS) + 1):
            x_BCHW = self.get_submodule(f"layer{stage}")(x_BCHW)
        return self.fc(x_BCHW.mean(dim=(2, 3)))


class Block(nn.Module):
    """A residual block: two 3 x 3 convolutions, or a bottleneck (1 x 1 down to `width`, 3 x 3, 1 x
    1 up).
    """

    def __init__(self, before: int, width: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        # kernel, channels and stride of each convolution
        if bottleneck:
            sizes = [(1, width, 1), (3, width, stride), (1, _EXPANSION * width, 1)]
        else:
            sizes = [(3, width, stride), (3, width, 1)]
        self.convolutions = len(sizes)
        inputs = before
        for number, (kernel, outputs, step) in enumerate(sizes, start=1):
            convolution = nn.Conv2d(
                inputs, outputs, kernel, stride=step, padding=kernel // 2, bias=False
            )
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", nn.BatchNorm2d(outputs))
            inputs = outputs
        self.downsample = None
        if stride != 1 or before != inputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, inputs, 1, stride=stride, bias=False), nn.BatchNorm2d(inputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = x_BCHW
        for number in range(1, self.convolutions + 1):
            if number > 1:
                y_BCHW = F.relu(y_BCHW, inplace=True)
            y_BCHW = getattr(self, f"conv{number}")(y_BCHW)
            y_BCHW = getattr(self, f"bn{number}")(y_BCHW)
        if self.downsample is not None:
            x_BCHW = self.downsample(x_BCHW)
        return F.relu(y_BCHW + x_BCHW, inplace=True)
