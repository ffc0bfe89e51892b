"""The table that `precision` and `channels_last` = "auto" read: what bf16 and channels last gain in
whole steps, by kind and size.

    python benchmarks/precision.py [--seconds 20] [--only NAME ...] [--write]

For each shape one run of surefoot for each number format (and layout of images) makes steps in turn
in one process, on one thread. Times are seconds of the processor (`time.process_time`), which other
processes disturb less than those of a clock; each turn gives the ratio to fp32 with images as they
come. Printed are the median of these ratios, and between which two of them it lies with 19 chances
in 20.

A region is the range of sizes between the shapes that are listed for it. Gains rise with the rows:
so of its least and its largest width the fewest rows were measured, or the most, where nothing is
gained. It comes into the table with bf16 if the lower ends of all its shapes are 1.15 or more, as a
region without a gain if all upper ends are less (1.1 for layouts of images); else it stays out, and
"auto" is fp32 there. With --write the rows of this instruction set and version of torch are
replaced in src/surefoot/config/speed_table.py, and its part of results/precision.txt.

With ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 the library that multiplies matrices leaves AMX alone. That
is not what a processor without AMX does, which may multiply bfloat16 at another speed, so nothing
is written then.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import cnn, perceptron, plain_convolutions
from torch import Tensor, nn

import surefoot as sf
from surefoot.config.speed_table import BF16_WORTH_IT, LAYOUT_WORTH_IT, Facts
from surefoot.memory import instruction_set
from surefoot.recipes.translation.corpus import cross_entropy, targets_of
from surefoot.run.facts import data_facts, model_facts, world_facts
from surefoot.tools.profile.profile import interval
from surefoot.train.plan import speed_facts

TABLE = Path(__file__).parents[1] / "src" / "surefoot" / "config" / "speed_table.py"
RESULTS = Path(__file__).parent / "results" / "precision.txt"
TURN_S = 0.15  # of steps in fp32, at least
FEWEST_TURNS = 11

Build = Callable[..., sf.Run]  # takes settings of the run
Ratios = dict[str, list[float]]


def classifier(model: Callable[[], nn.Module], shape: tuple[int, ...], *, batch: int) -> Build:
    """A network of a class for each sample."""
    data = torch.randn(4 * batch, *shape), torch.randint(10, (4 * batch,))

    def loss(network: Any, held: Any) -> Tensor:
        return F.cross_entropy(network(held[0]), held[1])

    return lambda **settings: sf.Run(
        model=model, loss=loss, train_data=data, batch_size=batch, **settings
    )


def gpt(
    layers: int, heads: int, width: int, context: int, vocab_size: int, *, batch: int, **shape: Any
) -> Build:
    tokens = torch.randint(vocab_size, (4 * batch, context + 1))
    network = sf.models.GPTConfig(layers, heads, width, context, vocab_size, **shape)

    def loss(model: Any, held: Any) -> Any:
        (rows,) = held
        return model(
            rows[:, :-1],
            loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, rows[:, 1:]),
        )

    return lambda **settings: sf.Run(
        model=lambda: sf.models.GPT(network),
        loss=loss,
        count_fn=lambda held: held[0][:, 1:].numel(),
        train_data=(tokens,),
        batch_size=batch,
        **settings,
    )


def translation(
    layers: int, width: int, vocab_size: int, *, tokens: int, longest: int, **shape: Any
) -> Build:
    """Pairs of about 14 tokens a side, as Multi30k has them."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(2.55, 0.35, size=(2048, 2)).astype(int), 4, longest)
    lengths[0] = longest
    rows = [[draw.integers(4, vocab_size, size=size).tolist() for size in pair] for pair in lengths]
    pairs = sf.data.TokenPairs([one for one, _ in rows], [other for _, other in rows])
    both: dict[str, Any] = {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "heads": 4,
        "vocab_size": vocab_size,
    }
    network = sf.models.Seq2SeqConfig(width=width, mlp_width=4 * width, **both, **shape)
    return lambda **settings: sf.Run(
        model=lambda: sf.models.Seq2Seq(network),
        loss=cross_entropy(0.1),
        count_fn=targets_of,
        train_data=pairs,
        batch_size=f"{tokens} tokens",
        **settings,
    )


