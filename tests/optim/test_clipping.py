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
    for held in model.parameters():
        held.grad = size * torch.randn(held.shape, generator=generator, dtype=held.dtype)
    return model


def limits(clip, model):
    return clipping_of(clip, clipped_parameters(clip, model, model.parameters()))


def applied(text, model, *, factor=1.0, made=None, skipped=0.0):
    """The gradients of a model, limited, and how much of them was."""
    made = made or limits(clipping(text), model)
    gradients = [held.grad for held in model.parameters()]
    norm = gradient_norm(gradients, factor=factor)
    clipped = made.apply(gradients, factor=factor, norm=norm, skipped=torch.tensor(skipped))
    return gradients, clipped


@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("most", [0.1, 5.0, 1e6])
def test_by_norm_is_torchs(most, factor):
    expected = with_gradients(network())
    for held in expected.parameters():
        held.grad *= factor
    norm = nn.utils.clip_grad_norm_(expected.parameters(), most)
    found, clipped = applied(f"norm {most}", with_gradients(network()), factor=factor)
    torch.testing.assert_close(
        found, [held.grad for held in expected.parameters()], rtol=1e-12, atol=1e-14
    )
    assert bool(clipped) == bool(norm > most)


@pytest.mark.parametrize("most", [1.0, 0.3, 7.7e-5])
def test_by_norm_on_numbers_of_the_host_has_the_bits_of_the_same_arithmetic_on_tensors(most):
    generator = torch.Generator().manual_seed(0)
    made = clipping_of(("norm", most), [nn.Parameter(torch.zeros(1))])
    for size in torch.rand(200, generator=generator) * 3 * most:
        gradient = torch.randn(9, generator=generator) * size
        norm = torch.linalg.vector_norm(gradient)
        limit = torch.clamp(torch.tensor(most) / (norm + torch.tensor(1e-6)), max=1.0)
        expected = gradient * limit
        clipped = made.apply([gradient], factor=1.0, norm=norm, skipped=torch.tensor(0.0))
        assert torch.equal(gradient, expected)
        assert bool(clipped) == bool(limit < 1)


@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("most", [0.1, 1.0, 1e6])
def test_by_value_is_torchs_and_counts_what_was_beyond(most, factor):
    expected = with_gradients(network())
    for held in expected.parameters():
        held.grad *= factor
    values = torch.cat([held.grad.flatten() for held in expected.parameters()])
    nn.utils.clip_grad_value_(expected.parameters(), most)
    found, clipped = applied(f"value {most}", with_gradients(network()), factor=factor)
    assert all(
        torch.equal(one, held.grad) for one, held in zip(found, expected.parameters(), strict=True)
    )
    assert float(clipped) == pytest.approx(float((values.abs() > most).double().mean()), rel=1e-6)


def by_the_paper(weight, gradient, most):
    """Brock et al. 2021, section 4.1, equation 3, with their code's units: rows of a matrix, a
    vector as a whole.
    """
    axes = tuple(range(1, weight.ndim)) if weight.ndim > 1 else None
    norm_w = np.sqrt((weight**2).sum(axis=axes, keepdims=True))
    norm_g = np.sqrt((gradient**2).sum(axis=axes, keepdims=True))
    limit = most * np.maximum(norm_w, 1e-3)
    above = norm_g > limit
    return gradient * np.where(above, limit / np.where(above, norm_g, 1.0), 1.0), above.flatten()


