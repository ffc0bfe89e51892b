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
from same_bits import newest_checkpoint
from surefoot.errors import CheckpointError

pytestmark = forks
INPUTS = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3))


def build(run_dir: Path | None, model: Any, parallel: str, **changes: Any) -> sf.Run:
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
        length="4 steps",
        save_every="1000 steps",
        run_dir=run_dir,
        console=False,
        report=False,
        **changes,
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


def net_for_ddp() -> nn.Module:
    layers = [TwoKeys(), Transposed(), Counting(), Quantised()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def net_for_fsdp() -> nn.Module:
    layers = [Cloning(), Counting(), Quantised()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


@pytest.mark.fast("fsdp")
@pytest.mark.parametrize(
    ("parallel", "net"),
    [
        pytest.param("ddp", net_for_ddp, id="ddp"),
        pytest.param("fsdp", net_for_fsdp, id="fsdp"),
    ],
)
def test_two_ranks_go_on_with_every_bit_and_one_rank_can_use_the_weights(
    parallel: str, net: Any, tmp_path: Path
) -> None:
    def train(rank: int) -> None:
        build(tmp_path / "whole", net, parallel).train()
        build(tmp_path / "run", net, parallel, stop_after="2 steps").train()
        build(tmp_path / "run", net, parallel).train()

    assert on_ranks(2, train) == [0, 0]

    whole = newest_checkpoint(tmp_path / "whole")
    resumed = newest_checkpoint(tmp_path / "run")
    assert whole.step == resumed.step == 4
    assert resumed.state["extra"] == whole.state["extra"]
    for file in ("model", "ema", "optimizer"):
        assert_equal_bits(resumed.tensors(file), whole.tensors(file))
    alone = sf.load(tmp_path / "run").load_model(net())
    average = resumed.tensors("ema")
    for name, value in alone.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert equal_bits(value, average[name]), name


def assert_equal_bits(tensors: dict[str, Any], expected: dict[str, Any]) -> None:
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not equal_bits(tensors[name], expected[name])] == []


@pytest.mark.parametrize("layer", [TwoKeys, pytest.param(Transposed, marks=pytest.mark.slow)])
def test_what_does_not_lie_by_rows_is_refused_before_the_first_step(
    layer: Any, tmp_path: Path
) -> None:
    def net() -> nn.Module:
        return nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH))

    def train(rank: int) -> None:
        with refused("parameter-not-sharded-by-rows", CheckpointError):
            build(tmp_path / "run", net, "fsdp").train()

    assert on_ranks(2, train) == [0, 0]
