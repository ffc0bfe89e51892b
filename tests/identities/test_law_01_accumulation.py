"""Law 1: gradients do not depend on how the global batch is cut into micro-batches. (1 s)

In float64, so that only arithmetic that is wrong can differ; the gradient is read off as the change
that SGD at rate 1 makes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
CUTS = [[12], [6, 6], [4, 4, 4], [1] * 12, [5, 7], [1, 11], [3, 1, 6, 2], [11, 1]]


def weighted_mean(model: Any, batch: Batch) -> sf.Mean:
    """The same mean over weights that are not whole numbers."""
    weights = (batch[1] != IGNORED).double() * 0.7
    each = F.cross_entropy(
        model(batch[0]).movedim(2, 1), batch[1], ignore_index=IGNORED, reduction="none"
    )
    return sf.Mean((each * weights).sum(), weights.sum())


def one_a_sample(batch: Batch) -> int:
    return len(batch[0])


def run_of(loss: Any, *, clip: str = "off", model: Any = None) -> sf.Run:
    return sf.Run(
        model=model or (lambda: nn.Linear(FEATURES, CLASSES).double()),
        loss=loss,
        train_data=tokens(SAMPLES, seed=1, dtype=torch.float64),
        batch_size=SAMPLES,
        length="8 steps",
        optimizer=sf.optim.sgd(lr=1.0),
        precision="fp32",
        device="cpu",
        clip=clip,
        console=False,
    )


def cut(batch: Batch, sizes: Sequence[int], count: Any = counted_targets) -> list[MicroBatch]:
    parts = zip(torch.split(batch[0], list(sizes)), torch.split(batch[1], list(sizes)), strict=True)
    nothing = np.zeros(0, dtype=np.int64)
    return [
        MicroBatch(part, count(part), index, nothing, nothing) for index, part in enumerate(parts)
    ]


def change_and_step(run: sf.Run, micro_batches: list[MicroBatch]) -> tuple[dict[str, Tensor], Step]:
    """What one step changes in every parameter: minus the gradient that was applied."""
    model = run.state.models["model"]
    before = {name: held.detach().clone() for name, held in model.named_parameters()}
    step = Step(0, micro_batches, run.parts.task, run.state)
    sf.forward_backward(step)
    sf.update(step)
    return {name: before[name] - held.detach() for name, held in model.named_parameters()}, step


def by_autograd(clip: float | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of the mean over all counted targets, without any of our own code."""
    model = run_of(None).state.models["model"]
    loss = plain_mean(model, tokens(SAMPLES, seed=1, dtype=torch.float64))
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return {
        name: held.grad for name, held in model.named_parameters() if held.grad is not None
    }, loss.detach()


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
    gradient, mean = by_autograd()

    found, step = change_and_step(
        run_of(loss), cut(tokens(SAMPLES, seed=1, dtype=torch.float64), sizes, count)
    )

    assert_same(found, gradient)
    assert_same(step.loss, mean)
    by_target = 0.7 if loss is weighted_mean else 1.0
    assert float(step.target_count) == pytest.approx(
        by_target * counted_targets(tokens(SAMPLES, seed=1)), rel=1e-12
    )
    assert_same(
        step.grad_norm,
        torch.linalg.vector_norm(torch.cat([held.flatten() for held in gradient.values()])),
    )


@in_one
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("loss", [plain_mean, counted_mean])
def test_the_norm_that_clips_is_that_of_the_whole_gradient(loss: Any, sizes: list[int]) -> None:
    gradient, _ = by_autograd(clip=0.05)

    found, _ = change_and_step(
        run_of(loss, clip="norm 0.05"), cut(tokens(SAMPLES, seed=1, dtype=torch.float64), sizes)
    )

    assert_same(found, gradient)


@in_one
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("clip", ["norm 0.05", "value 0.01", "adaptive 0.01", "auto 0.5"])
def test_what_a_limit_leaves_does_not_depend_on_how_the_batch_is_cut(
    clip: str, sizes: list[int]
) -> None:
    def two_steps(sizes: list[int]) -> tuple[Any, Any]:
        run = run_of(
            weighted_mean,
            clip=clip,
            model=lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)).double(),
        )
        for seed in (1, 2):  # the second is limited by what was remembered of the first
            data = tokens(SAMPLES, seed=seed, dtype=torch.float64)
            change, step = change_and_step(run, cut(data, sizes, one_a_sample))
        return change, step.clip_fractions

    assert_same(two_steps(sizes), two_steps([SAMPLES]))


@in_one
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("loss", "count"),
    [(plain_mean, counted_targets), (counted_mean, counted_targets), (counted_mean, one_a_sample)],
)
def test_a_wholly_ignored_micro_batch_contributes_nothing(
    loss: Any, count: Any, place: int
) -> None:
    inputs, targets = tokens(SAMPLES, seed=1, dtype=torch.float64)
    ignored = (inputs[:3], torch.full_like(targets[:3], IGNORED))
    parts = cut((inputs, targets), [5, 7], count)
    nothing = np.zeros(0, dtype=np.int64)
    parts.insert(place, MicroBatch(ignored, count(ignored), 9, nothing, nothing))

    found, step = change_and_step(run_of(loss), parts)

    assert_same(found, by_autograd()[0])
    assert_same(step.loss, by_autograd()[1])


