"""Memory and time of one forward and backward pass, with all activations kept, and with blocks
computed again.

    python benchmarks/activations.py [--threads 1] [--device cpu]

Memory is the most that tensors take at once above weights, the gradients of the pass in it; time
(on a CPU the processor's) the least of several passes, the three ways in turn. On a CPU operators'
results are counted as long as they live; on CUDA the allocator is asked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Literal

import torch
from loops.conditions import reported
from torch import Tensor, nn

from surefoot.memory import in_words, peak
from surefoot.models import GPT, GPTConfig, ResNet
from surefoot.train.activation_checkpointing import compute_again

WAYS: tuple[Literal["off", "blocks", "selective"], ...] = ("off", "blocks", "selective")


def gpt(device: torch.device) -> tuple[Callable[[], nn.Module], Tensor, str]:
    shape = GPTConfig(layers=8, heads=4, width=128, context=128, vocab_size=512, dropout=0.1)
    return (
        lambda: GPT(shape),
        torch.randint(512, (16, 128), device=device),
        "GPT, 8 blocks of 128 channels, 16 x 128 tokens",
    )


def resnet(device: torch.device) -> tuple[Callable[[], nn.Module], Tensor, str]:
    return (
        lambda: ResNet(18, classes=10, channels=3, stem="cifar"),
        torch.randn(16, 3, 32, 32, device=device),
        "ResNet-18, 16 images of 32 x 32",
    )


def passed(model: nn.Module, inputs: Tensor, device: torch.device) -> float:
    # of the processor: others may use it too
    clock = perf_counter if device.type == "cuda" else process_time
    begun = clock()
    model(inputs).float().square().mean().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begun


def measure(
    build: Callable[[], nn.Module], inputs: Tensor, device: torch.device, *, rounds: int
) -> list[str]:
    models = []
    for way in WAYS:
        model = build().to(device)
        if way != "off":
            compute_again({"model": model}, way)
        models.append(model)
    memory = []
    least_s = [float("inf")] * len(WAYS)
    for model in models:
        with peak(device) as found:
            passed(model, inputs, device)
        memory.append(found.memory_bytes)
    for _ in range(rounds):
        for place, model in enumerate(models):
            model.zero_grad()
            least_s[place] = min(least_s[place], passed(model, inputs, device))
    return [
        f"  {way:<10} {in_words(size):>8}  {size / memory[0]:4.0%}   {took_s * 1000:7.0f} ms  {took_s / least_s[0]:.2f}"
        for way, size, took_s in zip(WAYS, memory, least_s, strict=True)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    place = torch.device(asked.device)
    with reported():
        for build, inputs, name in (gpt(place), resnet(place)):
            print(name)
            print("\n".join(measure(build, inputs, place, rounds=asked.rounds)), flush=True)
