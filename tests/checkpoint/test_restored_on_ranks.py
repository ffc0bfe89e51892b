"""Modules with a protocol of their own on two ranks: shards are filled where they lie, and what
does not come back is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import surefoot as sf
from module_protocols import WIDTH, Cloning, Quantised, Transposed, TwoKeys, equal_bits
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.errors import CheckpointError

pytestmark = forks
INPUTS = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3))


def build(run_dir: Path | None, model: Any, parallel: str, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "length": "4 steps",
        "save_every": "1000 steps",
        "console": False,
        "report": False,
    }
    return sf.Run(
        model=model,
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        train_data=(INPUTS, INPUTS.flip(0)),
        batch_size=4,
        micro_batch_size=2,
        optimizer=sf.optim.adamw(lr=1e-2),
        ema=0.5,
        device="cpu",
        parallel=parallel,
        run_dir=run_dir,
        **(settings | changes),
    )


class Counting(nn.Linear):
    """Extra state that is the same on every rank: how many passes there were."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return super().forward(inputs) * (1 + self.passes / 10)

    def get_extra_state(self) -> Any:
        return {"passes": self.passes, 1: torch.full((2,), self.passes)}

    def set_extra_state(self, state: Any) -> None:
        self.passes = int(state[1][0])


def nets(parallel: str) -> nn.Module:
    own = [Cloning()] if parallel == "fsdp" else [TwoKeys(), Transposed()]
    return nn.Sequential(*own, Counting(), Quantised(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.fast("fsdp")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_go_on_with_every_bit_and_one_rank_can_use_the_weights(
    parallel: str, tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        whole = build(tmp_path / "whole", lambda: nets(parallel), parallel)
        whole.train()
        build(tmp_path / "run", lambda: nets(parallel), parallel, stop_after="2 steps").train()
        build(tmp_path / "run", lambda: nets(parallel), parallel).train()

    assert on_ranks(2, train) == [0, 0]
    both = [
        sf.checkpoint.Store(tmp_path / name / "checkpoints").newest_intact()
        for name in ("whole", "run")
    ]
    contents = [each[0] for each in both if each is not None]
    assert [each.step for each in contents] == [4, 4]
    for file in ("model", "ema", "optimizer"):
        one, other = (each.tensors(file) for each in contents)
        assert one.keys() == other.keys()
        assert [name for name in one if not equal_bits(one[name], other[name])] == []
    assert contents[0].state["extra"] == contents[1].state["extra"]
    alone = sf.load(tmp_path / "run").load_model(nets(parallel))
    assert all(
        equal_bits(each, contents[1].tensors("ema")[name])
        for name, each in alone.state_dict().items()
        if isinstance(each, torch.Tensor)
    )


@pytest.mark.parametrize("layer", [TwoKeys, pytest.param(Transposed, marks=pytest.mark.slow)])
def test_what_does_not_lie_by_rows_is_refused_before_the_first_step(
    layer: Any, tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        with refused("parameter-not-sharded-by-rows", CheckpointError):
            build(
                tmp_path / "run", lambda: nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH)), "fsdp"
            ).train()

    assert on_ranks(2, train) == [0, 0]
