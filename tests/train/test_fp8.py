"""Linear layers in 8 bits: refused where they cannot be; emulated on the CPU where torchao is
installed. 1 s, with torchao 6 s more.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from surefoot.train import precision as formats

SHAPE = sf.models.GPTConfig(2, 2, 32, 16, 48, family="gpt2")  # whose head does not begin at zero


def loss(model: Any, batch: Any) -> Tensor:
    (rows,) = batch
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def built(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    rows = torch.randint(48, (32, 17), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {
        "model": lambda: sf.models.GPT(SHAPE),
        "loss": loss,
        "train_data": (rows,),
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "6 steps",
        "optimizer": sf.optim.adamw(lr=1e-3),
        "precision": "fp8",
        "ema": 0.5,
        "report": False,
        "run_dir": run_dir,
        "console": False,
    }
    return sf.Run(**(arguments | changes))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU may do what only some GPUs can; torchao emulates it there."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install surefoot[quant]")
    monkeypatch.setitem(
        formats.FORMATS, "fp8", replace(formats.FORMATS["fp8"], refuse=lambda _: None)
    )


def test_a_device_that_does_not_multiply_in_8_bits_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with refused("precision-without-hardware", value="fp8", device="cpu"):
        built()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100")
    with refused("precision-without-hardware", value="fp8", device="NVIDIA A100 (8.0)"):
        formats.precision("fp8", torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    assert formats.precision("fp8", torch.device("cuda", 0)).name == "fp8"


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with refused("package-not-usable", modules=["torchao"]):
        formats.with_fp8(sf.models.GPT(SHAPE), torch.device("cpu"))


def test_a_model_without_such_layers_is_refused() -> None:
    with refused("model-without-fp8-layers"):
        formats.with_fp8(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 16)), torch.device("cpu"))


@pytest.mark.slow  # torchao takes seconds to import
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
class TestEmulated:
    def test_hidden_layers_are_taken_and_nothing_else(self, emulated: None) -> None:
        model = sf.models.GPT(SHAPE)
        before = dict(model.named_parameters())
        formats.with_fp8(model, torch.device("cpu"))
        kinds = {
            name: type(part).__name__
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear)
        }
        assert {name for name, kind in kinds.items() if kind == "Linear"} == {"head"}
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is held for name, held in before.items())

    def test_gradients_are_those_of_bf16_to_the_digits_of_8_bits(self, emulated: None) -> None:
        made = []
        for precision in ("fp8", "bf16"):
            run = built(precision=precision)
            with run:
                step = next(iter(run.steps()))
                sf.forward_backward(step, loss)
                made.append(
                    {name: held.grad for name, held in run.state.models["model"].named_parameters()}
                )
                sf.update(step)
        for name, gradient in made[0].items():
            assert F.cosine_similarity(gradient.flatten(), made[1][name].flatten(), dim=0) > 0.97, (
                name
            )
        assert any(not torch.equal(gradient, made[1][name]) for name, gradient in made[0].items())

    def test_a_resumed_run_is_bit_equal_and_its_weights_are_a_plain_models(
        self, emulated: None, tmp_path: Path
    ) -> None:
        whole = built()
        whole.train()
        built(tmp_path / "run", stop_after="3 steps").train()
        resumed = built(tmp_path / "run")
        resumed.train()
        plain = sf.models.GPT(SHAPE)
        sf.load(tmp_path / "run").load_model(plain, device="cpu")
        for name, held in whole.state.models["model"].state_dict().items():
            assert torch.equal(held, resumed.state.models["model"].state_dict()[name])
        for name, held in whole.state.ema_models["model"].model.state_dict().items():
            assert torch.equal(held, plain.state_dict()[name])
        with refused(
            "settings-changed", sf.CheckpointError, changes=["precision was 'fp8', now 'bf16'"]
        ):
            built(tmp_path / "run", precision="bf16").train()


def test_a_frozen_model_in_evaluation_mode_stays_in_it(emulated: None) -> None:
    teacher = sf.models.GPT(SHAPE).eval().requires_grad_(False)
    models: dict[str, Any] = {"student": lambda: sf.models.GPT(SHAPE), "teacher": teacher}
    run = built(model=models, optimizer={"student": sf.optim.adamw(lr=1e-3)}, ema=None)
    assert not any(part.training for part in run.state.models["teacher"].modules())
    assert all(part.training for part in run.state.models["student"].modules())
