"""Runs whose settings change while they go on, compared by the tensors of their checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from identities.test_law_19_changes import run_in
from rank_processes import on_ranks
from surefoot.checkpoint.reader import read

LAST = 23  # step of `run_in`


def tensors_of(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Return the tensors of all files of a checkpoint but the counts and times of its state."""
    checkpoint = read(run_dir / "checkpoints" / f"step-{step:08d}")
    tensors = {}
    for file in checkpoint.files:
        if file != "state":
            for name, tensor in checkpoint.tensors(file).items():
                tensors[f"{file}/{name}"] = tensor
    return tensors


def assert_same_end(one: Path, other: Path, *, step: int = LAST) -> None:
    expected = tensors_of(one, step)
    found = tensors_of(other, step)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def given_the_journal_of(changed: Path, run_dir: Path) -> Path:
    run_dir.mkdir()
    shutil.copy(changed / "changes.jsonl", run_dir)
    return run_dir


def on_two_ranks(run_dir: Path, **settings: Any) -> None:
    assert on_ranks(2, lambda _: run_in(run_dir, **settings).train()) == [0, 0]
