"""DCGAN on 8 x 8 digits: https://github.com/pytorch/examples, dcgan."""

import torch
from torch import nn

import surefoot as sf

criterion, fakes = nn.BCEWithLogitsLoss(), {}
adam = sf.optim.adam(lr=2e-3, betas=(0.5, 0.999))


def generator():
    deep, out = nn.ConvTranspose2d(8, 32, 4), nn.ConvTranspose2d(32, 1, 4, 2, 1)
    return nn.Sequential(deep, nn.BatchNorm2d(32), nn.ReLU(), out, nn.Tanh())


def discriminator():
    conv, deep = nn.Conv2d(1, 16, 4, 2, 1), nn.Conv2d(16, 32, 4, 2, 1)
    layers = conv, nn.LeakyReLU(0.2), deep, nn.BatchNorm2d(32), nn.LeakyReLU(0.2)
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 2), nn.Flatten(0))


def discriminator_loss(models, batch):
    fake = models["generator"](torch.randn(len(batch[0]), 8, 1, 1).to(batch[0]))
    fakes[id(batch)] = fake  # for the generator's loss, which gets the same batch
    real, fake = map(models["discriminator"], (batch[0], fake.detach()))
    loss = criterion(real, torch.ones_like(real))
    return loss + criterion(fake, torch.zeros_like(fake))


def generator_loss(models, batch):
    fake = models["discriminator"](fakes.pop(id(batch)))
    return criterion(fake, torch.ones_like(fake))


def build():
    images = torch.stack([image for image, _ in sf.data.load_images().train])
    return sf.Run(
        model={"generator": generator, "discriminator": discriminator},
        train_data=(images / images.abs().max(),),
        batch_size=64,
        length="20 epochs",
        optimizer={"generator": adam, "discriminator": adam},
        run_dir="runs/dcgan",
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
