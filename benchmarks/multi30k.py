"""Seconds of training to one validation loss on Multi30k: surefoot's recipe against a plain PyTorch script of the same model.

    python benchmarks/multi30k.py --data DIR [--length "1000 steps"] [--lr 1e-3] [--threads 2]

surefoot trains its preset `multi30k` for `--length`, its schedule included; then the plain script trains until it has the same
validation loss, or `--most` times as long. The last line is the ratio of their seconds.

The plain script has the design of PyTorch's own translation tutorial: nn.Transformer, sinusoidal positions, Adam(betas=(0.9,
0.98), eps=1e-9) at one rate, cross-entropy over what is not padding, random batches of 128 pairs padded to the longest,
float32. The text, the subwords and the sizes are those of the preset (one vocabulary and one embedding, which is the head
too), so that both have as many weights to learn. The loss is over the real tokens of the validation part, in nats per token
without smoothing; evaluations are not counted as training.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import surefoot as sf
from surefoot.config import layered
from surefoot.data.subwords import BEGIN, END, PADDING
from surefoot.recipes import translation as recipe

PRESET = layered(recipe.Config, [("preset", recipe.PRESETS["multi30k"])])[0]
HEADS, WIDTH, HIDDEN = PRESET.model.heads, PRESET.model.width, PRESET.model.hidden
LAYERS, LONGEST = (PRESET.model.encoder_layers, PRESET.model.decoder_layers), PRESET.data.max_target
Rows = tuple[Tensor, Tensor]  # a source and a target


class Translator(nn.Module):
    def __init__(self, vocabulary: int, *, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, *LAYERS, HIDDEN, dropout, batch_first=True, norm_first=norm_first
        )
        self.head = nn.Linear(WIDTH, vocabulary)
        for parameter in self.transformer.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(512.0), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))

    def embedded(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(tokens) * math.sqrt(WIDTH) + self.get_buffer("positions")[: tokens.shape[1]]
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


def rows_of(pairs: Sequence[tuple[str, str]], tokenizer: sf.SubwordTokenizer, *, longest: int) -> list[Rows]:
    sources = tokenizer.encode_all([source for source, _ in pairs])
    targets = tokenizer.encode_all([target for _, target in pairs])
    return [
        (torch.tensor([*source, END]), torch.tensor([BEGIN, *target, END]))
        for source, target in zip(sources, targets, strict=True)
        if max(len(source), len(target)) < longest
    ]


def padded(rows: list[Rows]) -> Rows:
    sources, targets = (
        pad_sequence(list(side), batch_first=True, padding_value=PADDING) for side in zip(*rows, strict=True)
    )
    return sources, targets


def loss_of(model: nn.Module, batch: Rows, *, reduction: str) -> Tensor:
    source, target = batch
    logits = model(source, target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PADDING, reduction=reduction)


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


def surefoot(path: str, *, length: str, seed: int) -> tuple[float, float]:
    """Seconds of training that a run of the preset takes, and the validation loss that it ends with."""
    changes = {"data.path": path, "length": length, "seed": seed, "out": None, "evaluate_every": "50%", "best": "loss"}
    changes["ema"] = None  # an average over a thousand steps says little of a run that is as short
    run = recipe.build(layered(recipe.Config, [("preset", recipe.PRESETS["multi30k"]), ("benchmark", changes)])[0])
    run.train()
    spent_s = run.parts.whole.clock.state()["total_s"]
    return float(spent_s["training"]) + float(spent_s["waiting"]), run.scores("validation")["validation/loss"]


def plain(asked: argparse.Namespace, *, until_loss: float, most_s: float) -> tuple[float, float]:
    """Seconds of training that the plain script takes to a validation loss, or to `most_s`; and its loss then."""
    torch.manual_seed(asked.seed)
    found = sf.load_pairs(asked.data)
    vocabulary = PRESET.data.vocabulary or 0
    tokenizer = sf.SubwordTokenizer.trained([one for pair in found.training for one in pair], vocabulary=vocabulary)
    training = rows_of(found.training, tokenizer, longest=LONGEST)
    validation = rows_of(found.held_out, tokenizer, longest=512)
    model = Translator(tokenizer.vocabulary, dropout=asked.dropout, norm_first=asked.norm_first)
    optimizer = torch.optim.Adam(model.parameters(), lr=asked.lr, betas=(0.9, 0.98), eps=1e-9)
    print(
        f"plain: {sum(parameter.numel() for parameter in model.parameters()):,} parameters, {vars(asked)}", flush=True
    )
    batches: DataLoader[Rows] = DataLoader(training, batch_size=asked.batch_size, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    spent_s, step = 0.0, 0
    while True:
        begun = perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch, reduction="mean").backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if step % asked.every == 0:
                spent_s += perf_counter() - begun
                loss = validation_loss(model, validation)
                print(f"step {step}  {spent_s:.1f} s of training  validation loss {loss:.4f}", flush=True)
                if loss <= until_loss or spent_s >= most_s:
                    return spent_s, loss
                begun = perf_counter()
        spent_s += perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="directory of Multi30k's files")
    parser.add_argument("--length", default="1000 steps", help="of surefoot's run")
    parser.add_argument(
        "--most", type=float, default=4.0, help="times surefoot's seconds, after which the plain script gives up"
    )
    parser.add_argument("--every", type=int, default=100, help="steps of the plain script between two evaluations")
    parser.add_argument("--batch-size", type=int, default=128, help="pairs, of the plain script")
    parser.add_argument(
        "--lr", type=float, default=1e-3, help="of the plain script; the tutorial's 1e-4 is for a wider model"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="of the plain script, as in the tutorial")
    parser.add_argument("--norm-first", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    ours_s, wanted = surefoot(asked.data, length=asked.length, seed=asked.seed)
    theirs_s, reached = plain(asked, until_loss=wanted, most_s=asked.most * ours_s)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {asked.threads} threads")
    print(f"surefoot {ours_s:.0f} s to {wanted:.4f}; plain {theirs_s:.0f} s to {reached:.4f}")
    more = "" if reached <= wanted else "more than "
    print(f"plain/surefoot {more}{theirs_s / ours_s:.2f}")


if __name__ == "__main__":
    main()
