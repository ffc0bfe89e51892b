"""Tiny models of transformers with random weights, conversations, and runs of the finetune recipe
that tests can kill.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import torch

import surefoot as sf
from run_files import records_of, with_keys
from small_runs import KilledBeforeOperation
from surefoot.checkpoint.filesystem import DISK
from surefoot.checkpoint.store import Store
from surefoot.config.tree import layered
from surefoot.program import find_program
from surefoot.recipes import finetune

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 128},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "mistral": {**LLAMA, "sliding_window": 16},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
}


def instruction(one: int, two: int) -> dict[str, Any]:
    total = one + two
    return {
        "instruction": f"What is {one} plus {two}?",
        "response": f"{one} plus {two} is {total}.",
    }


def dialogue(number: int) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": f"What follows {number}?"},
        {"role": "assistant", "content": f"{number + 1}."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": f"{number + 2} does."},
    ]
    return {"messages": messages}


ROWS = [instruction(one, two) for one, two in product(range(7), range(4, 9))]
ROWS += [dialogue(number) for number in range(9)]


def write_chat(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def write_model(
    directory: Path,
    family: str = "gpt2",
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    **changes: Any,
) -> Path:
    """A model with random weights and a tokenizer, as `save_pretrained` writes them."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from surefoot.recipes.finetune.models import quiet

    directory.mkdir(parents=True)
    trained = sf.tokenizers.BPETokenizer.train([json.dumps(row) for row in ROWS], vocab_size=300)
    described = json.loads(trained.to_json())["tokenizer"]
    (directory / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        eos_token="<|endoftext|>",
        chat_template=chat_template,
    )
    tokenizer.save_pretrained(directory)
    size = {
        "vocab_size": trained.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(11)
        config = AutoConfig.for_model(family, **(size | FAMILIES[family] | changes))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases too, which start at 0
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(directory)
    return directory


def config(
    run_dir: Path | None, model: Path | None, chat: Path | None, **changes: Any
) -> finetune.Config:
    def text_of(path: Path | None) -> str | None:
        return None if path is None else str(path)

    small = {
        "run_dir": text_of(run_dir),
        "model": text_of(model),
        "data.path": text_of(chat),
        "length": "8 steps",
        "batch_size": "192 tokens",
        "micro_batch_size": "96 tokens",
        "optimizer.lr": 5e-3,
        "precision": "fp32",
        "evaluate_every": "4 steps",
        "save_every": "3 steps",
        "log_every": "1 steps",
        "layer_stats_every": None,
        "lora.rank": 4,
        "report": False,
        "tensorboard": False,
        "sample_tokens": 8,
        "data.val_fraction": 0.1,
    }
    if changes.get("method") == "full":
        del small["lora.rank"]
    settings, _ = layered(finetune.Config, [("test", small | changes)])
    return settings


def build_as_command(asked: finetune.Config) -> sf.Run:
    """A run as `surefoot train` builds it: its directory alone is enough to use it."""
    program = find_program("finetune")
    run = finetune.build(asked)
    run.configuration = program.config_text(asked, {}, program.described)
    return run


def session(spec: dict[str, Any]) -> None:
    """One start of a run in a process of its own: killed in a forward pass, or before an operation
    of the disk.
    """
    run_dir = Path(spec["run_dir"])
    run = finetune.build(
        config(
            run_dir,
            Path(spec["model"]),
            Path(spec["chat"]),
            **spec.get("changes", {}),
            check_state=False,
        )
    )
    if "operation" in spec:
        counted = KilledBeforeOperation(spec["operation"])
        for name in KilledBeforeOperation.CHANGING:
            setattr(DISK, name, _counting(getattr(DISK, name), counted))
    if "pass" in spec:
        left = spec["pass"]

        def kill(module: Any, inputs: Any) -> None:
            nonlocal left
            if module.training:
                left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        run.state.model.register_forward_pre_hook(kill)
    with run:
        for step in run:
            if run.rank > 0:
                continue
            with run_dir.with_suffix(".ids").open("a") as file:
                ids = [part.sample_ids.tolist() for part in step.micro_batches]
                file.write(json.dumps([step.index, ids]) + "\n")


def _counting(method: Any, counted: KilledBeforeOperation) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        counted.left -= 1
        if counted.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **named)

    return call


def outcome(run_dir: Path) -> dict[str, Any]:
    """Everything that must be equal to the bit: tensors of the newest checkpoint, records, and the
    samples of each step.
    """
    newest = Store(run_dir / "checkpoints").newest_intact()
    assert newest is not None
    checkpoint, _ = newest
    tensors = {}
    for file in checkpoint.files:
        for name, tensor in checkpoint.tensors(file).items():
            tensors[f"{file}/{name}"] = hash_of(tensor)
    shown = ("kind", "step", "loss", "grad_norm", "targets", "lr", "val/loss", "val/accuracy")
    lines = run_dir.with_suffix(".ids").read_text().splitlines()
    return {
        "step": checkpoint.step,
        "tensors": tensors,
        "records": with_keys(records_of(run_dir, "train", "eval"), shown),
        "ids": dict(map(json.loads, lines)),
    }


def hash_of(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return sha256(data).hexdigest()
