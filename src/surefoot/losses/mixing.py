"""Mixup and cutmix: pairs of images of a batch are mixed on the host, with the generators that the
loop seeds.

Shapes: B batch, C channels, H height, W width, K classes.
"""

import random
from dataclasses import dataclass

from torch import Tensor

from surefoot.errors import out_of_range
from surefoot.losses.dense import cross_entropy
from surefoot.mean import Mean


@dataclass(frozen=True)
class MixedBatch:
    """Images mixed from two samples: a fraction `share` has the class `labels`, the rest the class
    `others` (both (B,)).

    >>> import torch
    >>> mixture = MixedBatch(
    ...     torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), torch.tensor([1, 0]), share=0.75
    ... )
    >>> round(
    ...     float(mixup_cross_entropy(torch.eye(2), mixture).value), 4
    ... )  # 0.75 * 0.3133 + 0.25 * 1.3133
    0.5633
    """

    images: Tensor
    labels: Tensor
    others: Tensor
    share: float


def mixup(
    images_BCHW: Tensor, labels_B: Tensor, *, mixup: float = 0.0, cutmix: float = 0.0
) -> MixedBatch:
    """Mix each image with another image of its batch; the proportion is drawn once per batch.

    `mixup` is the parameter of the Beta distribution of the weight in a mean of two images (Zhang
    et al., 2018: https://arxiv.org/abs/1710.09412). `cutmix` is the Beta parameter of the area
    outside the rectangle that is copied from the other image (Yun et al., 2019:
    https://arxiv.org/abs/1905.04899). A value of 0 disables mixup or cutmix. If both are above 0,
    each batch uses mixup or cutmix with equal probability.

    >>> import torch
    >>> mixture = mixup(torch.zeros(4, 1, 8, 8), torch.arange(4), mixup=0.2)
    >>> mixture.images.shape, 0 <= mixture.share <= 1
    (torch.Size([4, 1, 8, 8]), True)
    """
    refuse_mixing(mixup=mixup, cutmix=cutmix)
    cuts = cutmix > 0 and (mixup <= 0 or random.random() < 0.5)
    strength = cutmix if cuts else mixup
    if len(labels_B) < 2 or strength <= 0:
        return MixedBatch(images_BCHW, labels_B, labels_B, 1.0)
    share = random.betavariate(strength, strength)
    # samples are in random order, so the neighbor at any distance is a random partner
    shift = random.randrange(1, len(labels_B))
    partners_BCHW = images_BCHW.roll(shift, 0)
    others_B = labels_B.roll(shift, 0)
    if not cuts:
        mean_BCHW = share * images_BCHW + (1 - share) * partners_BCHW
        return MixedBatch(mean_BCHW, labels_B, others_B, share)
    height, width = images_BCHW.shape[-2:]
    top, bottom = _stretch(height, (1 - share) ** 0.5)
    left, right = _stretch(width, (1 - share) ** 0.5)
    cut_BCHW = images_BCHW.clone()
    cut_BCHW[..., top:bottom, left:right] = partners_BCHW[..., top:bottom, left:right]
    # the border of the images may have shortened the rectangle
    rectangle = (bottom - top) * (right - left) / (height * width)
    return MixedBatch(cut_BCHW, labels_B, others_B, 1 - rectangle)


def mixup_cross_entropy(
    logits_BK: Tensor, mixture: MixedBatch, *, label_smoothing: float = 0.0
) -> Mean:
    """Return the cross-entropy with both labels of each image, weighted by their shares, over B
    samples.

    >>> import torch
    >>> mixture = MixedBatch(
    ...     torch.zeros(2, 1, 1, 1), torch.tensor([0, 1]), torch.tensor([1, 0]), 0.25
    ... )
    >>> round(float(mixup_cross_entropy(torch.zeros(2, 4), mixture).value), 4)
    1.3863
    """
    first = cross_entropy(logits_BK, mixture.labels, label_smoothing=label_smoothing)
    if mixture.share == 1.0:
        return first
    second = cross_entropy(logits_BK, mixture.others, label_smoothing=label_smoothing)
    return Mean(mixture.share * first.total + (1 - mixture.share) * second.total, first.count)


def refuse_mixing(*, mixup: float, cutmix: float) -> None:
    """Raise `ConfigError` for a value that is not 0 or a positive, finite Beta parameter."""
    for name, value in (("mixup", mixup), ("cutmix", cutmix)):
        if not 0 <= value < float("inf"):
            raise out_of_range(
                name,
                value,
                "0 (off) or a positive number, such as 0.2 (few images are mixed half and half)",
            )


def _stretch(length: int, fraction: float) -> tuple[int, int]:
    """Return the start and end of this fraction of a side, around a random middle."""
    middle = random.randrange(length)
    half = length * fraction / 2
    return max(0, round(middle - half)), min(length, round(middle + half))
