"""The residual networks: published sizes, and the same outputs and gradients as other
implementations of them; 9 seconds.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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
    """Gains, biases and statistics at random, so that none of them can be in the wrong place
    unnoticed.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, held in model.state_dict().items():
            if held.is_floating_point() and held.ndim == 1:
                held.copy_(
                    torch.rand(held.shape, generator=generator) + (0.5 if "var" in name else 0.0)
                )
    return model.eval()


@pytest.mark.parametrize("layers", PUBLISHED)
def test_parameters_are_as_many_as_published(layers):
    with torch.device("meta"):
        assert parameters(ResNet(layers, channels=3, classes=1000)) == PUBLISHED[layers]


def test_the_small_stem_has_three_by_three_and_keeps_both_sides():
    with torch.device("meta"):
        small, large = network(stem="cifar"), network()
    assert parameters(large) - parameters(small) == 64 * 3 * (49 - 9)
    sides = []
    for model in (small, large):
        model.layer1.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
        model(images(side=32).to("meta"))
    assert sides == [32, 8]


def test_outputs_and_names_are_those_of_torchvision():
    try:
        from torchvision import models
    except Exception as problem:  # one that does not fit this torch raises what it likes
        pytest.skip(f"torchvision cannot be imported: {str(problem).splitlines()[0]}")
    for layers, theirs in (
        (18, models.resnet18()),
        (34, models.resnet34()),
        (50, models.resnet50()),
    ):
        ours = ResNet(layers, channels=3, classes=1000)
        ours.load_state_dict(scrambled(theirs).state_dict())
        assert_close(ours.eval()(images()), theirs(images()), rtol=1e-4, atol=1e-4)


class ByHand:
    """The networks a second time, from table 1 and figure 5 of the paper: functions of named
    weights, without any module.

    A batch norm is written out: with `statistics` None every one takes the batch's own, as in
    training, and notes them.
    """

    def __init__(self, weights, *, training):
        self.weights = weights
        self.training = training
        self.statistics = {}

    def norm(self, x, name):
        if self.training:
            mean = x.mean((0, 2, 3))
            variance = x.var((0, 2, 3), correction=0)
            self.statistics[name] = mean.detach(), x.var((0, 2, 3), correction=1).detach()
        else:
            mean = self.weights[f"{name}.running_mean"]
            variance = self.weights[f"{name}.running_var"]
        shape = (1, -1, 1, 1)
        gain = self.weights[f"{name}.weight"].view(shape)
        bias = self.weights[f"{name}.bias"].view(shape)
        return (x - mean.view(shape)) / (variance.view(shape) + 1e-5).sqrt() * gain + bias

    def convolved(self, x, convolution, norm, *, stride=1):
        """With a border of zeros that keeps the sides of an odd kernel, halved by a stride of 2."""
        weight = self.weights[f"{convolution}.weight"]
        border = (weight.shape[-1] - 1) // 2
        return self.norm(F.conv2d(F.pad(x, [border] * 4), weight, stride=stride), norm)

    def block(self, x, name, *, stride, layers):
        kernels = [1, 3, 1] if layers >= 50 else [3, 3]
        strided = 1 if layers >= 50 else 0  # the first 3 x 3
        y = x
        for index, kernel in enumerate(kernels):
            assert self.weights[f"{name}.conv{index + 1}.weight"].shape[-1] == kernel
            here = stride if index == strided else 1
            y = self.convolved(y, f"{name}.conv{index + 1}", f"{name}.bn{index + 1}", stride=here)
            y = y if index == len(kernels) - 1 else y.clamp(min=0)
        if y.shape != x.shape:
            x = self.convolved(x, f"{name}.downsample.0", f"{name}.downsample.1", stride=stride)
        return (x + y).clamp(min=0)

    def __call__(self, x, *, layers, stem):
        x = self.convolved(x, "conv1", "bn1", stride=2 if stem == "imagenet" else 1).clamp(min=0)
        if stem == "imagenet":  # the largest of 3 x 3, every second one
            x = F.pad(x, [1] * 4, value=-torch.inf).unfold(2, 3, 2).unfold(3, 3, 2).amax((-1, -2))
        for part, count in enumerate("2222" if layers == 18 else "3463", start=1):
            for number in range(int(count)):
                halves = part > 1 and number == 0
                x = self.block(x, f"layer{part}.{number}", stride=2 if halves else 1, layers=layers)
        return (
            torch.einsum("bchw,kc->bk", x, self.weights["fc.weight"]) / x[0, 0].numel()
            + self.weights["fc.bias"]
        )


