"""Panels (`tracking/panels.py`) of model outputs: text tinted by loss, examples by score, a confusion matrix, images.

Shapes: B batch, K classes, C channels, H height, W width.
"""

import base64
import io
import math
import random
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
from surefoot.tokenizers.tokenizer import Tokenizer
from surefoot.tracking.panels import ConfusionMatrix, Example, Examples, Group, Image, ImageGrid, Panel, TextHeatmap

_ALL_CLASSES = 30  # of more, those with the most mistakes are shown
_SIDE = 56  # pixels, of the larger side of a picture: sixteen of them fit a page
_SAMPLES = 10_000  # are looked at, spread over a data set that has more
_LONGEST_S = 30.0
_AT_ONCE = 64


def tinted_by_loss(
    title: str, tokens: Sequence[int], losses: Sequence[float], *, tokenizer: Tokenizer, legend: str | None = None
) -> TextHeatmap:
    """The text of `tokens`, each tinted by the model's loss (nats); there is one loss less, because the first token has none.

    A piece is one token, or the tokens of one character that is spread over several, with the sum of their losses. The joined
    pieces equal the decoded tokens. The end of a document has no text, and its loss is left out.

    >>> from surefoot.tokenizers.tokenizer import ByteTokenizer
    >>> tinted_by_loss("", [104, 195, 169], [1.0, 0.5], tokenizer=ByteTokenizer()).pieces
    (('h', None), ('é', 1.5))
    """
    if len(losses) != len(tokens) - 1:
        raise ConfigError(f"tinted_by_loss: {len(tokens)} tokens and {len(losses)} losses: one less than tokens")
    whole = tokenizer.decode(tokens)
    pieces: list[tuple[str, float | None]] = []
    done, held = 0, 0.0
    for place, loss in enumerate([None, *losses]):
        if tokens[place] == tokenizer.end:
            continue
        held += 0.0 if loss is None else max(loss, 0.0)  # in this order, which lets pass what is not a number
        text = tokenizer.decode(tokens[: place + 1])
        if len(text) > done and whole.startswith(text):  # no character is begun and not ended
            pieces.append((text[done:], held if place and math.isfinite(held) else None))
            done, held = len(text), 0.0
    if done < len(whole):
        pieces.append((whole[done:], None))
    legend = "the model's loss at each token, in nats" if legend is None else legend
    return TextHeatmap(title=title, legend=legend, unit="nats", pieces=tuple(pieces))


def examples_by_score(
    title: str, legend: str, said: Sequence[tuple[str, str, str, float]], *, each: int = 5
) -> Examples:
    """The best, the worst and some random ones of (source, reference, output, score): `each` per group, without repetition.

    >>> said = [("a", "A", "A", 100.0), ("b", "B", "C", 0.0), ("c", "C", "C", 90.0)]
    >>> [(one.source, one.group) for one in examples_by_score("", "", said, each=1).examples]
    [('a', 'best'), ('b', 'worst'), ('c', 'random')]
    """
    order = sorted(range(len(said)), key=lambda place: -said[place][3])
    best, rest = order[:each], order[each:]
    worst, rest = rest[::-1][:each], rest[: max(0, len(rest) - each)]
    drawn = random.Random(0).sample(sorted(rest), min(each, len(rest)))
    groups: list[tuple[Group, list[int]]] = [("best", best), ("worst", worst), ("random", drawn)]
    examples = [
        Example(source=source, reference=reference, output=output, score=score, group=group)
        for group, places in groups
        for source, reference, output, score in (said[place] for place in places)
    ]
    return Examples(title=title, legend=legend, examples=tuple(examples))


def confusion_panel(title: str, confusion: Sequence[Sequence[int]], *, classes: Sequence[str]) -> ConfusionMatrix:
    """A confusion matrix (row: true class, column: prediction). With many classes, those with fewest mistakes share one row.

    >>> confusion_panel("val", [[3, 1], [0, 4]], classes=("cat", "dog")).counts
    ((3, 1), (0, 4))
    """
    counts_KK = np.asarray(confusion, dtype=np.int64)
    if counts_KK.shape != (len(classes), len(classes)):
        raise ConfigError(f"confusion_panel: a matrix of shape {counts_KK.shape} for {len(classes)} classes")
    names = list(classes)
    if len(classes) > _ALL_CLASSES:
        mistakes_K = counts_KK.sum(axis=0) + counts_KK.sum(axis=1) - 2 * counts_KK.diagonal()
        shown = np.sort(np.argsort(-mistakes_K, kind="stable")[: _ALL_CLASSES - 1])
        place_K = np.full(len(classes), len(shown))
        place_K[shown] = np.arange(len(shown))
        summed = np.zeros((_ALL_CLASSES, _ALL_CLASSES), dtype=np.int64)
        np.add.at(summed, (place_K[:, None], place_K[None, :]), counts_KK)
        counts_KK, names = summed, [*(names[place] for place in shown), f"{len(classes) - len(shown)} others"]
    return ConfusionMatrix(title=title, classes=tuple(names), counts=tuple(map(tuple, counts_KK.tolist())))


