"""What panels are made of: losses on text, sentences by their score, confusion and pictures; 2
seconds.
"""

from __future__ import annotations

import base64
import io
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import surefoot as sf
from refused import refused

BPE = sf.tokenizers.BPETokenizer.train(
    ["the cät sat on 日本 mats, the cät ran 🐈 off"] * 9, vocab_size=300
)
BYTES = sf.tokenizers.ByteTokenizer()
TOKENIZERS: list[Any] = [BYTES, BPE]


def heatmap(
    tokens: list[int], losses: list[float], tokenizer: Any = BYTES
) -> sf.report.TextHeatmap:
    return sf.report.TextHeatmap.from_losses("", tokens, losses, tokenizer=tokenizer)


@given(
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1),
    st.sampled_from(TOKENIZERS),
)
def test_the_pieces_put_together_are_the_text_and_the_losses_are_all_there(
    text: str, tokenizer: Any
) -> None:
    tokens = tokenizer.encode(text).tolist()
    losses = [1.0] * (len(tokens) - 1)
    panel = heatmap(tokens, losses, tokenizer)
    assert panel.text == text
    first_text, _ = panel.pieces[0]
    assert first_text != ""
    values = [value for _, value in panel.pieces if value is not None]
    assert sum(values) == pytest.approx(sum(losses))


@given(st.lists(st.integers(0, 256), min_size=1, max_size=40))
def test_any_bytes_and_ends_give_the_text_that_decoding_gives(tokens: list[int]) -> None:
    panel = heatmap(tokens, [1.0] * (len(tokens) - 1))
    assert panel.text == BYTES.decode(tokens)


def test_a_character_of_three_bytes_is_one_piece_with_the_sum_of_its_losses() -> None:
    panel = heatmap(BYTES.encode("a日b").tolist(), [0.5, 0.25, 0.125, 4.0])
    assert panel.pieces == (("a", None), ("日", 0.875), ("b", 4.0))


def test_the_end_of_a_document_has_no_text_and_its_loss_counts_for_none() -> None:
    panel = heatmap([97, 256, 98], [9.0, 1.0])
    assert panel.pieces == (("a", None), ("b", 1.0))


def test_a_loss_that_is_no_number_has_none_and_a_negative_zero_is_zero() -> None:
    panel = heatmap([97, 98, 99], [math.nan, -0.0])
    assert panel.pieces == (("a", None), ("b", None), ("c", 0.0))


def test_losses_of_another_number_are_refused() -> None:
    with refused("panel-losses-not-of-tokens", tokens=2, losses=2):
        heatmap([97, 98], [1.0, 2.0])


def sentences_scored(scores: list[float]) -> list[tuple[str, str, str, float]]:
    return [(str(place), "", "", score) for place, score in enumerate(scores)]


def scores_of(panel: sf.report.Examples, group: str) -> list[float]:
    return [float(example.score or 0) for example in panel.examples if example.group == group]


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 6))
def test_the_best_are_the_best_and_the_worst_the_worst_and_none_is_shown_twice(
    scores: list[float], each: int
) -> None:
    panel = sf.report.Examples.best_and_worst("", "", sentences_scored(scores), each=each)

    sources = [example.source for example in panel.examples]
    assert len(set(sources)) == len(sources) == min(len(scores), 3 * each)
    best = scores_of(panel, "best")
    worst = scores_of(panel, "worst")
    assert best == sorted(scores, reverse=True)[: len(best)]
    assert worst == sorted(scores)[: len(worst)]
    for score in scores_of(panel, "random"):
        assert max(worst) <= score <= min(best)


def test_the_random_ones_are_the_same_each_time() -> None:
    sentences = sentences_scored([float(score) for score in range(30)])
    panel = sf.report.Examples.best_and_worst("", "", sentences)
    assert sf.report.Examples.best_and_worst("", "", sentences) == panel


def test_of_many_classes_those_with_most_mistakes_are_shown_and_nothing_is_lost() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (50, 50)) + 100 * np.eye(50, dtype=int)
    counts[7, 9] = 1000
    classes = [f"class {place}" for place in range(50)]

    panel = sf.report.ConfusionMatrix.from_counts("", counts.tolist(), classes=classes)

    assert len(panel.classes) == 30
    assert panel.classes[-1] == "21 others"
    row = panel.classes.index("class 7")
    column = panel.classes.index("class 9")
    assert panel.counts[row][column] == 1000
    assert np.sum(panel.counts) == counts.sum()