@pytest.mark.fast("18-imagenet-True")
@pytest.mark.parametrize(
    ("layers", "stem", "training"),
    [
        (18, "imagenet", True),
        (50, "cifar", False),
        pytest.param(18, "cifar", False, marks=pytest.mark.slow),  # each takes a second or two
        pytest.param(34, "cifar", True, marks=pytest.mark.slow),
        pytest.param(50, "imagenet", True, marks=pytest.mark.slow),
    ],
)
def test_outputs_gradients_and_statistics_are_those_of_the_network_written_by_hand(
    layers, stem, training
):
    model = scrambled(network(layers, stem=stem, zero_init_residual=False).double()).train(training)
    inputs = images(side=48 if stem == "imagenet" else 10).double().requires_grad_()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        weights[name].requires_grad_()
    by_hand = ByHand(weights, training=training)

    ours = model(inputs)
    theirs = by_hand(inputs, layers=layers, stem=stem)

    assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    direction = torch.randn(
        ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    ours_back = torch.autograd.grad((ours * direction).sum(), [inputs, *model.parameters()])
    theirs_back = torch.autograd.grad(
        (theirs * direction).sum(), [inputs, *(weights[name] for name in names)]
    )
    for name, one, other in zip(["inputs", *names], ours_back, theirs_back, strict=True):
        assert_close(
            one,
            other,
            rtol=1e-7,
            atol=1e-9 * float(other.abs().max()),
            msg=lambda text, name=name: name + text,
        )
    for name, tensor in model.named_buffers():
        norm, _, kind = name.rpartition(".")
        if kind != "num_batches_tracked":
            observed = (
                by_hand.statistics[norm][kind == "running_var"] if training else weights[name]
            )
            assert_close(tensor, 0.9 * weights[name] + 0.1 * observed, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "kind", "depths"), [(18, "basic", [2, 2, 2, 2]), (50, "bottleneck", [3, 4, 6, 3])]
)
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


def test_convolutions_start_with_the_deviation_that_keeps_gradients_of_one_size():
    """He et al. 2015, equation 14: two over the kernel's area times the channels that it makes."""
    for name, parameter in network().named_parameters():
        if parameter.ndim == 4:
            expected = (2 / (parameter.shape[0] * parameter.shape[2] * parameter.shape[3])) ** 0.5
            assert float(parameter.detach().std()) == pytest.approx(
                expected, rel=4 / (2 * parameter.numel()) ** 0.5
            ), name


@pytest.mark.parametrize("layers", [18, 50])
def test_every_block_starts_as_identity_where_the_last_gain_is_zero(layers):
    model = network(layers).eval()
    x = torch.rand(2, 64 if layers == 18 else 256, 8, 8)
    assert_close(model.layer1[1](x), x, rtol=0, atol=0)
    assert not torch.equal(network(layers, zero_init_residual=False).eval().layer1[1](x), x)


def test_channels_last_changes_the_layout_and_nothing_else():
    plain = network().eval()
    turned = network(channels_last=True).eval()
    layouts = []
    turned.layer2.register_forward_hook(
        lambda _, __, output: layouts.append(
            output.is_contiguous(memory_format=torch.channels_last)
        )
    )
    assert_close(turned(images()), plain(images()), rtol=1e-4, atol=1e-4)
    assert layouts == [True]


@pytest.mark.parametrize("wrong", [{"layers": 19}, {"channels": 0}, {"classes": 0}])
def test_sizes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        network(**wrong)