def layers_of(*sizes: int, norms: bool = False) -> Callable[[], nn.Module]:
    """A perceptron of these widths."""

    def built() -> nn.Module:
        parts: list[nn.Module] = []
        for before, after in pairwise(sizes[:-1]):
            parts += [
                nn.Linear(before, after),
                *([nn.BatchNorm1d(after)] if norms else []),
                nn.ReLU(),
            ]
        return nn.Sequential(*parts, nn.Linear(sizes[-2], sizes[-1]))

    return built


def resnet(*, channels_last: bool) -> nn.Module:
    return sf.models.ResNet(18, channels=3, classes=10, channels_last=channels_last)


def small_convolutions() -> nn.Module:
    """As a user writes one for small pictures."""
    parts: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64)):
        parts += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 49, 10))


SHAPES: dict[str, Callable[[], Build]] = {
    "perceptron 32-64-10, batch 32": lambda: classifier(lambda: perceptron(64), (32,), batch=32),
    "perceptron 32-512-10, batch 256": lambda: classifier(
        lambda: perceptron(512), (32,), batch=256
    ),
    "perceptron 784-256-128-10, batch 64": lambda: classifier(
        layers_of(784, 256, 128, 10), (784,), batch=64
    ),
    "perceptron 784-512-512-10, batch 128": lambda: classifier(
        layers_of(784, 512, 512, 10), (784,), batch=128
    ),
    "perceptron 784-512-512-10, batch norm, batch 512": lambda: classifier(
        layers_of(784, 512, 512, 10, norms=True), (784,), batch=512
    ),
    "perceptron 784-1024-1024-10, batch 128": lambda: classifier(
        layers_of(784, 1024, 1024, 10), (784,), batch=128
    ),
    "perceptron 784-1024-1024-10, batch 256": lambda: classifier(
        layers_of(784, 1024, 1024, 10), (784,), batch=256
    ),
    "perceptron 1024-2048-2048-10, batch 128": lambda: classifier(
        layers_of(1024, 2048, 2048, 10), (1024,), batch=128
    ),
    "perceptron 1024-2048-2048-10, batch 512": lambda: classifier(
        layers_of(1024, 2048, 2048, 10), (1024,), batch=512
    ),
    "perceptron 1024-2048-2048-10, batch 1024": lambda: classifier(
        layers_of(1024, 2048, 2048, 10), (1024,), batch=1024
    ),
    "GPT 2 x 64, context 64, batch 8": lambda: gpt(2, 2, 64, 64, 65, batch=8),
    "GPT-2 4 x 128, context 64, batch 12": lambda: gpt(
        4, 4, 128, 64, 65, batch=12, family="gpt2", tie_embeddings=True
    ),
    "GPT 4 x 128, context 128, batch 8, 2,048 tokens": lambda: gpt(4, 4, 128, 128, 2048, batch=8),
    "GPT-2 4 x 128, context 128, batch 8, 50,304 tokens": lambda: gpt(
        4, 4, 128, 128, 50304, batch=8, family="gpt2", tie_embeddings=True
    ),
    "GPT 4 x 128, SwiGLU, 2 heads, context 256, batch 8": lambda: gpt(
        4, 2, 128, 256, 65, batch=8, activation="swiglu", smear=True
    ),
    "GPT 4 x 256, context 128, batch 8, 2,048 tokens": lambda: gpt(4, 4, 256, 128, 2048, batch=8),
    "GPT-2 6 x 384, context 256, batch 4": lambda: gpt(
        6, 6, 384, 256, 65, batch=4, family="gpt2", tie_embeddings=True
    ),
    "GPT-2 6 x 384, dropout 0.2, context 256, batch 4": lambda: gpt(
        6, 6, 384, 256, 65, batch=4, family="gpt2", tie_embeddings=True, dropout=0.2
    ),
    "GPT 4 x 512, context 512, batch 2, 8,192 tokens": lambda: gpt(4, 8, 512, 512, 8192, batch=2),
    "GPT-2 2 x 768, context 1024, batch 1, 8,192 tokens": lambda: gpt(
        2, 12, 768, 1024, 8192, batch=1, family="gpt2", tie_embeddings=True
    ),
    "GPT 2 x 768, context 256, batch 16, 8,192 tokens": lambda: gpt(
        2, 12, 768, 256, 8192, batch=16
    ),
    "encoder-decoder 2+2 x 128, 1,024 tokens": lambda: translation(
        2, 128, 2000, tokens=1024, longest=40
    ),
    "encoder-decoder 4+4 x 128, 4,096 tokens, dropout": lambda: translation(
        4, 128, 5000, tokens=4096, longest=60, dropout=0.25, activation="relu2"
    ),
    "encoder-decoder 3+3 x 256, 2,048 tokens": lambda: translation(
        3, 256, 8000, tokens=2048, longest=60, norm_placement="post"
    ),
    "encoder-decoder 3+3 x 256, 4,096 tokens": lambda: translation(
        3, 256, 8000, tokens=4096, longest=60, norm_placement="post"
    ),
    "encoder-decoder 3+3 x 256, 2,048 tokens, short pairs": lambda: translation(
        3, 256, 8000, tokens=2048, longest=16, norm_placement="post"
    ),
    "encoder-decoder 2+2 x 512, 2,048 tokens, short pairs": lambda: translation(
        2, 512, 8000, tokens=2048, longest=16, norm_placement="post", dropout=0.1
    ),
    "encoder-decoder 2+2 x 512, 2,048 tokens": lambda: translation(
        2, 512, 8000, tokens=2048, longest=60, norm_placement="post", dropout=0.1
    ),
    "SimpleCNN of width 32, 1 x 8 x 8, batch 64": lambda: classifier(
        lambda: sf.models.SimpleCNN(channels=1, classes=10, channels_last=True), (1, 8, 8), batch=64
    ),
    "SimpleCNN of width 32, 1 x 28 x 28, batch 64": lambda: classifier(
        lambda: sf.models.SimpleCNN(channels=1, classes=10, channels_last=True),
        (1, 28, 28),
        batch=64,
    ),
    "SimpleCNN of width 32, 1 x 28 x 28, batch 256": lambda: classifier(
        lambda: sf.models.SimpleCNN(channels=1, classes=10, channels_last=True),
        (1, 28, 28),
        batch=256,
    ),
    "SimpleCNN of width 64, 3 x 32 x 32, batch 128": lambda: classifier(
        lambda: cnn(channels_last=True), (3, 32, 32), batch=128
    ),
    "ResNet-18, 3 x 32 x 32, batch 16": lambda: classifier(
        lambda: resnet(channels_last=True), (3, 32, 32), batch=16
    ),
    "a user's CNN 32-64, 1 x 28 x 28, batch 64": lambda: classifier(
        small_convolutions, (1, 28, 28), batch=64
    ),
    "a user's CNN 64-128-128, 3 x 32 x 32, batch 16": lambda: classifier(
        plain_convolutions, (3, 32, 32), batch=16
    ),
    "a user's CNN 64-128-128, 3 x 32 x 32, batch 128": lambda: classifier(
        plain_convolutions, (3, 32, 32), batch=128
    ),
    "ResNet-18 as images come, 3 x 32 x 32, batch 16": lambda: classifier(
        lambda: resnet(channels_last=False), (3, 32, 32), batch=16
    ),
}

