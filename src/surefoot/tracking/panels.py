"""Report panels as plain data; `tracking/task_panels.py` computes the panels of a model."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal, Self

import numpy as np

from surefoot.errors import ConfigError
from surefoot.tokenizers.tokenizer import Tokenizer
from surefoot.tracking.panel_checks import (
    check_number,
    check_png,
    check_size,
    check_texts,
    is_count,
    wrong_type,
    wrong_value,
)

_MOST_CLASSES = 100
_ALL_CLASSES = 30  # classes of a confusion matrix


Group = Literal["best", "worst", "random"]


@dataclass(frozen=True, kw_only=True)
class TextHeatmap:
    """A text in pieces, each tinted by its value.

    unit: "nats" for losses (0 or more), or "fraction" for values from 0 to 1. A piece with the
    value None is not tinted.

    >>> TextHeatmap(
    ...     title="val", legend="loss", unit="nats", pieces=(("def", None), (" f", 0.7))
    ... ).text
    'def f'
    """

    kind: ClassVar[str] = "text-heatmap"
    title: str
    legend: str
    unit: Literal["nats", "fraction"]
    pieces: tuple[tuple[str, float | None], ...]

    def __post_init__(self) -> None:
        check_texts(self.title, self.legend, *(text for text, _ in self.pieces))
        if self.unit not in ("nats", "fraction"):
            raise wrong_value("unit", self.unit, "'nats' or 'fraction'")
        check_size(len(self.pieces), "pieces")
        max_value = math.inf if self.unit == "nats" else 1.0
        for text, value in self.pieces:
            check_number(value, f"the value of {text!r}", min_value=0.0, max_value=max_value)

    @classmethod
    def from_losses(
        cls,
        title: str,
        tokens: Sequence[int],
        losses: Sequence[float],
        *,
        tokenizer: Tokenizer,
        legend: str | None = None,
    ) -> Self:
        """Tint the text of `tokens` by each token's loss in nats; `losses` omits the first token,
        which has no loss.

        A piece is one token, or all tokens of one character with the sum of their losses. The
        end-of-document token has no text, and its loss is omitted.

        >>> from surefoot.tokenizers import ByteTokenizer
        >>> TextHeatmap.from_losses(
        ...     "", [104, 195, 169], [1.0, 0.5], tokenizer=ByteTokenizer()
        ... ).pieces
        (('h', None), ('é', 1.5))
        """
        if len(losses) != len(tokens) - 1:
            raise ConfigError(
                "panel-losses-not-of-tokens",
                problem=f"a panel cannot be shown: {len(tokens)} tokens have {len(losses)} losses",
                remedy="give one loss fewer than tokens; the first token has none",
                tokens=len(tokens),
                losses=len(losses),
            )
        text = tokenizer.decode(tokens)
        pieces: list[tuple[str, float | None]] = []
        done = 0  # characters in pieces
        total = 0.0  # loss of the characters after them
        for index, loss in enumerate([None, *losses]):
            if tokens[index] == tokenizer.eos_id:
                continue
            if loss is not None:
                total += max(loss, 0.0)  # in this order `max` propagates NaN
            decoded = tokenizer.decode(tokens[: index + 1])
            ends_at_character = text.startswith(decoded)
            if len(decoded) > done and ends_at_character:
                has_loss = index > 0 and math.isfinite(total)
                pieces.append((decoded[done:], total if has_loss else None))
                done = len(decoded)
                total = 0.0
        if done < len(text):
            pieces.append((text[done:], None))
        if legend is None:
            legend = "the model's loss at each token, in nats"
        return cls(title=title, legend=legend, unit="nats", pieces=tuple(pieces))

    @property
    def text(self) -> str:
        """The joined text of all pieces."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model's output for one source and its reference. `group` is "best", "worst" or "random".

    >>> worst = Example(source="one", reference="eins", output="ein", score=0.5, group="worst")
    >>> Examples(title="val", legend="chrF", examples=(worst,)).examples[0].output
    'ein'
    """

    source: str
    reference: str
    output: str
    score: float | None
    group: Group


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Examples side by side; `legend` describes the score."""

    kind: ClassVar[str] = "examples"
    title: str
    legend: str
    examples: tuple[Example, ...]

    def __post_init__(self) -> None:
        check_texts(self.title, self.legend)
        check_size(len(self.examples), "examples")
        for one in self.examples:
            if not isinstance(one, Example):
                raise wrong_type("an example", one, "a sf.report.Example")
            check_texts(one.source, one.reference, one.output)
            check_number(one.score, "a score")
            if one.group not in ("best", "worst", "random"):
                raise wrong_value("group", one.group, "'best', 'worst' or 'random'")

    @classmethod
    def best_and_worst(
        cls,
        title: str,
        legend: str,
        scored: Sequence[tuple[str, str, str, float]],
        *,
        each: int = 5,
    ) -> Self:
        """Select `each` best, `each` worst and `each` random rows (source, reference, output,
        score), without repetition.

        >>> scored = [("a", "A", "A", 100.0), ("b", "B", "C", 0.0), ("c", "C", "C", 90.0)]
        >>> [
        ...     (one.source, one.group)
        ...     for one in Examples.best_and_worst("", "", scored, each=1).examples
        ... ]
        [('a', 'best'), ('b', 'worst'), ('c', 'random')]
        """
        best_first = sorted(range(len(scored)), key=lambda index: -scored[index][3])
        others = best_first[each:]
        between = sorted(others[: max(0, len(others) - each)])
        groups: dict[Group, list[int]] = {
            "best": best_first[:each],
            "worst": others[::-1][:each],
            "random": random.Random(0).sample(between, min(each, len(between))),
        }
        examples = []
        for group, indices in groups.items():
            for index in indices:
                source, reference, output, score = scored[index]
                example = Example(
                    source=source, reference=reference, output=output, score=score, group=group
                )
                examples.append(example)
        return cls(title=title, legend=legend, examples=tuple(examples))


