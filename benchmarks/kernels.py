"""What on the CPU is surefoot's own instead of torch's: a head's loss, attention, dropout; torch's
time / ours.

    python benchmarks/kernels.py [--threads 1]

Each is a forward and a backward pass, the least of several, both taken in turn. Sizes are those of
a translation step of about 3,840 tokens. Attention is over positions x channels of a head. Head and
attention compute in bfloat16 on a processor with an instruction for it, else in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F
from loops.conditions import reported
from torch import Tensor

from surefoot.losses.dense import linear_cross_entropy
from surefoot.memory import instruction_set
from surefoot.models import layers
from surefoot.models.attention import causal_attention

DTYPE = torch.float32 if instruction_set() == "none" else torch.bfloat16


def times_as_fast(
    theirs: Callable[[], Tensor], ours: Callable[[], Tensor], *, rounds: int = 8
) -> str:
    least = [float("inf")] * 2
    for _ in range(rounds):
        for place, function in enumerate((theirs, ours)):
            begun = perf_counter()
            function().backward()  # type: ignore[no-untyped-call]
            least[place] = min(least[place], perf_counter() - begun)
    return f"{least[0] * 1000:7.1f} ms  {least[1] * 1000:7.1f} ms  {least[0] / least[1]:.1f}"


def head(classes: int) -> str:
    hidden = torch.randn(3600, 256, requires_grad=True)
    matrix = torch.randn(classes, 256, requires_grad=True)
    targets = torch.randint(classes, (3600,))

    def theirs() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.bfloat16 == DTYPE):
            return F.cross_entropy(F.linear(hidden, matrix).float(), targets, label_smoothing=0.1)

    def ours() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.bfloat16 == DTYPE):
            return torch.as_tensor(
                linear_cross_entropy(hidden, matrix, targets, label_smoothing=0.1).value
            )

    return times_as_fast(theirs, ours)


def attention(places: int, channels: int) -> str:
    shape = 3840 // places, 128 // channels, places, channels
    held = [torch.randn(shape, dtype=DTYPE, requires_grad=True) for _ in range(3)]

    def theirs() -> Tensor:  # in float32, which is torch's quicker one
        q, k, v = (part.float() for part in held)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).to(DTYPE).sum()

    return times_as_fast(
        theirs, lambda: causal_attention(held[0], held[1], held[2], drop_fraction=0.0).sum()
    )


def dropout() -> str:
    values = torch.randn(3840, 128, requires_grad=True)
    return times_as_fast(
        lambda: F.dropout(values, 0.2).sum(), lambda: layers.dropout(values, 0.2).sum()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads, {DTYPE}: torch, ours, times as fast"
    )
    for classes in (5000, 8000):
        print(f"head of {classes} classes      {head(classes)}")
    for places, channels in ((16, 32), (64, 32), (128, 32), (256, 32), (256, 64), (512, 64)):
        print(f"attention, {places:3} x {channels}     {attention(places, channels)}")
    print(f"dropout                 {dropout()}")


if __name__ == "__main__":
    with reported():
        main()