# Which shapes, by how their names begin, are the corners of a region.
REGIONS: tuple[tuple[str, ...], ...] = (
    ("perceptron 32-", "perceptron 784-256", "perceptron 784-512-512-10, batch 128"),
    ("perceptron 784-1024",),
    (
        "perceptron 784-512-512-10, batch norm",
        "perceptron 1024-2048-2048-10, batch 512",
        "perceptron 1024-2048-2048-10, batch 1024",
    ),
    ("GPT 2 x 64",),
    ("GPT-2 4 x 128", "GPT 4 x 128"),
    ("GPT-2 4 x 128", "GPT 4 x 128", "GPT-2 6 x 384"),
    ("GPT 4 x 256", "GPT 4 x 512", "GPT-2 2 x 768", "GPT 2 x 768"),
    ("GPT-2 6 x 384", "GPT 4 x 512", "GPT-2 2 x 768", "GPT 2 x 768"),
    ("encoder-decoder 2+2 x 128",),
    ("encoder-decoder 4+4 x 128",),
    ("encoder-decoder 3+3 x 256", "encoder-decoder 2+2 x 512"),
    ("SimpleCNN of width 32, 1 x 8 x 8",),
    ("SimpleCNN of width 32, 1 x 28",),
    ("SimpleCNN of width 32, 1 x 28", "SimpleCNN of width 64"),
    ("ResNet-18, 3",),
    ("a user's CNN",),
    ("a user's CNN 64-128-128",),
    ("ResNet-18 as images come",),
)


