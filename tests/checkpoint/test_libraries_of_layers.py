"""Quantised and adapted layers of other libraries: a run with a frozen base and a trained rest
resumes to the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from module_protocols import equal_bits

pytestmark = [
    pytest.mark.slow,  # for what importing these libraries takes
    pytest.mark.filterwarnings("ignore"),  # which warn of much
]
WIDTH = 64
INPUTS = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))


def build(run_dir: Path | None, model: Callable[[], nn.Module], **changes: Any) -> sf.Run:
    return sf.Run(
        model=model,
        loss=lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1]),
        train_data=(INPUTS, INPUTS.flip(0)),
        batch_size=4,
        optimizer=sf.optim.adamw(lr=1e-2),
        precision="fp32",
        length="4 steps",
        save_every="1000 steps",
        run_dir=run_dir,
        console=False,
        report=False,
        **changes,
    )


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A pretrained base: the same weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build()


def assert_goes_on(model: Callable[[], nn.Module], run_dir: Path) -> None:
    """Stopped and resumed it ends as it does when left alone, and its weights can be used, in other
    models as built anew.
    """
    whole = build(None, model)
    whole.train()
    build(run_dir, model, stop_after="2 steps", ema=None).train()
    resumed = build(run_dir, model)
    resumed.train()
    loaded = sf.load(run_dir).load_model(model)

    expected = whole.state.models["model"].eval()(INPUTS)
    assert equal_bits(resumed.state.models["model"].eval()(INPUTS), expected)
    assert equal_bits(loaded(INPUTS), expected)


def test_layers_of_4_bits(tmp_path: Path) -> None:
    """Their load_state_dict refuses what their state_dict gives: the copies stand, and are
    compared.
    """
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is no part of this installation")

    def model() -> nn.Module:
        base = seeded(
            lambda: bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        )
        base.requires_grad_(False).to("cpu")
        return nn.Sequential(base, nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    assert_goes_on(model, tmp_path / "run")


def test_layers_of_8_bits(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is no part of this installation")

    def model() -> nn.Module:
        base = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False).requires_grad_(False)
        return nn.Sequential(base.to("cpu"), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    assert_goes_on(model, tmp_path / "run")


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_weights_of_torchao(config: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao is no part of this installation"
    )

    def model() -> nn.Module:
        base = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        quantization.quantize_(base, vars(quantization)[config]())
        return nn.Sequential(base, nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    assert_goes_on(model, tmp_path / "run")


def test_layers_with_a_low_rank_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is no part of this installation")

    def model() -> nn.Module:
        base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        config = peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: nn.Module = peft.get_peft_model(base, config)
        return adapted

    assert_goes_on(model, tmp_path / "run")
