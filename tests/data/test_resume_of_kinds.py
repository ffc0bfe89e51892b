"""Every kind of data set, sample and batch: killed in a step, the run is resumed to the same
bits.
"""

from __future__ import annotations

import json
import os
import signal
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import surefoot as sf
from rank_processes import forks, on_ranks

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")

SAMPLES = 14
FEATURES = 4
CLASSES = 3
INPUTS = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(SAMPLES) % CLASSES
COLUMNS = {
    "x": INPUTS.tolist(),
    "y": LABELS.tolist(),
    "name": [f"row {row}" for row in range(SAMPLES)],
}
Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Sample:
    x: Tensor
    y: int
    mask: Tensor | None = None


class Rows:
    """Samples that `make` builds from a row's inputs and label."""

    def __init__(self, make: Callable[[Tensor, int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> Any:
        return self.make(INPUTS[sample], int(LABELS[sample]))


class Drawing(Rows):
    """Samples with noise of the generator that is passed as an argument."""

    def __getitem__(self, sample: int, rng: np.random.Generator | None = None) -> Any:
        assert rng is not None
        return self.make(INPUTS[sample] + rng.normal(), int(LABELS[sample]))


class Graphs:
    """A batch of graphs as their libraries have it: nodes of all graphs in one tensor, and a way to
    move of its own.
    """

    def __init__(self, samples: list[tuple[Tensor, int]]) -> None:
        self.nodes = torch.cat([inputs.repeat(1 + label, 1) for inputs, label in samples])
        self.labels = torch.cat([torch.full((1 + label,), label) for _, label in samples])
        self.num_graphs = len(samples)

    def to(self, device: torch.device) -> Graphs:
        self.nodes = self.nodes.to(device)
        self.labels = self.labels.to(device)
        return self


def noisy(batch: dict[str, list[Any]]) -> dict[str, Any]:
    x = torch.tensor(batch["x"])
    return {"x": x + 0.1 * torch.rand(x.shape), "y": torch.tensor(batch["y"])}


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    labels = [len(sample) % CLASSES for sample in samples]
    return pad_sequence(samples, batch_first=True), torch.tensor(labels)


def encoded(x: Tensor, y: int) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


def picture(x: Tensor) -> Image.Image:
    pixels = (64 * x + 128).clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels.reshape(2, 2).numpy())


def stacked(samples: list[tuple[Image.Image, int]]) -> tuple[Tensor, Tensor]:
    pixels = np.stack([np.array(picture) for picture, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    return torch.from_numpy(pixels).flatten(1) / 255, labels


def hugging_face_images(directory: Path) -> Any:
    path = directory / "images"
    if not path.exists():
        columns = {"x": [picture(row) for row in INPUTS], "y": LABELS.tolist()}
        features = datasets.Features({"x": datasets.Image(), "y": datasets.Value("int64")})
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(path)
    return datasets.load_from_disk(path).with_format("torch")


def loader(sampler: Any) -> dict[str, Any]:
    """The training data of a run, and the settings that its loader decides."""
    rows: Any = Rows(lambda x, y: (x + torch.rand(FEATURES), y))
    return {
        "train_data": DataLoader(rows, batch_size=4, sampler=sampler, num_workers=1),
        "loss": of_pair,
        "batch_size": None,
        "workers": None,
    }


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def of_images(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"].flatten(1) / 255), batch["y"])


def of_mapping(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def of_fields(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def of_padded(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].mean(dim=1)), batch[1])


def of_graphs(model: nn.Module, batch: Graphs) -> Tensor:
    return F.cross_entropy(model(batch.nodes), batch.labels)


def of_packed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.data), batch.data.argmax(dim=1) % CLASSES)


def hugging_face(directory: Path) -> Any:
    """A data set on disk: its columns are memory-mapped."""
    path = directory / "hugging_face"
    if not path.exists():
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict(COLUMNS).save_to_disk(path)
    return datasets.load_from_disk(path)


def table(directory: Path, *, name: str) -> sf.data.Table:
    import pyarrow.parquet

    schema = pyarrow.schema({"x": pyarrow.list_(pyarrow.float32()), "y": "int64", "name": "string"})
    columns = pyarrow.table(COLUMNS).cast(schema)
    path = directory / "rows.parquet"
    if not path.exists():
        pyarrow.parquet.write_table(columns, path, row_group_size=4)
    if name == "memory":
        return sf.data.Table(columns, columns=["x", "y"])
    in_groups = sf.data.Table(path, max_cache_bytes=0)
    if name == "parquet":
        return in_groups
    return in_groups.write_arrow(directory / "rows.arrow")


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "hugging face": lambda at: {"train_data": hugging_face(at), "loss": of_mapping},
    "hugging face, in tensors": lambda at: {
        "train_data": hugging_face(at).with_format("torch").select(range(1, SAMPLES)),
        "loss": of_mapping,
    },
    "hugging face, transformed": lambda at: {
        "train_data": hugging_face(at).with_transform(noisy),
        "loss": of_mapping,
    },
    "arrow in memory": lambda at: {"train_data": table(at, name="memory"), "loss": of_mapping},
    "arrow file": lambda at: {"train_data": table(at, name="arrow"), "loss": of_mapping},
    "parquet": lambda at: {"train_data": table(at, name="parquet"), "loss": of_mapping},
    "dataclass": lambda _: {"train_data": Rows(Sample), "loss": of_fields},
    "named tuple": lambda _: {"train_data": Rows(Point), "loss": of_fields},
    "BatchEncoding": lambda _: {"train_data": Rows(encoded), "loss": of_mapping},
    "rng": lambda _: {"train_data": Drawing(Sample), "loss": of_fields},
    "shapes that differ": lambda _: {
        "train_data": Rows(lambda x, y: x.repeat(1 + y, 1)),
        "collate_fn": padded,
        "loss": of_padded,
    },
    "packed sequences": lambda _: {
        "train_data": Rows(lambda x, y: x.repeat(1 + y, 1)),
        "collate_fn": lambda samples: pack_sequence(samples, enforce_sorted=False),
        "count_fn": lambda batch: len(batch.data),
        "loss": of_packed,
    },
    "graphs": lambda _: {
        "train_data": Rows(lambda x, y: (x, y)),
        "collate_fn": Graphs,
        "count_fn": lambda batch: len(batch.nodes),
        "loss": of_graphs,
    },
    "PIL images": lambda _: {
        "train_data": Rows(lambda x, y: (picture(x), y)),
        "collate_fn": stacked,
        "loss": of_pair,
    },
    "PIL images of hugging face": lambda at: {
        "train_data": hugging_face_images(at),
        "loss": of_images,
    },
    "a loader of a part": lambda _: loader(SubsetRandomSampler(range(1, SAMPLES - 2))),
    "a loader of weights": lambda _: loader(
        WeightedRandomSampler(LABELS + 0.5, 9, replacement=False)
    ),
    "a loader of some": lambda _: loader(RandomSampler(LABELS, num_samples=9)),  # type: ignore[arg-type]
    "a loader of ranks": lambda _: loader(DistributedSampler(LABELS, num_replicas=1, rank=0)),  # type: ignore[arg-type]
}


def build(kind: str, directory: Path, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES)
        ),
        "batch_size": 4,
        "micro_batch_size": 2,
        "length": "7 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "save_every": "2 steps",
        "log_every": "1 steps",
        "layer_stats_every": None,
        "console": False,
        "report": False,
    }
    of_kind = KINDS[kind](directory)
    of_kind["loss"] = changes.get("loss", of_kind["loss"])
    return sf.Run(**(settings | changes | of_kind))


