"""What `precision` and `compile` = "auto" win: milliseconds a step against surefoot in fp32,
uncompiled, and a plain script.

    python benchmarks/machine.py [--rounds 7] [--only NAME ...] [--short]

For each shape three ways take turns in one process, on one thread: a plain script (float32, torch's
default AdamW, clip_grad_norm_, everything laid out as torch does), surefoot with fp32 and no
compiling, and surefoot with what "auto" chooses; printed is what that is, and why. The plain script
has the same shape of model: the very same class for the perceptron and the networks of images
(there without channels_last), for GPTs one in the design of nanoGPT with torch's attention, for
translation nn.Transformer on random batches of 128 pairs padded to the longest, where surefoot
makes batches of similar length and computes its head over real tokens. There a step is as many
target tokens as the plain script's.

Data are synthetic: only time is measured, and no length or size of theirs depends on what they say.
Times are seconds of the processor, which other processes disturb less than those of a clock; each
is the median over rounds of some steps. What "auto" chooses is looked up in a table that
benchmarks/precision.py makes, so that it is the same in every run of this script. With --short
rounds are fewer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from loops.conditions import reported
from plain_gpt import PlainGPT
from plain_translator import Translator
from torch import Tensor, nn

import surefoot as sf
from surefoot.recipes.translation.corpus import cross_entropy, targets_of
from surefoot.run.messages import precision_in_words

Step = Callable[[], int]  # makes one and says how many targets it had
Precision = Literal["auto", "fp32"]


@dataclass(frozen=True)
class Case:
    """A shape: a plain step, what surefoot makes of it, how long such a run is, and how many steps
    are a round.
    """

    plain: Callable[[], Step]
    run: Callable[..., sf.Run]
    length: int
    steps: int


def plain_step(
    model: nn.Module, loss: Callable[[nn.Module, Any], tuple[Tensor, int]], batches: list[Any]
) -> Step:
    """The step that its user would have written."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = iter(range(1 << 40))

    def step() -> int:
        optimizer.zero_grad()
        value, targets = loss(model, batches[next(made) % len(batches)])
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return targets

    return step


def classified(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def classifier(
    plain: Callable[[], nn.Module],
    ours: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    batch: int,
    **more: int,
) -> Case:
    """Networks of a class for each sample."""
    inputs = torch.randn(8 * batch, *shape)
    labels = torch.randint(10, (8 * batch,))
    batches = list(zip(torch.split(inputs, batch), torch.split(labels, batch), strict=True))

    def run(**settings: Any) -> sf.Run:
        return sf.Run(
            model=ours, loss=classified, train_data=(inputs, labels), batch_size=batch, **settings
        )

    return Case(
        lambda: plain_step(plain(), lambda m, b: (classified(m, b), len(b[1])), batches),
        run,
        **more,
    )


def gpt(*, layers: int, heads: int, width: int, context: int, batch: int, **more: int) -> Case:
    """A GPT-2 of this shape, on characters."""
    shape = {"layers": layers, "heads": heads, "width": width, "context": context, "vocab_size": 65}
    tokens = torch.randint(65, (16 * batch, context + 1))

    def theirs(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()), rows[
            :, 1:
        ].numel()

    def ours(model: Any, held: Any) -> Any:
        (rows,) = held
        return model(
            rows[:, :-1],
            loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, rows[:, 1:]),
        )

    def run(**settings: Any) -> sf.Run:
        network = sf.models.GPTConfig(
            layers, heads, width, context, 65, family="gpt2", tie_embeddings=True
        )
        return sf.Run(
            model=lambda: sf.models.GPT(network),
            loss=ours,
            count_fn=lambda held: held[0][:, 1:].numel(),
            train_data=(tokens,),
            batch_size=batch,
            **settings,
        )

    return Case(
        lambda: plain_step(PlainGPT(**shape), theirs, list(torch.split(tokens, batch))), run, **more
    )


