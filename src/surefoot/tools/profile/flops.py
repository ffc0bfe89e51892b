"""The floating-point operations of a step, by torch's counter and by the usual formula for GPTs.

Only matrix products, convolutions and attention count; a multiplication and an addition are two
operations. Causal attention counts in full, even if tiles skip half. Recomputation in a fused
kernel's backward pass does not count.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from surefoot.data.loader import MicroBatch
from surefoot.data.nested import tensors
from surefoot.errors import out_of_range
from surefoot.models.attention import in_one_tile
from surefoot.models.gpt import GPT
from surefoot.tools.profile.timed_step import (
    Stepping,
    Stopwatch,
    is_compiled,
    stopwatch,
    with_forward,
)
from surefoot.train.activation_checkpointing import plain_forward
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import State, Task
from surefoot.train.precision import FORMATS


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step of this process.

    `again` counts the recomputation by activation checkpointing. For surefoot's GPT, `formula` is 6
    N per token (Kaplan et al. 2020, table 1) plus 12 L T D for attention (`gpt_flops`).
    """

    by_phase: dict[str, int]
    again: int
    formula: int | None = None

    @property
    def model(self) -> int:
        """The operations of the model's forward and backward passes, without recomputation."""
        return sum(number for phase, number in self.by_phase.items() if phase != "optimizer")

    @property
    def done(self) -> int:
        """All operations, including checkpoint recomputation and the optimizer, but without
        recomputation inside kernels.
        """
        return sum(self.by_phase.values()) + self.again


def counter() -> Any:
    """Return torch's FLOP counter with support for attention on the CPU, which torch 2.13 omits.

    The counter ignores the scores that fused attention recomputes in its backward pass, unlike
    torch's own counter.

    >>> with counter() as counting:
    ...     held = torch.ones(4, 3) @ torch.ones(3, 5)
    >>> counting.get_total_flops()
    120
    """
    from torch.utils import flop_counter  # makes loggers when it is imported

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(flop_counter.sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(outer: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        batch, heads, queries, channels = query
        again: int = 2 * batch * heads * queries * key[2] * channels  # the scores
        return int(flop_counter.sdpa_backward_flop_count(outer, query, key, value)) - again  # type: ignore[no-untyped-call]

    operators = torch.ops.aten
    return flop_counter.FlopCounterMode(
        display=False,
        custom_mapping={
            operators._scaled_dot_product_flash_attention_for_cpu: forward,
            operators._scaled_dot_product_flash_attention_for_cpu_backward: backward,
            operators._scaled_dot_product_flash_attention_backward: backward,
            operators._scaled_dot_product_efficient_attention_backward: backward,
            operators._scaled_dot_product_cudnn_attention_backward: backward,
        },
    )


def count_flops(task: Task, state: State, micro_batches: list[MicroBatch], feed: Any) -> Flops:
    """Count the operations of one step with these micro-batches. Compiled models are counted
    without compilation.
    """
    called = task.forward.values() if isinstance(task.forward, dict) else [task.forward]
    if any(is_compiled(model) for model in called if isinstance(model, nn.Module)):
        task = replace(task, forward=sole_or_all(state.models))
    done = _by_phase(task, state, micro_batches, feed)
    once = done
    blocks = recomputed_blocks(state)
    if blocks:
        with kept_activations(blocks):
            once = _by_phase(task, state, micro_batches, feed)
    formula = None
    model = state.models.get("model")
    if isinstance(model, GPT):
        formula = 0
        for micro_batch in micro_batches:
            input_ids = next(tensors(micro_batch.batch))
            formula += gpt_flops(model, tokens=input_ids.numel(), length=input_ids.shape[1])
    return Flops(once, sum(done.values()) - sum(once.values()), formula)


@contextmanager
def kept_activations(blocks: list[nn.Module]) -> Iterator[None]:
    """Disable activation checkpointing of blocks in this context."""
    with ExitStack() as stack:
        for block in blocks:
            plain = plain_forward(block)
            assert plain is not None
            stack.enter_context(with_forward(block, plain))
        yield


def recomputed_blocks(state: State) -> list[nn.Module]:
    """Return the blocks of a run's models that use activation checkpointing."""
    blocks = []
    for model in state.models.values():
        blocks += [module for module in model.modules() if plain_forward(module) is not None]
    return blocks


def _by_phase(
    task: Task, state: State, micro_batches: list[MicroBatch], feed: Any
) -> dict[str, int]:
    with counter() as counting, in_one_tile():
        watch = Stopwatch(now=counting.get_total_flops)
        taken = Stepping(task, state, feed, watch).make(micro_batches)
    return {phase: int(number) for phase, number in taken.items() if number}


def gpt_flops(model: GPT, *, tokens: int, length: int) -> int:
    """Return the operations of a GPT's forward and backward pass: (6 N + 12 L T D) per token, for
    sequences of equal length.

    N is the number of parameters in matrix products (with the head, without embeddings), L the
    number of layers, T the tokens in a sequence, and D the width. The formula is from Chowdhery et
    al. 2022, appendix B (https://arxiv.org/abs/2204.02311).
    """
    matrices = {part.weight for part in model.modules() if isinstance(part, nn.Linear)}
    attention = 12 * model.shape.layers * length * model.shape.width
    return (6 * sum(weight.numel() for weight in matrices) + attention) * tokens


_SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}


def measure_peak_flops(device: torch.device, precision: str, *, limit_s: float = 1.0) -> float:
    """Measure the highest operations per second of square matrix products of several sizes, within
    about `limit_s` seconds.

    The products use the run's precision and torch's current TF32 settings. A product of n x n
    matrices has 2 n^3 operations. Measured peaks are below the manufacturers' values.

    >>> measure_peak_flops(torch.device("cpu"), "fp32", limit_s=0.01) > 1e8
    True
    """
    dtype = FORMATS[precision].autocast or torch.float32
    watch = stopwatch(device)
    sizes = _SIZES.get(device.type, _SIZES["cpu"])
    best = 0.0
    for size in sizes:
        left = torch.full((size, size), 0.5, device=device, dtype=dtype)
        right = torch.full((size, size), 0.5, device=device, dtype=dtype)
        product = left @ right
        until = perf_counter() + limit_s / len(sizes)
        took_s = 0.0
        while not took_s or perf_counter() + took_s <= until:
            watch.start()
            torch.mm(left, right, out=product)
            took_s = sum(watch.lap().values())
            best = max(best, 2.0 * size**3 / took_s)
        if 8 * took_s > limit_s:  # the next size takes eight times as long
            break
    return best


def parse_peak_flops(text: str) -> float:
    """Return the number in `--peak-flops 989e12`. Raises `ConfigError` unless the number is above
    0.

    >>> parse_peak_flops("989e12")
    989000000000000.0
    """
    try:
        flops = float(text)
    except ValueError:
        flops = 0.0
    if not 0 < flops < float("inf"):
        meaning = "a number of operations per second, such as 989e12 (an H100 in bf16)"
        raise out_of_range("peak_flops", text, meaning)
    return flops
