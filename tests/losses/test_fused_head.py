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
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 6, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(classes, 6, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(classes, (rows,), generator=generator)


@in_one
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_value_and_gradients_are_those_of_torch(rows: int, label_smoothing: float) -> None:
    hidden, head, targets = tensors(rows, 11)
    total = summed_cross_entropy(hidden, head, targets, label_smoothing=label_smoothing)[0]
    plain = F.cross_entropy(
        hidden @ head.T, targets, reduction="sum", label_smoothing=label_smoothing
    )
    torch.testing.assert_close(total, plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(total * 0.3, [hidden, head])
    expected = torch.autograd.grad(plain * 0.3, [hidden, head])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_it_is_the_gradient_by_finite_differences() -> None:
    hidden, head, targets = tensors(7, 5)
    assert torch.autograd.gradcheck(
        lambda *held: summed_cross_entropy(*held, targets, label_smoothing=0.2)[0], (hidden, head)
    )


def test_under_autocast_it_is_as_near_to_float32_as_the_plain_one() -> None:
    hidden, head, targets = tensors(600, 300, torch.float32)
    exact = torch.autograd.grad(
        F.cross_entropy(hidden @ head.T, targets, reduction="sum"), [hidden, head]
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pieces = summed_cross_entropy(hidden, head, targets)[0]
        plain = F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="sum")
    assert pieces.dtype == torch.float32
    for one, other, true in zip(
        torch.autograd.grad(pieces, [hidden, head]),
        torch.autograd.grad(plain, [hidden, head]),
        exact,
        strict=True,
    ):
        assert one.dtype == torch.float32
        assert (one - true).norm() <= 1.2 * (other - true).norm()


def test_the_piece_changes_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = tensors(500, 9)
    whole = summed_cross_entropy(hidden, head, targets)[0]
    monkeypatch.setattr(dense, "_PIECE", 7)
    torch.testing.assert_close(
        summed_cross_entropy(hidden, head, targets)[0], whole, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("ignored", [0, 3, 600])
def test_linear_cross_entropy_takes_it_for_many_logits_and_leaves_ignored_targets_out(
    ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, targets = tensors(600, 8000, torch.float32)
    targets[:ignored] = -100
    asked: list[int] = []

    def counting(*held: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        asked.append(len(held[0]))
        return summed_cross_entropy(*held, **settings)

    monkeypatch.setattr("surefoot.losses.dense.summed_cross_entropy", counting)
    mean = linear_cross_entropy(hidden, head, targets, label_smoothing=0.1)
    assert asked == [600 - ignored]
    plain = F.cross_entropy(hidden @ head.T, targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(
        mean.total, plain if ignored < 600 else torch.zeros(()), rtol=1e-5, atol=1e-5
    )
    assert mean.count == 600 - ignored
    assert isinstance(mean.total, Tensor)
    mean.total.backward()
    assert hidden.grad is not None
    assert not hidden.grad[:ignored].any()
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, head, targets, label_smoothing=0.1)
    assert len(asked) == 1
    torch.testing.assert_close(evaluated.total, mean.total, rtol=1e-5, atol=1e-5)
    assert evaluated.count == mean.count


def test_an_evaluation_never_has_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = tensors(1300, 4000, torch.float32)
    rows: list[int] = []
    plain = F.linear
    monkeypatch.setattr(
        F, "linear", lambda part, weight: (rows.append(len(part)), plain(part, weight))[1]
    )
    with torch.no_grad():
        linear_cross_entropy(hidden, head, targets)
    assert rows == [512, 512, 276]


@pytest.mark.parametrize("rows", [3, 600])
def test_targets_that_do_not_fit_are_told_alike_however_many(rows: int) -> None:
    hidden, head, _ = tensors(rows, 8000, torch.float32)
    with refused("targets-misfit", targets=(rows + 1,)):
        linear_cross_entropy(hidden, head, torch.zeros(rows + 1, dtype=torch.long))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [40, 8000, 20_000])
@pytest.mark.parametrize("in_pieces", [True, False])
def test_scores_are_those_of_the_logits_and_change_no_bit_of_the_loss(
    classes: int, label_smoothing: float, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits at once, in pieces with their gradient, and in chunks."""
    if not in_pieces:  # as on another device than a CPU
        monkeypatch.setattr(dense, "WORTH_PIECES", 1 << 60)
    hidden, head, targets = tensors(600, classes, torch.float32)
    with torch.no_grad():
        targets[::2] = (hidden @ head.T).argmax(dim=1)[::2]
    targets[:100] = -100
    settings = {"label_smoothing": label_smoothing}
    mean = linear_cross_entropy(hidden, head, targets, **settings)
    scored, scores = linear_cross_entropy_with_scores(hidden, head, targets, **settings)
    assert torch.equal(torch.as_tensor(mean.total), torch.as_tensor(scored.total))
    expected = torch.autograd.grad(mean.value, [hidden, head])  # type: ignore[arg-type]
    found = torch.autograd.grad(scored.value, [hidden, head])  # type: ignore[arg-type]
    assert all(map(torch.equal, expected, found))
    if classes > dense.HELD_AT_ONCE and not in_pieces and not label_smoothing:
        assert scores == {}  # torch's function shows no logits
        return
    logits = hidden @ head.T
    real = targets != -100
    right = float((logits.argmax(dim=1) == targets)[real].double().mean())
    assert 0.5 <= right < 0.6
    assert float(scores["accuracy"].value) == pytest.approx(right)
    assert ("unsmoothed_loss" in scores) == bool(label_smoothing)
    if label_smoothing:
        plain = float(F.cross_entropy(logits, targets).detach())
        assert float(scores["unsmoothed_loss"].value) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_scores_without_gradients_take_the_pieces_of_the_loss(
    label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no bit of the loss differs, and all logits are never there at once."""
    hidden, head, targets = tensors(1300, 4000, torch.float32)
    right = int(((hidden @ head.T).argmax(dim=1) == targets).sum())
    settings = {"label_smoothing": label_smoothing}
    rows: list[int] = []
    plain = F.linear
    monkeypatch.setattr(
        F, "linear", lambda part, weight: (rows.append(len(part)), plain(part, weight))[1]
    )
    with torch.no_grad():
        mean = linear_cross_entropy(hidden, head, targets, **settings)
        scored, scores = linear_cross_entropy_with_scores(hidden, head, targets, **settings)
    assert rows == [512, 512, 276] * 2
    assert torch.equal(torch.as_tensor(mean.total), torch.as_tensor(scored.total))
    assert int(scores["accuracy"].total) == right
