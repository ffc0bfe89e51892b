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
TOKENIZERS: list[Any] = [sf.tokenizers.ByteTokenizer(), BPE]


def tinted(tokens: list[int], tokenizer: Any) -> sf.report.TextHeatmap:
    return sf.report.TextHeatmap.from_losses(
        "", tokens, [1.0] * (len(tokens) - 1), tokenizer=tokenizer
    )


@given(
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), min_size=1),
    st.sampled_from(TOKENIZERS),
)
def test_the_pieces_put_together_are_the_text_and_the_losses_are_all_there(
    text: str, tokenizer: Any
) -> None:
    tokens = tokenizer.encode(text).tolist()
    found = tinted(tokens, tokenizer)
    assert found.text == text
    of_first = len(next(iter(found.pieces))[0].encode())
    numbers = [value for _, value in found.pieces if value is not None]
    assert sum(numbers) == pytest.approx(len(tokens) - 1)
    assert of_first >= 1


@given(st.lists(st.integers(0, 256), min_size=1, max_size=40))
def test_any_bytes_and_ends_give_the_text_that_decoding_gives(tokens: list[int]) -> None:
    assert tinted(
        tokens, sf.tokenizers.ByteTokenizer()
    ).text == sf.tokenizers.ByteTokenizer().decode(tokens)


def test_a_character_of_three_bytes_is_one_piece_with_the_sum_of_its_losses() -> None:
    tokens = sf.tokenizers.ByteTokenizer().encode("a日b").tolist()
    found = sf.report.TextHeatmap.from_losses(
        "", tokens, [0.5, 0.25, 0.125, 4.0], tokenizer=sf.tokenizers.ByteTokenizer()
    )
    assert found.pieces == (("a", None), ("日", 0.875), ("b", 4.0))


def test_the_end_of_a_document_has_no_text_and_its_loss_counts_for_none() -> None:
    found = sf.report.TextHeatmap.from_losses(
        "", [97, 256, 98], [9.0, 1.0], tokenizer=sf.tokenizers.ByteTokenizer()
    )
    assert found.pieces == (("a", None), ("b", 1.0))


def test_a_loss_that_is_no_number_has_none_and_a_negative_zero_is_zero() -> None:
    found = sf.report.TextHeatmap.from_losses(
        "", [97, 98, 99], [float("nan"), -0.0], tokenizer=sf.tokenizers.ByteTokenizer()
    )
    assert found.pieces == (("a", None), ("b", None), ("c", 0.0))


def test_losses_of_another_number_are_refused() -> None:
    with refused("panel-losses-not-of-tokens", tokens=2, losses=2):
        sf.report.TextHeatmap.from_losses(
            "", [97, 98], [1.0, 2.0], tokenizer=sf.tokenizers.ByteTokenizer()
        )


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 6))
def test_the_best_are_the_best_and_the_worst_the_worst_and_none_is_shown_twice(
    scores: list[float], each: int
) -> None:
    said = [(str(place), "", "", score) for place, score in enumerate(scores)]
    shown = sf.report.Examples.best_and_worst("", "", said, each=each).examples
    assert len({one.source for one in shown}) == len(shown) == min(len(said), 3 * each)
    best, worst, drawn = (
        [float(one.score or 0) for one in shown if one.group == group]
        for group in ("best", "worst", "random")
    )
    assert best == sorted(scores, reverse=True)[: len(best)]
    assert worst == sorted(scores)[: len(worst)]
    assert all(max(worst) <= score <= min(best) for score in drawn)


def test_the_random_ones_are_the_same_each_time() -> None:
    said = [(str(place), "", "", float(place)) for place in range(30)]
    assert sf.report.Examples.best_and_worst("", "", said) == sf.report.Examples.best_and_worst(
        "", "", said
    )


def test_of_many_classes_those_with_most_mistakes_are_shown_and_nothing_is_lost() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (50, 50)) + 100 * np.eye(50, dtype=int)
    counts[7, 9] = 1000
    panel = sf.report.ConfusionMatrix.from_counts(
        "", counts.tolist(), classes=[f"class {place}" for place in range(50)]
    )
    assert len(panel.classes) == 30
    assert panel.classes[-1] == "21 others"
    assert panel.counts[panel.classes.index("class 7")][panel.classes.index("class 9")] == 1000
    assert np.sum(panel.counts) == counts.sum()


def test_a_matrix_for_other_classes_is_refused() -> None:
    with refused("panel-counts-not-of-classes", classes=2, columns=[1]):
        sf.report.ConfusionMatrix.from_counts("", [[1]], classes=("a", "b"))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_comes_back_as_it_was_before_it_was_normalised(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(2, 8, 8, channels), dtype=np.uint8)
    moments: dict[str, Any] = {
        "mean": (0.3, 0.5, 0.7)[:channels],
        "std": (0.2, 0.25, 0.3)[:channels],
    }
    image = sf.data.ImageArrays(pixels, np.zeros(2), **moments)[1][0]
    with Image.open(io.BytesIO(base64.b64decode(sf.report.encode_png(image, **moments)))) as read:
        assert np.array_equal(np.asarray(read).reshape(8, 8, channels), pixels[1])


def test_a_large_picture_is_made_small() -> None:
    with Image.open(
        io.BytesIO(base64.b64decode(sf.report.encode_png(torch.rand(3, 100, 300))))
    ) as read:
        assert (read.width, read.height) == (56, 19)


class Guessing(nn.Module):
    """Logits that are in the image."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :4] * self.scale


def pictures(samples: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 1, 2, 4, generator=generator), torch.randint(
        4, (samples,), generator=generator
    )


@torch.no_grad()
def test_confusion_and_losses_are_those_of_the_scores() -> None:
    images, labels = pictures()
    confusion, wrong = sf.report.classification_panels(
        Guessing(), (images, labels), classes="abcd", images=7
    )
    report = sf.metrics.ClassificationReport("abcd")
    metrics = report.whole(*report.per_batch(Guessing()(images), labels))
    assert isinstance(confusion, sf.report.ConfusionMatrix)
    assert isinstance(wrong, sf.report.ImageGrid)
    assert [list(row) for row in confusion.counts] == metrics["confusion"]
    logits = images.flatten(1)[:, :4]
    losses = F.cross_entropy(logits, labels, reduction="none")
    worst = losses.argsort(descending=True)[:7]
    assert [one.loss for one in wrong.images] == pytest.approx(losses[worst].tolist())
    assert [one.label for one in wrong.images] == [
        "abcd"[label] for label in labels[worst].tolist()
    ]
    assert [one.guess for one in wrong.images] == [
        "abcd"[guess] for guess in logits[worst].argmax(1).tolist()
    ]
    chances = logits[worst].softmax(dim=1)
    assert [one.probability for one in wrong.images] == pytest.approx(chances.amax(1).tolist())
    right = chances.gather(1, labels[worst, None])[:, 0]
    assert [one.label_probability for one in wrong.images] == pytest.approx(right.tolist())
    assert [one.png for one in wrong.images] == [
        sf.report.encode_png(images[place]) for place in worst.tolist()
    ]


@torch.no_grad()
def test_a_logit_that_is_no_number_is_the_worst_and_is_shown_without_one() -> None:
    images, labels = pictures(10)
    images[3] = math.nan
    _, wrong = sf.report.classification_panels(
        Guessing(), (images, labels), classes="abcd", images=2
    )
    assert isinstance(wrong, sf.report.ImageGrid)
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
    assert sum(map(sum, only.counts)) == 50
    assert all(abs(one - other) <= 1 for one, other in pairwise(sum(row) for row in only.counts))
    assert only.title.endswith("50 of 400 samples")