@dataclass(frozen=True)
class Measured:
    """One shape: its facts, milliseconds of a step in fp32, and how many times as fast each variant
    was in each turn.
    """

    facts: Facts
    ms: float
    ratios: Ratios

    def __str__(self) -> str:
        facts = self.facts
        sizes = f"{facts.layers}, width {facts.width}, {facts.rows:,} rows, {facts.positions:,} positions"
        gains = [
            f"{name} {median(ratios):.2f} ({interval(ratios)[0]:.2f} to {interval(ratios)[1]:.2f})"
            for name, ratios in self.ratios.items()
        ]
        turns = len(next(iter(self.ratios.values())))
        return f"  {sizes}; fp32 {self.ms:,.3g} ms a step\n  times as fast, {turns} turns: {'; '.join(gains)}"


def stepping(
    build: Build, open_runs: ExitStack, precision: str, channels_last: bool
) -> tuple[sf.Run, Iterator[Any]]:
    """An open run, and its steps."""
    run = build(
        optimizer=sf.optim.adamw(lr=1e-3),
        length="1000000 steps",
        log_every="1000000 steps",
        layer_stats_every=None,
        precision=precision,
        channels_last=channels_last,
        console=False,
    )
    open_runs.enter_context(run)
    return run, iter(run)


def seconds_of(steps: Iterator[Any], count: int) -> float:
    """Of the processor, of all threads of this process, for so many steps."""
    begun = time.process_time()
    for _ in range(count):
        next(steps)
    return time.process_time() - begun


def measure(build: Build, *, seconds: float) -> Measured:
    variants: dict[str, tuple[str, bool]] = {"fp32": ("fp32", False), "bf16": ("bf16", False)}
    with ExitStack() as open_runs:
        run, plain = stepping(build, open_runs, "fp32", False)
        parts = run.parts
        models = run.state.models
        facts = speed_facts(
            parts.settings,
            world_facts(parts.world),
            data_facts(parts.pipeline, {}, reads_shape=True),
            model_facts(models, run.state.optimizers, {}, was_compiled=False),
            unmeasured=True,
        )
        assert isinstance(facts, Facts), facts
        if facts.layers == "convolution":
            variants |= {"channels last": ("fp32", True), "bf16, channels last": ("bf16", True)}
        steps = {"fp32": plain}
        ratios: Ratios = {}
        for name, (precision, channels_last) in variants.items():
            if name != "fp32":
                _, steps[name] = stepping(build, open_runs, precision, channels_last)
                ratios[name] = []
        # the first steps allocate; all make equally many, so that a turn has the same samples in
        # all
        for steps_of_variant in steps.values():
            seconds_of(steps_of_variant, 2)
        slowest_s = max(seconds_of(steps_of_variant, 2) for steps_of_variant in steps.values()) / 2
        count = max(1, round(TURN_S / slowest_s))
        started_s = time.process_time()
        plain_s = list[float]()
        while len(plain_s) < FEWEST_TURNS or time.process_time() - started_s < seconds:
            names = list(steps)
            if len(plain_s) % 2 == 0:  # so that none is always the later one
                names.reverse()
            spent_s = {name: seconds_of(steps[name], count) for name in names}
            plain_s.append(spent_s["fp32"] / count)
            for name, ratio in ratios.items():
                ratio.append(spent_s["fp32"] / spent_s[name])
    return Measured(facts, 1000 * median(plain_s), ratios)


