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


def parameter_count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def scramble(model):
    """Draw gains, biases and statistics, so that none of them can be in the wrong place
    unnoticed. Returns the model in evaluation mode.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or tensor.ndim != 1:
                continue
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
            if "var" in name:
                tensor.add_(0.5)
    return model.eval()


@pytest.mark.parametrize("layers", PUBLISHED)
def test_parameters_are_as_many_as_published(layers):
    with torch.device("meta"):
        model = ResNet(layers, channels=3, classes=1000)
    assert parameter_count(model) == PUBLISHED[layers]


def test_the_small_stem_has_three_by_three_and_the_large_one_seven_by_seven():
    with torch.device("meta"):
        small = network(stem="cifar")
        large = network()
    assert parameter_count(large) - parameter_count(small) == 64 * 3 * (7 * 7 - 3 * 3)


@pytest.mark.parametrize(("stem", "side_after"), [("cifar", 32), ("imagenet", 8)])
def test_the_small_stem_keeps_both_sides(stem, side_after):
    with torch.device("meta"):
        model = network(stem=stem)
    sides = []
    model.layer1.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))

    model(images(side=32).to("meta"))

    assert sides == [side_after]


@pytest.mark.parametrize("layers", PUBLISHED)
def test_outputs_and_names_are_those_of_torchvision(layers):
    try:
        from torchvision import models
    except Exception as problem:  # one that does not fit this torch raises what it likes
        pytest.skip(f"torchvision cannot be imported: {str(problem).splitlines()[0]}")
    theirs = scramble(getattr(models, f"resnet{layers}")())
    ours = ResNet(layers, channels=3, classes=1000).eval()

    ours.load_state_dict(theirs.state_dict())

    assert_close(ours(images()), theirs(images()), rtol=1e-4, atol=1e-4)


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
        kernels = [3, 3]
        strides = [stride, 1]
        if layers >= 50:
            kernels = [1, 3, 1]
            strides = [1, stride, 1]
        y = x
        for number, (kernel, stride_here) in enumerate(zip(kernels, strides, strict=True), start=1):
            assert self.weights[f"{name}.conv{number}.weight"].shape[-1] == kernel
            if number > 1:
                y = y.clamp(min=0)
            y = self.convolved(y, f"{name}.conv{number}", f"{name}.bn{number}", stride=stride_here)
        if y.shape != x.shape:
            x = self.convolved(x, f"{name}.downsample.0", f"{name}.downsample.1", stride=stride)
        return (x + y).clamp(min=0)

    def __call__(self, x, *, layers, stem):
        if stem == "imagenet":
            x = self.convolved(x, "conv1", "bn1", stride=2).clamp(min=0)
            # the largest of 3 x 3, every second one
            x = F.pad(x, [1] * 4, value=-torch.inf).unfold(2, 3, 2).unfold(3, 3, 2).amax((-1, -2))
        else:
            x = self.convolved(x, "conv1", "bn1").clamp(min=0)
        block_counts = [2, 2, 2, 2] if layers == 18 else [3, 4, 6, 3]
        for part, count in enumerate(block_counts, start=1):
            for number in range(count):
                stride = 2 if part > 1 and number == 0 else 1
                x = self.block(x, f"layer{part}.{number}", stride=stride, layers=layers)
        sums = torch.einsum("bchw,kc->bk", x, self.weights["fc.weight"])
        return sums / x[0, 0].numel() + self.weights["fc.bias"]


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
    model = scramble(network(layers, stem=stem, zero_init_residual=False).double())
    model.train(training)
    side = 48 if stem == "imagenet" else 10
    inputs = images(side=side).double().requires_grad_()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        weights[name].requires_grad_()
    by_hand = ByHand(weights, training=training)

    ours = model(inputs)
    theirs = by_hand(inputs, layers=layers, stem=stem)

    assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    our_gradients = torch.autograd.grad((ours * direction).sum(), [inputs, *model.parameters()])
    their_parameters = [weights[name] for name in names]
    their_gradients = torch.autograd.grad((theirs * direction).sum(), [inputs, *their_parameters])
    for name, our, their in zip(["inputs", *names], our_gradients, their_gradients, strict=True):
        atol = 1e-9 * float(their.abs().max())
        assert_close(our, their, rtol=1e-7, atol=atol, msg=lambda text, name=name: name + text)
    for name, tensor in model.named_buffers():
        norm, _, kind = name.rpartition(".")
        if kind == "num_batches_tracked":
            continue
        observed = weights[name]
        if training:
            mean, variance = by_hand.statistics[norm]
            observed = mean if kind == "running_mean" else variance
        assert_close(tensor, 0.9 * weights[name] + 0.1 * observed, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "kind", "depths", "widths"),
    [
        (18, "basic", [2, 2, 2, 2], [64, 128, 256, 512]),
        (50, "bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    ],
)
def test_outputs_are_those_of_transformers(layers, kind, depths, widths):
    from transformers import ResNetConfig
    from transformers.models.resnet.modeling_resnet import ResNetForImageClassification

    shape = ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=widths, num_labels=10)
    theirs = scramble(ResNetForImageClassification(shape))
    ours = network(layers).eval()

    weights = {our_name(name): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(weights)

    assert_close(ours(images()), theirs(images()).logits, rtol=1e-4, atol=1e-4)


def our_name(theirs: str) -> str:
    """Our name of a tensor of transformers."""
    parts = theirs.split(".")
    tensor = parts[-1]
    kind = {"convolution": "conv", "normalization": "bn"}
    if "embedder" in parts:
        return f"{kind[parts[3]]}1.{tensor}"
    if parts[0] == "classifier":
        return f"fc.{tensor}"
    block = f"layer{int(parts[3]) + 1}.{parts[5]}"
    if parts[6] == "shortcut":
        place = ["convolution", "normalization"].index(parts[7])
        return f"{block}.downsample.{place}.{tensor}"
    return f"{block}.{kind[parts[8]]}{int(parts[7]) + 1}.{tensor}"


def test_convolutions_start_with_the_deviation_that_keeps_gradients_of_one_size():
    """He et al. 2015, equation 14: two over the kernel's area times the channels that it makes."""
    for name, parameter in network().named_parameters():
        if parameter.ndim == 4:
            channels, _, height, width = parameter.shape
            expected = (2 / (channels * height * width)) ** 0.5
            four_errors = 4 / (2 * parameter.numel()) ** 0.5
            deviation = float(parameter.detach().std())
            assert deviation == pytest.approx(expected, rel=four_errors), name


@pytest.mark.parametrize(("layers", "channels"), [(18, 64), (50, 256)])
def test_every_block_starts_as_identity_where_the_last_gain_is_zero(layers, channels):
    x = torch.rand(2, channels, 8, 8)
    zeroed = network(layers).eval().layer1[1]
    plain = network(layers, zero_init_residual=False).eval().layer1[1]

    assert_close(zeroed(x), x, rtol=0, atol=0)
    assert not torch.equal(plain(x), x)


def test_channels_last_changes_the_layout_and_nothing_else():
    plain = network().eval()
    turned = network(channels_last=True).eval()
    outputs = []
    turned.layer2.register_forward_hook(lambda _, __, output: outputs.append(output))

    assert_close(turned(images()), plain(images()), rtol=1e-4, atol=1e-4)

    (of_layer2,) = outputs
    assert of_layer2.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("name", "value"), [("layers", 19), ("channels", 0), ("classes", 0)])
def test_sizes_that_cannot_be_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        network(**{name: value})
