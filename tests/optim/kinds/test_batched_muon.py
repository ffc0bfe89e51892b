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
        x = grad.bfloat16().float().div(grad.bfloat16().float().norm().clamp(min=eps))
        tall = x.shape[0] > x.shape[1]
        gram = x.T @ x if tall else x @ x.T
        product = torch.eye(len(gram))
        for _ in range(steps):
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c) + a * torch.eye(len(gram))
            product = product @ factor
            gram = factor @ gram @ factor
        return (x @ product if tall else product @ x).bfloat16()
    x = grad.bfloat16().T if grad.shape[0] > grad.shape[1] else grad.bfloat16()
    x = x.div(x.norm().clamp(min=eps)).float()
    for _ in range(steps):
        gram = (x @ x.T).bfloat16().float()
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c).bfloat16().float()
        x = torch.addmm(x, update, x, beta=a).bfloat16().float()
    return (x.T if grad.shape[0] > grad.shape[1] else x).bfloat16()


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
    how = [NewtonSchulz(steps=3 + place % 2) for place in range(len(SHAPES))]
    for made, matrix, each in zip(orthogonal(matrices(), how), matrices(), how, strict=True):
        assert torch.equal(
            made, _muon._zeropower_via_newtonschulz(matrix, each.coefficients, each.steps, each.eps)
        )


def test_singular_values_end_near_one() -> None:
    for made in orthogonal(matrices(), [NewtonSchulz()] * len(SHAPES)):
        values = torch.linalg.svdvals(made.float())
        assert (
            0.3 < float(values.min()) <= float(values.max()) < 1.3
        )  # of a random matrix none is very small


@pytest.mark.parametrize("steps", [5, 12])
def test_a_long_matrix_of_rank_two_stays_one(steps: int) -> None:
    rows = torch.randn(2, 96, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    (made,) = orthogonal([rows], [NewtonSchulz(steps=steps)])
    values = torch.linalg.svdvals(made.float())
    assert 0.3 < float(values[1]) <= float(values[0]) < 1.3
    assert float(values[2]) < 0.02  # bfloat16's own rounding


def test_a_matrix_of_zeros_stays_one() -> None:
    (made,) = orthogonal([torch.zeros(3, 4)], [NewtonSchulz()])
    assert not made.any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rate", [None, "match_rms_adamw"])
def test_steps_are_torchs_to_the_bit(nesterov: bool, rate: str | None) -> None:
    settings: dict[str, Any] = {
        "lr": 0.1,
        "nesterov": nesterov,
        "adjust_lr_fn": rate,
        "weight_decay": 0.2,
    }
    models = [[nn.Parameter(matrix) for matrix in matrices()] for _ in range(2)]
    optimizers = [torch.optim.Muon(models[0], **settings), BatchedMuon(models[1], **settings)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter, gradient in zip(model, matrices(seed=step), strict=True):
                parameter.grad = gradient
            model[4].grad = None  # not used in any step
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))


@pytest.mark.parametrize("together", [1, 2000, 1 << 24])
def test_batches_of_any_size_make_the_same_bits_and_take_the_memory_that_is_told(
    together: int, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal_module, "_TOGETHER", together)
    models = [[nn.Parameter(matrix) for matrix in matrices()] for _ in range(2)]
    optimizers = [torch.optim.Muon(models[0], lr=0.1), BatchedMuon(models[1], lr=0.1)]
    for model, optimizer in zip(models, optimizers, strict=True):
        for parameter, gradient in zip(model, matrices(seed=1), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))
    with peak(torch.device("cpu")) as found:
        optimizers[1].step()
    told = update_bytes(skipping(optimizers[1], torch.device("meta")), optimizers[1])
    most = 2 if instructions == "none" else 1  # as `working_bytes` says
    assert told <= found.memory_bytes <= 1.1 * most * told  # norms and such are small


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_found_inf_leaves_every_bit_or_changes_nothing(bad: float) -> None:
    models = [[nn.Parameter(matrix) for matrix in matrices()] for _ in range(2)]
    told, plain = (BatchedMuon(model, lr=0.1) for model in models)
    told.found_inf = torch.tensor(bad)  # type: ignore[attr-defined]
    for model, optimizer in zip(models, (told, plain), strict=True):
        for parameter, gradient in zip(model, matrices(seed=1), strict=True):
            parameter.grad = gradient
        optimizer.step()
    expected = matrices() if bad else models[1]
    assert all(torch.equal(one, other) for one, other in zip(models[0], expected, strict=True))
    momenta = torch.stack([told.state[p]["momentum_buffer"].norm() for p in models[0]]).sum()
    assert bool(momenta) != bool(bad)
