"""A variational autoencoder: https://github.com/pytorch/examples, vae.

The original sums its loss over a batch. Here it is a mean over images, so that it does
not depend on the batch size; Adam's steps do not depend on such a factor.
"""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf


class VAE(nn.Module):
    def __init__(self, pixels=64, hidden=400, latent=20):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.code = nn.Linear(hidden, 2 * latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels)
        )

    def forward(self, images):
        mean, log_variance = self.code(self.encoder(images)).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(latent), mean, log_variance


def loss(model, batch):
    (images,) = batch
    logits, mean, log_var = model(images)
    error = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    count = len(images)
    return (error + divergence) / count, {"divergence": sf.Mean(divergence, count)}


def pixels(images):
    """Return images as rows of pixels between 0 and 1."""
    rows = torch.stack([image.flatten() for image, _ in images])
    return ((rows - rows.min()) / (rows.max() - rows.min()),)


def build():
    digits = sf.data.load_images()
    return sf.Run(
        model=VAE,
        loss=loss,
        train_data=pixels(digits.train),
        splits={"val": sf.Split(pixels(digits.val))},
        batch_size=128,
        length="20 epochs",
        optimizer=sf.optim.adam(lr=1e-3),
        run_dir="runs/vae",
    )


if __name__ == "__main__":
    build().train()
