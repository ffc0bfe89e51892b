"""CLIP-like training: https://github.com/moein-shariatnia/OpenAI-CLIP.

Images of discs and texts of three words meet in one space. The batch is encoded in parts.
"""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf

WORDS = 8


class Towers(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        last = nn.Linear(width, width)
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), last)
        self.text = nn.EmbeddingBag(3 * WORDS, width)
        self.log_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images, texts):
        images = F.normalize(self.image(images), dim=1)
        return images, F.normalize(self.text(texts), dim=1), self.log_scale.exp()


def contrast(_, features):
    images, texts, scale = features
    logits = scale * images @ texts.T
    pairs = torch.arange(len(logits), device=logits.device)
    right = sf.Mean((logits.argmax(dim=1) == pairs).sum(), len(pairs))
    loss = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
    return loss, {"accuracy": right}


def discs():
    words = torch.cartesian_prod(*[torch.arange(WORDS)] * 3)
    row, column, radius = words.T[:, :, None, None]
    squares = (torch.arange(16)[:, None] - 2 * row) ** 2
    squares = squares + (torch.arange(16) - 2 * column) ** 2
    return torch.sigmoid(1.0 + radius - squares.sqrt()), words + WORDS * torch.arange(3)


def build():
    return sf.Run(
        model=Towers,
        loss=sf.losses.whole_batch(lambda model, batch: model(*batch), contrast),
        train_data=discs(),
        batch_size=128,
        micro_batch_size=32,
        length="50 epochs",
        optimizer=sf.optim.adamw(lr=3e-3, decay="all"),
        run_dir="runs/clip",
    )


if __name__ == "__main__":
    build().train()