def translation(*, width: int, layers: int, vocab_size: int, **more: int) -> Case:
    """Pairs of about 14 tokens a side, as Multi30k has them."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(2.55, 0.35, size=(4096, 2)).astype(int), 4, 60)
    rows = [[draw.integers(4, vocab_size, size=size).tolist() for size in pair] for pair in lengths]
    pairs = sf.data.TokenPairs([one for one, _ in rows], [other for _, other in rows])
    order = np.arange(len(pairs))
    batches = [
        pairs.gather(order[start : start + 128], order[:128]) for start in range(0, 2048, 128)
    ]

    def theirs(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        source, target = batch
        logits = model(source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0
        ), targets_of(batch)

    def run(**settings: Any) -> sf.Run:
        network = sf.models.Seq2SeqConfig(
            encoder_layers=layers,
            decoder_layers=layers,
            heads=4,
            width=width,
            mlp_width=4 * width,
            vocab_size=vocab_size,
            norm_placement="post",
        )
        return sf.Run(
            model=lambda: sf.models.Seq2Seq(network),
            loss=cross_entropy(0.0),
            count_fn=targets_of,
            train_data=pairs,
            batch_size="2048 tokens",
            **settings,
        )

    return Case(
        lambda: plain_step(Translator(vocab_size, width, layers), theirs, batches), run, **more
    )


def perceptron(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(32, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def plain_convolutions() -> nn.Module:
    """As a user writes one who never heard of memory formats."""
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 128)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def cnn(*, channels_last: bool) -> nn.Module:
    return sf.models.SimpleCNN(channels=3, classes=10, width=64, channels_last=channels_last)


CASES: dict[str, Callable[[], Case]] = {
    "perceptron 32-64-10, batch 32": lambda: classifier(
        lambda: perceptron(64), lambda: perceptron(64), (32,), batch=32, length=20_000, steps=200
    ),
    "perceptron 32-512-10, batch 256": lambda: classifier(
        lambda: perceptron(512), lambda: perceptron(512), (32,), batch=256, length=20_000, steps=50
    ),
    "GPT of nanoGPT's CPU setting, 4 x 128, context 64, batch 12": lambda: gpt(
        layers=4, heads=4, width=128, context=64, batch=12, length=2000, steps=5
    ),
    "GPT of 6 x 384, context 256, batch 4": lambda: gpt(
        layers=6, heads=6, width=384, context=256, batch=4, length=5000, steps=1
    ),
    "CNN with batch norm, surefoot's, 3 x 32 x 32, batch 128": lambda: classifier(
        lambda: cnn(channels_last=False),
        lambda: cnn(channels_last=True),
        (3, 32, 32),
        batch=128,
        length=12_000,
        steps=1,
    ),
    "CNN with batch norm, a user's own, 3 x 32 x 32, batch 128": lambda: classifier(
        plain_convolutions, plain_convolutions, (3, 32, 32), batch=128, length=12_000, steps=1
    ),
    "encoder-decoder 3+3 x 256, Multi30k's lengths": lambda: translation(
        width=256, layers=3, vocab_size=8000, length=5000, steps=1
    ),
}


def stepping(run: sf.Run, open_runs: ExitStack) -> Step:
    """Steps of an open run."""
    open_runs.enter_context(run)
    made: Iterator[sf.Step] = iter(run)

    def step() -> int:
        return int(next(made).target_count)

    return step


def measured(case: Case, *, rounds: int, length: int) -> list[str]:
    """A line on what was chosen, and one on the times."""

    def run(precision: Precision, compiles: bool | Literal["auto"]) -> sf.Run:
        return case.run(
            optimizer=sf.optim.adamw(lr=1e-3),
            length=f"{length} steps",
            log_every="1000 steps",
            layer_stats_every=None,
            precision=precision,
            compile=compiles,
            console=False,
        )

    auto = run("auto", "auto")
    why_compile = auto.parts.plan.reasons.compile
    how_compiled = "compiled" if auto.parts.compiled else "not compiled"
    chosen = f"{precision_in_words(auto.parts, auto.parts.plan.reasons)}, {how_compiled} (auto: {why_compile})"
    seconds: dict[str, list[float]] = {"plain": [], "fp32": [], "auto": []}
    with ExitStack() as open_runs:
        ways = {
            "plain": case.plain(),
            "fp32": stepping(run("fp32", False), open_runs),
            "auto": stepping(auto, open_runs),
        }
        targets = 0
        for place in range(rounds + 1):
            for name, step in ways.items():
                begun = time.process_time()
                counted = 0
                for _ in range(case.steps):
                    counted += step()
                if place:  # the first allocates, and compiles
                    seconds[name].append((time.process_time() - begun) / counted)
                elif name == "plain":
                    targets = counted // case.steps
    ms = {name: median(held) * targets * 1000 for name, held in seconds.items()}
    return [
        f"  auto: {chosen}",
        f"  ms a step: plain {ms['plain']:,.4g}, surefoot fp32 {ms['fp32']:,.4g}, surefoot auto {ms['auto']:,.4g};"
        f" auto is {ms['plain'] / ms['auto']:.2f} times as fast as plain, {ms['fp32'] / ms['auto']:.2f} times as fp32",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], help="shapes whose names begin so")
    parser.add_argument(
        "--short", action="store_true", help="three rounds, nothing compiled: about a minute"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds = 3 if arguments.short else arguments.rounds
    python = sys.version.split()[0]
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, python {python}, {rounds} rounds"
    )
    for name, case in CASES.items():
        if not arguments.only or name.startswith(tuple(arguments.only)):
            made = case()
            length = (
                max(made.length // 100, made.steps * (rounds + 2))
                if arguments.short
                else made.length
            )
            print(
                "\n".join(
                    [
                        f"{name}; a run of {length:,} steps",
                        *measured(made, rounds=rounds, length=length),
                    ]
                ),
                flush=True,
            )


if __name__ == "__main__":
    with reported():
        main()