def encode_png(image_CHW: Tensor, *, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)) -> str:
    """An image of 1 or 3 channels as a small PNG in base64; `mean` and `std` undo its normalization, if it is not in 0..1.

    >>> encode_png(torch.zeros(1, 8, 8))[:8]
    'iVBORw0K'
    """
    return base64.b64encode(png_file(image_CHW, mean=mean, std=std, side=_SIDE)).decode()


def png_file(image_CHW: Tensor, *, mean: Sequence[float], std: Sequence[float], side: int | None = None) -> bytes:
    """The bytes of a PNG file of the image, with no side longer than `side` pixels (None: not resized).

    >>> png_file(torch.zeros(1, 8, 8), mean=(0.0,), std=(1.0,))[1:4]
    b'PNG'
    """
    from PIL.Image import fromarray

    if image_CHW.ndim != 3 or image_CHW.shape[0] not in (1, 3):
        raise ConfigError(f"an image of shape {tuple(image_CHW.shape)}: (C, H, W) of 1 or 3 channels can be shown")
    pixels_CHW = image_CHW.detach().float().cpu() * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
    bytes_HWC = (pixels_CHW.nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = fromarray(bytes_HWC[:, :, 0] if bytes_HWC.shape[2] == 1 else np.ascontiguousarray(bytes_HWC))
    if side is not None:
        picture.thumbnail((side, side))  # which makes none larger
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
    max_images: int = 16,
) -> Iterator[Panel]:
    """The confusion matrix of a data set of (image, label), and the images with the largest losses.

    As `Run(panels_fn=...)`: `lambda model: sf.report.classification_panels(model, held_out, classes=names)`. `mean` and `std` are
    those of the images' normalization. A large data set is read in 10,000 spread samples, for at most 30 s.
    max_images: their number; 0 if the inputs are not images.

    >>> data = torch.eye(3).view(3, 1, 1, 3), torch.tensor([0, 1, 0])
    >>> confusion, wrong = classification_panels(nn.Flatten(), data, classes=("a", "b", "c"))
    >>> confusion.counts, wrong.images[0].label, wrong.images[0].guess
    (((1, 0, 1), (0, 1, 0), (0, 0, 0)), 'a', 'c')
    """
    counts_KK = np.zeros((len(classes), len(classes)), dtype=np.int64)
    worst: list[tuple[float, int, int, float, Tensor]] = []
    total, seen, begun = sample_count(dataset), 0, perf_counter()
    for inputs, labels_B in _spread(dataset, total, device=next(iter(model.parameters()), torch.empty(0)).device):
        log_chances_BK = F.log_softmax(model(inputs).float(), dim=1)
        # NaN is infinite: none is worse
        losses_B = F.nll_loss(log_chances_BK, labels_B, reduction="none").nan_to_num(math.inf, math.inf)
        chances_B, guesses_B = log_chances_BK.max(dim=1)
        labels, guesses = labels_B.tolist(), guesses_B.tolist()
        np.add.at(counts_KK, (labels, guesses), 1)
        worst += zip(losses_B.tolist(), labels, guesses, chances_B.tolist(), inputs, strict=True)
        worst = sorted(worst, key=lambda wrong: -wrong[0])[:max_images]
        seen += len(labels_B)
        if perf_counter() - begun > _LONGEST_S:
            break
    part = "" if seen == total else f", {seen:,} of {total:,} samples"
    yield confusion_panel(f"{name}: which class was taken for which{part}", counts_KK.tolist(), classes=classes)
    if max_images:
        drawn = [
            _picture(classes[label], classes[guess], loss, log_chance, encode_png(image, mean=mean, std=std))
            for loss, label, guess, log_chance, image in worst
        ]
        yield ImageGrid(title=f"{name}: the largest losses{part}", images=tuple(drawn))


def _picture(label: str, guess: str, loss: float, log_chance: float, png: str) -> Image:
    """One image with the model's prediction; `log_chance` is the log probability of its guess."""
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
    """Batches of samples from everywhere in a data set, shuffled, so that a reader who stops early has seen all kinds."""
    ids = np.unique(np.linspace(0, total - 1, min(total, _SAMPLES)).round().astype(np.int64))
    mixed = np.random.default_rng(0).permutation(ids)
    some = tuple(part[mixed] for part in dataset) if is_tensors(dataset) else Subset(dataset, mixed.tolist())
    for batch in in_order(some, batch_size=_AT_ONCE, seed=0, device=device):
        yield batch.batch[0], batch.batch[1]
