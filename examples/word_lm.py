"""Word-level LSTM: https://github.com/pytorch/examples, word_language_model."""

from pydoc_data.topics import topics
from zlib import crc32

import torch
from torch import nn

import surefoot as sf

WINDOW, WIDTH, LANES, WORDS = 16, 64, 20, 2_000


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words, state):
        hidden = self.dropout(self.embedding(words))
        hidden, state = self.lstm(hidden, state.split(1))
        return self.out(self.dropout(hidden)), torch.cat(state)


def build():
    words = [crc32(word.encode()) for word in "".join(topics.values()).split()]
    numbers = torch.tensor(words[:60_000]) % WORDS
    windows = numbers.unfold(0, WINDOW + 1, WINDOW)  # each and the word that follows it
    lanes = torch.arange(len(windows)).tensor_split(LANES)
    lane_of = torch.cat([torch.full_like(lane, row) for row, lane in enumerate(lanes)])
    goes_on = lane_of == lane_of.roll(1)  # not the first window of a lane
    carried = torch.zeros(2, LANES, WIDTH)

    def loss(model, batch):
        words, lane, goes_on = batch
        logits, state = model(words[:, :-1], carried[:, lane] * goes_on[:, None])
        carried[:, lane] = state.detach()
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    run = sf.Run(
        model=LSTM,
        loss=loss,
        train_data=(windows, lane_of, goes_on),
        order="lanes",
        batch_size=LANES,
        length="3 epochs",
        optimizer=sf.optim.adam(lr=5e-3),
        clip="norm 0.25",
        device="cpu",  # as `carried`
        run_dir="runs/word-lm",
    )
    run.register_state("lanes", carried)
    return run


if __name__ == "__main__":
    build().train()
