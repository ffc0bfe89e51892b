"""Multi30k, surefoot's presets against a plain PyTorch script: seconds to a validation loss, and
BLEU after 25 minutes.

    python benchmarks/multi30k.py --data DIR [--steps 200] [--most 12] [--threads 1]      seconds of training to one loss
    python benchmarks/multi30k.py --data DIR --minutes 25 [--only surefoot]               BLEU after 25 minutes of training
    python benchmarks/multi30k.py --data DIR --short                                      about a minute and a half

Seconds to a loss: surefoot trains its preset `multi30k-fast` for `--steps`, its schedule included;
then the plain script trains until it has the same validation loss, or `--most` times as long. The
last line is the ratio of their seconds.

`--minutes`: surefoot trains its preset `multi30k` for as many steps as fit, by the pace of 40 steps
before; the plain script trains for so long. Both translate the test part (test_2016_flickr) once:
surefoot by the preset's beam search, the plain script greedily, as its tutorial has it. `--only`
makes one side alone, so that each can have a core of its own.

The plain script has the design of PyTorch's own translation tutorial: nn.Transformer, sinusoidal
positions, Adam(betas=(0.9, 0.98), eps=1e-9) at one rate, cross-entropy over what is not padding,
random batches of 128 pairs padded to the longest, float32. The text, the subwords and the sizes are
those of the preset (one vocabulary and one embedding, which is the head too), so that both have as
many weights to learn. The loss is over the real tokens of the validation part, in nats per token
without smoothing. What counts is training: reading, evaluating and translating do not, choosing a
number format does. The presets' settings were chosen on 1,000 pairs held out of the training part.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from time import perf_counter
from typing import Any

import sacrebleu
import torch
import torch.nn.functional as F
from loops.conditions import reported
from loops.training import seconds_of_training
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import surefoot as sf
from surefoot.config.tree import layered
from surefoot.memory import instruction_set
from surefoot.recipes import translation as recipe
from surefoot.tokenizers.subwords import BEGIN, END, PADDING

PRESET = layered(recipe.Config, [("preset", recipe.PRESETS["multi30k"])])[0]
HEADS = PRESET.model.heads
WIDTH = PRESET.model.width
HIDDEN = PRESET.model.mlp_width
LAYERS = (PRESET.model.encoder_layers, PRESET.model.decoder_layers)
LONGEST = PRESET.data.max_target_tokens
Rows = tuple[Tensor, Tensor]  # a source and a target
PRECISION = "fp32" if instruction_set() == "none" else "bf16"
PACE_STEPS, SPARE = (
    40,
    0.98,
)  # steps to measure the pace with, after ten that are not; how much of the time is planned


class Translator(nn.Module):
    def __init__(self, vocab_size: int, *, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, *LAYERS, HIDDEN, dropout, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(WIDTH, vocab_size)
        for parameter in self.transformer.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(512.0), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer(
            "positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
        )

    def embedded(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = (
            self.embedding(tokens) * math.sqrt(WIDTH)
            + self.get_buffer("positions")[: tokens.shape[1]]
        )
        dropped: Tensor = self.dropout(vectors)
        return dropped

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self.embedded(source),
            self.embedded(target),
            tgt_mask=later,
            src_key_padding_mask=source == PADDING,
            tgt_key_padding_mask=target == PADDING,
            memory_key_padding_mask=source == PADDING,
        )
        logits: Tensor = self.head(hidden)
        return logits


def rows_of(
    pairs: Sequence[tuple[str, str]], tokenizer: sf.tokenizers.SubwordTokenizer, *, longest: int
) -> list[Rows]:
    sources = tokenizer.encode_all([source for source, _ in pairs])
    targets = tokenizer.encode_all([target for _, target in pairs])
    return [
        (torch.tensor([*source, END]), torch.tensor([BEGIN, *target, END]))
        for source, target in zip(sources, targets, strict=True)
        if max(len(source), len(target)) < longest
    ]


def padded(rows: list[Rows]) -> Rows:
    sources, targets = (
        pad_sequence(list(side), batch_first=True, padding_value=PADDING)
        for side in zip(*rows, strict=True)
    )
    return sources, targets


def loss_of(model: nn.Module, batch: Rows, *, reduction: str) -> Tensor:
    source, target = batch
    logits = model(source, target[:, :-1])
    return F.cross_entropy(
        logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PADDING, reduction=reduction
    )


@torch.no_grad()
def validation_loss(model: nn.Module, rows: list[Rows]) -> float:
    model.eval()
    nats = count = 0.0
    for first in range(0, len(rows), 128):
        batch = padded(rows[first : first + 128])
        nats += float(loss_of(model, batch, reduction="sum"))
        count += int((batch[1][:, 1:] != PADDING).sum())
    model.train()
    return nats / count


@torch.no_grad()
def translated(
    model: Translator,
    sources: Sequence[str],
    tokenizer: sf.tokenizers.SubwordTokenizer,
    *,
    most: int = 100,
) -> list[str]:
    """Greedy translations: the likeliest token at each place, until the sentence ends."""
    model.eval()
    said = []
    for first in range(0, len(sources), 128):
        rows = [
            torch.tensor([*row, END]) for row in tokenizer.encode_all(sources[first : first + 128])
        ]
        source = pad_sequence(rows, batch_first=True, padding_value=PADDING)
        target = torch.full((len(rows), 1), BEGIN)
        while target.shape[1] <= most and not (target == END).any(dim=1).all():
            target = torch.cat([target, model(source, target)[:, -1:].argmax(dim=-1)], dim=1)
        for row in target[:, 1:].tolist():
            said.append(tokenizer.decode(row[: row.index(END)] if END in row else row))
    model.train()
    return said


def built(preset: str, asked: argparse.Namespace, *, steps: int) -> sf.Run:
    """surefoot's run of a preset, without a directory; nothing is scored while it trains."""
    changes: dict[str, Any] = {
        "data.path": asked.data,
        "seed": asked.seed,
        "run_dir": None,
        "precision": PRECISION,
    }
    changes |= {"length": f"{steps} steps", "evaluate_every": "100%"}
    return recipe.build(
        layered(recipe.Config, [("preset", recipe.PRESETS[preset]), ("benchmark", changes)])[0]
    )


