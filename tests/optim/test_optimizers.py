"""Optimizers against ten lines of NumPy and against torch's own; 1 second."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from in_one import in_one
from refused import refused
from surefoot.errors import ConfigError
from surefoot.optim.build import build_optimizer
from surefoot.optim.optimizers import OptimizerSpec, adam, adamw, nadam, named, radam, sgd
from surefoot.optim.param_groups import parameter_groups


def gradients(steps=7, shape=(3, 4)):
    return np.random.default_rng(0).normal(size=(steps, *shape))


def trained(spec: OptimizerSpec) -> np.ndarray:
    """A matrix of ones after one step for each of `gradients`, in float64."""
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimizer = build_optimizer(spec, parameter_groups(model, spec.weight_decay))
    for gradient in gradients():
        model.weight.grad = torch.from_numpy(gradient)
        optimizer.step()
    return model.weight.detach().numpy()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_adamw_is_the_published_algorithm(weight_decay, betas):
    lr = 0.02
    eps = 1e-8
    weight = np.ones((3, 4))
    first = np.zeros((3, 4))
    second = np.zeros((3, 4))
    for t, gradient in enumerate(gradients(), start=1):
        weight -= lr * weight_decay * weight
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        scale = np.sqrt(second / (1 - betas[1] ** t)) + eps
        weight -= lr * (first / (1 - betas[0] ** t)) / scale
    spec = adamw(lr, weight_decay=weight_decay, betas=betas, eps=eps)

    np.testing.assert_allclose(trained(spec), weight, rtol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_the_published_algorithm(weight_decay, momentum, nesterov):
    lr = 0.02
    weight = np.ones((3, 4))
    buffer = np.zeros((3, 4))
    for gradient in gradients():
        whole = gradient + weight_decay * weight
        buffer = momentum * buffer + whole
        if nesterov:
            weight -= lr * (whole + momentum * buffer)
        else:
            weight -= lr * buffer
    spec = sgd(lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    np.testing.assert_allclose(trained(spec), weight, rtol=1e-12)


def reference_adam(lr, betas, decay):
    """Kingma and Ba's algorithm 1 with the decay in the gradient."""
    weight = np.ones((3, 4))
    first = np.zeros((3, 4))
    second = np.zeros((3, 4))
    for t, plain in enumerate(gradients(), start=1):
        gradient = plain + decay * weight
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        scale = np.sqrt(second / (1 - betas[1] ** t)) + 1e-8
        weight -= lr * (first / (1 - betas[0] ** t)) / scale
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_has_its_decay_in_the_gradient(decay):
    spec = adam(0.02, betas=(0.9, 0.99), weight_decay=decay)
    expected = reference_adam(0.02, (0.9, 0.99), decay)

    np.testing.assert_allclose(trained(spec), expected, rtol=1e-12)


def reference_nadam(lr, decay):
    """Dozat's algorithm with torch's schedule of momentum: mu = beta1 (1 - 0.5 * 0.96^(t psi));
    decoupled decay.
    """
    weight = np.ones((3, 4))
    first = np.zeros((3, 4))
    second = np.zeros((3, 4))
    product = 1.0
    for t, gradient in enumerate(gradients(), start=1):
        mu = 0.9 * (1 - 0.5 * 0.96 ** (t * 4e-3))
        following = 0.9 * (1 - 0.5 * 0.96 ** ((t + 1) * 4e-3))
        product *= mu
        weight -= lr * decay * weight
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        ahead = (1 - mu) / (1 - product) * gradient + following / (1 - product * following) * first
        weight -= lr * ahead / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return weight


def reference_radam(lr, decay):
    """Liu et al.'s algorithm 2 with torch's threshold of 5; decoupled decay."""
    weight = np.ones((3, 4))
    first = np.zeros((3, 4))
    second = np.zeros((3, 4))
    limit = 2 / (1 - 0.9) - 1
    for t, gradient in enumerate(gradients(), start=1):
        weight -= lr * decay * weight
        first = 0.9 * first + 0.1 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        length = limit - 2 * t * 0.9**t / (1 - 0.9**t)
        update = first / (1 - 0.9**t)
        if length > 5:
            rectified = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            update = update * np.sqrt(rectified) * np.sqrt(1 - 0.9**t) / (np.sqrt(second) + 1e-8)
        weight -= lr * update
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_nadam_is_the_published_algorithm_with_decoupled_decay(decay):
    spec = nadam(0.02, weight_decay=decay)

    np.testing.assert_allclose(trained(spec), reference_nadam(0.02, decay), rtol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_radam_is_the_published_algorithm_with_decoupled_decay(decay):
    spec = radam(0.02, weight_decay=decay, betas=(0.9, 0.9))

    np.testing.assert_allclose(trained(spec), reference_radam(0.02, decay), rtol=1e-6)


@pytest.mark.parametrize(
    ("spec", "torchs"),
    [
        (adamw(0.01), lambda parameters: torch.optim.AdamW(parameters, lr=0.01)),
        (adam(0.01), lambda parameters: torch.optim.Adam(parameters, lr=0.01)),
        (
            sgd(0.01, momentum=0.9),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        ),
    ],
)
def test_defaults_are_torchs(spec, torchs):
    model = nn.Linear(4, 3, bias=False)
    optimizer = build_optimizer(spec, parameter_groups(model, spec.weight_decay))
    (group,) = optimizer.param_groups

    (expected,) = torchs(model.parameters()).param_groups
    for key, value in expected.items():
        if key not in ("params", "fused", "foreach"):
            assert group[key] == value, key


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.complex64, False)])
def test_real_parameters_are_trained_by_the_fused_kernel_and_complex_ones_by_another(dtype, fused):
    groups = parameter_groups(nn.Linear(2, 2, dtype=dtype), 0.1)

    assert build_optimizer(adamw(0.1), groups).defaults["fused"] == fused


