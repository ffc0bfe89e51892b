"""Limits on gradients against torch's own and NumPy, what they remember, and the clipped fraction
in the records; 4 seconds.
"""

from __future__ import annotations

import copy
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import surefoot as sf
from in_one import in_one
from refused import refused
from same_bits import assert_same_bits, weights
from surefoot.config.train_settings import clipping
from surefoot.distributed.shards import aligned
from surefoot.optim.build import clipped_parameters
from surefoot.optim.clipping import RECENT, Adaptive, ByNorm, clipping_of, gradient_norm
from surefoot.optim.skip_step import should_skip
from surefoot.tracking.jsonl import records

KINDS = ["norm 0.3", "value 0.02", "adaptive 0.01", "auto 0.7"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


def with_gradients(model, *, seed=1, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = size * gradient
    return model


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def norm_of(model):
    return float(gradient_norm(gradients_of(model), factor=1.0))


def clipper(kind, model):
    return clipping_of(
        clipping(kind), clipped_parameters(clipping(kind), model, model.parameters())
    )


def clip(model, limit, *, factor=1.0, skipped=0.0):
    """Limit the gradients of a model; how much of them was limited."""
    gradients = gradients_of(model)
    norm = gradient_norm(gradients, factor=factor)
    return limit.apply(gradients, factor=factor, norm=norm, skipped=torch.tensor(skipped))


@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("limit", [0.1, 5.0, 1e6])
def test_by_norm_is_torchs(limit, factor):
    expected = with_gradients(network())
    for gradient in gradients_of(expected):
        gradient.mul_(factor)
    norm = nn.utils.clip_grad_norm_(expected.parameters(), limit)

    model = with_gradients(network())
    clipped = clip(model, clipper(f"norm {limit}", model), factor=factor)

    torch.testing.assert_close(gradients_of(model), gradients_of(expected), rtol=1e-12, atol=1e-14)
    assert bool(clipped) == bool(norm > limit)


@pytest.mark.parametrize("limit", [1.0, 0.3, 7.7e-5])
def test_by_norm_on_numbers_of_the_host_has_the_bits_of_the_same_arithmetic_on_tensors(limit):
    generator = torch.Generator().manual_seed(0)
    by_norm = clipping_of(("norm", limit), [nn.Parameter(torch.zeros(1))])
    for size in torch.rand(200, generator=generator) * 3 * limit:
        gradient = torch.randn(9, generator=generator) * size
        norm = torch.linalg.vector_norm(gradient)
        share = torch.clamp(torch.tensor(limit) / (norm + torch.tensor(1e-6)), max=1.0)
        expected = gradient * share

        clipped = by_norm.apply([gradient], factor=1.0, norm=norm, skipped=torch.tensor(0.0))

        assert torch.equal(gradient, expected)
        assert bool(clipped) == bool(share < 1)


@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("limit", [0.1, 1.0, 1e6])
def test_by_value_is_torchs_and_counts_what_was_beyond(limit, factor):
    expected = with_gradients(network())
    for gradient in gradients_of(expected):
        gradient.mul_(factor)
    values = torch.cat([gradient.flatten() for gradient in gradients_of(expected)])
    beyond_fraction = float((values.abs() > limit).double().mean())
    nn.utils.clip_grad_value_(expected.parameters(), limit)

    model = with_gradients(network())
    clipped = clip(model, clipper(f"value {limit}", model), factor=factor)

    assert all(map(torch.equal, gradients_of(model), gradients_of(expected)))
    assert float(clipped) == pytest.approx(beyond_fraction, rel=1e-6)


def by_the_paper(weight, gradient, limit):
    """The limited gradient, and which units were above their limit.

    Brock et al. 2021, section 4.1, equation 3, with their code's units: rows of a matrix, a vector
    as a whole.
    """
    axes = None
    if weight.ndim > 1:
        axes = tuple(range(1, weight.ndim))
    weight_norm = np.sqrt((weight**2).sum(axis=axes, keepdims=True))
    gradient_norm = np.sqrt((gradient**2).sum(axis=axes, keepdims=True))
    most = limit * np.maximum(weight_norm, 1e-3)
    above = gradient_norm > most
    shares = np.where(above, most / np.where(above, gradient_norm, 1.0), 1.0)
    return gradient * shares, above.flatten()


@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize(("limit", "size"), [(0.01, 1.0), (0.5, 0.3), (1e-4, 1e-7), (1e6, 1.0)])
def test_adaptive_is_the_formula_of_the_paper_and_spares_the_final_layer(limit, size, factor):
    model = with_gradients(network(), size=size)
    with torch.no_grad():
        model[3].weight[0] = 0.0  # a unit whose weights are 0 counts as one of norm 0.001
        model[3].weight.grad[1] = 0.0
    expected = {}
    above = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy() * float(factor)
        if name.startswith("5."):
            expected[name] = gradient
        else:
            weight = parameter.detach().numpy()
            expected[name], units_above = by_the_paper(weight, gradient, limit)
            above += [*units_above]

    clipped = clip(model, clipper(f"adaptive {limit}", model), factor=factor)

    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(
            parameter.grad.numpy(), expected[name], rtol=1e-12, atol=1e-18, err_msg=name
        )
    assert float(clipped) == pytest.approx(np.mean(above), rel=1e-6)


def test_automatic_limits_to_the_quantile_of_the_last_norms():
    rng = np.random.default_rng(0)
    model = network()
    automatic = clipper("auto 0.9", model)
    norms = []
    fractions = []
    for step in range(RECENT + 30):
        with_gradients(model, seed=step, size=float(rng.lognormal()))
        norms.append(norm_of(model))
        limit = np.quantile(norms[-RECENT:], 0.9)

        clipped = bool(clip(model, automatic))

        assert norm_of(model) == pytest.approx(min(norms[-1], limit), rel=1e-12)
        assert clipped == (norms[-1] > limit)
        fractions.append(clipped)
    assert not fractions[0]  # of one norm the quantile is that norm
    assert 0.04 < np.mean(fractions[30:]) < 0.2


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.99])
def test_the_quantile_of_few_norms_is_numpys(quantile):
    model = network()
    automatic = clipper(f"auto {quantile}", model)
    norms = []
    for step, size in enumerate([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0]):
        with_gradients(model, seed=step, size=size)
        norms.append(norm_of(model))
        limit = np.quantile(norms, quantile)

        clip(model, automatic)

        assert norm_of(model) == pytest.approx(min(norms[-1], limit), rel=1e-12)