@pytest.mark.parametrize(
    ("loss", "count"),
    [(plain_mean, counted_targets), (counted_mean, counted_targets), (counted_mean, one_a_sample)],
)
def test_a_batch_with_nothing_to_count_changes_nothing_and_is_no_bad_step(
    loss: Any, count: Any
) -> None:
    inputs, targets = tokens(SAMPLES, seed=1, dtype=torch.float64)

    found, step = change_and_step(
        run_of(loss), cut((inputs, torch.full_like(targets, IGNORED)), [5, 7], count)
    )

    assert all(torch.count_nonzero(held) == 0 for held in found.values())
    assert step.skipped is not None
    assert step.loss is not None
    assert (float(step.skipped), float(step.loss), float(step.target_count)) == (0.0, 0.0, 0.0)


def test_a_loss_may_count_some_micro_batches_itself_and_others_not() -> None:
    """The count of all is that of the one kind and of the other."""

    batch = tokens(8, seed=3, dtype=torch.float64)

    def mixed(model: Any, batch: Batch) -> Any:
        return counted_mean(model, batch) if len(batch[0]) > 2 else plain_mean(model, batch)

    found, step = change_and_step(run_of(mixed), cut(batch, [3, 2, 2, 1]))
    expected, whole = change_and_step(run_of(plain_mean), cut(batch, [8]))
    assert_same(found, expected)
    assert float(step.loss) == pytest.approx(float(whole.loss), rel=1e-6)  # type: ignore[arg-type]
    assert float(step.target_count) == float(whole.target_count)


def test_what_a_loss_returns_beside_it_is_averaged_over_what_was_counted() -> None:
    def loss(model: Any, batch: Batch) -> Any:
        right = (model(batch[0]).argmax(2) == batch[1]).sum()
        return counted_mean(model, batch), {"accuracy": sf.Mean(right, (batch[1] != IGNORED).sum())}

    values = []
    for sizes in CUTS:
        _, step = change_and_step(
            run_of(loss), cut(tokens(SAMPLES, seed=1, dtype=torch.float64), sizes)
        )
        meter = Meter()
        meter.add(step)
        values.append(meter.read()[0]["accuracy"])

    assert values == [values[0]] * len(CUTS)
    assert values[0] > 0


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
    ends = []
    for part in cut(tokens(SAMPLES, seed=1, dtype=torch.float64), sizes):
        if part.count:
            alone: Any = run_of(normalised_loss, model=Normalised).state.models["model"]
            alone.load_state_dict(run.state.models["model"].state_dict())
            alone(part.batch[0])
            ends.append((alone[2].running_mean.clone(), alone[2].running_var.clone()))

    change_and_step(run, cut(tokens(SAMPLES, seed=1, dtype=torch.float64), sizes))

    assert_same(norm.running_mean, torch.stack([mean for mean, _ in ends]).mean(0))
    assert_same(norm.running_var, torch.stack([variance for _, variance in ends]).mean(0))
    assert int(norm.num_batches_tracked) == 1  # it counts steps


def test_an_infinite_buffer_that_no_pass_changes_stays_what_it_is() -> None:
    """A mask of infinities: infinity minus infinity must not become its change."""

    class Masked(Normalised):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((2,), -torch.inf))

    run = run_of(normalised_loss, model=Masked)
    change_and_step(run, cut(tokens(SAMPLES, seed=1, dtype=torch.float64), [4, 4, 4]))
    assert run.state.models["model"].state_dict()["mask"].tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4]], ids=str)
def test_a_step_with_nothing_to_count_changes_no_weight_and_no_statistic(sizes: list[int]) -> None:
    run = run_of(normalised_loss, model=Normalised)
    before = {name: held.clone() for name, held in run.state.models["model"].state_dict().items()}
    inputs, targets = tokens(SAMPLES, seed=1, dtype=torch.float64)
    _, step = change_and_step(run, cut((inputs, torch.full_like(targets, IGNORED)), sizes))
    assert (float(step.loss), float(step.grad_norm), float(step.skipped)) == (0.0, 0.0, 0.0)
    after = run.state.models["model"].state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@in_one
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("loss", "count"), [(plain_mean, counted_targets), (counted_mean, None), (weighted_mean, None)]
)
def test_a_whole_run_does_not_depend_on_the_micro_batch_size(
    loss: Any, count: Any, micro_batch_size: int
) -> None:
    """A loss that returns a `Mean` counts by itself, without `count=`."""

    def trained(size: int) -> tuple[dict[str, Tensor], list[float]]:
        run = sf.Run(
            model=lambda: nn.Sequential(
                nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)
            ).double(),
            loss=loss,
            count_fn=count,
            train_data=tokens(SAMPLES, seed=1, dtype=torch.float64),
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

    torch.testing.assert_close(trained(micro_batch_size), trained(12), rtol=1e-9, atol=1e-9)