def test_a_matrix_for_other_classes_is_refused() -> None:
    with refused("panel-counts-not-of-classes", classes=2, columns=[1]):
        sf.report.ConfusionMatrix.from_counts("", [[1]], classes=("a", "b"))


def open_png(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_comes_back_as_it_was_before_it_was_normalized(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(2, 8, 8, channels), dtype=np.uint8)
    moments: dict[str, Any] = {
        "mean": (0.3, 0.5, 0.7)[:channels],
        "std": (0.2, 0.25, 0.3)[:channels],
    }
    image, _ = sf.data.ImageArrays(pixels, np.zeros(2), **moments)[1]
    with open_png(sf.report.encode_png(image, **moments)) as picture:
        assert np.array_equal(np.asarray(picture).reshape(8, 8, channels), pixels[1])


def test_a_large_picture_is_made_small() -> None:
    with open_png(sf.report.encode_png(torch.rand(3, 100, 300))) as picture:
        assert picture.size == (56, 19)


class ScaledPixels(nn.Module):
    """Logits that are in the image."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :4] * self.scale


def random_pictures(samples: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 1, 2, 4, generator=generator)
    labels = torch.randint(4, (samples,), generator=generator)
    return images, labels


def classify(
    images: torch.Tensor, labels: torch.Tensor, *, grid_size: int
) -> tuple[sf.report.ConfusionMatrix, sf.report.ImageGrid]:
    confusion, grid = sf.report.classification_panels(
        ScaledPixels(), (images, labels), classes="abcd", images=grid_size
    )
    assert isinstance(confusion, sf.report.ConfusionMatrix)
    assert isinstance(grid, sf.report.ImageGrid)
    return confusion, grid


@torch.no_grad()
def test_confusion_is_that_of_the_metric() -> None:
    images, labels = random_pictures()
    confusion, _ = classify(images, labels, grid_size=7)
    report = sf.metrics.ClassificationReport("abcd")
    metrics = report.whole(*report.per_batch(ScaledPixels()(images), labels))
    assert [list(row) for row in confusion.counts] == metrics["confusion"]


@torch.no_grad()
def test_the_images_of_the_grid_are_those_with_the_largest_losses() -> None:
    images, labels = random_pictures()
    logits = images.flatten(1)[:, :4]
    losses = F.cross_entropy(logits, labels, reduction="none")
    probabilities = logits.softmax(dim=1)

    _, grid = classify(images, labels, grid_size=7)

    worst = losses.argsort(descending=True)[:7].tolist()
    for shown, place in zip(grid.images, worst, strict=True):
        label = int(labels[place])
        guess = int(logits[place].argmax())
        assert shown.loss == pytest.approx(float(losses[place]))
        assert shown.label == "abcd"[label]
        assert shown.guess == "abcd"[guess]
        assert shown.probability == pytest.approx(float(probabilities[place, guess]))
        assert shown.label_probability == pytest.approx(float(probabilities[place, label]))
        assert shown.png == sf.report.encode_png(images[place])


@torch.no_grad()
def test_a_logit_that_is_no_number_is_the_worst_and_is_shown_without_one() -> None:
    images, labels = random_pictures(10)
    images[3] = math.nan
    _, wrong = classify(images, labels, grid_size=2)
    assert wrong.images[0].loss is None
    assert wrong.images[1].loss is not None


@torch.no_grad()
def test_inputs_that_are_no_pictures_have_a_matrix_alone() -> None:
    (only,) = sf.report.classification_panels(
        nn.Identity(), (torch.eye(3), torch.arange(3)), classes="abc", images=0
    )
    assert isinstance(only, sf.report.ConfusionMatrix)
    assert only.counts == ((1, 0, 0), (0, 1, 0), (0, 0, 1))


@torch.no_grad()
def test_of_a_large_data_set_samples_from_everywhere_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.tracking.task_panels._SAMPLES", 50)
    labels = torch.arange(400) // 100  # sorted, as files of class folders are
    data = F.one_hot(labels, 4).float(), labels
    (only,) = sf.report.classification_panels(nn.Identity(), data, classes="abcd", images=0)
    assert isinstance(only, sf.report.ConfusionMatrix)
    samples_of_classes = [sum(row) for row in only.counts]
    assert sum(samples_of_classes) == 50
    for samples, following in pairwise(samples_of_classes):
        assert abs(samples - following) <= 1
    assert only.title.endswith("50 of 400 samples")