@in_one
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_what_is_remembered_bit_unchanged(kind, bad):
    """Whether its norm is finite or not: past max_bad_steps good ones are skipped too."""
    model = with_gradients(network())
    limit = clipper(kind, model)
    clip(model, limit)
    before = copy.deepcopy(limit.remembered)

    clip(with_gradients(model, size=bad), limit, skipped=1.0)

    assert_same_bits(limit.remembered, before)
    assert bool(limit.remembered) == kind.startswith("auto")


def test_a_run_that_begins_with_a_bad_step_goes_on_as_if_it_had_not_been():
    model = network()
    limit = clipper("auto 0.7", model)
    clip(with_gradients(model, size=math.nan), limit, skipped=1.0)
    other_model = network()
    other_limit = clipper("auto 0.7", other_model)

    for step in range(5):
        size = 1.0 + step % 2
        clipped = clip(with_gradients(model, seed=step, size=size), limit)
        expected = clip(with_gradients(other_model, seed=step, size=size), other_limit)
        assert bool(clipped) == bool(expected)
        assert all(map(torch.equal, gradients_of(model), gradients_of(other_model)))


@pytest.mark.parametrize("kind", KINDS)
def test_of_no_gradients_none_is_clipped(kind):
    assert float(clip_nothing(kind)) == 0.0


def test_without_a_limit_there_is_no_clipped_fraction():
    assert clip_nothing("off") is None


def clip_nothing(kind):
    limit = clipper(kind, network())
    factor = torch.tensor(2.0)
    return limit.apply([], factor=factor, norm=torch.zeros(()), skipped=torch.tensor(0.0))


def test_adaptive_is_refused_where_there_is_only_a_final_layer():
    with refused("clip-without-layers", value="adaptive 0.01"):
        build(None, clip="adaptive 0.01", model=lambda: nn.Linear(8, 3))


