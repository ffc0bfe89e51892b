"""The small convolutional network: any size of image, the first loss, memory formats, and batch
statistics; 3 seconds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import surefoot as sf
from surefoot.models.simple_cnn import SimpleCNN


def images(batch=6, channels=1, side=12):
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(0))


def network(**settings):
    torch.manual_seed(0)
    return SimpleCNN(**({"channels": 1, "classes": 5, "width": 4} | settings))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (8, 8), (28, 28), (33, 17)])
def test_images_of_any_size_have_logits(height, width):
    assert network(channels=3)(torch.randn(2, 3, height, width)).shape == (2, 5)


@pytest.mark.parametrize(("channels", "width", "classes"), [(1, 32, 10), (3, 8, 7)])
def test_parameters_are_three_blocks_of_two_convolutions_with_norms_and_a_head(
    channels, width, classes
):
    sizes = [channels, width, 2 * width, 4 * width]
    blocks = sum(9 * before * after + 9 * after**2 + 4 * after for before, after in pairwise(sizes))
    model = SimpleCNN(channels=channels, classes=classes, width=width)
    assert (
        sum(parameter.numel() for parameter in model.parameters())
        == blocks + (4 * width + 1) * classes
    )


def test_the_first_loss_is_that_of_equally_likely_classes():
    loss = F.cross_entropy(network()(images()), torch.arange(6) % 5)
    assert loss.item() == pytest.approx(math.log(5), abs=1e-6)


def test_each_block_halves_both_sides():
    seen = []
    model = network()
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape[1:])))
    model(images(side=28))
    assert seen == [(4, 14, 14), (8, 7, 7), (16, 4, 4)]


@pytest.mark.parametrize("channels", [1, 3])  # of one channel both layouts are one to torch
def test_channels_last_changes_the_layout_and_nothing_else(channels):
    plain = network(channels=channels)
    turned = network(channels=channels, channels_last=True)
    torch.nn.init.normal_(plain.head.weight, generator=torch.Generator().manual_seed(1))
    turned.load_state_dict(plain.state_dict())
    assert_close(
        turned(images(channels=channels)), plain(images(channels=channels)), rtol=1e-5, atol=1e-5
    )
    layouts = []
    for model in (plain, turned):
        model.blocks[0].register_forward_hook(
            lambda _, __, output: layouts.append(
                output.is_contiguous(memory_format=torch.channels_last)
            )
        )
        model(images(channels=channels))
    assert layouts == [False, True]


@pytest.mark.parametrize("dropout", [0.0, 0.9])
def test_dropout_drops_in_training_only(dropout):
    model = network(dropout=dropout)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    x = images()
    assert torch.equal(model(x), model(x)) == (dropout == 0)
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "wrong", [{"channels": 0}, {"classes": 0}, {"width": 0}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        network(**wrong)


def run_of(x, y, *, micro_batch_size):
    return sf.Run(
        model=lambda: network().double(),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        train_data=(x.double(), y),
        batch_size=len(x),
        micro_batch_size=micro_batch_size,
        length="1 steps",
        optimizer=sf.optim.sgd(0.1),
        precision="fp32",
        device="cpu",
        console=False,
    )


def buffers(model):
    return {name: held for name, held in model.named_buffers() if held.is_floating_point()}


def test_statistics_of_four_micro_batches_in_turn_are_those_of_four_side_by_side():
    """1 x 4 and 4 x 1: each of four processes would normalise one micro-batch, and the mean of
    their buffers is kept.
    """
    run = run_of(images(batch=16), torch.arange(16) % 5, micro_batch_size=4)
    side_by_side = []
    for micro_batch in run.parts.pipeline.again(0):
        alone = network().double()
        alone.load_state_dict(run.state.models["model"].state_dict())
        alone(micro_batch.batch[0])
        side_by_side.append(buffers(alone))
    run.train()
    for name, held in buffers(run.state.models["model"]).items():
        assert_close(
            held, torch.stack([one[name] for one in side_by_side]).mean(0), rtol=1e-9, atol=1e-9
        )


def test_the_same_micro_batch_four_times_leaves_the_statistics_of_once():
    """Left alone, the running variance would have moved four times as far."""
    x = images(batch=1, side=12).repeat(4, 1, 1, 1)
    y = torch.zeros(4, dtype=torch.long)
    once = run_of(x[:1], y[:1], micro_batch_size=1)
    four_times = run_of(x, y, micro_batch_size=1)
    once.train()
    four_times.train()
    for name, held in buffers(four_times.state.models["model"]).items():
        assert_close(held, buffers(once.state.models["model"])[name], rtol=1e-9, atol=1e-9)