def session(kind: str, directory: Path, name: str, *, workers: int, killed_at: int | None) -> None:
    """One start of a run, killed in its n-th pass."""
    passes = iter(range(1_000))
    loss = KINDS[kind](directory)["loss"]

    def killing_loss(model: nn.Module, batch: Any) -> Tensor:
        if model.training and torch.is_grad_enabled() and next(passes) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch)

    run = build(
        kind,
        directory,
        loss=killing_loss,
        run_dir=directory / name,
        workers=workers,
        check_state=False,
    )
    with run:
        for step in run:
            sample_ids = [part.sample_ids.tolist() for part in step.micro_batches]
            with (directory / f"{name}.ids").open("a") as file:
                file.write(json.dumps([step.index, sample_ids]) + "\n")


def outcome(directory: Path, name: str) -> dict[str, Any]:
    """Everything that must be equal to the bit."""
    newest = max((directory / name / "checkpoints").glob("step-*"))
    records = sf.load(directory / name).records("train")
    lines = (directory / f"{name}.ids").read_text().splitlines()
    return {
        "checkpoint": newest.name,
        "tensors": {file.name: file.read_bytes() for file in newest.glob("*.safetensors")},
        "losses": {record["step"]: record["loss"] for record in records},
        "ids": dict([json.loads(line) for line in lines]),
    }


@forks
@pytest.mark.fast(
    "hugging face", "hugging face, transformed", "parquet", "dataclass", "graphs", "rng"
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_is_resumed_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    def run_whole(_: int) -> None:
        session(kind, tmp_path, "uninterrupted", workers=0, killed_at=None)

    def run_until_killed(_: int) -> None:
        session(kind, tmp_path, "killed", workers=2, killed_at=9)

    def resume(_: int) -> None:
        workers = 2 if kind == "parquet" else 0
        session(kind, tmp_path, "killed", workers=workers, killed_at=None)

    KINDS[kind](tmp_path)  # writes files
    assert on_ranks(1, run_whole) == [0]

    assert on_ranks(1, run_until_killed) == [-signal.SIGKILL]
    assert on_ranks(1, resume) == [0]

    assert outcome(tmp_path, "killed") == outcome(tmp_path, "uninterrupted")


@pytest.mark.parametrize("kind", ["graphs", "packed sequences"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_the_gradient_of_graphs_does_not_depend_on_how_the_batch_is_cut(
    micro_batch_size: int, kind: str, tmp_path: Path
) -> None:
    """Law 1, for a mean over nodes or tokens, of which each sample has another number."""

    def train_weights(micro_batch_size: int) -> Tensor:
        run = build(
            kind,
            tmp_path,
            model=lambda: nn.Linear(FEATURES, CLASSES).double(),
            loss=loss,
            optimizer=sf.optim.sgd(lr=0.5),
            micro_batch_size=micro_batch_size,
        )
        run.train()
        return nn.utils.parameters_to_vector(run.state.model.parameters()).detach()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch.nodes if kind == "graphs" else batch.data
        return F.cross_entropy(model(inputs.double()), inputs.argmax(dim=1) % CLASSES)

    whole = train_weights(4)

    torch.testing.assert_close(train_weights(micro_batch_size), whole, rtol=1e-9, atol=1e-12)
