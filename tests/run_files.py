"""What a run has written: its records by kind, the tensors of its newest checkpoint, its bytes."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from surefoot.tracking.jsonl import read_records


def records_of(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of these kinds, without those that a resume superseded."""
    records = read_records(run_dir / "metrics.jsonl")
    return [record for record in records if record["kind"] in kinds]


def with_keys(records: list[dict[str, Any]], keys: Collection[str]) -> list[dict[str, Any]]:
    """The records with these of their keys alone, such as those that are the same on any machine."""
    return [{key: record[key] for key in keys if key in record} for record in records]


def newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


def newest_tensors(run_dir: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """The tensors of one file of the newest checkpoint."""
    return load_file(newest_checkpoint(run_dir) / f"{name}.safetensors")


def newest_tensor_hashes(run_dir: Path) -> dict[str, str]:
    """The hash of each file of tensors of the newest checkpoint."""
    files = sorted(newest_checkpoint(run_dir).glob("*.safetensors"))
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in files}


def files_below(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two collections have the same names, and equal tensors under each."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
