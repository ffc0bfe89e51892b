"""Dropout from a quarter of the draws: the same distribution, seeded by torch's generator. 1 s."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.models.layers import Dropout, dropout


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.9])
def test_the_fraction_and_the_mean_are_what_they_should_be(fraction: float) -> None:
    torch.manual_seed(0)
    found = dropout(torch.ones(1_000_001), fraction)
    spread = (fraction * (1 - fraction) / 1e6) ** 0.5
    assert abs(float((found == 0).double().mean()) - fraction) < 5 * spread
    assert float(found.double().mean()) == pytest.approx(1.0, abs=5 * spread / (1 - fraction))
    assert found.unique().tolist() == pytest.approx([0.0, 1 / (1 - fraction)], rel=1e-4)


def test_each_of_the_four_units_of_a_draw_falls_as_often() -> None:
    torch.manual_seed(1)
    zero = (dropout(torch.ones(400_000), 0.25) == 0).view(-1, 4).double()
    assert zero.mean(dim=0).tolist() == pytest.approx([0.25] * 4, abs=0.01)
    assert torch.corrcoef(zero.T).fill_diagonal_(0).abs().max() < 0.02


def test_the_gradient_goes_through_what_was_kept() -> None:
    inputs = torch.randn(7, 13, dtype=torch.float64, requires_grad=True)
    outer = torch.randn(7, 13, dtype=torch.float64)
    found = dropout(inputs, 0.4)
    (gradient,) = torch.autograd.grad(found, inputs, outer)
    torch.testing.assert_close(gradient, outer * found.detach() / inputs.detach())


def test_it_draws_from_torchs_generator_and_nothing_in_evaluation_or_for_nothing() -> None:
    layer = Dropout(0.5)
    held = torch.ones(50)
    torch.manual_seed(3)
    first = layer(held)
    torch.manual_seed(3)
    assert torch.equal(layer(held), first)
    assert not torch.equal(layer(held), first)
    before = torch.get_rng_state()
    assert layer.eval()(held) is held
    assert Dropout(0.0)(held) is held
    assert torch.equal(torch.get_rng_state(), before)


def test_it_prints_as_torchs_own_does_but_for_what_it_lacks() -> None:
    assert repr(Dropout(0.2)) == repr(nn.Dropout(0.2)).replace(", inplace=False", "")


def test_no_fraction_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"^drop_fraction = 1\.0 .* 0 .* 1$"):
        Dropout(1.0)