@dataclass(frozen=True, kw_only=True)
class Curves:
    """User-defined values over steps, {name: ((step, value), ...)}.

    >>> heads = Curves(
    ...     title="temperature", legend="of the softmax", curves={"head": ((1, 1.0), (100, 0.7))}
    ... )
    >>> heads.kind, heads.curves["head"][-1]
    ('curves', (100, 0.7))
    """

    kind: ClassVar[str] = "curves"
    title: str
    legend: str
    curves: Mapping[str, tuple[tuple[int, float | None], ...]]

    def __post_init__(self) -> None:
        check_texts(self.title, self.legend, *self.curves)
        points = list(chain.from_iterable(self.curves.values()))
        check_size(len(points), "points")
        for step, value in points:
            if not is_count(step):
                raise wrong_value("a point's step", step, "an integer, 0 or more")
            check_number(value, "a point's value")


def _check_square(counts: Sequence[Sequence[int]], classes: int) -> None:
    """Raise `ConfigError` unless there is one row and one column of counts for each class."""
    columns = [len(row) for row in counts]
    if columns != [classes] * classes:
        raise ConfigError(
            "panel-counts-not-of-classes",
            problem=f"a panel cannot be shown: counts of {len(columns)} rows, for {classes} classes",
            remedy="give one row and one column of counts for each class",
            classes=classes,
            columns=columns,
        )


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """The number of samples per true class (row) and predicted class (column)."""

    kind: ClassVar[str] = "confusion-matrix"
    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_texts(self.title, *self.classes)
        check_size(len(self.classes), "classes", most=_MOST_CLASSES)
        _check_square(self.counts, len(self.classes))
        for row in self.counts:
            for count in row:
                if not is_count(count):
                    raise wrong_value("a count", count, "an integer, 0 or more")

    @classmethod
    def from_counts(
        cls, title: str, counts: Sequence[Sequence[int]], *, classes: Sequence[str]
    ) -> Self:
        """Build the panel from counts; above 30 classes, keep the 29 with the most errors and merge
        the others into one class.

        >>> ConfusionMatrix.from_counts("val", [[3, 1], [0, 4]], classes=("cat", "dog")).counts
        ((3, 1), (0, 4))
        """
        _check_square(counts, len(classes))
        counts_KK = np.asarray(counts, dtype=np.int64)
        names = list(classes)
        if len(names) > _ALL_CLASSES:
            mistakes_K = counts_KK.sum(axis=0) + counts_KK.sum(axis=1) - 2 * counts_KK.diagonal()
            most_mistakes = np.argsort(-mistakes_K, kind="stable")[: _ALL_CLASSES - 1]
            kept = np.sort(most_mistakes)
            row_K = np.full(len(names), len(kept))  # of the others
            row_K[kept] = np.arange(len(kept))
            merged_KK = np.zeros((_ALL_CLASSES, _ALL_CLASSES), dtype=np.int64)
            np.add.at(merged_KK, (row_K[:, None], row_K[None, :]), counts_KK)
            counts_KK = merged_KK
            names = [*(names[index] for index in kept), f"{len(names) - len(kept)} others"]
        return cls(title=title, classes=tuple(names), counts=tuple(map(tuple, counts_KK.tolist())))


@dataclass(frozen=True, kw_only=True)
class Image:
    """A small image (a PNG file as base64) with its true class, predicted class and loss.

    >>> missed = Image(png="iVBORw0KGgo=", label="cat", guess="dog", loss=2.3)
    >>> f"{missed.guess} instead of {missed.label}, loss {missed.loss}"
    'dog instead of cat, loss 2.3'
    """

    png: str
    caption: str = ""
    label: str | None = None
    guess: str | None = None
    probability: float | None = None  # of the predicted class
    label_probability: float | None = None  # of the true class
    loss: float | None = None  # in nats


@dataclass(frozen=True, kw_only=True)
class ImageGrid:
    """A grid of images.

    >>> grid = ImageGrid(
    ...     title="the largest losses",
    ...     images=(Image(png="iVBORw0KGgoAAAANSUhEUgAAAAgAAAAI", label="cat"),),
    ... )
    >>> grid.kind, [image.label for image in grid.images]
    ('image-grid', ['cat'])
    """

    kind: ClassVar[str] = "image-grid"
    title: str
    images: tuple[Image, ...]

    def __post_init__(self) -> None:
        check_texts(self.title)
        check_size(len(self.images), "images")
        for one in self.images:
            if not isinstance(one, Image):
                raise wrong_type("an image", one, "a sf.report.Image")
            check_png(one.png)
            check_texts(one.caption, *(name for name in (one.label, one.guess) if name is not None))
            check_number(one.loss, "the loss of an image", min_value=0.0)
            for chance in (one.probability, one.label_probability):
                check_number(chance, "a probability", min_value=0.0, max_value=1.0)


Panel = TextHeatmap | Examples | Curves | ConfusionMatrix | ImageGrid
