"""Seconds of training to a validation loss on Multi30k, of a plain PyTorch script: what a translation run is compared with.

    python benchmarks/multi30k_plain.py --data DIR [--until-loss 1.9] [--seconds 1500] [--lr 1e-4] [--threads 2]

The design of PyTorch's own translation tutorial: nn.Transformer, sinusoidal positions, Adam(betas=(0.9, 0.98), eps=1e-9) at one
rate, cross-entropy over what is not padding, random batches of 128 pairs padded to the longest, float32. The text, the
subwords and the sizes are those of the preset `multi30k` (one vocabulary and one embedding, which is the head too), so that
both have equally many weights to learn. Printed is the loss over the real tokens of the validation part, in nats per token
without smoothing, against the seconds of training: evaluations are not counted.
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
from surefoot.data.subwords import BEGIN, END, PADDING

VOCABULARY, LAYERS, HEADS, WIDTH, HIDDEN, LONGEST = 8000, 3, 4, 256, 1024, 128
Rows = tuple[Tensor, Tensor]  # a source and a target


class Translator(nn.Module):
    def __init__(self, vocabulary: int, *, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, dropout, batch_first=True, norm_first=norm_first
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--until-loss", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--norm-first", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(asked.seed)
    found = sf.load_pairs(asked.data)
    tokenizer = sf.SubwordTokenizer.trained([one for pair in found.training for one in pair], vocabulary=VOCABULARY)
    training = rows_of(found.training, tokenizer, longest=LONGEST)
    validation = rows_of(found.held_out, tokenizer, longest=512)
    model = Translator(tokenizer.vocabulary, dropout=asked.dropout, norm_first=asked.norm_first)
    optimizer = torch.optim.Adam(model.parameters(), lr=asked.lr, betas=(0.9, 0.98), eps=1e-9)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {vars(asked)}")

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
                if loss <= asked.until_loss or spent_s >= asked.seconds:
                    return
                begun = perf_counter()
        spent_s += perf_counter() - begun


if __name__ == "__main__":
    main()
