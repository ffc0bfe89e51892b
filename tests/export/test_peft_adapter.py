"""A user's own peft model: small checkpoints, the same bits after a kill, and an adapter that peft
loads, written without the program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from forked import Forked
from refused import refused

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
IDS = torch.randint(64, (32, 12), generator=torch.Generator().manual_seed(1))
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA |= {"vocab_size": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}


def pretrained() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def adapted(**changes: Any) -> nn.Module:
    lora: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
    model: nn.Module = peft.get_peft_model(pretrained(), peft.LoraConfig(**(lora | changes)))
    return model


def build(run_dir: Path, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": adapted,
        "loss": sf.losses.of_model,
        "batch_size": 8,
        "length": "6 steps",
    }
    settings |= {
        "train_data": [{"input_ids": row, "labels": row} for row in IDS],
        "run_dir": run_dir,
        "device": "cpu",
    }
    settings |= {
        "console": False,
        "report": False,
        "tensorboard": False,
        "save_every": "2 steps",
        "keep_last": 9,
    }
    return sf.Run(optimizer=sf.optim.adamw(lr=1e-2), **(settings | changes))


def train(run: sf.Run, *, dies_at: int | None = None) -> Any:
    with run:
        for step in run:
            if step.index + 1 == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return run.state.model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = model(IDS[:4]).logits
    return values


def size(run_dir: Path, step: int) -> int:
    return sum(file.stat().st_size for file in (run_dir / f"checkpoints/step-{step:08d}").iterdir())


def test_an_adapter_of_a_killed_run_is_exported_and_loaded_by_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(build(tmp_path / "alone"))
    with Forked(
        lambda: train(build(tmp_path / "killed"), dies_at=5), stdout=subprocess.PIPE
    ) as process:
        assert process.wait() == -signal.SIGKILL
    resumed = train(build(tmp_path / "killed"))
    assert torch.equal(logits(resumed), logits(alone))
    assert size(tmp_path / "killed", 6) < 0.15 * size(
        tmp_path / "killed", 0
    )  # of a model of 80,000 numbers
    with monkeypatch.context() as without_peft:
        without_peft.setitem(sys.modules, "peft", None)
        written = sf.load(tmp_path / "killed").export(tmp_path / "adapter", layout="peft")
    assert written.files == ("adapter_config.json", "adapter_model.safetensors")
    loaded = peft.PeftModel.from_pretrained(pretrained(), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(alone))
    assert not torch.equal(logits(pretrained().eval()), logits(alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}]
)
def test_other_adapters_are_loaded_with_equal_logits(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    trained = train(build(tmp_path / "run", model=lambda: adapted(**changes)))
    sf.load(tmp_path / "run").export(tmp_path / "adapter", layout="peft")
    loaded = peft.PeftModel.from_pretrained(pretrained(), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(trained))


def test_what_has_no_adapter_of_its_own_is_refused(tmp_path: Path) -> None:
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    models = {"plain": pretrained, "prompts": lambda: peft.get_peft_model(pretrained(), prompts)}
    for name, code in (
        ("plain", "run-without-adapter"),
        ("prompts", "adapter-of-computed-tensors"),
    ):
        train(build(tmp_path / name, model=models[name], length="2 steps"))
        with refused(code, value="peft"):
            sf.load(tmp_path / name).export(tmp_path / "out", layout="peft")
    assert (
        json.loads((tmp_path / "prompts" / "adapter.json").read_text())["config"]["peft_type"]
        == "PROMPT_TUNING"
    )


@pytest.mark.slow
def test_an_adapter_on_a_quantized_base_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

    def quantized() -> nn.Module:
        base = pretrained()
        quantization.quantize_(base, quantization.Int8WeightOnlyConfig(), filter_fn=_is_in_block)
        model: nn.Module = peft.get_peft_model(
            base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
        return model

    alone = train(build(tmp_path / "alone", model=quantized))
    with Forked(
        lambda: train(build(tmp_path / "killed", model=quantized), dies_at=5),
        stdout=subprocess.PIPE,
    ) as process:
        assert process.wait() == -signal.SIGKILL
    resumed = train(build(tmp_path / "killed", model=quantized))
    assert torch.equal(logits(resumed), logits(alone))
    assert size(tmp_path / "killed", 6) < 0.5 * size(tmp_path / "killed", 0)


def _is_in_block(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in name
