"""Denoising diffusion: superminddpm.py of https://github.com/cloneofsimo/minDiffusion."""

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf

TIMES = 100  # of noise


class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.register_buffer("beta", torch.linspace(1e-4, 0.1, TIMES))
        self.register_buffer("signal", torch.cumprod(1 - self.beta, dim=0))
        self.time = nn.Embedding(TIMES, width)
        sizes = (1, width), (width, width), (width, 1)
        self.conv = nn.ModuleList([nn.Conv2d(*size, 3, padding=1) for size in sizes])

    def forward(self, images, time):
        hidden = F.silu(self.conv[0](images) + self.time(time)[:, :, None, None])
        return self.conv[2](hidden + F.silu(self.conv[1](hidden)))


def loss(model, batch):
    images, time = batch[0], torch.randint(TIMES, (len(batch[0]),)).to(batch[0].device)
    noise, signal = torch.randn_like(images), model.signal[time][:, None, None, None]
    noisy = signal.sqrt() * images + (1 - signal).sqrt() * noise
    return F.mse_loss(model(noisy, time), noise)


def draw(model):
    image = torch.randn(1, 1, 8, 8, device=model.beta.device)
    for time in reversed(range(TIMES)):
        beta, at = model.beta[time], torch.full((1,), time, device=image.device)
        image -= beta * model(image, at) / (1 - model.signal[time]).sqrt()
        image /= (1 - beta).sqrt()
        image += beta.sqrt() * torch.randn_like(image) * (time > 0)
    return str((image[0, 0] > 0).int())


def build():
    images = torch.stack([image for image, _ in sf.data.load_images().train])
    return sf.Run(
        model=Denoiser,
        loss=loss,
        train_data=(images / images.abs().max(),),
        batch_size=128,
        length="30 epochs",
        optimizer=sf.optim.adam(lr=2e-3),
        ema=0.99,
        sample_fn=draw,
        run_dir="runs/ddpm",
    )


if __name__ == "__main__":
    build().train()
