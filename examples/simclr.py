"""SimCLR: https://github.com/sthalles/SimCLR, on 8 x 8 digits, encoded in parts."""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf


class TwoViews:
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return view(self.images[index]), view(self.images[index])


def view(image):  # random numbers are seeded by the epoch and the sample
    shifted = image.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(1, 2))
    return shifted * (0.5 + torch.rand(())) + 0.2 * torch.randn_like(image)


def network():
    conv = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*conv, nn.Linear(32 * 36, 128), nn.ReLU(), nn.Linear(128, 32))


def encode(model, batch):
    return model(batch[0]), model(batch[1])


def nt_xent(_, features, temperature=0.5):
    views = F.normalize(torch.cat(features), dim=1)
    logits = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    partners = torch.arange(len(views), device=views.device).roll(len(features[0]))
    accuracy = sf.metrics.accuracy(logits, partners)
    return F.cross_entropy(logits, partners), {"accuracy": accuracy}


def build():
    return sf.Run(
        model=network,
        loss=sf.losses.whole_batch(encode, nt_xent),
        train_data=TwoViews([image for image, _ in sf.data.load_images().train]),
        batch_size=256,
        micro_batch_size=64,
        length="10 epochs",
        optimizer=sf.optim.adam(lr=1e-3),
        run_dir="runs/simclr",
    )


if __name__ == "__main__":
    build().train()
