"""How large the checkpoints of a run with frozen parameters are, and how long a save takes.

    python benchmarks/frozen_parts.py [--short] [--rank 4]

GPTs with AdamW train all parameters, or adapters (LoRA, by default of rank 4) beside every linear
layer of their blocks. The adapters' run saves once with references to the first checkpoint, and
once whole, as surefoot 0.1.0 did. Seconds are the least of three saves.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.checkpoint.frozen import FrozenTensors
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig

STEPS = 4
SHAPES = {
    "4 x 128": GPTConfig(vocab_size=2048, context=128, layers=4, heads=4, width=128),
    "6 x 384": GPTConfig(vocab_size=2048, context=256, layers=6, heads=6, width=384),
    "12 x 768 (GPT-2)": GPTConfig(
        vocab_size=50257, context=1024, layers=12, heads=12, width=768, family="gpt2"
    ),
}


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.layer(x), self.up(self.down(x)))


def with_adapters(shape: GPTConfig, *, rank: int) -> GPT:
    model = GPT(shape).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".blocks." in f".{name}":
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, Adapted(module, rank))
    return model


def loss(model: nn.Module, batch: Any) -> Tensor:
    logits: Tensor = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def save(shape: GPTConfig, build: Any, directory: Path) -> tuple[int, int, float, float]:
    """Bytes of the first and the last checkpoint; the seconds that the copy takes, and the write
    beside the training.
    """
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 4_000)
    run = sf.Run(
        model=lambda: build(shape),
        loss=loss,
        train_data=sf.data.TrainWindows(tokens, context=16, seed=0),
        batch_size=1,
        length=f"{STEPS} steps",
        optimizer=sf.optim.adamw(lr=1e-3),
        precision="fp32",
        device="cpu",
        save_every="1 step",
        report=False,
        console=False,
        check_state=False,
        run_dir=directory,
    )
    copies, writes = list[float](), list[float]()
    with run:
        saving = run.parts.checkpointing
        assert saving is not None
        for step in run:
            saving.writer.wait()
            if step.index > 1:
                copies.append(saving.copying_s)
                writes.append(saving.writer.took_s)
    sizes = [
        sum(
            file.stat().st_size
            for file in (directory / "checkpoints" / f"step-{step:08d}").iterdir()
        )
        for step in (0, STEPS)
    ]
    return sizes[0], sizes[1], min(copies), min(writes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the smallest model only")
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    options = parser.parse_args()
    shapes = dict(list(SHAPES.items())[: 1 if options.short else None])
    adapted = partial(with_adapters, rank=options.rank)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, adapters of rank {options.rank}"
    )
    print(f"{'model':<18} {'checkpoint of':<22} {'MB':>9} {'copy, s':>8} {'write, s':>9}")
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as out:
            full = save(shape, GPT, Path(out) / "full")
            with patch.object(FrozenTensors, "bases", lambda *_: []):
                standalone = save(shape, adapted, Path(out) / "whole")
            referring = save(shape, adapted, Path(out) / "referring")
        for label, (_, size, copy_s, write_s) in {
            "all parameters": full,
            "adapters, whole": standalone,
            "adapters, referring": referring,
        }.items():
            print(f"{name:<18} {label:<22} {size / 1e6:>9.3f} {copy_s:>8.3f} {write_s:>9.3f}")
        print(
            f"{'':<18} {referring[1] / full[1]:.2%} of all parameters, {referring[1] / standalone[1]:.2%} of whole"
        )


if __name__ == "__main__":
    main()
