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
    expected = (4 * width + 1) * classes
    for before, after in pairwise([channels, width, 2 * width, 4 * width]):
        convolutions = 9 * before * after + 9 * after**2
        norms = 4 * after
        expected += convolutions + norms

    model = SimpleCNN(channels=channels, classes=classes, width=width)

    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_the_first_loss_is_that_of_equally_likely_classes():
    loss = F.cross_entropy(network()(images()), torch.arange(6) % 5)
    assert loss.item() == pytest.approx(math.log(5), abs=1e-6)


def test_each_block_halves_both_sides():
    shapes = []
    model = network()
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:])))
    model(images(side=28))
    assert shapes == [(4, 14, 14), (8, 7, 7), (16, 4, 4)]


@pytest.mark.parametrize("channels", [1, 3])  # of one channel both layouts are one to torch
def test_channels_last_changes_the_layout_and_nothing_else(channels):
    plain = network(channels=channels)
    turned = network(channels=channels, channels_last=True)
    torch.nn.init.normal_(plain.head.weight, generator=torch.Generator().manual_seed(1))
    turned.load_state_dict(plain.state_dict())
    outputs_of_blocks = []
    for model in (plain, turned):
        model.blocks[0].register_forward_hook(
            lambda _, __, output: outputs_of_blocks.append(output)
        )
    x = images(channels=channels)

    of_plain = plain(x)
    of_turned = turned(x)

    assert_close(of_turned, of_plain, rtol=1e-5, atol=1e-5)
    in_plain, in_turned = outputs_of_blocks
    assert not in_plain.is_contiguous(memory_format=torch.channels_last)
    assert in_turned.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dropout", [0.0, 0.9])
def test_dropout_drops_in_training_only(dropout):
    model = network(dropout=dropout)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    x = images()
    assert torch.equal(model(x), model(x)) == (dropout == 0)
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("name", "value"),
    [("channels", 0), ("classes", 0), ("width", 0), ("dropout", 1.0), ("dropout", -0.1)],
)
def test_sizes_that_cannot_be_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        network(**{name: value})


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


def statistics(model):
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}


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
        side_by_side.append(statistics(alone))

    run.train()

    for name, in_turn in statistics(run.state.models["model"]).items():
        mean = torch.stack([alone[name] for alone in side_by_side]).mean(0)
        assert_close(in_turn, mean, rtol=1e-9, atol=1e-9)


def test_the_same_micro_batch_four_times_leaves_the_statistics_of_once():
    """Left alone, the running variance would have moved four times as far."""
    x = images(batch=1, side=12).repeat(4, 1, 1, 1)
    y = torch.zeros(4, dtype=torch.long)
    once = run_of(x[:1], y[:1], micro_batch_size=1)
    four_times = run_of(x, y, micro_batch_size=1)

    once.train()
    four_times.train()

    of_once = statistics(once.state.models["model"])
    of_four_times = statistics(four_times.state.models["model"])
    assert_close(of_four_times, of_once, rtol=1e-9, atol=1e-9)