def surefoot(preset: str, asked: argparse.Namespace, *, steps: int) -> tuple[float, sf.Run]:
    """Seconds of training that a run of a preset takes, and the run, trained and not yet scored."""
    with redirect_stdout(StringIO()):
        run = built(preset, asked, steps=steps)
        begun = perf_counter()
        with run:
            opening_s = perf_counter() - begun
            for _ in run:
                if run.state.step == steps:
                    break
    return opening_s + seconds_of_training(run), run


def steps_in(preset: str, asked: argparse.Namespace, *, seconds: float) -> int:
    """How many steps of a preset fit into so many seconds, by the pace of some that are made for it
    and thrown away.
    """
    begun = 0.0
    with redirect_stdout(StringIO()), built(preset, asked, steps=PACE_STEPS + 11) as run:
        for step in run:
            if step.index == 9:
                begun = perf_counter()
            if step.index == 9 + PACE_STEPS:
                break
    return int(SPARE * seconds * PACE_STEPS / (perf_counter() - begun))


def plain(
    asked: argparse.Namespace, *, until_loss: float, most_s: float
) -> tuple[float, float, Translator, sf.tokenizers.SubwordTokenizer]:
    """Seconds of training that the plain script takes to a validation loss, or to `most_s`; its
    loss then, and the model.
    """
    torch.manual_seed(asked.seed)
    found = sf.data.load_pairs(asked.data)
    vocab_size = PRESET.data.vocab_size or 0
    tokenizer = sf.tokenizers.SubwordTokenizer.train(
        [one for pair in found.train for one in pair], vocab_size=vocab_size
    )
    training = rows_of(found.train, tokenizer, longest=LONGEST)
    validation = rows_of(found.val, tokenizer, longest=512)
    model = Translator(tokenizer.vocab_size, dropout=asked.dropout, norm_first=asked.norm_first)
    optimizer = torch.optim.Adam(model.parameters(), lr=asked.lr, betas=(0.9, 0.98), eps=1e-9)
    print(
        f"plain: {sum(parameter.numel() for parameter in model.parameters()):,} parameters",
        flush=True,
    )
    batches: DataLoader[Rows] = DataLoader(
        training,  # type: ignore[arg-type]
        batch_size=asked.batch_size,
        shuffle=True,
        collate_fn=padded,
    )
    spent_s = 0.0
    step = 0
    while True:
        begun = perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch, reduction="mean").backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            over = spent_s + perf_counter() - begun >= most_s
            if step % asked.every == 0 or over:
                spent_s += perf_counter() - begun
                loss = validation_loss(model, validation)
                print(
                    f"step {step}  {spent_s:.1f} s of training  validation loss {loss:.4f}",
                    flush=True,
                )
                if loss <= until_loss or over:
                    return spent_s, loss, model, tokenizer
                begun = perf_counter()
        spent_s += perf_counter() - begun