def test_each_group_has_its_own_decay():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    optimizer = build_optimizer(adamw(0.1, weight_decay=0.3), parameter_groups(model, 0.3))

    matrices, rest = optimizer.param_groups
    assert matrices["weight_decay"] == 0.3
    assert len(matrices["params"]) == 1
    assert rest["weight_decay"] == 0.0
    assert len(rest["params"]) == 3


def test_described_is_json_and_names_every_number():
    assert adamw(0.1).to_dict() == {
        "name": "adamw",
        "lr": 0.1,
        "weight_decay": 0.01,
        "decay": "matrices",
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    }


@in_one
@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("adamw", {"momentum": 0.9}, "optimizer-setting-foreign"),
        ("sgd", {"eps": 0.1}, "optimizer-setting-foreign"),
        ("sgd", {"betas": (0.9, 0.99)}, "optimizer-setting-foreign"),
        ("lion", {"eps": 1e-8}, "optimizer-setting-foreign"),
        ("adamw", {"betas": (0.9, 1.0)}, "setting-out-of-range"),
        ("adamw", {"betas": (0.9,)}, "setting-out-of-range"),
        ("sgd", {"momentum": 1.0}, "setting-out-of-range"),
        ("adamw", {"eps": -1.0}, "setting-out-of-range"),
        ("muon", {"ns_steps": 0}, "setting-out-of-range"),
        ("muon", {"adamw_modules": "head"}, "setting-out-of-range"),
        ("adafactor", {"beta2_decay": 0.8}, "setting-out-of-range"),
        ("adafactor", {"clip_threshold": 0.5}, "setting-out-of-range"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name, settings, code):
    ((key, value),) = settings.items()
    with refused(code, setting=f"optimizer.{key}", value=value):
        named(name, lr=0.1, settings=settings)


@pytest.mark.parametrize(
    ("name", "settings"), [("sgd", {"nesterov": True}), ("muon", {"momentum": 0.0})]
)
def test_nesterov_without_momentum_is_refused(name, settings):
    with refused("nesterov-without-momentum"):
        named(name, lr=0.1, settings=settings)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("adamww", "adamw"),
        ("lbfgs", "adamw, adam, sgd, lion"),
        ("schedule-free", "schedule_free"),
        ("schedulefree", "schedule_free"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_may_be_meant(name, meant):
    with refused("optimizer-unknown", value=name) as caught:
        named(name, lr=0.1)

    assert meant in caught.value.remedies[0]


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf"), "fast", True])
def test_a_rate_that_cannot_be_is_refused(lr):
    with refused("setting-out-of-range", setting="optimizer.lr", value=lr):
        adamw(lr)


def test_all_problems_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        named("adamw", lr=-1.0, weight_decay=-1.0, settings={"momentum": 0.9})

    names = [problem.fields["setting"] for problem in caught.value.problems]
    assert names == ["optimizer.momentum", "optimizer.lr", "optimizer.weight_decay"]


def test_a_specification_does_not_import_torch():
    code = "import sys, surefoot.optim as o; o.adamw(0.1); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "cut",
    [
        lambda matrix: matrix[:, :5],
        lambda matrix: matrix[:2, :5],
        lambda matrix: matrix[::3],
        lambda matrix: matrix[:, ::4],
    ],
    ids=["columns", "columns of two rows", "two rows", "two columns"],
)
def test_a_parameter_with_gaps_in_memory_is_refused_by_name(cut):
    """Torch's fused kernels on the CPU would train what lies between its numbers instead."""
    whole = torch.randn(6, 8)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(5, 6))
    model[0].weight = nn.Parameter(whole.t().contiguous().t())  # in another order, without gaps
    groups = parameter_groups(model, 0.1)
    assert build_optimizer(adamw(0.1), groups)

    model[1].weight = nn.Parameter(cut(whole))
    with refused("parameter-with-gaps", names=["1.weight"]):
        build_optimizer(adamw(0.1), parameter_groups(model, 0.1))
