"""Counted cross-entropy against torch's own reductions, and over every way of cutting a batch; 1
second.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from refused import refused
from surefoot.losses import dense
from surefoot.losses.dense import chunked_cross_entropy, cross_entropy, linear_cross_entropy
from surefoot.mean import Mean, summed
from surefoot.train.loss_accumulator import scalar

CLASSES = 7
CHANNELS = 5


@pytest.fixture
def ragged():
    """Logits (6, 9, C) and targets of rows that hold 9, 0, 4, 1, 7 and 2 counted ones."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 9, CLASSES, generator=generator)
    targets = torch.randint(CLASSES, (6, 9), generator=generator)
    for row, counted in enumerate([9, 0, 4, 1, 7, 2]):
        targets[row, counted:] = -100
    return logits, targets


def gradient(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_value_is_torchs_mean_reduction(ragged, label_smoothing, ignore_index):
    logits, targets = ragged
    targets = targets.where(targets != -100, ignore_index)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    expected = F.cross_entropy(logits.reshape(-1, CLASSES), targets.reshape(-1), **options)
    assert_close(cross_entropy(logits, targets, **options).value, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_total_is_torchs_sum_reduction(ragged, label_smoothing):
    logits, targets = ragged
    expected = F.cross_entropy(
        logits.reshape(-1, CLASSES),
        targets.reshape(-1),
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    assert cross_entropy(logits, targets, label_smoothing=label_smoothing).total == expected


def test_count_is_a_tensor_of_the_targets_that_are_not_ignored(ragged):
    count = cross_entropy(*ragged).count
    assert isinstance(count, torch.Tensor)
    assert count == 9 + 0 + 4 + 1 + 7 + 2


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 4], [1, 5], [3, 2, 1], [6]])
def test_gradient_does_not_depend_on_how_the_batch_is_cut(ragged, sizes):
    logits, targets = ragged
    logits.requires_grad_()
    parts = zip(logits.split(sizes), targets.split(sizes), strict=True)
    loss = summed([cross_entropy(*part) for part in parts]).value
    expected_loss = F.cross_entropy(logits.reshape(-1, CLASSES), targets.reshape(-1))

    (slope,) = gradient(loss, logits)

    (expected,) = gradient(expected_loss, logits)
    assert_close(slope, expected, rtol=1e-6, atol=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=12))
@settings(max_examples=50)
def test_ignored_targets_weigh_nothing_wherever_they_stand(counted):
    generator = torch.Generator().manual_seed(len(counted))
    logits = torch.randn(len(counted), CLASSES, generator=generator)
    kept = torch.tensor(counted)
    targets = torch.where(kept, torch.arange(len(counted)) % CLASSES, -100)

    mean = cross_entropy(logits, targets)

    alone = cross_entropy(logits[kept], targets[kept])
    assert int(mean.count) == int(alone.count)
    assert_close(mean.value, alone.value, rtol=1e-6, atol=1e-6, equal_nan=not any(counted))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_nothing_to_count_is_a_loss_of_zero_with_zero_gradients(shape, label_smoothing):
    logits = torch.randn(*shape, CLASSES, requires_grad=True)
    mean = cross_entropy(logits, torch.full(shape, -100), label_smoothing=label_smoothing)
    (slope,) = gradient(mean.value, logits)

    assert mean.value.item() == 0.0
    assert int(mean.count) == 0
    assert torch.equal(slope, torch.zeros_like(slope))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    logits = torch.zeros(100_000, 2, dtype=dtype)
    targets = torch.zeros(100_000, dtype=torch.long)

    total = cross_entropy(logits, targets).total

    far_past_the_largest_float16 = 100_000 * math.log(2)
    assert total.dtype == torch.float32
    assert_close(total.item(), far_past_the_largest_float16, rtol=1e-4, atol=0)


def test_float64_logits_stay_float64(ragged):
    logits, targets = ragged
    assert cross_entropy(logits.double(), targets).total.dtype == torch.float64


@pytest.mark.parametrize(
    ("logits", "targets"), [((2, 7, 3), (2, 3)), ((4, 3, 7), (3, 4)), ((4, 7), (5,))]
)
def test_shapes_that_do_not_fit_are_refused_with_both_named(logits, targets):
    with refused("targets-misfit", logits=logits, targets=targets):
        cross_entropy(torch.zeros(logits), torch.zeros(targets, dtype=torch.long))


@pytest.mark.parametrize("chunk", [1, 4, 54, 1000])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_chunked_loss_is_the_whole_ones_equal(ragged, chunk, label_smoothing):
    _, targets = ragged
    hidden = torch.randn(6, 9, CHANNELS, dtype=torch.float64, requires_grad=True)
    head = torch.randn(CLASSES, CHANNELS, dtype=torch.float64, requires_grad=True)
    whole = cross_entropy(hidden @ head.T, targets, label_smoothing=label_smoothing)
    chunked, *_ = chunked_cross_entropy(
        hidden, head, targets, chunk=chunk, label_smoothing=label_smoothing
    )

    assert_close((chunked.total, chunked.count), (whole.total, whole.count), rtol=1e-12, atol=0)
    slopes = gradient(chunked.value, hidden, head)
    assert_close(slopes, gradient(whole.value, hidden, head), rtol=1e-10, atol=1e-12)


