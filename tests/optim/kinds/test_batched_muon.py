"""Muon in batches: torch's own bits, whatever is batched with what, and no bit after a bad step. 1
s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon

from surefoot.memory import peak
from surefoot.optim import newton_schulz as orthogonal_module
from surefoot.optim.kinds.muon import BatchedMuon
from surefoot.optim.newton_schulz import NewtonSchulz, orthogonal
from surefoot.optim.skip_step import skipping, update_bytes

SHAPES = [(16, 48), (16, 16), (48, 16), (16, 48), (7, 3), (1, 5), (32, 32)]


def matrices(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def in_rounded_products(
    grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Torch's iteration in float32, each product rounded to bfloat16: what a processor does that
    multiplies bfloat16 itself.

    Of a long matrix the iteration is that of A = XX^T, unrounded: an iteration multiplies X by F =
    aI + bA + cAA, and A by FF.
    """
    a, b, c = coefficients
    if max(grad.shape) > 1.5 * min(grad.shape) and steps <= 5:
        x = grad.bfloat16().float()
        x = x / x.norm().clamp(min=eps)
        is_tall = x.shape[0] > x.shape[1]
        gram = x.T @ x if is_tall else x @ x.T
        identity = torch.eye(len(gram))
        product = identity
        for _ in range(steps):
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c) + a * identity
            product = product @ factor
            gram = factor @ gram @ factor
        return (x @ product if is_tall else product @ x).bfloat16()
    is_tall = grad.shape[0] > grad.shape[1]
    x = grad.bfloat16()
    if is_tall:
        x = x.T
    x = x.div(x.norm().clamp(min=eps)).float()
    for _ in range(steps):
        gram = (x @ x.T).bfloat16().float()
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c).bfloat16().float()
        x = torch.addmm(x, update, x, beta=a).bfloat16().float()
    return (x.T if is_tall else x).bfloat16()


@pytest.fixture(autouse=True, params=["avx512_bf16", "none"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The processor's instructions for bfloat16. Without any, torch's Muon is given the reference
    above.
    """
    monkeypatch.setattr(orthogonal_module, "instruction_set", lambda: request.param)
    if request.param == "none":
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_rounded_products)
    return str(request.param)


def test_each_is_made_what_torchs_muon_makes_of_it_alone_to_the_bit() -> None:
    settings = [NewtonSchulz(steps=3 + place % 2) for place in range(len(SHAPES))]

    batched = orthogonal(matrices(), settings)

    for result, matrix, setting in zip(batched, matrices(), settings, strict=True):
        alone = _muon._zeropower_via_newtonschulz(
            matrix, setting.coefficients, setting.steps, setting.eps
        )
        assert torch.equal(result, alone)


def test_singular_values_end_near_one() -> None:
    """Of a random matrix none is very small."""
    for result in orthogonal(matrices(), [NewtonSchulz()] * len(SHAPES)):
        values = torch.linalg.svdvals(result.float())
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.3


@pytest.mark.parametrize("steps", [5, 12])
def test_a_long_matrix_of_rank_two_stays_one(steps: int) -> None:
    rows = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).repeat(8, 1)

    (result,) = orthogonal([rows], [NewtonSchulz(steps=steps)])

    first, second, third, *_ = torch.linalg.svdvals(result.float()).tolist()
    assert 0.3 < second <= first < 1.3
    assert third < 0.02  # bfloat16's own rounding


def test_a_matrix_of_zeros_stays_one() -> None:
    (result,) = orthogonal([torch.zeros(3, 4)], [NewtonSchulz()])

    assert not result.any()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(matrix) for matrix in matrices()]


def give_gradients(parameters: list[nn.Parameter], *, seed: int) -> None:
    for parameter, gradient in zip(parameters, matrices(seed=seed), strict=True):
        parameter.grad = gradient


def assert_same_bits(parameters: list[nn.Parameter], expected: Any) -> None:
    assert all(torch.equal(one, other) for one, other in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rate", [None, "match_rms_adamw"])
def test_steps_are_torchs_to_the_bit(nesterov: bool, rate: str | None) -> None:
    settings: dict[str, Any] = {
        "lr": 0.1,
        "nesterov": nesterov,
        "adjust_lr_fn": rate,
        "weight_decay": 0.2,
    }
    batched = parameters()
    batched_muon = BatchedMuon(batched, **settings)
    expected = parameters()
    muon = torch.optim.Muon(expected, **settings)

    for step in range(3):
        give_gradients(batched, seed=step)
        batched[4].grad = None  # not used in any step
        batched_muon.step()
        give_gradients(expected, seed=step)
        expected[4].grad = None
        muon.step()

    assert_same_bits(batched, expected)


@pytest.mark.parametrize("together", [1, 2000, 1 << 24])
def test_batches_of_any_size_make_the_same_bits_and_take_the_memory_that_is_told(
    together: int, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal_module, "_TOGETHER", together)
    batched = parameters()
    batched_muon = BatchedMuon(batched, lr=0.1)
    give_gradients(batched, seed=1)
    expected = parameters()
    muon = torch.optim.Muon(expected, lr=0.1)
    give_gradients(expected, seed=1)

    batched_muon.step()
    muon.step()
    assert_same_bits(batched, expected)

    with peak(torch.device("cpu")) as measured:
        batched_muon.step()
    announced = update_bytes(skipping(batched_muon, torch.device("meta")), batched_muon)
    most = 2 if instructions == "none" else 1  # as `working_bytes` says
    assert announced <= measured.memory_bytes <= 1.1 * most * announced  # norms and such are small


def flagged_step(flag: float) -> tuple[list[nn.Parameter], float]:
    """Weights after a step with this `found_inf`, and the sum of the norms of its momenta."""
    flagged = parameters()
    optimizer = BatchedMuon(flagged, lr=0.1)
    optimizer.found_inf = torch.tensor(flag)  # type: ignore[attr-defined]
    give_gradients(flagged, seed=1)
    optimizer.step()
    norms = [float(state["momentum_buffer"].norm()) for state in optimizer.state.values()]
    assert len(norms) == len(flagged)
    return flagged, sum(norms)


def test_a_flag_of_a_bad_step_leaves_every_bit() -> None:
    weights, momentum = flagged_step(1.0)

    assert_same_bits(weights, matrices())
    assert momentum == 0.0


def test_a_flag_of_a_good_step_changes_nothing() -> None:
    expected = parameters()
    optimizer = BatchedMuon(expected, lr=0.1)
    give_gradients(expected, seed=1)
    optimizer.step()

    weights, momentum = flagged_step(0.0)

    assert_same_bits(weights, expected)
    assert momentum > 0.0
