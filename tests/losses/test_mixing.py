"""Mixup and cutmix: what images and targets hold of two samples, and of what the draws are a
function; 2 seconds.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import surefoot as sf
from refused import refused
from surefoot.losses.mixing import MixedBatch, mixup, mixup_cross_entropy


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Image n is all n."""
    labels = torch.arange(size)
    images = labels.float().view(-1, 1, 1, 1).expand(-1, 2, 10, 12).clone()
    return images, labels


@pytest.mark.parametrize(
    "settings", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}]
)
def test_an_image_holds_of_both_samples_what_the_share_says(settings: dict[str, float]) -> None:
    """The mean of an image that is all n, in part all m, is share x n + (1 - share) x m."""
    shares = set()
    for seed in range(40):
        random.seed(seed)
        images, labels = batch()

        mixture = mixup(images, labels, **settings)

        means = mixture.images.mean(dim=(1, 2, 3))
        expected = mixture.share * mixture.labels + (1 - mixture.share) * mixture.others
        assert_close(means, expected.float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(labels, mixture.labels)
        assert sorted(mixture.others.tolist()) == labels.tolist()
        assert mixture.share == 1 or (mixture.others != labels).all()
        shares.add(mixture.share)
    assert len(shares) > 20
    assert min(shares) >= 0


def test_cutmix_puts_in_a_rectangle() -> None:
    random.seed(3)
    images, labels = batch()

    mixture = mixup(images, labels, cutmix=1.0)

    changed = (mixture.images != images)[0, 0]
    rows = changed.any(dim=1).nonzero().flatten()
    columns = changed.any(dim=0).nonzero().flatten()
    assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    assert int(changed.sum()) == len(rows) * len(columns) == round((1 - mixture.share) * 120)


def test_mixup_changes_all_of_an_image() -> None:
    random.seed(3)
    images, labels = batch()

    mixture = mixup(images, labels, mixup=1.0)

    assert (mixture.images != images)[1].all()


def test_with_both_each_has_its_turn_half_of_the_time() -> None:
    random.seed(0)
    images, labels = batch()
    cuts = 0
    for _ in range(400):
        mixture = mixup(images, labels, mixup=1.0, cutmix=1.0)
        cuts += len(mixture.images[0].unique()) == 2

    assert 150 < cuts < 250


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_against_the_mixed_distribution(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=generator)
    labels = torch.arange(5) % 4
    others = torch.arange(1, 6) % 4
    mixture = MixedBatch(torch.zeros(5, 1, 1, 1), labels, others, 0.3)
    targets = 0.3 * F.one_hot(labels, 4) + 0.7 * F.one_hot(others, 4)

    mean = mixup_cross_entropy(logits, mixture, label_smoothing=smoothing)

    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert_close(torch.as_tensor(mean.value), expected)
    assert int(mean.count) == 5


@pytest.mark.parametrize(("size", "settings"), [(1, {"mixup": 1.0}), (6, {})])
def test_one_sample_alone_and_no_mixing_leave_images_as_they_are(
    size: int, settings: dict[str, float]
) -> None:
    images, labels = batch(size)

    mixture = mixup(images, labels, **settings)

    assert torch.equal(mixture.images, images)
    assert mixture.share == 1.0


def test_what_is_drawn_is_a_function_of_seed_step_and_micro_batch() -> None:
    """Steps made with other logging draw the same, and each micro-batch by itself."""

    def draw_shares(log_every: str) -> list[float]:
        shares: list[float] = []

        def loss(model: Any, batch: Any) -> Any:
            mixture = sf.losses.mixup(*batch, mixup=0.5, cutmix=0.5)
            shares.append(mixture.share)
            return sf.losses.mixup_cross_entropy(model(mixture.images), mixture)

        sf.Run(
            model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(240, 12)),
            loss=loss,
            train_data=batch(12),
            batch_size=12,
            micro_batch_size=4,
            length="3 steps",
            optimizer=sf.optim.sgd(0.1),
            precision="fp32",
            log_every=log_every,
            device="cpu",
            console=False,
        ).train()
        return shares

    shares = draw_shares("1 steps")

    assert len(set(shares)) == 9
    assert draw_shares("3 steps") == shares


@pytest.mark.parametrize(
    ("setting", "value"), [("mixup", -0.1), ("cutmix", float("inf")), ("mixup", float("nan"))]
)
def test_what_is_no_parameter_is_refused(setting: str, value: float) -> None:
    with refused("setting-out-of-range", setting=setting):
        mixup(*batch(), **{setting: value})
