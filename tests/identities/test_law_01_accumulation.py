"""Law 1: gradients do not depend on how the global batch is cut into micro-batches. (1 s)

In float64, so that only arithmetic that is wrong can differ; the gradient is read off as the change
that SGD at rate 1 makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from ragged import (
    CLASSES,
    FEATURES,
    IGNORED,
    Batch,
    counted_mean,
    counted_targets,
    plain_mean,
    tokens,
)
from surefoot.data.loader import MicroBatch
from surefoot.train.loop import Step
from surefoot.train.meter import Meter

SAMPLES = 12
WEIGHT = 0.7  # of a target, in `weighted_mean`
CUTS = [[12], [6, 6], [4, 4, 4], [1] * 12, [5, 7], [1, 11], [3, 1, 6, 2], [11, 1]]


def weighted_mean(model: Any, batch: Batch) -> sf.Mean:
    """The same mean over weights that are not whole numbers."""
    inputs, targets = batch
    weights = (targets != IGNORED).double() * WEIGHT
    losses = F.cross_entropy(
        model(inputs).movedim(2, 1), targets, ignore_index=IGNORED, reduction="none"
    )
    return sf.Mean((losses * weights).sum(), weights.sum())


def one_a_sample(batch: Batch) -> int:
    return len(batch[0])


def data() -> Batch:
    return tokens(SAMPLES, seed=1, dtype=torch.float64)


def without_targets(batch: Batch) -> Batch:
    inputs, targets = batch
    return inputs, torch.full_like(targets, IGNORED)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


def run_of(loss: Any, *, clip: str = "off", model: Any = linear) -> sf.Run:
    return sf.Run(
        model=model,
        loss=loss,
        train_data=data(),
        batch_size=SAMPLES,
        length="8 steps",
        optimizer=sf.optim.sgd(lr=1.0),
        precision="fp32",
        device="cpu",
        clip=clip,
        console=False,
    )


def micro_batch_of(part: Batch, count: Any, index: int) -> MicroBatch:
    no_ids = np.zeros(0, dtype=np.int64)
    return MicroBatch(part, count(part), index, no_ids, no_ids)


def cut(batch: Batch, sizes: Sequence[int], count: Any = counted_targets) -> list[MicroBatch]:
    inputs, targets = batch
    parts = zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)
    return [micro_batch_of(part, count, index) for index, part in enumerate(parts)]


def gradient_and_step(
    run: sf.Run, micro_batches: list[MicroBatch]
) -> tuple[dict[str, Tensor], Step]:
    """The gradient that a step applies: minus what it changes in every parameter."""
    model = run.state.models["model"]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step = Step(0, micro_batches, run.parts.task, run.state)
    sf.forward_backward(step)
    sf.update(step)
    gradient = {
        name: before[name] - parameter.detach() for name, parameter in model.named_parameters()
    }
    return gradient, step


def gradient_and_loss_of_torch(clip: float | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Of the mean over all counted targets, without any of our own code."""
    model = run_of(None).state.models["model"]
    loss = plain_mean(model, data())
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    gradient = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient[name] = parameter.grad
    return gradient, loss.detach()


def norm_of(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in gradient.values()]).norm()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@in_one
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (plain_mean, counted_targets),
        (counted_mean, counted_targets),
        (counted_mean, one_a_sample),  # the loss's own counts are those that hold
        (weighted_mean, one_a_sample),
    ],
)
def test_gradient_and_loss_do_not_depend_on_how_the_batch_is_cut(
    loss: Any, count: Any, sizes: list[int]
) -> None:
    expected, mean = gradient_and_loss_of_torch()

    gradient, step = gradient_and_step(run_of(loss), cut(data(), sizes, count))

    assert_same(gradient, expected)
    assert_same(step.loss, mean)
    assert_same(step.grad_norm, norm_of(expected))
    target_count = float(counted_targets(data()))
    if loss is weighted_mean:
        target_count *= WEIGHT
    assert float(step.target_count) == pytest.approx(target_count, rel=1e-12)


@in_one
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("loss", [plain_mean, counted_mean])
def test_the_norm_that_clips_is_that_of_the_whole_gradient(loss: Any, sizes: list[int]) -> None:
    expected, _ = gradient_and_loss_of_torch(clip=0.05)
    gradient, _ = gradient_and_step(run_of(loss, clip="norm 0.05"), cut(data(), sizes))
    assert_same(gradient, expected)


@in_one
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("clip", ["norm 0.05", "value 0.01", "adaptive 0.01", "auto 0.5"])
def test_what_a_limit_leaves_does_not_depend_on_how_the_batch_is_cut(
    clip: str, sizes: list[int]
) -> None:
    def two_layers() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)).double()

    def second_gradient(sizes: list[int]) -> tuple[Any, Any]:
        """It is limited by what was remembered of the first."""
        run = run_of(weighted_mean, clip=clip, model=two_layers)
        first_batch = tokens(SAMPLES, seed=1, dtype=torch.float64)
        second_batch = tokens(SAMPLES, seed=2, dtype=torch.float64)
        gradient_and_step(run, cut(first_batch, sizes, one_a_sample))
        gradient, step = gradient_and_step(run, cut(second_batch, sizes, one_a_sample))
        return gradient, step.clip_fractions

    assert_same(second_gradient(sizes), second_gradient([SAMPLES]))


@in_one
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("loss", "count"),
    [(plain_mean, counted_targets), (counted_mean, counted_targets), (counted_mean, one_a_sample)],
)
def test_a_wholly_ignored_micro_batch_contributes_nothing(
    loss: Any, count: Any, place: int
) -> None:
    expected, mean = gradient_and_loss_of_torch()
    inputs, targets = data()
    ignored = without_targets((inputs[:3], targets[:3]))
    micro_batches = cut((inputs, targets), [5, 7], count)
    micro_batches.insert(place, micro_batch_of(ignored, count, index=9))

    gradient, step = gradient_and_step(run_of(loss), micro_batches)

    assert_same(gradient, expected)
    assert_same(step.loss, mean)


