"""A GAN on a ring of eight Gaussians: Goodfellow et al. 2014, arxiv.org/abs/1406.2661.

Two models, two optimizers, and a loop with the losses of section 3.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf


def perceptron(inputs, outputs):
    layers = nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def generate(models, batch):
    return models["generator"](torch.randn(len(batch[0]), 4).to(batch[0]))


def discriminator_loss(models, batch):
    real = models["discriminator"](batch[0])
    fake = models["discriminator"](generate(models, batch).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(models, batch):
    return F.softplus(-models["discriminator"](generate(models, batch))).mean()


def build():
    ring = torch.view_as_real(2 * torch.exp(0.25j * torch.pi * torch.arange(2048)))
    noise = torch.randn(2048, 2, generator=torch.Generator().manual_seed(0))
    sizes = {"generator": (4, 2), "discriminator": (2, 1)}
    return sf.Run(
        model={name: partial(perceptron, *size) for name, size in sizes.items()},
        optimizer=dict.fromkeys(sizes, sf.optim.adam(lr=1e-3, betas=(0.5, 0.99))),
        train_data=(ring + 0.1 * noise,),
        batch_size=128,
        length="1500 steps",
        run_dir="runs/gan",
    )


def train(run):
    with run:
        for step in run.steps():
            sf.forward_backward(step, discriminator_loss)
            sf.update(step, "discriminator")
            step.log(generator_loss=sf.forward_backward(step, generator_loss))
            sf.update(step, "generator")


if __name__ == "__main__":
    train(build())
