"""Two tasks with learned weights: github.com/yaringal/multi-task-learning-example.

The log variance of each task is a parameter (Kendall et al. 2018), and in the records.
"""

import torch
from torch import nn

import surefoot as sf


class Net(nn.Module):
    def __init__(self, hidden=1024):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, hidden), nn.ReLU())
        self.first, self.second = nn.Linear(hidden, 1), nn.Linear(hidden, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        hidden = self.hidden(inputs)
        outputs = torch.cat([self.first(hidden), self.second(hidden)], dim=1)
        return outputs, self.log_variances


def loss(model, batch):
    inputs, targets = batch
    outputs, log_variances = model(inputs)
    errors = (outputs - targets).square()
    return (torch.exp(-log_variances) * errors + log_variances).sum(dim=1).mean()


def lines(samples=100):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 1, generator=random)
    noise = torch.randn(samples, 2, generator=random) * torch.tensor([10.0, 1.0])
    return inputs, torch.cat([2 * inputs + 8, 3 * inputs + 3], dim=1) + noise


def build():
    return sf.Run(
        model=Net,
        loss=loss,
        train_data=lines(),
        batch_size=20,
        length="200 epochs",
        optimizer=sf.optim.adam(lr=1e-2),
        run_dir="runs/multi-task",
    )


def train(run):
    with run:
        for step in run:
            deviations = torch.exp(run.state.model.log_variances.detach() / 2)
            step.log(first_deviation=deviations[0], second_deviation=deviations[1])


if __name__ == "__main__":
    train(build())
