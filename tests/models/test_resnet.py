"""The residual networks: published sizes, and the same outputs as other implementations of them; 6 seconds."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from surefoot.models.resnet import ResNet

PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032}


def images(side=64, batch=2):
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


def network(layers=18, **settings):
    torch.manual_seed(0)
    return ResNet(layers, **({"channels": 3, "classes": 10} | settings))


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def scrambled(model):
    """Gains, biases and statistics at random, so that none of them can be in the wrong place unnoticed."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, held in model.state_dict().items():
            if held.is_floating_point() and held.ndim == 1:
                held.copy_(torch.rand(held.shape, generator=generator) + (0.5 if "var" in name else 0.0))
    return model.eval()


@pytest.mark.parametrize("layers", PUBLISHED)
def test_parameters_are_as_many_as_published(layers):
    with torch.device("meta"):
        assert parameters(ResNet(layers, channels=3, classes=1000)) == PUBLISHED[layers]


def test_the_small_stem_has_three_by_three_and_keeps_both_sides():
    small, large = network(stem="cifar"), network()
    assert parameters(large) - parameters(small) == 64 * 3 * (49 - 9)
    sides = []
    for model in (small, large):
        model.layer1.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
        model(images(side=32))
    assert sides == [32, 8]


def test_outputs_and_names_are_those_of_torchvision():
    try:
        from torchvision import models
    except Exception as problem:  # one that does not fit this torch raises what it likes
        pytest.skip(f"torchvision cannot be imported: {str(problem).splitlines()[0]}")
    for layers, theirs in ((18, models.resnet18()), (34, models.resnet34()), (50, models.resnet50())):
        ours = ResNet(layers, channels=3, classes=1000)
        ours.load_state_dict(scrambled(theirs).state_dict())
        assert_close(ours.eval()(images()), theirs(images()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layers", "kind", "depths"), [(18, "basic", [2, 2, 2, 2]), (50, "bottleneck", [3, 4, 6, 3])])
def test_outputs_are_those_of_transformers(layers, kind, depths):
    from transformers import ResNetConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    widths = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    shape = ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=widths, num_labels=10)
    theirs = scrambled(ResNetForImageClassification(shape))
    ours = network(layers).eval()
    ours.load_state_dict({_renamed(name): held for name, held in theirs.state_dict().items()})
    assert_close(ours(images()), theirs(images()).logits, rtol=1e-4, atol=1e-4)


def _renamed(theirs: str) -> str:
    parts = theirs.split(".")
    kind = {"convolution": "conv", "normalization": "bn"}
    if "embedder" in parts:
        return f"{kind[parts[3]]}1.{parts[-1]}"
    if parts[0] == "classifier":
        return f"fc.{parts[-1]}"
    block = f"layer{int(parts[3]) + 1}.{parts[5]}"
    if parts[6] == "shortcut":
        return f"{block}.downsample.{0 if parts[7] == 'convolution' else 1}.{parts[-1]}"
    return f"{block}.{kind[parts[8]]}{int(parts[7]) + 1}.{parts[-1]}"


@pytest.mark.parametrize("layers", [18, 50])
def test_every_block_starts_as_identity_where_the_last_gain_is_zero(layers):
    model = network(layers).eval()
    x = torch.rand(2, 64 if layers == 18 else 256, 8, 8)
    assert_close(model.layer1[1](x), x, rtol=0, atol=0)
    assert not torch.equal(network(layers, zero_last_gain=False).eval().layer1[1](x), x)


def test_channels_last_changes_the_layout_and_nothing_else():
    plain, turned = network().eval(), network(channels_last=True).eval()
    layouts = []
    turned.layer2.register_forward_hook(
        lambda _, __, output: layouts.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    assert_close(turned(images()), plain(images()), rtol=1e-4, atol=1e-4)
    assert layouts == [True]


@pytest.mark.parametrize("wrong", [{"layers": 19}, {"channels": 0}, {"classes": 0}])
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        network(**wrong)