@pytest.mark.parametrize("factor", [1.0, torch.tensor(0.5, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize(("most", "size"), [(0.01, 1.0), (0.5, 0.3), (1e-4, 1e-7), (1e6, 1.0)])
def test_adaptive_is_the_formula_of_the_paper_and_spares_the_final_layer(most, size, factor):
    model = with_gradients(network(), size=size)
    with torch.no_grad():
        model[3].weight[0] = 0.0  # a unit whose weights are 0 counts as one of norm 0.001
        model[3].weight.grad[1] = 0.0
    held = dict(model.named_parameters())
    before = {
        name: (one.detach().numpy().copy(), one.grad.numpy() * float(factor))
        for name, one in held.items()
    }
    _, clipped = applied(f"adaptive {most}", model, factor=factor)
    units = []
    for name, (weight, gradient) in before.items():
        expected, above = (
            (gradient, None) if name.startswith("5.") else by_the_paper(weight, gradient, most)
        )
        np.testing.assert_allclose(
            held[name].grad.numpy(), expected, rtol=1e-12, atol=1e-18, err_msg=name
        )
        units += [] if above is None else [*above]
    assert float(clipped) == pytest.approx(np.mean(units), rel=1e-6)


def test_automatic_limits_to_the_quantile_of_the_last_norms():
    rng = np.random.default_rng(0)
    model = network()
    made = None
    norms = []
    fractions = []
    for step in range(RECENT + 30):
        with_gradients(model, seed=step, size=float(rng.lognormal()))
        made = made or limits(("auto", 0.9), model)
        norms.append(float(gradient_norm([held.grad for held in model.parameters()], factor=1.0)))
        most = np.quantile(norms[-RECENT:], 0.9)
        found, clipped = applied("", model, made=made)
        assert float(gradient_norm(found, factor=1.0)) == pytest.approx(
            min(norms[-1], most), rel=1e-12
        )
        assert bool(clipped) == (norms[-1] > most)
        fractions.append(bool(clipped))
    assert not fractions[0]  # of one norm the quantile is that norm
    assert 0.04 < np.mean(fractions[30:]) < 0.2


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.99])
def test_the_quantile_of_few_norms_is_numpys(quantile):
    model = network()
    norms = []
    made = limits(("auto", quantile), model)
    for step, size in enumerate([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0]):
        with_gradients(model, seed=step, size=size)
        norms.append(float(gradient_norm([held.grad for held in model.parameters()], factor=1.0)))
        found, _ = applied("", model, made=made)
        left = float(gradient_norm(found, factor=1.0))
        assert left == pytest.approx(min(norms[-1], np.quantile(norms, quantile)), rel=1e-12)


@in_one
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_what_is_remembered_bit_unchanged(kind, bad):
    """Whether its norm is finite or not: past max_bad_steps good ones are skipped too."""
    model = with_gradients(network())
    made = limits(clipping(kind), model)
    applied(kind, model, made=made)
    before = copy.deepcopy(made.remembered)
    applied(kind, with_gradients(model, size=bad), made=made, skipped=1.0)
    assert made.remembered.keys() == before.keys()
    assert all(torch.equal(held, before[name]) for name, held in made.remembered.items())
    assert bool(made.remembered) == kind.startswith("auto")


def test_a_run_that_begins_with_a_bad_step_goes_on_as_if_it_had_not_been():
    model, other = network(), network()
    made, again = (limits(("auto", 0.7), net) for net in (model, other))
    applied("", with_gradients(model, size=math.nan), made=made, skipped=1.0)
    for step in range(5):
        found, clipped = applied(
            "", with_gradients(model, seed=step, size=1.0 + step % 2), made=made
        )
        expected, too = applied(
            "", with_gradients(other, seed=step, size=1.0 + step % 2), made=again
        )
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
        assert bool(clipped) == bool(too)


@pytest.mark.parametrize("kind", [*KINDS, "off"])
def test_parameters_without_gradient_are_left_alone(kind):
    model = network()
    made = limits(clipping(kind), model)
    clipped = made.apply(
        [], factor=torch.tensor(2.0), norm=torch.zeros(()), skipped=torch.tensor(0.0)
    )
    assert clipped is None if kind == "off" else float(clipped) == 0.0


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


def state_bits(run):
    tensors = dict(run.parts.packed().files["state"])
    tensors |= run.state.models["model"].state_dict()
    return {name: held.numpy().tobytes() for name, held in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bit_equal_with_a_bad_step_on_the_way(kind, tmp_path):
    train = data(11)
    whole = build(tmp_path / "whole", clip=kind, train_data=train, log_every="3 steps")
    whole.train()
    build(
        tmp_path / "halves", clip=kind, train_data=train, log_every="3 steps", stop_after="4 steps"
    ).train()
    second = build(tmp_path / "halves", clip=kind, train_data=train, log_every="3 steps")
    second.train()
    assert state_bits(second) == state_bits(whole)
    logged = {
        name: [
            repr((record["step"], record["loss"], record["clip_fraction"]))
            for record in records(tmp_path / name / "metrics.jsonl")
            if record["kind"] == "train"
        ]
        for name in ("whole", "halves")
    }
    assert logged["whole"] == logged["halves"]
    assert "nan" in str(logged["whole"])  # the bad step


def test_another_limit_at_resume_is_refused(tmp_path):
    build(tmp_path / "run", clip="auto 0.9", stop_after="4 steps").train()
    with refused(
        "settings-changed", sf.CheckpointError, changes=["clip was 'auto 0.9', now 'auto 0.8'"]
    ):
        build(tmp_path / "run", clip="auto 0.8").train()


@pytest.mark.parametrize("bad", [(), (11,)])
def test_clipped_is_the_fraction_of_applied_steps_whose_norm_was_above(bad, tmp_path):
    build(tmp_path / "each", clip="norm 1.0", train_data=data(*bad)).train()
    build(tmp_path / "all", clip="norm 1.0", train_data=data(*bad), log_every="8 steps").train()
    each = [
        record
        for record in records(tmp_path / "each" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    (whole,) = [
        record
        for record in records(tmp_path / "all" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    above = [record["grad_norm"] > 1.0 for record in each if not record["skipped"]]
    assert len(above) == 8 - len(bad)
    assert 0 < whole["clip_fraction"] < 1
    assert whole["clip_fraction"] == np.mean(above)
    assert [record.get("clip_fraction") for record in each] == [
        None if record["skipped"] else float(record["grad_norm"] > 1.0) for record in each
    ]


@pytest.mark.parametrize("kind", ["value 0.02", "adaptive 0.2"])
def test_clipped_is_the_mean_fraction_of_values_or_units_over_the_steps(kind, tmp_path):
    run = build(tmp_path / "run", clip=kind, log_every="8 steps")
    seen = []
    with run:
        for step in run:
            seen.append(float(step.clip_fractions["model"]))
    (record,) = [
        record
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert 0 < record["clip_fraction"] < 1
    assert record["clip_fraction"] == pytest.approx(np.mean(seen), rel=1e-12)


def test_without_a_limit_nothing_is_said_of_one(tmp_path):
    build(tmp_path / "run", clip="off").train()
    assert all(
        "clip_fraction" not in record for record in records(tmp_path / "run" / "metrics.jsonl")
    )


def test_several_optimizers_remember_their_own_norms(tmp_path):
    def one_loss(name):
        return lambda models, batch: loss(models[name], batch)

    def build_two(run_dir, **changes):
        return build(
            run_dir,
            model={"first": Net, "second": Net},
            optimizer={"first": sf.optim.sgd(0.1), "second": sf.optim.sgd(0.1)},
            loss=None,
            clip="auto 0.5",
            **changes,
        )

    def train(run):
        with run:
            for step in run.steps():
                for name in ("first", "second"):
                    sf.forward_backward(step, one_loss(name))
                    for held in run.state.models[name].parameters():
                        held.grad.mul_(1.0 if name == "first" else 10.0)
                    sf.update(step, name)
        return run

    whole = train(build_two(tmp_path / "whole"))
    train(build_two(tmp_path / "halves", stop_after="4 steps"))
    second = train(build_two(tmp_path / "halves"))
    norms = {
        name: held.clipping.remembered["norms"][:8] for name, held in whole.state.optimizers.items()
    }
    assert float(norms["second"].min()) > 2 * float(norms["first"].max())
    for name, held in whole.state.optimizers.items():
        assert torch.equal(
            held.clipping.remembered["norms"],
            second.state.optimizers[name].clipping.remembered["norms"],
        )
    found = [
        record["clip_fraction"]
        for record in records(tmp_path / "whole" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert found[0] == 0.0
    assert set(found) <= {0.0, 0.5, 1.0}
    assert len(set(found)) > 1


class OnGpu(torch.Tensor):
    """Says that it is not on the CPU, and notes the addresses of which norms are taken, to the next
    multiple of 32 bytes.
    """

    is_cpu = False
    noted: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "norm" in func.__name__:
            cls.noted += [
                each.data_ptr() % 32
                for each in pytree.tree_leaves(args)
                if isinstance(each, torch.Tensor)
            ]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_norms_on_a_gpu_are_taken_of_gradients_that_start_at_a_vector():
    """Its reductions add in another order elsewhere, such as in the buckets of DDP."""
    flat = torch.arange(101.0).as_subclass(OnGpu)
    parameter = nn.Parameter(torch.zeros(100))
    parameter.grad = flat[1:]
    OnGpu.noted.clear()
    norm = gradient_norm([flat, flat[1:]], factor=1.0)
    Adaptive(0.01, [parameter]).apply(
        [parameter.grad], factor=1.0, norm=norm, skipped=torch.zeros(())
    )
    assert len(OnGpu.noted) > 3
    assert not any(OnGpu.noted)
    same, copied = aligned([flat, flat[1:]])
    assert same is flat
    assert torch.equal(copied, flat[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_norms_do_not_depend_on_where_gradients_are_in_memory():
    flat = torch.randn(200_001, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for size in (128, 1000, 65_536, 200_000):
        apart = flat[1 : size + 1].clone()
        assert torch.equal(
            gradient_norm([flat[1 : size + 1]] * 2, factor=1.0),
            gradient_norm([apart] * 2, factor=1.0),
        )


def test_a_step_without_gradients_is_not_among_the_recent_norms():
    """Else a model that is trained in every third step alone would be limited to 0, and stay as it
    is.
    """
    run = build(
        None,
        model={"first": Net, "second": Net},
        optimizer={"first": sf.optim.sgd(0.1), "second": sf.optim.sgd(0.1)},
        loss=None,
        clip="auto 0.5",
    )
    norms = []
    with run:
        for step in run.steps():
            name = "second" if step.index % 3 == 2 else "first"
            sf.forward_backward(step, lambda models, batch, name=name: loss(models[name], batch))
            sf.update(step)  # both
            norms += [float(step.grad_norms["second"])] if name == "second" else []
    remembered = run.state.optimizers["second"].clipping.remembered["norms"]
    assert remembered[torch.isfinite(remembered)].tolist() == norms
    assert len(norms) == 2


def test_on_a_device_a_step_without_gradients_is_limited_and_skipped_there() -> None:
    """Their norm is a number on the host, whatever device is trained on; "meta" stands for one that
    cannot be read.
    """
    norm, loss, bad_in_a_row = (
        torch.zeros(()),
        torch.zeros((), device="meta"),
        torch.zeros((), device="meta"),
    )
    skipped = should_skip(norm, loss, bad_in_a_row, max_bad_steps=1)
    by_norm = ByNorm(1.0, dtype=torch.float32, device=torch.device("meta"))
    assert skipped.is_meta
    assert by_norm.apply([], factor=1.0, norm=norm, skipped=skipped).is_meta
