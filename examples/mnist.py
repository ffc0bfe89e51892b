"""MNIST by a small convolutional network: https://github.com/pytorch/examples, mnist.

`data/mnist` has the files of MNIST. Without it, scikit-learn's 8 x 8 digits are used.
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

import surefoot as sf


class Net(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * (size // 2 - 2) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build():
    path = Path("data/mnist")
    data = sf.data.load_images(path if path.exists() else None)
    steps_per_epoch = len(data.train) // 64
    return sf.Run(
        model=lambda: Net(data.fitting.size),
        loss=loss,
        train_data=data.train,
        splits={"test": sf.Split(data.test, metrics=sf.metrics.accuracy)},
        batch_size=64,
        length="14 epochs",
        optimizer=partial(torch.optim.Adadelta, lr=1.0),
        schedule=sf.schedules.from_scheduler(
            lambda optimizer: StepLR(optimizer, steps_per_epoch, gamma=0.7)
        ),
        run_dir="runs/mnist",
    )


if __name__ == "__main__":
    build().train()