# --- in a run -------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def data(*bad):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(32, 8, generator=generator)
    inputs[list(bad)] = math.nan
    return inputs, torch.randint(3, (32,), generator=generator)


def build(run_dir, **changes):
    settings = {
        "model": Net,
        "loss": loss,
        "train_data": data(),
        "batch_size": 4,
        "micro_batch_size": 2,
        "length": "8 steps",
        "optimizer": sf.optim.adamw(0.05),
        "precision": "fp32",
        "device": "cpu",
        "log_every": "1 steps",
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def train_records(run_dir):
    return [record for record in records(run_dir / "metrics.jsonl") if record["kind"] == "train"]


def state_bits(run):
    tensors = run.parts.packed().tensors("state") | weights(run)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_equal_with_a_bad_step_on_the_way(kind, tmp_path):
    def build_part(name, **changes):
        settings = {"clip": kind, "train_data": data(11), "log_every": "3 steps"}
        return build(tmp_path / name, **(settings | changes))

    whole = build_part("whole")
    whole.train()
    build_part("halves", stop_after="4 steps").train()
    resumed = build_part("halves")
    resumed.train()

    assert state_bits(resumed) == state_bits(whole)
    logged = logged_values(tmp_path / "whole")
    assert logged_values(tmp_path / "halves") == logged
    assert "nan" in str(logged)  # the bad step


def logged_values(run_dir):
    return [
        repr((record["step"], record["loss"], record["clip_fraction"]))
        for record in train_records(run_dir)
    ]


def test_another_limit_at_resume_is_refused(tmp_path):
    build(tmp_path / "run", clip="auto 0.9", stop_after="4 steps").train()

    changes = ["clip was 'auto 0.9', now 'auto 0.8'"]
    with refused("settings-changed", sf.CheckpointError, changes=changes):
        build(tmp_path / "run", clip="auto 0.8").train()


@pytest.mark.parametrize("bad", [(), (11,)])
def test_clipped_is_the_fraction_of_applied_steps_whose_norm_was_above(bad, tmp_path):
    settings = {"clip": "norm 1.0", "train_data": data(*bad)}
    build(tmp_path / "steps", log_every="1 step", **settings).train()
    build(tmp_path / "whole", log_every="8 steps", **settings).train()

    of_steps = train_records(tmp_path / "steps")
    (of_run,) = train_records(tmp_path / "whole")
    above = []
    for record in of_steps:
        if record["skipped"]:
            assert record.get("clip_fraction") is None
        else:
            above.append(float(record["grad_norm"] > 1.0))
            assert record["clip_fraction"] == above[-1]
    assert len(above) == 8 - len(bad)
    assert 0 < of_run["clip_fraction"] < 1
    assert of_run["clip_fraction"] == np.mean(above)


@pytest.mark.parametrize("kind", ["value 0.02", "adaptive 0.2"])
def test_clipped_is_the_mean_fraction_of_values_or_units_over_the_steps(kind, tmp_path):
    run = build(tmp_path / "run", clip=kind, log_every="8 steps")
    fractions = []
    with run:
        for step in run:
            fractions.append(float(step.clip_fractions["model"]))

    (record,) = train_records(tmp_path / "run")
    assert 0 < record["clip_fraction"] < 1
    assert record["clip_fraction"] == pytest.approx(np.mean(fractions), rel=1e-12)


def test_without_a_limit_nothing_is_said_of_one(tmp_path):
    build(tmp_path / "run", clip="off").train()

    run_records = records(tmp_path / "run" / "metrics.jsonl")
    assert run_records
    assert not any("clip_fraction" in record for record in run_records)


def build_two(run_dir=None, **changes):
    return build(
        run_dir,
        model={"first": Net, "second": Net},
        optimizer={"first": sf.optim.sgd(0.1), "second": sf.optim.sgd(0.1)},
        loss=None,
        clip="auto 0.5",
        **changes,
    )


def loss_of(name):
    return lambda models, batch: loss(models[name], batch)


def train_both(run):
    """Train the second model with gradients ten times as large."""
    with run:
        for step in run.steps():
            sf.forward_backward(step, loss_of("first"))
            sf.update(step, "first")

            sf.forward_backward(step, loss_of("second"))
            for gradient in gradients_of(run.state.models["second"]):
                gradient.mul_(10.0)
            sf.update(step, "second")
    return run


def remembered_norms(run, name):
    return run.state.optimizers[name].clipping.remembered["norms"]


def test_several_optimizers_remember_their_own_norms(tmp_path):
    whole = train_both(build_two(tmp_path / "whole"))
    train_both(build_two(tmp_path / "halves", stop_after="4 steps"))
    resumed = train_both(build_two(tmp_path / "halves"))

    smallest_of_second = float(remembered_norms(whole, "second")[:8].min())
    largest_of_first = float(remembered_norms(whole, "first")[:8].max())
    assert smallest_of_second > 2 * largest_of_first
    for name in ("first", "second"):
        assert torch.equal(remembered_norms(resumed, name), remembered_norms(whole, name))


def test_with_several_optimizers_the_clipped_fraction_is_of_their_updates(tmp_path):
    train_both(build_two(tmp_path / "run"))

    fractions = [record["clip_fraction"] for record in train_records(tmp_path / "run")]
    assert fractions[0] == 0.0
    assert set(fractions) <= {0.0, 0.5, 1.0}
    assert len(set(fractions)) > 1


class OnGpu(torch.Tensor):
    """Says that it is not on the CPU, and notes the addresses of which norms are taken, to the next
    multiple of 32 bytes.
    """

    is_cpu = False
    noted: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "norm" in func.__name__:
            for leaf in pytree.tree_leaves(args):
                if isinstance(leaf, torch.Tensor):
                    cls.noted.append(leaf.data_ptr() % 32)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_norms_on_a_gpu_are_taken_of_gradients_that_start_at_a_vector():
    """Its reductions add in another order elsewhere, such as in the buckets of DDP."""
    flat = torch.arange(101.0).as_subclass(OnGpu)
    parameter = nn.Parameter(torch.zeros(100))
    parameter.grad = flat[1:]
    adaptive = Adaptive(0.01, [parameter])
    OnGpu.noted.clear()

    norm = gradient_norm([flat, flat[1:]], factor=1.0)
    adaptive.apply([parameter.grad], factor=1.0, norm=norm, skipped=torch.zeros(()))

    assert len(OnGpu.noted) > 3
    assert not any(OnGpu.noted)


def test_what_starts_elsewhere_is_copied_to_be_aligned():
    flat = torch.arange(101.0).as_subclass(OnGpu)

    same, copied = aligned([flat, flat[1:]])

    assert same is flat
    assert torch.equal(copied, flat[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_norms_do_not_depend_on_where_gradients_are_in_memory():
    flat = torch.randn(200_001, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for size in (128, 1000, 65_536, 200_000):
        view = flat[1 : size + 1]
        copied = view.clone()
        norm = gradient_norm([view, view], factor=1.0)
        assert torch.equal(norm, gradient_norm([copied, copied], factor=1.0))


def test_a_step_without_gradients_is_not_among_the_recent_norms():
    """Else a model that is trained in every third step alone would be limited to 0, and stay as it
    is.
    """
    run = build_two()
    norms = []
    with run:
        for step in run.steps():
            if step.index % 3 == 2:
                sf.forward_backward(step, loss_of("second"))
                sf.update(step)  # both
                norms.append(float(step.grad_norms["second"]))
            else:
                sf.forward_backward(step, loss_of("first"))
                sf.update(step)

    remembered = remembered_norms(run, "second")
    assert remembered[torch.isfinite(remembered)].tolist() == norms
    assert len(norms) == 2


def test_on_a_device_a_step_without_gradients_is_limited_and_skipped_there() -> None:
    """Their norm is a number on the host, whatever device is trained on; "meta" stands for one that
    cannot be read.
    """
    norm = torch.zeros(())
    on_device = torch.zeros((), device="meta")
    by_norm = ByNorm(1.0, dtype=torch.float32, device=torch.device("meta"))

    skipped = should_skip(norm, on_device, on_device, max_bad_steps=1)
    clipped = by_norm.apply([], factor=1.0, norm=norm, skipped=skipped)

    assert skipped.is_meta
    assert clipped.is_meta
