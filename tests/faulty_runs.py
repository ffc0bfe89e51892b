"""A small run with one fault in it: in a sample, in a layer, in the loss or in an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

SAMPLES, FEATURES, WIDTH, CLASSES = 48, 6, 8, 3
LARGE = 100.0  # what one sample has in a fault that magnitude brings about

Fault = Literal[
    "none", "sample", "label", "magnitude", "flattened", "root", "step", "loss", "norm", "update"
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings. `sample` is the one that is at fault, where one is; `step` the step, where that
    is.
    """

    run_dir: str | None = None
    fault: Fault = "none"
    sample: int = 17
    step: int = 5
    length: str = "24 steps"
    batch_size: int = 8
    micro_batch_size: int | None = 4
    log_every: str = "1 steps"
    save_every: str = "4 steps"
    max_bad_steps: int = 0
    checkpointed: bool = False
    compile: bool = False
    precision: str = "fp32"
    parallel: str = "auto"


class Act(nn.Module):
    """What stands between two layers, with the fault; `steps` counts those made while training."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fault = config.fault
        self.step = config.step
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.calls = nn.Buffer(torch.zeros(()), persistent=False)

    def forward(self, x_BC: Tensor) -> Tensor:
        self.calls += 1
        match self.fault:
            case "magnitude":
                is_large_BC = x_BC.abs() > 0.2 * LARGE
                return torch.where(is_large_BC, x_BC.exp().square().exp(), torch.tanh(x_BC))
            case "flattened":  # rows are no samples any more
                x_N = x_BC.reshape(-1)
                is_large_N = x_N.abs() > 0.2 * LARGE
                return torch.where(is_large_N, x_N.square() * 3e36, torch.tanh(x_N))
            case "root":  # finite, with an infinite gradient for the samples that come to exactly 0
                is_small_B1 = x_BC.abs().amax(dim=1, keepdim=True) < 0.2 * LARGE
                return (x_BC * is_small_B1).abs().sqrt()
            case "step" if self.training:
                self.steps += 1
                return torch.tanh(x_BC) / (self.steps != self.step + 1)
        return torch.tanh(x_BC)


class Block(nn.Module):
    def __init__(self, config: Config, *, faulty: bool) -> None:
        super().__init__()
        self.mask = Mask()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.act = Act(config) if faulty else nn.Tanh()

    def forward(self, x_BC: Tensor) -> Tensor:
        weights_BC = torch.softmax(self.mask(x_BC), dim=1)
        hidden_BC = self.act(self.up(x_BC)).view_as(x_BC)
        return x_BC + self.down(hidden_BC) * weights_BC


class Mask(nn.Module):
    """Minus infinity where nothing is to be seen: no fault."""

    def forward(self, x_BC: Tensor) -> Tensor:
        is_hidden_C = torch.arange(WIDTH) % 4 == 3
        return x_BC.detach().tanh().masked_fill(is_hidden_C, -torch.inf)


class Net(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(config, faulty=place == 1) for place in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        x_BC = self.first(x_BF)
        for block in self.blocks:
            x_BC = block(x_BC)
        return self.head(self.drop(self.norm(x_BC)))


def data(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.ones(SAMPLES)
    match config.fault:
        case "sample":
            inputs[config.sample, 2] = torch.nan
        case "label":
            weights[config.sample] = torch.inf
        case "magnitude" | "flattened" | "root":
            inputs[config.sample] = LARGE
        case "loss":
            weights[config.sample] = -1.0
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return inputs, labels, weights


def build(config: Config) -> sf.Run:
    def loss(model: Any, batch: Any) -> Tensor:
        inputs, labels, weights = batch
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        if config.fault == "loss":
            weights = 1 + weights.log()
        if config.fault == "norm" and model.training:
            # every gradient is finite, and its square is not
            losses = losses * torch.where(weights.sum() > 0, 3e25, 1.0)
        scale = 100.0 if config.fault == "update" else 1.0
        return (losses * weights).mean() * scale

    precision: Any = config.precision
    parallel: Any = config.parallel
    optimizer: Any = sf.optim.adamw(lr=1e-2)
    if config.fault == "update":  # of gradients above 1, which are finite
        optimizer = sf.optim.sgd(lr=3e38, momentum=0.0)
    return sf.Run(
        model=lambda: Net(config),
        loss=loss,
        train_data=data(config),
        optimizer=optimizer,
        buffers={"*.act.steps": "max"},  # every micro-batch counts the step from its start
        clip="off",
        activation_checkpointing="blocks" if config.checkpointed else "off",
        keep_last=99,
        console=False,
        report=False,
        check_state=False,  # it has a counter that is not saved
        run_dir=config.run_dir,
        length=config.length,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        log_every=config.log_every,
        save_every=config.save_every,
        max_bad_steps=config.max_bad_steps,
        compile=config.compile,
        precision=precision,
        parallel=parallel,
    )


def first_step_of(config: Config) -> tuple[int, int]:
    """The first step that holds the sample, and the micro-batch of it."""
    pipeline = build(config).parts.pipeline
    for step in range(24):
        for index, ids in enumerate(pipeline.samples(step)):
            if config.sample in ids:
                return step, index
    raise AssertionError(f"no step reads sample {config.sample}")