def test_without_gradients_no_chunk_is_prepared_to_be_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's function for that imports torch's compiler, which takes longer than an evaluation."""
    hidden = torch.randn(2, 10, CHANNELS)
    head = torch.randn(CLASSES, CHANNELS)
    targets = torch.randint(0, CLASSES, (2, 10))
    with_gradients, *_ = chunked_cross_entropy(hidden, head, targets, chunk=3)

    monkeypatch.setattr(dense, "checkpoint", None)
    with torch.no_grad():
        without, *_ = chunked_cross_entropy(hidden, head, targets, chunk=3)

    assert torch.equal(without.value, with_gradients.value)


def test_chunked_loss_never_holds_more_than_a_chunk_of_logits(monkeypatch):
    rows = []
    linear = F.linear

    def counting_linear(part, weight):
        rows.append(part.shape[0])
        return linear(part, weight)

    monkeypatch.setattr(F, "linear", counting_linear)
    hidden = torch.randn(2, 10, CHANNELS, requires_grad=True)
    head = torch.randn(CLASSES, CHANNELS)
    targets = torch.ones(2, 10, dtype=torch.long)

    mean, *_ = chunked_cross_entropy(hidden, head, targets, chunk=8)
    mean.total.backward()

    assert sorted(rows) == [4, 4, 8, 8, 8, 8]  # each once forward, once again backward


@pytest.mark.parametrize("shape", [(4,), (0,)])
def test_chunked_loss_with_nothing_to_count_has_zero_gradients(shape):
    hidden = torch.randn(*shape, CHANNELS, requires_grad=True)
    head = torch.randn(CLASSES, CHANNELS, requires_grad=True)

    mean, *_ = chunked_cross_entropy(hidden, head, torch.full(shape, -100), chunk=3)

    assert mean.value.item() == 0.0
    for slope in gradient(mean.value, hidden, head):
        assert torch.equal(slope, torch.zeros_like(slope))


@pytest.mark.parametrize(
    ("hidden", "head", "targets", "chunk", "code"),
    [
        ((4, 5), (7, 6), (4,), 2, "targets-misfit"),
        ((4, 5), (7, 5), (3,), 2, "targets-misfit"),
        ((4, 5), (7, 5), (4,), 0, "setting-out-of-range"),
    ],
)
def test_chunked_loss_refuses_what_does_not_fit(hidden, head, targets, chunk, code):
    hidden = torch.zeros(hidden)
    head = torch.zeros(head)
    targets = torch.zeros(targets, dtype=torch.long)

    with refused(code):
        chunked_cross_entropy(hidden, head, targets, chunk=chunk)


@pytest.mark.parametrize("classes", [CLASSES, 20_000], ids=["held at once", "in pieces"])
@pytest.mark.parametrize("torch_has_it", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_the_head_and_its_loss_together_are_the_two_one_after_the_other(
    classes, torch_has_it, counted, monkeypatch
):
    if torch_has_it and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    monkeypatch.setattr("surefoot.losses.dense.TORCH_HAS_IT", torch_has_it)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, 30, CHANNELS, dtype=torch.float64, generator=generator)
    hidden.requires_grad_()
    head = torch.randn(classes, CHANNELS, dtype=torch.float64, generator=generator)
    head.requires_grad_()
    targets = torch.randint(classes, (3, 30), generator=generator)
    targets[:, 20:] = -100
    if not counted:
        targets[:] = -100

    apart = cross_entropy(hidden @ head.T, targets)
    together = linear_cross_entropy(hidden, head, targets)

    assert_close((together.total, together.count), (apart.total, apart.count), rtol=1e-12, atol=0)
    slopes = gradient(together.value, hidden, head)
    assert_close(slopes, gradient(apart.value, hidden, head), rtol=1e-9, atol=1e-12)


def test_under_autocast_the_head_is_computed_in_its_type(monkeypatch):
    """`F.linear_cross_entropy` does not follow autocast: a third of a GPT's arithmetic would run in
    float32.
    """
    types = []
    linear = F.linear

    def noting_linear(part, weight):
        logits = linear(part, weight)
        types.append(logits.dtype)
        return logits

    monkeypatch.setattr(F, "linear", noting_linear)
    hidden = torch.randn(8, CHANNELS, requires_grad=True)
    head = torch.randn(20_000, CHANNELS, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, head, torch.arange(8)).total.backward()

    assert types == [torch.bfloat16, torch.bfloat16]  # forward, and once again backward


def test_a_scalar_that_depends_on_a_parameter_passes_as_it_is():
    loss = torch.ones((), requires_grad=True) * 2

    assert scalar(loss) is loss


@pytest.mark.parametrize(
    ("loss", "code", "fields"),
    [
        (1.0, "loss-not-a-tensor", {"returned": "float"}),
        (Mean(1.0, 1), "loss-not-a-tensor", {"returned": "Mean"}),
        (torch.ones(3, requires_grad=True), "loss-not-a-scalar", {"shape": (3,)}),
        (torch.ones(()), "loss-without-gradient", {}),
    ],
)
def test_a_loss_that_no_step_can_start_from_is_refused(loss, code, fields):
    with refused(code, **fields):
        scalar(loss)
