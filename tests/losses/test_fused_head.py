"""The loss of a linear head in pieces is the plain one, in value and in gradient. 3 s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from in_one import in_one
from refused import refused
from surefoot.losses import dense
from surefoot.losses.dense import (
    linear_cross_entropy,
    linear_cross_entropy_with_scores,
    summed_cross_entropy,
)


def tensors(
    rows: int, classes: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors, the weight of the head, and targets."""
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 6, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(classes, 6, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(classes, (rows,), generator=generator)
    return hidden, head, targets


@pytest.fixture
def rows_of_linear(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each call of `F.linear`."""
    rows: list[int] = []
    linear = F.linear

    def counting_linear(inputs: Tensor, weight: Tensor) -> Tensor:
        rows.append(len(inputs))
        return linear(inputs, weight)

    monkeypatch.setattr(F, "linear", counting_linear)
    return rows


@in_one
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_value_and_gradients_are_those_of_torch(rows: int, label_smoothing: float) -> None:
    hidden, head, targets = tensors(rows, 11)
    settings: dict[str, Any] = {"label_smoothing": label_smoothing}

    total, *_ = summed_cross_entropy(hidden, head, targets, **settings)
    gradients = torch.autograd.grad(total * 0.3, [hidden, head])

    expected = F.cross_entropy(hidden @ head.T, targets, reduction="sum", **settings)
    expected_gradients = torch.autograd.grad(expected * 0.3, [hidden, head])
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-11, atol=1e-12)


def test_it_is_the_gradient_by_finite_differences() -> None:
    hidden, head, targets = tensors(7, 5)

    def total(hidden: Tensor, head: Tensor) -> Tensor:
        return summed_cross_entropy(hidden, head, targets, label_smoothing=0.2)[0]

    assert torch.autograd.gradcheck(total, (hidden, head))


def test_under_autocast_it_is_as_near_to_float32_as_the_plain_one() -> None:
    hidden, head, targets = tensors(600, 300, torch.float32)
    in_float32 = F.cross_entropy(hidden @ head.T, targets, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_pieces, *_ = summed_cross_entropy(hidden, head, targets)
        plain = F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="sum")

    gradients = torch.autograd.grad(in_pieces, [hidden, head])
    plain_gradients = torch.autograd.grad(plain, [hidden, head])

    exact_gradients = torch.autograd.grad(in_float32, [hidden, head])
    assert in_pieces.dtype == torch.float32
    for gradient, of_plain, exact in zip(gradients, plain_gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact).norm() <= 1.2 * (of_plain - exact).norm()


def test_the_piece_changes_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = tensors(500, 9)
    in_large_pieces, *_ = summed_cross_entropy(hidden, head, targets)

    monkeypatch.setattr(dense, "_PIECE", 7)
    in_small_pieces, *_ = summed_cross_entropy(hidden, head, targets)

    torch.testing.assert_close(in_small_pieces, in_large_pieces, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ignored", [0, 3, 600])
def test_linear_cross_entropy_takes_it_for_many_logits_and_leaves_ignored_targets_out(
    ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, targets = tensors(600, 8000, torch.float32)
    targets[:ignored] = -100
    rows_in_pieces = []

    def counting(hidden: Tensor, *others: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        rows_in_pieces.append(len(hidden))
        return summed_cross_entropy(hidden, *others, **settings)

    monkeypatch.setattr("surefoot.losses.dense.summed_cross_entropy", counting)

    mean = linear_cross_entropy(hidden, head, targets, label_smoothing=0.1)
    assert isinstance(mean.total, Tensor)
    mean.total.backward()
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, head, targets, label_smoothing=0.1)

    expected = torch.zeros(())
    if ignored < 600:
        expected = F.cross_entropy(hidden @ head.T, targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(mean.total, expected, rtol=1e-5, atol=1e-5)
    assert mean.count == 600 - ignored
    assert hidden.grad is not None
    assert not hidden.grad[:ignored].any()
    assert rows_in_pieces == [600 - ignored]  # not in the evaluation
    torch.testing.assert_close(evaluated.total, mean.total, rtol=1e-5, atol=1e-5)
    assert evaluated.count == mean.count


def test_an_evaluation_never_has_all_logits_at_once(rows_of_linear: list[int]) -> None:
    hidden, head, targets = tensors(1300, 4000, torch.float32)

    with torch.no_grad():
        linear_cross_entropy(hidden, head, targets)

    assert rows_of_linear == [512, 512, 276]


@pytest.mark.parametrize("rows", [3, 600])
def test_targets_that_do_not_fit_are_told_alike_however_many(rows: int) -> None:
    hidden, head, _ = tensors(rows, 8000, torch.float32)
    targets = torch.zeros(rows + 1, dtype=torch.long)

    with refused("targets-misfit", targets=(rows + 1,)):
        linear_cross_entropy(hidden, head, targets)


# enough logits for pieces, where there are many classes
ROWS_AND_CLASSES = [(600, 40), (600, 8000), (220, 20_000)]


def scored_tensors(rows: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Half of the targets is right, and a sixth of them is ignored."""
    hidden, head, targets = tensors(rows, classes, torch.float32)
    with torch.no_grad():
        targets[::2] = (hidden @ head.T).argmax(dim=1)[::2]
    targets[: rows // 6] = -100
    return hidden, head, targets


@pytest.fixture(params=[True, False], ids=["in pieces", "elsewhere"])
def in_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """In pieces with their gradient, or as on another device than a CPU."""
    if not request.param:
        monkeypatch.setattr(dense, "WORTH_PIECES", 1 << 60)
    return bool(request.param)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), ROWS_AND_CLASSES)
@pytest.mark.usefixtures("in_pieces")
def test_scores_change_no_bit_of_the_loss(rows: int, classes: int, label_smoothing: float) -> None:
    hidden, head, targets = scored_tensors(rows, classes)
    settings: dict[str, Any] = {"label_smoothing": label_smoothing}

    mean = linear_cross_entropy(hidden, head, targets, **settings)
    scored, _ = linear_cross_entropy_with_scores(hidden, head, targets, **settings)

    assert torch.equal(torch.as_tensor(scored.total), torch.as_tensor(mean.total))
    gradients = torch.autograd.grad(scored.value, [hidden, head])  # type: ignore[arg-type]
    expected = torch.autograd.grad(mean.value, [hidden, head])  # type: ignore[arg-type]
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "classes"), ROWS_AND_CLASSES)
def test_scores_are_those_of_the_logits(
    rows: int, classes: int, label_smoothing: float, in_pieces: bool
) -> None:
    hidden, head, targets = scored_tensors(rows, classes)
    settings: dict[str, Any] = {"label_smoothing": label_smoothing}

    _, scores = linear_cross_entropy_with_scores(hidden, head, targets, **settings)

    if classes > dense.HELD_AT_ONCE and not in_pieces and not label_smoothing:
        assert scores == {}  # torch's function shows no logits
        return
    logits = hidden @ head.T
    is_right = (logits.argmax(dim=1) == targets)[targets != -100]
    right_fraction = float(is_right.double().mean())
    assert 0.5 <= right_fraction < 0.6
    assert float(scores["accuracy"].value) == pytest.approx(right_fraction)
    assert ("unsmoothed_loss" in scores) == bool(label_smoothing)
    if label_smoothing:
        unsmoothed_loss = float(F.cross_entropy(logits, targets).detach())
        assert float(scores["unsmoothed_loss"].value) == pytest.approx(unsmoothed_loss, rel=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_scores_without_gradients_take_the_pieces_of_the_loss(
    label_smoothing: float, rows_of_linear: list[int]
) -> None:
    """So no bit of the loss differs, and all logits are never there at once."""
    hidden, head, targets = tensors(1300, 4000, torch.float32)
    right = int(((hidden @ head.T).argmax(dim=1) == targets).sum())
    settings: dict[str, Any] = {"label_smoothing": label_smoothing}

    with torch.no_grad():
        mean = linear_cross_entropy(hidden, head, targets, **settings)
        scored, scores = linear_cross_entropy_with_scores(hidden, head, targets, **settings)

    assert rows_of_linear == [512, 512, 276] * 2
    assert torch.equal(torch.as_tensor(mean.total), torch.as_tensor(scored.total))
    assert int(scores["accuracy"].total) == right
