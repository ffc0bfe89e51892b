"""A word-level LSTM whose state is carried from step to step, in lanes, as in torch's example word_language_model.

Each lane reads its own stretch of the text, window after window. The loss keeps the state after the last window of each
lane in a registered tensor, so a killed run resumes with the same bits. Run it:  python examples/word_lm.py
"""

from __future__ import annotations

from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

WINDOW, WIDTH = 16, 64  # words, features


class Windows:
    """Consecutive windows of a text: window i + 1 begins where window i ends. Each has inputs, targets and its number."""

    def __init__(self, words: Tensor) -> None:
        self.words = words

    def __len__(self) -> int:
        return (len(self.words) - 1) // WINDOW

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        words = self.words[index * WINDOW : (index + 1) * WINDOW + 1]
        return words[:-1], words[1:], index


class LSTM(nn.Module):
    """A language model that takes and returns its state."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocab_size, WIDTH), nn.Dropout(0.2)
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, vocab_size)

    def forward(self, words: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the state after the last word. A state holds the two parts of an LSTM's state."""
        hidden, (h, c) = self.lstm(self.dropout(self.embedding(words)), (state[0:1], state[1:2]))
        return self.out(self.dropout(hidden)), torch.cat([h, c])


class CarriedLoss:
    """The mean loss over words; `state` is what the lanes carry to the next step."""

    def __init__(self, samples: int, lanes: int) -> None:
        self.state = torch.zeros(2, lanes, WIDTH)
        self.starts = torch.stack([lane[0] for lane in torch.arange(samples).tensor_split(lanes)])

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Continue from the state of each window's lane, and keep the state after the window; a lane starts from zero."""
        inputs, targets, windows = batch
        if not torch.is_grad_enabled():  # windows of a split are scored alone
            logits, _ = model(inputs, self.state.new_zeros(2, len(windows), WIDTH))
        else:
            lanes = torch.searchsorted(self.starts, windows, right=True) - 1
            goes_on = (windows > self.starts[lanes])[:, None]
            logits, state = model(inputs, self.state[:, lanes] * goes_on)
            self.state[:, lanes] = state.detach()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(count: int = 60_000, vocab_size: int = 2_000) -> Tensor:
    """Return words of Python's own documentation as numbers; rare words share the number 0."""
    words = " ".join(topics[name] for name in sorted(topics)).split()[:count]
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(vocab_size - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def build(**changes: Any) -> sf.Run:
    """Return the run; `changes` replace its settings."""
    words = text()
    settings: dict[str, Any] = {
        "model": lambda: LSTM(2_000),
        "train_data": Windows(words[:50_000]),
        "order": "lanes",
        "batch_size": 20,
        "length": "3 epochs",
        "optimizer": sf.optim.adamw(lr=5e-3),
        "clip": "norm 0.25",
        "splits": {"val": sf.Split(Windows(words[50_000:]), batch_size=20)},
        "device": "cpu",
        "run_dir": "runs/word-lm",
    } | changes
    loss = CarriedLoss(len(settings["train_data"]), settings["batch_size"])
    run = sf.Run(loss=loss, **settings)
    run.register_state("lanes", loss.state)
    return run


def train(run: sf.Run) -> None:
    """Make all remaining steps. With several processes, each has the state of its own lanes, and they exchange it after a step."""
    state = run.loss.state  # type: ignore[union-attr]
    with run:
        for _ in run:
            if run.world_size > 1:
                parts = [torch.empty_like(part) for part in state.chunk(run.world_size, dim=1)]
                torch.distributed.all_gather(parts, state.chunk(run.world_size, dim=1)[run.rank].contiguous())
                state.copy_(torch.cat(parts, dim=1))


if __name__ == "__main__":
    train(build())