def to_a_loss(asked: argparse.Namespace) -> None:
    ours_s, run = surefoot("multi30k-fast", asked, steps=asked.steps)
    wanted = run.evaluate("val")["val/loss"]
    print(
        f"surefoot: {asked.steps} steps, {ours_s:.1f} s of training  validation loss {wanted:.4f}",
        flush=True,
    )
    theirs_s, reached, *_ = plain(asked, until_loss=wanted, most_s=asked.most * ours_s)
    print(f"surefoot {ours_s:.1f} s to {wanted:.4f}; plain {theirs_s:.1f} s to {reached:.4f}")
    more = "" if reached <= wanted else "more than "
    print(f"plain/surefoot {more}{theirs_s / ours_s:.1f}")


def in_minutes(asked: argparse.Namespace) -> None:
    limit_s = 60 * asked.minutes
    if asked.only != "plain":
        steps = steps_in("multi30k", asked, seconds=limit_s)
        ours_s, run = surefoot("multi30k", asked, steps=steps)
        scores = run.evaluate("val", "test")
        told = (
            f"validation loss {scores['val/loss']:.4f}, BLEU {scores['val/bleu']:.2f} (greedy); "
            f"test BLEU {scores['test/bleu']:.2f}, chrF {scores['test/chrf']:.2f} (beam {PRESET.beam_size})"
        )
        print(f"surefoot {ours_s:.0f} s of training, {steps:,} steps: {told}", flush=True)
    if asked.only != "surefoot":
        theirs_s, loss, model, tokenizer = plain(asked, until_loss=-math.inf, most_s=limit_s)
        found = sf.data.load_pairs(asked.data)
        assert found.test is not None
        bleu = []
        for pairs in (found.val, found.test):
            said = translated(model, [source for source, _ in pairs], tokenizer)
            bleu.append(sacrebleu.corpus_bleu(said, [[target for _, target in pairs]]).score)
        print(
            f"plain    {theirs_s:.0f} s of training: validation loss {loss:.4f}, BLEU {bleu[0]:.2f}; "
            f"test BLEU {bleu[1]:.2f} (greedy)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", required=True, help="directory of Multi30k's files")
    parser.add_argument("--steps", type=int, default=200, help="of surefoot's run to a loss")
    parser.add_argument(
        "--minutes", type=float, help="BLEU after so much training, instead of seconds to a loss"
    )
    parser.add_argument("--only", choices=["surefoot", "plain"], help="with --minutes: one side")
    parser.add_argument("--short", action="store_true", help="about a minute and a half")
    parser.add_argument(
        "--most",
        type=float,
        default=12.0,
        help="times surefoot's seconds, after which the plain script gives up",
    )
    parser.add_argument(
        "--every", type=int, default=100, help="steps of the plain script between two evaluations"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="pairs, of the plain script")
    parser.add_argument(
        "--lr",
        type=float,
        default=1e-3,
        help="of the plain script; the tutorial's 1e-4 is for a wider model",
    )
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="of the plain script, as in the tutorial"
    )
    parser.add_argument("--norm-first", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.short:
        asked.steps = 30
        asked.most = 3.0
        asked.every = 10
        asked.minutes = None
    torch.set_num_threads(asked.threads)
    (to_a_loss if asked.minutes is None else in_minutes)(asked)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {asked.threads} threads"
    )


if __name__ == "__main__":
    with reported():
        main()
