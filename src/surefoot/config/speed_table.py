"""Measured speedups of bf16 and channels last, from which "auto" chooses.
`benchmarks/precision.py --write` writes the rows and benchmarks/results/precision.txt. Nothing here
reads a clock or imports torch, so equal facts give the same choice in every process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

BF16_WORTH_IT = 1.15  # minimum speedup over fp32, because bf16 loses digits
LAYOUT_WORTH_IT = 1.1  # minimum speedup over contiguous images; the memory format loses no digits
CUDA_BF16_FROM = (8, 0)  # compute capability (Ampere); from the specification, not measured

# Compiling takes 20 to 35 s on a CPU core and did not speed up GPTs or image networks
# (benchmarks/results/machine.txt). Absent devices were not measured.
COMPILE: Mapping[str, bool] = {"cpu": False}


@dataclass(frozen=True)
class Facts:
    """The facts that decide the precision and the memory format of images.

    instructions: the processor's instructions for bf16. torch: its version. layers: "linear",
    "attention", "encoder-decoder", "convolution", or "convolution, channels last" for a network
    that sets its own memory format. width: the smaller dimension of most matrices. rows: samples,
    tokens or pixels per micro-batch. positions: tokens per row.
    """

    instructions: str
    torch: str
    layers: str
    width: int
    rows: int
    positions: int = 1


@dataclass(frozen=True)
class Row:
    """A region between the smallest and largest measured sizes, with the minimum speedups in it.

    gains: speedup over fp32 with contiguous images, by "bf16", "channels last" and "bf16, channels
    last".
    """

    layers: str
    width: tuple[int, int]
    rows: tuple[int, int]
    positions: tuple[int, int]
    gains: Mapping[str, float]

    def holds(self, facts: Facts) -> bool:
        return (
            self.layers == facts.layers
            and self.width[0] <= facts.width <= self.width[1]
            and self.rows[0] <= facts.rows <= self.rows[1]
            and self.positions[0] <= facts.positions <= self.positions[1]
        )


@dataclass(frozen=True)
class Choice:
    """A precision and a memory format; `known` is True if the table has a row, and `why` is the
    reason as text.
    """

    precision: Literal["fp32", "bf16"]
    channels_last: bool
    known: bool
    why: str


# By instructions and torch version: the date and its measured rows. Written by
# `benchmarks/precision.py --write`.
# fmt: off
TABLE: Mapping[tuple[str, str], tuple[str, Sequence[Row]]] = {
    ("amx_bf16", "2.13"): ("2026-11-22", (
        Row("linear", (32, 512), (32, 128), (1, 1), {"bf16": 1.09}),
        Row("linear", (1024, 1024), (128, 256), (1, 1), {"bf16": 1.18}),
        Row("linear", (512, 2048), (512, 1024), (1, 1), {"bf16": 1.60}),
        Row("attention", (64, 64), (520, 520), (65, 65), {"bf16": 0.91}),
        Row("attention", (128, 128), (780, 2056), (65, 257), {"bf16": 1.15}),
        Row("attention", (128, 384), (1028, 2056), (65, 257), {"bf16": 1.15}),
        Row("attention", (256, 768), (1032, 4112), (129, 1025), {"bf16": 1.61}),
        Row("attention", (384, 768), (1028, 4112), (257, 1025), {"bf16": 1.47}),
        Row("encoder-decoder", (128, 128), (1024, 1024), (41, 41), {"bf16": 1.14}),
        Row("encoder-decoder", (256, 512), (2048, 4096), (17, 61), {"bf16": 1.41}),
        Row("convolution, channels last", (128, 128), (4096, 4096), (1, 1), {"bf16": 0.90}),
        Row("convolution, channels last", (128, 128), (50176, 200704), (1, 1), {"bf16": 1.52}),
        Row("convolution, channels last", (128, 256), (131072, 200704), (1, 1), {"bf16": 1.52}),
        Row("convolution, channels last", (512, 512), (16384, 16384), (1, 1), {"bf16": 0.95}),
        Row("convolution", (32, 128), (50176, 131072), (1, 1), {"bf16": 1.24, "channels last": 1.16, "bf16, channels last": 1.73}),
        Row("convolution", (128, 128), (16384, 131072), (1, 1), {"bf16": 1.32, "channels last": 1.16, "bf16, channels last": 1.78}),
        Row("convolution", (512, 512), (16384, 16384), (1, 1), {"bf16": 0.85, "channels last": 0.88, "bf16, channels last": 0.82}),
    )),
    ("avx512_bf16", "2.13"): ("2026-11-23", (
        Row("linear", (1024, 1024), (128, 256), (1, 1), {"bf16": 1.59}),
        Row("linear", (512, 2048), (512, 1024), (1, 1), {"bf16": 1.71}),
        Row("attention", (64, 64), (520, 520), (65, 65), {"bf16": 1.01}),
        Row("attention", (128, 128), (780, 2056), (65, 257), {"bf16": 1.32}),
        Row("attention", (128, 384), (1028, 2056), (65, 257), {"bf16": 1.32}),
        Row("attention", (256, 768), (1032, 4112), (129, 1025), {"bf16": 1.65}),
        Row("attention", (384, 768), (1028, 4112), (257, 1025), {"bf16": 1.40}),
        Row("encoder-decoder", (128, 128), (1024, 1024), (41, 41), {"bf16": 1.26}),
        Row("encoder-decoder", (128, 128), (4096, 4096), (61, 61), {"bf16": 1.28}),
        Row("encoder-decoder", (256, 512), (2048, 4096), (17, 61), {"bf16": 1.40}),
        Row("convolution, channels last", (128, 128), (4096, 4096), (1, 1), {"bf16": 1.15}),
        Row("convolution, channels last", (128, 128), (50176, 200704), (1, 1), {"bf16": 1.45}),
        Row("convolution, channels last", (128, 256), (131072, 200704), (1, 1), {"bf16": 1.45}),
        Row("convolution, channels last", (512, 512), (16384, 16384), (1, 1), {"bf16": 1.18}),
        Row("convolution", (32, 128), (50176, 131072), (1, 1), {"bf16": 1.30, "channels last": 1.18, "bf16, channels last": 1.72}),
        Row("convolution", (128, 128), (16384, 131072), (1, 1), {"bf16": 1.37, "channels last": 1.18, "bf16, channels last": 1.72}),
        Row("convolution", (512, 512), (16384, 16384), (1, 1), {"bf16": 1.16, "channels last": 0.85, "bf16, channels last": 1.05}),
    )),
}
# fmt: on


def look_up(facts: Facts, *, layout_open: bool = True) -> Choice:
    """Return the choice for these facts by the minimum gains of all matching rows. Without a
    matching row, return fp32 without channels last.

    >>> look_up(Facts("amx_bf16", "1.0", "linear", width=256, rows=100))
    Choice(precision='fp32', channels_last=False, known=False, why='models of this kind and size were not measured')
    """
    _, measured = TABLE.get((facts.instructions, facts.torch), ("", ()))
    rows = [row for row in measured if row.holds(facts)]
    if not rows:
        return Choice("fp32", False, False, "models of this kind and size were not measured")
    names = ["bf16"]
    if layout_open:
        names += ["channels last", "bf16, channels last"]
    gains = {"": 1.0}  # fp32 with contiguous images
    for name in names:
        gains[name] = min(row.gains.get(name, 0.0) for row in rows)
    fp32 = _with_layout(gains, "")
    bf16 = _with_layout(gains, "bf16")
    if gains[bf16] >= BF16_WORTH_IT * gains[fp32]:
        faster = f"measured at least {gains[bf16]:.2f} times as fast as fp32"
        return Choice("bf16", bf16.endswith("channels last"), True, faster)
    sooner = f", channels last at least {gains[fp32]:.2f} times as fast" if fp32 else ""
    return Choice("fp32", bool(fp32), True, f"bf16 was measured hardly faster{sooner}")


def _with_layout(gains: Mapping[str, float], precision: str) -> str:
    """Return the name of a precision in `gains`, with channels last if that is worth it."""
    name = f"{precision}, channels last".removeprefix(", ")
    return name if gains.get(name, 0.0) >= LAYOUT_WORTH_IT * gains[precision] else precision
