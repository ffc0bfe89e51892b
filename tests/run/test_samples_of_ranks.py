"""With `sample_on_all_ranks` every rank draws samples of its own; rank 0 draws what it draws
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import surefoot as sf
from rank_processes import Ranks


def build(run_dir: str, **changes: Any) -> sf.Run:
    inputs = torch.linspace(-1, 1, 16).reshape(8, 2)
    return sf.Run(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        train_data=(inputs, inputs.sum(1, keepdim=True)),
        sample_fn=lambda model: f"{model.weight.numel()} weights, {int(torch.randint(10**9, ()))}",
        sample_every="2 steps",
        batch_size=4,
        micro_batch_size=2,
        length="4 steps",
        optimizer=sf.optim.sgd(lr=0.01),
        device="cpu",
        console=False,
        report=False,
        run_dir=run_dir,
        **changes,
    )


def on_rank(run_dir: str, parallel: str, on_all: bool) -> Any:
    run = build(run_dir, parallel=parallel, sample_on_all_ranks=on_all)
    run.train()
    return run.sample()


def texts_of(run_dir: Path) -> list[list[str]]:
    samples = sf.load(run_dir).records("sample")
    return [record.get("texts", [record["text"]]) for record in samples]


def test_the_record_has_the_texts_of_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    returned = ranks(2, on_rank, run_dir=str(tmp_path / "all"), parallel="ddp", on_all=True)
    ranks(2, on_rank, run_dir=str(tmp_path / "main"), parallel="fsdp", on_all=False)

    of_all = texts_of(tmp_path / "all")
    of_main = texts_of(tmp_path / "main")
    assert len(of_all) == len(of_main) == 2
    for (first, second), (alone,) in zip(of_all, of_main, strict=True):
        assert first.startswith("2 weights")
        assert second.startswith("2 weights")
        assert first != second
        assert first == alone
    assert returned == [of_all[-1]] * 2


def test_one_process_draws_as_before(tmp_path: Path) -> None:
    build(str(tmp_path / "all"), sample_on_all_ranks=True).train()
    build(str(tmp_path / "main"), sample_on_all_ranks=False).train()

    assert texts_of(tmp_path / "all") == texts_of(tmp_path / "main")
