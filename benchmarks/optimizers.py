"""Milliseconds of an update and bytes of state for each optimizer, on the tiny GPT; the table of
docs/guides/optimizers.md.

    python benchmarks/optimizers.py [--steps 20]

The default of the recipe gpt: 4 blocks of width 128, 2048 tokens, 8 windows of 128. One thread,
float32, times of the CPU by this process alone (as long as the clock's where nothing else runs),
medians over the steps. An update is all that follows the gradients: norm, clipping, the optimizer
with its way to skip.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from statistics import median
from time import process_time
from typing import Any

import torch
from loops.conditions import reported

import surefoot as sf
from surefoot.optim.optimizers import OptimizerSpec

SHAPE = sf.models.GPTConfig(layers=4, heads=4, width=128, context=128, vocab_size=2048)
OPTIMIZERS = {
    "sgd": sf.optim.sgd(0.1),
    "sgd, momentum": sf.optim.sgd(0.1, momentum=0.9),
    "adafactor": sf.optim.adafactor(),
    "adamw8bit": sf.optim.adamw8bit(1e-3),
    "lion": sf.optim.lion(1e-4),
    "muon": sf.optim.muon(1e-3),
    "adamw": sf.optim.adamw(1e-3),
    "adam": sf.optim.adam(1e-3),
    "nadam": sf.optim.nadam(1e-3),
    "radam": sf.optim.radam(1e-3),
    "schedule_free": sf.optim.schedule_free(1e-3),
}


def loss(model: Any, batch: Any) -> Any:
    inputs_BT, targets_BT = batch
    return model(
        inputs_BT,
        loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, targets_BT),
    )


def measured(optimizer: OptimizerSpec, *, steps: int) -> tuple[float, float, int]:
    """Milliseconds of the passes and of the update, and bytes of state."""
    tokens = torch.randint(2048, (64, 129), generator=torch.Generator().manual_seed(0))
    run = sf.Run(
        model=lambda: sf.models.GPT(SHAPE),
        loss=loss,
        train_data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        batch_size=8,
        length=f"{steps + 3} steps",
        optimizer=optimizer,
        precision="fp32",
        device="cpu",
        console=False,
    )
    passes = []
    updates = []
    with run:
        for step in run.steps():
            begun = process_time()
            sf.forward_backward(step)
            between = process_time()
            sf.update(step)
            passes.append(between - begun)
            updates.append(process_time() - between)
    state = run.state.optimizers["model"].optimizer.state
    held = [
        value
        for kept in state.values()
        for value in kept.values()
        if isinstance(value, torch.Tensor)
    ]
    memory_bytes = sum(value.numel() * value.element_size() for value in held)
    return 1000 * median(passes[3:]), 1000 * median(updates[3:]), memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights_bytes = 4 * SHAPE.parameters
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, python {sys.version.split()[0]}"
    )
    print("| optimizer | update, ms | passes, ms | state, MB | state / weights |")
    print("|---|---:|---:|---:|---:|")
    for name, optimizer in OPTIMIZERS.items():
        if name == "adamw8bit" and find_spec("bitsandbytes") is None:
            continue
        passes_ms, update_ms, state_bytes = measured(optimizer, steps=arguments.steps)
        print(
            f"| {name} | {update_ms:.1f} | {passes_ms:.0f} | {state_bytes / 1e6:.2f} | {state_bytes / weights_bytes:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    with reported():
        main()
