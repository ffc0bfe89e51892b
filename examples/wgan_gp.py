"""WGAN-GP, implementations/wgan_gp of https://github.com/eriklindernoren/PyTorch-GAN.

The critic learns in every step, from a gradient of a gradient, the generator in a fifth.
"""

from functools import partial

import torch
from torch import nn

import surefoot as sf


def perceptron(outputs):
    layers = nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU()
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def critic_loss(models, batch):
    (real,) = batch
    fake = models["generator"](torch.randn_like(real)).detach()
    between = torch.lerp(fake, real, torch.rand_like(real[:, :1])).requires_grad_()
    scores = models["critic"](between).sum()
    (slopes,) = torch.autograd.grad(scores, between, create_graph=True)
    penalty = 10.0 * (slopes.norm(dim=1) - 1).square().mean()
    distance = models["critic"](real).mean() - models["critic"](fake).mean()
    return penalty - distance


def generator_loss(models, batch):
    return -models["critic"](models["generator"](torch.randn_like(batch[0]))).mean()


def build():
    angle = 9 * torch.rand(2048, 1, generator=torch.Generator().manual_seed(0)).sqrt()
    spiral = torch.cat([angle * angle.cos(), angle * angle.sin()], dim=1) / 5
    adam = sf.optim.adam(lr=1e-3, betas=(0.5, 0.999))
    return sf.Run(
        model={"generator": partial(perceptron, 2), "critic": partial(perceptron, 1)},
        train_data=(spiral,),
        batch_size=128,
        length="1000 steps",
        optimizer={"generator": adam, "critic": adam},
        run_dir="runs/wgan-gp",
    )


def train(run):
    with run:
        for step in run.steps():
            sf.forward_backward(step, critic_loss)
            sf.update(step, "critic")
            if step.index % 5 == 4:
                step.log(generator_loss=sf.forward_backward(step, generator_loss))
                sf.update(step, "generator")


if __name__ == "__main__":
    train(build())