@pytest.mark.parametrize(
    ("loss", "count"),
    [(plain_mean, counted_targets), (counted_mean, counted_targets), (counted_mean, one_a_sample)],
)
def test_a_batch_with_nothing_to_count_changes_nothing_and_is_no_bad_step(
    loss: Any, count: Any
) -> None:
    ignored = without_targets(data())

    gradient, step = gradient_and_step(run_of(loss), cut(ignored, [5, 7], count))

    for part in gradient.values():
        assert torch.count_nonzero(part) == 0
    assert step.skipped is not None
    assert step.loss is not None
    assert float(step.skipped) == 0
    assert float(step.loss) == 0
    assert float(step.target_count) == 0


def test_a_loss_may_count_some_micro_batches_itself_and_others_not() -> None:
    """The count of all is that of the one kind and of the other."""

    batch = tokens(8, seed=3, dtype=torch.float64)

    def mixed(model: Any, batch: Batch) -> Any:
        if len(batch[0]) > 2:
            return counted_mean(model, batch)
        return plain_mean(model, batch)

    gradient, step = gradient_and_step(run_of(mixed), cut(batch, [3, 2, 2, 1]))

    expected, whole = gradient_and_step(run_of(plain_mean), cut(batch, [8]))
    assert_same(gradient, expected)
    assert float(step.loss) == pytest.approx(float(whole.loss), rel=1e-6)  # type: ignore[arg-type]
    assert float(step.target_count) == float(whole.target_count)


def test_what_a_loss_returns_beside_it_is_averaged_over_what_was_counted() -> None:
    def loss(model: Any, batch: Batch) -> Any:
        inputs, targets = batch
        right = (model(inputs).argmax(2) == targets).sum()
        accuracy = sf.Mean(right, (targets != IGNORED).sum())
        return counted_mean(model, batch), {"accuracy": accuracy}

    accuracies = []
    for sizes in CUTS:
        _, step = gradient_and_step(run_of(loss), cut(data(), sizes))
        meter = Meter()
        meter.add(step)
        means, *_ = meter.read()
        accuracies.append(means["accuracy"])

    whole, *_ = accuracies
    assert whole > 0
    assert accuracies == [whole] * len(CUTS)


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(0, 1),
            nn.Linear(FEATURES, 6),
            nn.BatchNorm1d(6, momentum=0.3),
            nn.Linear(6, CLASSES),
        )
        self.double()


def normalised_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_batch_statistics_are_the_mean_over_the_micro_batches_of_the_step(sizes: list[int]) -> None:
    run = run_of(normalised_loss, model=Normalised)
    norm: Any = run.state.models["model"][2]
    norm.running_mean.fill_(0.7)
    norm.running_var.fill_(3.0)
    # every micro-batch by itself, from the statistics at the start of the step, with the weights at
    # its start
    means = []
    variances = []
    for micro_batch in cut(data(), sizes):
        if micro_batch.count:
            alone = deepcopy(run.state.models["model"])
            alone(micro_batch.batch[0])
            means.append(alone[2].running_mean)
            variances.append(alone[2].running_var)

    gradient_and_step(run, cut(data(), sizes))

    assert_same(norm.running_mean, torch.stack(means).mean(0))
    assert_same(norm.running_var, torch.stack(variances).mean(0))
    assert int(norm.num_batches_tracked) == 1  # it counts steps


def test_an_infinite_buffer_that_no_pass_changes_stays_what_it_is() -> None:
    """A mask of infinities: infinity minus infinity must not become its change."""

    class Masked(Normalised):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2,), -torch.inf))

    run = run_of(normalised_loss, model=Masked)
    gradient_and_step(run, cut(data(), [4, 4, 4]))
    assert run.state.models["model"].state_dict()["mask"].tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4]], ids=str)
def test_a_step_with_nothing_to_count_changes_no_weight_and_no_statistic(sizes: list[int]) -> None:
    run = run_of(normalised_loss, model=Normalised)
    before = deepcopy(run.state.models["model"].state_dict())

    _, step = gradient_and_step(run, cut(without_targets(data()), sizes))

    assert step.loss is not None
    assert step.grad_norm is not None
    assert step.skipped is not None
    assert float(step.loss) == 0
    assert float(step.grad_norm) == 0
    assert float(step.skipped) == 0
    after = run.state.models["model"].state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@in_one
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("loss", "count"), [(plain_mean, counted_targets), (counted_mean, None), (weighted_mean, None)]
)
def test_a_whole_run_does_not_depend_on_the_micro_batch_size(
    loss: Any, count: Any, micro_batch_size: int
) -> None:
    """A loss that returns a `Mean` counts by itself, without `count=`."""

    def two_layers() -> nn.Module:
        layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        return layers.double()

    def train(size: int) -> tuple[dict[str, Tensor], list[float]]:
        run = sf.Run(
            model=two_layers,
            loss=loss,
            count_fn=count,
            train_data=data(),
            batch_size=12,
            micro_batch_size=size,
            length="10 steps",
            optimizer=sf.optim.adamw(lr=1e-2),
            precision="fp32",
            device="cpu",
            console=False,
        )
        with run:
            counts = [float(step.target_count) for step in run]
        return run.state.models["model"].state_dict(), counts

    torch.testing.assert_close(train(micro_batch_size), train(12), rtol=1e-9, atol=1e-9)
