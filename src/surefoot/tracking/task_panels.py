"""Panels (`tracking/panels.py`) of model outputs: text tinted by loss, examples by score, a
confusion matrix, images.

Shapes: B batch, K classes, C channels, H height, W width.
"""

import base64
import io
import math
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from surefoot.data.gathering import is_tensors, sample_count
from surefoot.data.loader import in_order
from surefoot.errors import ConfigError
from surefoot.tracking.panels import ConfusionMatrix, Image, ImageGrid, Panel

_ALL_CLASSES = 30  # maximum classes; the classes with the most errors are shown
_SIDE = 56  # pixels of the larger side; sixteen images fit a page
_SAMPLES = 10_000  # maximum samples, evenly spaced in the data set
_LONGEST_S = 30.0
_AT_ONCE = 64


def encode_png(
    image_CHW: Tensor, *, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> str:
    """Encode an image of 1 or 3 channels as a small base64 PNG. `mean` and `std` undo the image's
    normalization, to values in 0..1.

    >>> encode_png(torch.zeros(1, 8, 8))[:8]
    'iVBORw0K'
    """
    return base64.b64encode(png_file(image_CHW, mean=mean, std=std, side=_SIDE)).decode()


def png_file(
    image_CHW: Tensor, *, mean: Sequence[float], std: Sequence[float], side: int | None = None
) -> bytes:
    """Return an image as a PNG file with sides of at most `side` pixels (None: original size).

    >>> png_file(torch.zeros(1, 8, 8), mean=(0.0,), std=(1.0,))[1:4]
    b'PNG'
    """
    from PIL.Image import fromarray

    if image_CHW.ndim != 3 or image_CHW.shape[0] not in (1, 3):
        raise ConfigError(
            "image-shape",
            problem=f"an image of shape {tuple(image_CHW.shape)} is not (C, H, W) with 1 or 3"
            " channels",
            value=tuple(image_CHW.shape),
        )
    std_C11 = torch.tensor(std).view(-1, 1, 1)
    mean_C11 = torch.tensor(mean).view(-1, 1, 1)
    pixels_CHW = image_CHW.detach().float().cpu() * std_C11 + mean_C11
    scaled_CHW = pixels_CHW.nan_to_num(0.0).clamp(0, 1) * 255
    bytes_HWC = scaled_CHW.round().to(torch.uint8).permute(1, 2, 0).numpy()
    is_gray = bytes_HWC.shape[2] == 1
    picture = fromarray(bytes_HWC[:, :, 0] if is_gray else np.ascontiguousarray(bytes_HWC))
    if side is not None:
        picture.thumbnail((side, side))  # `thumbnail` never enlarges
    file = io.BytesIO()
    picture.save(file, "png", optimize=True)
    return file.getvalue()


def classification_panels(
    model: nn.Module,
    dataset: Any,
    *,
    classes: Sequence[str],
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    name: str = "val",
    images: int = 16,
) -> Iterator[Panel]:
    """Yield the confusion matrix of a data set of (image, label), and the images with the largest
    losses.

    Use `Run(panels_fn=lambda model: sf.report.classification_panels(model, held_out,
    classes=names))` for the report. `mean` and `std` are the values of the images' normalization.
    At most 10,000 evenly spaced samples are read, for at most 30 s. images: the number of images to
    show; 0 if the inputs are not images.

    >>> data = torch.eye(3).view(3, 1, 1, 3), torch.tensor([0, 1, 0])
    >>> confusion, wrong = classification_panels(nn.Flatten(), data, classes=("a", "b", "c"))
    >>> confusion.counts, wrong.images[0].label, wrong.images[0].guess
    (((1, 0, 1), (0, 1, 0), (0, 0, 0)), 'a', 'c')
    """
    counts_KK = np.zeros((len(classes), len(classes)), dtype=np.int64)
    worst: list[tuple[float, int, int, float, Tensor]] = []
    total = sample_count(dataset)
    samples_read = 0
    start = perf_counter()
    device = next(iter(model.parameters()), torch.empty(0)).device
    for inputs, labels_B in _spread(dataset, total, device=device):
        log_chances_BK = F.log_softmax(model(inputs).float(), dim=1)
        losses_B = F.nll_loss(log_chances_BK, labels_B, reduction="none")
        losses = losses_B.nan_to_num(math.inf, math.inf).tolist()  # NaN is the worst loss
        chances_B, guesses_B = log_chances_BK.max(dim=1)
        labels = labels_B.tolist()
        guesses = guesses_B.tolist()
        np.add.at(counts_KK, (labels, guesses), 1)
        worst += zip(losses, labels, guesses, chances_B.tolist(), inputs, strict=True)
        worst = sorted(worst, key=lambda sample: -sample[0])[:images]
        samples_read += len(labels_B)
        if perf_counter() - start > _LONGEST_S:
            break
    part = "" if samples_read == total else f", {samples_read:,} of {total:,} samples"
    yield ConfusionMatrix.from_counts(
        f"{name}: confusion matrix{part}", counts_KK.tolist(), classes=classes
    )
    if images:
        pictures = []
        for loss, label, guess, log_chance, image in worst:
            png = encode_png(image, mean=mean, std=std)
            pictures.append(_picture(classes[label], classes[guess], loss, log_chance, png))
        title = f"{name}: images with the largest losses{part}"
        yield ImageGrid(title=title, images=tuple(pictures))


def _picture(label: str, guess: str, loss: float, log_chance: float, png: str) -> Image:
    finite = math.isfinite(loss)
    return Image(
        png=png,
        caption=f"{label}, predicted {guess}",
        label=label,
        guess=guess,
        probability=None if math.isnan(log_chance) else min(1.0, math.exp(log_chance)),
        label_probability=min(1.0, math.exp(-loss)) if finite else None,
        loss=max(0.0, loss) if finite else None,
    )


def _spread(dataset: Any, total: int, *, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    ids = np.unique(np.linspace(0, total - 1, min(total, _SAMPLES)).round().astype(np.int64))
    # mixed, so that early samples are representative if time runs out
    mixed = np.random.default_rng(0).permutation(ids)
    chosen: Any
    if is_tensors(dataset):
        chosen = tuple(part[mixed] for part in dataset)
    else:
        chosen = Subset(dataset, mixed.tolist())
    for batch in in_order(chosen, batch_size=_AT_ONCE, seed=0, device=device):
        yield batch.batch[0], batch.batch[1]
