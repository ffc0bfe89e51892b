"""Small runs that the lines train: a GPT whose text can be learnt, and a network with a sample that
breaks its step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

VOCABULARY = 64


def is_tiny(device: str) -> bool:
    """Whether this is a dry run."""
    return device == "cpu"


def rows_of_tokens(rows: int, context: int) -> Tensor:
    """Rows in which each token follows from the one before, so that the loss falls within a few
    steps.
    """
    tokens = torch.randint(VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(1))
    columns = [tokens]
    for _ in range(context):
        columns.append((columns[-1] * 5 + 3) % VOCABULARY)
    return torch.cat(columns, dim=1)


def token_loss(model: Any, batch: Any) -> Tensor:
    (rows,) = batch
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def gpt_run(device: str, *, dropout: float = 0.0, **changes: Any) -> sf.Run:
    """A GPT in two micro-batches per step."""
    layers, heads, width, context = (2, 2, 32, 16) if is_tiny(device) else (4, 4, 256, 128)
    shape = sf.models.GPTConfig(
        layers,
        heads,
        width,
        context,
        VOCABULARY,
        dropout=dropout,
        family="gpt2",
        tie_embeddings=True,
    )
    settings: dict[str, Any] = {
        "model": lambda: sf.models.GPT(shape),
        "loss": token_loss,
        "count_fn": lambda batch: batch[0][:, 1:].numel(),
        "train_data": (rows_of_tokens(256, context),),
        "batch_size": 16,
        "micro_batch_size": 8,
        "length": "20 steps",
        "optimizer": sf.optim.adamw(lr=3e-3),
        "precision": "fp32",
        "device": device,
        "log_every": "1 steps",
        "layer_stats_every": None,
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


class Net(nn.Sequential):
    """Batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)
        )


def class_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def breaking_data() -> tuple[Tensor, Tensor]:
    """Forty samples of which one makes the gradient of its step NaN."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(40, 5, generator=generator)
    inputs[7] = torch.nan
    return inputs, torch.randint(3, (40,), generator=generator)


def breaking_run(device: str, **changes: Any) -> sf.Run:
    """A run that skips one step in five."""
    settings: dict[str, Any] = {
        "model": Net,
        "loss": class_loss,
        "train_data": breaking_data(),
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "20 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "precision": "fp32",
        "device": device,
        "log_every": "1000 steps",
        "layer_stats_every": None,
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def optimizers(device: str) -> dict[str, Any]:
    """Surefoot's own and torch's, one for each way in which a step is skipped."""
    on_gpu = device == "cuda"
    return {
        "adamw": sf.optim.adamw(lr=1e-2),
        "sgd": sf.optim.sgd(lr=0.1, momentum=0.9),
        "adafactor": sf.optim.adafactor(),
        "lion": sf.optim.lion(1e-3),
        "muon": sf.optim.muon(1e-3),
        "schedule_free": sf.optim.schedule_free(1e-2),
        "torch's NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, capturable=on_gpu),
        "torch's RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, capturable=on_gpu),
    }


def losses_of(run: sf.Run) -> list[float]:
    """Train; return the loss of each step."""
    losses: list[Tensor] = []
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(step.loss.detach().clone())
    return [float(loss) for loss in losses]


def assert_close(losses: list[float], expected: list[float], *, relative: float) -> float:
    """Check losses one by one; return the largest relative difference."""
    assert len(losses) == len(expected)
    difference = max(abs(a - b) / max(abs(b), 1e-2) for a, b in zip(losses, expected, strict=True))
    assert difference <= relative, (
        f"losses differ by up to {difference:.1e}: {losses} and {expected}"
    )
    return difference
