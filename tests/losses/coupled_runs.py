"""SimCLR and CLIP in small, for tests in one process and on several ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.train import gradient_cache

SAMPLES = 48
FEATURES = 6
WIDTH = 5


def nt_xent(first: Tensor, second: Tensor, temperature: float = 0.5) -> Tensor:
    """Chen et al. 2020, equation 1: each view is to be told from all others by its partner."""
    views = F.normalize(torch.cat([first, second]), dim=1)
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    logits = (views @ views.T / temperature).masked_fill(itself, -torch.inf)
    partners = torch.arange(len(views), device=views.device).roll(len(first))
    return F.cross_entropy(logits, partners)


class Encoder(nn.Sequential):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, WIDTH)
        )
        if norm:
            self.insert(1, nn.BatchNorm1d(8))


def two_views(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    first, second = model(torch.cat(batch)).chunk(2)
    return first, second


def views_loss(model: Any, features: Any) -> Tensor:
    return nt_xent(*features)


def ordered_loss(model: Any, features: Any) -> Tensor:
    """Each sample has a weight by its place in the batch."""
    first, second = features
    places = torch.arange(len(first))
    return views_loss(model, features) + (places * (first * second).sum(1)).mean()


class TwoTowers(nn.Module):
    """CLIP's shape: two encoders and a learned scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(FEATURES, WIDTH)
        self.text = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor([1.5]))  # FSDP shards no scalar

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image_features = F.normalize(self.image(images), dim=1)
        text_features = F.normalize(self.text(texts), dim=1)
        return image_features, text_features, self.log_scale.exp()[0]


def symmetric_loss(scale: Tensor, images: Tensor, texts: Tensor) -> Any:
    """Radford et al. 2021, figure 3."""
    logits = scale * images @ texts.T
    targets = torch.arange(len(logits), device=logits.device)
    accuracy = sf.Mean((logits.argmax(1) == targets).sum(), len(targets))
    loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    return loss, {"accuracy": accuracy}


def towers(model: Any, batch: Any) -> Any:
    return model(*batch)


def clip_loss(model: Any, features: Any) -> Any:
    images, texts, scale = features
    assert scale.ndim == 0
    return symmetric_loss(scale, images, texts)


def towers_alone(model: Any, batch: Any) -> Any:
    images, texts, _ = model(*batch)
    return {"images": images, "texts": texts, "labels": torch.arange(len(images))}


def clip_loss_with_its_parameter(model: Any, features: Any) -> Any:
    assert not features["labels"].requires_grad
    return symmetric_loss(model.log_scale.exp()[0], features["images"], features["texts"])


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Two noisy views of the same vectors."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensor:
        return torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)

    shared = draw()
    first = shared + 0.3 * draw()
    second = shared + 0.3 * draw()
    return first.to(dtype), second.to(dtype)


def build(kind: str = "clip", *, double: bool = True, **changes: Any) -> sf.Run:
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    model, encode_fn, loss_fn = {
        "simclr": (Encoder, two_views, views_loss),
        "ordered": (Encoder, two_views, ordered_loss),
        "dropout": (lambda: Encoder(0.3), two_views, views_loss),
        "norm": (lambda: Encoder(0.3, norm=True), two_views, views_loss),
        "clip": (TwoTowers, towers, clip_loss),
        "parameter": (TwoTowers, towers_alone, clip_loss_with_its_parameter),
    }[kind]
    settings: dict[str, Any] = {
        "model": model,
        "loss": sf.losses.whole_batch(encode_fn, loss_fn),
        "train_data": data(torch.get_default_dtype()),
        "batch_size": 24,
        "length": "3 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "precision": "fp32",
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def trained(kind: str = "clip", **changes: Any) -> dict[str, Any]:
    """Losses, norms and what is logged in each step, and all weights and buffers at the end."""
    run = build(kind, **changes)
    steps: list[Any] = []
    with run:
        for step in run:
            assert step.loss is not None
            assert step.grad_norm is not None
            logged = run.parts.run_state.meter.logged[-1][1].get("accuracy", sf.Mean(0.0, 0))
            of_ranks = run.parts.world.gathered([float(logged.total), float(logged.count)])
            right = sum(total for total, _ in of_ranks)
            count = sum(count for _, count in of_ranks)
            numbers = [step.loss, step.grad_norm, step.target_count, right / max(count, 1)]
            steps.append([float(number) for number in numbers])
        scores = run.evaluate() if run.splits else {}
    return {"steps": steps, "weights": weights(run), "scores": scores}


def session(run_dir: str, *, is_killed: bool, **changes: Any) -> dict[str, Tensor]:
    """Train to the end, or to a kill between the two passes of step 4; the checkpoints are of even
    steps.
    """
    compute = gradient_cache.CachedLoss._compute

    def compute_or_die(cached: Any, passes: Any) -> None:
        compute(cached, passes)
        if is_killed and cached.step.index == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    gradient_cache.CachedLoss._compute = compute_or_die  # type: ignore[method-assign]
    settings: dict[str, Any] = {
        "length": "6 steps",
        "save_every": "2 steps",
        "log_every": "1 steps",
    }
    run = build(run_dir=run_dir, **(settings | changes))
    run.train()
    return weights(run)


def trained_with(kind: str, **changes: Any) -> dict[str, Any]:
    """As `trained`, with a split whose batches are cut elsewhere; for ranks, which take JSON
    alone.
    """
    dtype = torch.float64 if changes.get("double", True) else torch.float32
    first, second = data(dtype)
    if changes.pop("few", False):  # of eight micro-batches five have no target
        changes["count_fn"] = lambda batch: len(batch[0]) * int(batch[0][0, 0] > 0.3)
    strategy = changes.pop("strategy", None)
    if strategy is not None:
        unused = changes.pop("find_unused_parameters", False)
        changes["parallel"] = getattr(sf, strategy)(find_unused_parameters=unused)
    predict = vectors if kind in ("clip", "parameter") else None
    views = (first[:40], second[:40])
    split = sf.Split(views, metrics=retrieval, batch_size=7, predict=predict)
    return trained(kind, splits={"val": split}, **changes)


def vectors(model: Any, batch: Any) -> Any:
    images, texts, _ = model(*batch)
    return images, texts


@sf.metrics.whole_split
def retrieval(first: Tensor, second: Tensor) -> dict[str, float]:
    """How often the nearest second vector is the right one."""
    nearest = (first @ second.T).argmax(1)
    is_right = nearest == torch.arange(len(first))
    return {"top_1": float(is_right.double().mean())}


def weights(run: sf.Run) -> dict[str, Tensor]:
    """All weights and buffers, whole ones also of shards."""
    from torch.distributed.tensor import DTensor

    tensors = {}
    for name, tensor in run.state.models["model"].state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors[name] = whole.detach().clone()
    return tensors
