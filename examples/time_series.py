"""Sine waves: https://github.com/pytorch/examples, time_sequence_prediction.

LBFGS evaluates the whole data up to twenty times in a step, as in the original. Its
state is saved like that of any optimizer.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 51, num_layers=2, batch_first=True)
        self.linear = nn.Linear(51, 1)
        self.double()

    def forward(self, waves, future=0):
        hidden, state = self.lstm(waves[:, :, None])
        outputs = [self.linear(hidden)]
        for _ in range(future):
            hidden, state = self.lstm(outputs[-1][:, -1:], state)
            outputs.append(self.linear(hidden))
        return torch.cat(outputs, dim=1)[:, :, 0]


def loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def sine_waves(count=23, length=60, period=5):
    random = torch.Generator().manual_seed(0)
    offsets = torch.randint(-4 * period, 4 * period, (count, 1), generator=random)
    waves = torch.sin((torch.arange(length) + offsets).double() / period)
    return waves[:, :-1], waves[:, 1:]


def build():
    inputs, targets = sine_waves()
    return sf.Run(
        model=Sequence,
        loss=loss,
        train_data=(inputs[3:], targets[3:]),
        splits={"test": sf.Split((inputs[:3], targets[:3]))},
        batch_size=len(inputs) - 3,
        length="8 steps",
        optimizer=partial(torch.optim.LBFGS, lr=0.8),
        run_dir="runs/time-series",
    )


if __name__ == "__main__":
    build().train()
