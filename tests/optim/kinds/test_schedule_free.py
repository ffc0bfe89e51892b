"""Schedule-free AdamW against its authors' package and ten lines of NumPy; and the weights that are
evaluated. (2 s)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from same_bits import assert_same_bits, weights
from stated import lines_naming
from surefoot.checkpoint.store import Store
from surefoot.optim.ema import copy_model
from surefoot.optim.kinds.schedule_free import ScheduleFree, ScheduleFreeAverage
from surefoot.tracking.jsonl import records
from surefoot.train.model_weights import weights_of

RATES = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.1]


def gradients() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(RATES), 3, 4))


def trained(
    rates: list[float], *, betas: tuple[float, float], decay: float
) -> tuple[nn.Linear, Tensor]:
    """A matrix after one step for each gradient, and its mean as it would be evaluated."""
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    optimizer = ScheduleFree(model.parameters(), lr=0.02, betas=betas, weight_decay=decay)
    average = ScheduleFreeAverage(copy_model(model), optimizer)
    for rate, gradient in zip(rates, gradients(), strict=False):
        optimizer.param_groups[0]["lr"] = 0.02 * rate
        model.weight.grad = torch.from_numpy(gradient)
        optimizer.step()
        average.update(torch.tensor(1.0))
    average.refresh(model)
    return model, next(average.model.parameters()).detach()


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.98, 0.0)])
def test_it_is_the_published_algorithm_with_any_rates(
    betas: tuple[float, float], decay: float
) -> None:
    x = np.ones((3, 4))
    y = x
    z = x
    square = np.zeros((3, 4))
    weights = 0.0
    for t, (rate, gradient) in enumerate(zip(RATES, gradients(), strict=True), start=1):
        lr = 0.02 * rate
        square = betas[1] * square + (1 - betas[1]) * gradient**2
        update = gradient / (np.sqrt(square / (1 - betas[1] ** t)) + 1e-8) + decay * y
        z = z - lr * update
        weights += lr**2
        share = lr**2 / weights
        x = (1 - share) * x + share * z
        y = (1 - betas[0]) * z + betas[0] * x

    model, mean = trained(RATES, betas=betas, decay=decay)

    # the sum of weights is in float32
    np.testing.assert_allclose(model.weight.detach().numpy(), y, rtol=1e-6)
    np.testing.assert_allclose(mean.numpy(), x, rtol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_with_a_warm_up_it_is_its_authors_package(decay: float) -> None:
    """Whose rate never falls: it would weigh by the largest so far."""
    package = pytest.importorskip("schedulefree")
    theirs = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    optimizer = package.AdamWScheduleFree(
        [theirs], lr=0.02, betas=(0.9, 0.99), weight_decay=decay, warmup_steps=4
    )
    optimizer.train()
    for gradient in gradients():
        theirs.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    trained_theirs = theirs.detach().clone()
    optimizer.eval()

    model, mean = trained([0.25, 0.5, 0.75, 1, 1, 1, 1, 1], betas=(0.9, 0.99), decay=decay)

    torch.testing.assert_close(model.weight.detach(), trained_theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mean, theirs.detach(), rtol=1e-6, atol=1e-7)


def test_at_a_constant_rate_the_mean_is_that_of_all_places_of_the_fast_point() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    holder = nn.Module()
    holder.weight = parameter
    optimizer = ScheduleFree([parameter], lr=0.1)
    average = ScheduleFreeAverage(copy_model(holder), optimizer)
    places = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(3, dtype=torch.float64, generator=generator)
        optimizer.step()
        places.append(optimizer.state[parameter]["z"].clone())
    average.update(torch.tensor(1.0))
    average.refresh(holder)

    mean = next(average.model.parameters()).detach()
    torch.testing.assert_close(mean, torch.stack(places).mean(0), rtol=1e-6, atol=1e-8)


def test_a_rate_of_zero_moves_nothing() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)

    ScheduleFree([parameter], lr=0.0).step()

    assert parameter.tolist() == [1.0, 1.0]


# --- in a run -------------------------------------------------------------------------------------


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(24, 5, generator=generator)
    labels = torch.randint(3, (24,), generator=generator)
    return inputs, labels


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def build(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data(),
        "batch_size": 4,
        "length": "12 steps",
        "optimizer": sf.optim.schedule_free(0.05),
        "splits": {"all": sf.Split(data(), batch_size=8)},
        "evaluate_every": "3 steps",
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def expected_mean(run: sf.Run) -> dict[str, Tensor]:
    """x = (y - (1 - beta1) z) / beta1, by name, in float64."""
    state = run.state.optimizers["model"].optimizer.state
    mean = {}
    for name, y in run.state.models["model"].named_parameters():
        z = state[y]["z"].double()
        mean[name] = ((y.double() - 0.1 * z) / 0.9).float().detach()
    return mean


def test_the_mean_is_what_is_scored_and_saved_and_loaded(tmp_path: Any) -> None:
    run = build(run_dir=tmp_path / "run")
    run.train()
    mean = expected_mean(run)
    model = Net()
    sf.load(tmp_path / "run").load_model(model)

    torch.testing.assert_close(dict(model.named_parameters()), mean, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        by_hand = float(loss(model, data()))
        of_trained = float(loss(run.state.models["model"].eval(), data()))
    assert run.evaluate()["all/loss"] == pytest.approx(by_hand, rel=1e-5)
    assert of_trained != pytest.approx(by_hand, rel=1e-3)


def test_scoring_and_saving_more_often_changes_no_bit(tmp_path: Any) -> None:
    often = build(evaluate_every="1 steps", run_dir=tmp_path / "run", save_every="1 steps")
    often.train()
    never = build(splits=None)
    never.train()

    assert_same_bits(weights(often), weights(never))


def test_a_split_for_the_end_is_scored_with_the_mean_of_the_best_step(tmp_path: Any) -> None:
    """Weights of another step are lent to the model then: the mean must not be made of them and of
    the newest z.
    """
    splits = {
        "all": sf.Split(data(), batch_size=8),
        "end": sf.Split(data(), batch_size=8, at_end=True),
    }
    run = build(splits=splits, best="max all/loss", run_dir=tmp_path / "run")
    losses: dict[int, float] = {}
    with run:
        for step in run:
            if step.metrics:
                losses[step.index + 1] = step.metrics["all/loss"]

    run_records = records(tmp_path / "run" / "metrics.jsonl")
    *_, at_end = [record for record in run_records if record["kind"] == "final_eval"]
    best = max(losses, key=losses.__getitem__)  # by "max all/loss"
    assert best != 12
    assert at_end["weights_step"] == best
    assert at_end["end/loss"] == pytest.approx(losses[best], rel=1e-6)


def test_a_mean_that_is_lent_is_not_made_anew_of_the_newest_steps(tmp_path: Any) -> None:
    """Between two evaluations the twin is behind: it must catch up before other weights stand in
    its place.
    """
    run = build(splits=None, run_dir=tmp_path / "run", length="3 steps", save_every="1 steps")
    with run:
        for step in run:
            if step.index == 2:
                start = Store(tmp_path / "run/checkpoints").at(0)
                with weights_of(run.state, start):
                    lent = run.parts.evaluator.models()["model"].state_dict()
                    torch.testing.assert_close(dict(lent), start.tensors("ema"))
                mean = dict(run.state.ema_models["model"].model.named_parameters())
                torch.testing.assert_close(mean, expected_mean(run), rtol=1e-5, atol=1e-6)


def test_averages_of_its_own_and_ema_are_refused_together() -> None:
    fields = {"setting": "ema", "value": 0.9, "optimizer": "schedule_free"}

    with refused("average-of-averaging-optimizer", **fields):
        build(ema=0.9)


def test_a_falling_schedule_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    build(schedule=sf.schedules.cosine(), console=True)
    build(schedule=sf.schedules.constant("2 steps"), console=True)

    (note,) = lines_naming(capsys.readouterr().out, "note: ", " schedule_free ")
    assert "schedule=sf.schedules.constant(...)" in note


def test_a_first_beta_of_zero_is_refused() -> None:
    with refused("setting-out-of-range", setting="optimizer.betas", value=(0.0, 0.9)):
        sf.optim.schedule_free(0.1, betas=(0.0, 0.9))


def test_a_parameter_that_is_frozen_has_no_mean() -> None:
    """Its fast point is that of an earlier step, and the loop's body may move it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    average = ScheduleFreeAverage(copy_model(model), optimizer)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        average.update(torch.tensor(1.0))
    model[0].requires_grad_(False)
    torch.nn.init.zeros_(model[0].weight)

    average.refresh(model)

    assert torch.equal(average.model[0].weight, torch.zeros(2, 2))
    assert not torch.equal(average.model[1].weight, model[1].weight)