def row_of(corners: list[Measured]) -> str | None:
    """A region's row of the table; None where some of its shapes gain and others do not."""
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    for name in corners[0].ratios:
        intervals = [interval(corner.ratios[name]) for corner in corners]
        least[name] = min(low for low, _ in intervals)
        most[name] = max(high for _, high in intervals)
    if least["bf16"] >= BF16_WORTH_IT:
        gains = least
    elif not any(is_worth_it(name, gain) for name, gain in most.items()):
        gains = most
    else:
        return None
    facts = [corner.facts for corner in corners]
    (layers,) = {fact.layers for fact in facts}
    widths = [fact.width for fact in facts]
    positions = [fact.positions for fact in facts]
    width = min(widths), max(widths)
    # a range of rows that was measured at the least width and at the largest
    rows_of_ends = [[fact.rows for fact in facts if fact.width == end] for end in width]
    rows = [fact.rows for fact in facts]
    if gains is least:
        range_of_rows = max(map(min, rows_of_ends)), max(rows)
    else:
        range_of_rows = min(rows), min(map(max, rows_of_ends))
    range_of_positions = min(positions), max(positions)
    written = ", ".join(f'"{name}": {gain:.2f}' for name, gain in gains.items())
    return f'Row("{layers}", {width}, {range_of_rows}, {range_of_positions}, {{{written}}}),'


def is_worth_it(name: str, gain: float) -> bool:
    """Return True if a variant gains enough for "auto" to choose it."""
    return gain >= (BF16_WORTH_IT if "bf16" in name else LAYOUT_WORTH_IT)


def rewrite(
    rows: list[str],
    lines: list[str],
    *,
    instructions: str,
    version: str,
    table: Path,
    results: Path,
) -> None:
    """Replace the rows of this instruction set and version in the table, and the part of the
    results that is theirs.
    """
    found = re.fullmatch(
        r"(.*?\nTABLE[^\n]* = \{\n)(.*)(\}\n# fmt: on.*)", table.read_text(), re.DOTALL
    )
    assert found is not None, table
    head, body, tail = found.groups()
    held = dict(
        re.findall(r'^    (\(".*?"\)): (\(.*?^    \)\),\n)', body, re.MULTILINE | re.DOTALL)
    )
    own = "".join(f"        {row}\n" for row in rows)
    held[f'("{instructions}", "{version}")'] = f'("{date.today()}", (\n{own}    )),\n'
    table.write_text(
        head + "".join(f"    {key}: {part}" for key, part in sorted(held.items())) + tail
    )
    parts = results.read_text().strip().split("\n\n") if results.exists() else []
    others = [
        part for part in parts if f"{instructions}, torch {version} " not in part.splitlines()[0]
    ]
    results.write_text("\n\n".join([*others, "\n".join(lines)]) + "\n")


def load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of the processor for each shape, about"
    )
    parser.add_argument("--only", nargs="*", default=[], help="shapes whose names begin so")
    parser.add_argument(
        "--write", action="store_true", help="replace the rows of the table and the results"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    instructions = instruction_set()
    version = ".".join(torch.__version__.split(".")[:2])
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA")
    if limited and arguments.write:
        parser.error(
            f"--write: ONEDNN_MAX_CPU_ISA={limited} makes this another processor than it is"
        )
    facts = f"{instructions}, torch {version} ({torch.__version__}), {torch.cpu.get_capabilities()['cpu_name']}"
    lines = [
        f"# {date.today()}, benchmarks/precision.py, {facts}, {os.cpu_count()} cores, 1 thread, {load()} at the start; whole"
        " steps, seconds of the processor, medians of ratios and their intervals"
    ]
    print(lines[0], flush=True)
    measured: dict[str, Measured] = {}
    for name, shape in SHAPES.items():
        if not arguments.only or name.startswith(tuple(arguments.only)):
            measured[name] = measure(shape(), seconds=arguments.seconds)
            lines += [name, str(measured[name])]
            print("\n".join(lines[-2:]), flush=True)
    rows: list[str] = []
    for region in REGIONS:
        corners = [each for name, each in measured.items() if name.startswith(region)]
        row = row_of(corners) if corners else None
        lines.append(f"{' | '.join(region)}: {'not in the table' if row is None else row}")
        print(lines[-1])
        rows += [] if row is None else [row]
    lines.append(f"{load()} at the end")
    if arguments.write:
        rewrite(
            rows, lines, instructions=instructions, version=version, table=TABLE, results=RESULTS
        )


if __name__ == "__main__":
    main()
