"""Batch normalisation over all processes: what it is made of, and where it is refused. (1 s; on
CUDA 20 s)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks
from surefoot.config.batch_size import batching
from surefoot.distributed.ddp import synchronized
from surefoot.models import ResNet
from surefoot.plan import summary
from surefoot.run.build_state import with_synchronized_norms

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def run_of(**changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(1)
    data = 3 * torch.randn(16, 4, generator=generator), torch.randint(2, (16,), generator=generator)
    settings: dict[str, Any] = {
        "model": Net,
        "batch_size": 16,
        "micro_batch_size": 8,
        "length": "2 steps",
    }
    settings |= {
        "optimizer": sf.optim.sgd(lr=0.1),
        "console": False,
        "precision": "fp32",
        "sync_batch_norm": True,
    }
    return sf.Run(loss=loss, train_data=data, **settings | changes)


def test_every_batch_normalisation_is_converted_and_keeps_its_names() -> None:
    model = ResNet(18, classes=3, channels=3, stem="cifar")
    names, norms = (
        list(model.state_dict()),
        sum(isinstance(part, nn.BatchNorm2d) for part in model.modules()),
    )
    found = synchronized({"model": model})["model"]
    kinds = [type(part) for part in found.modules()]
    assert list(found.state_dict()) == names
    assert (kinds.count(nn.SyncBatchNorm), kinds.count(nn.BatchNorm2d)) == (norms, 0)


def test_a_model_without_any_is_refused() -> None:
    with pytest.raises(sf.ConfigError, match="Linear has no batch normalization"):
        synchronized({"model": nn.Linear(2, 2)})


def test_on_a_cpu_it_is_refused_by_name() -> None:
    with pytest.raises(sf.ConfigError, match="sync_batch_norm needs CUDA, but this run uses cpu"):
        run_of(device="cpu")


def test_ranks_with_unequal_shares_are_refused() -> None:
    """Each pass waits for all ranks."""
    sizes = batching(16, 4)
    assert with_synchronized_norms({"model": Net()}, sizes, ranks=2).keys() == {"model"}
    with pytest.raises(sf.ConfigError, match="3 ranks have unequal shares of the 4 micro-batches"):
        with_synchronized_norms({"model": Net()}, sizes, ranks=3)


def on_cuda(**changes: Any) -> Tensor:
    run = run_of(device="cuda", **changes)
    run.train()
    return torch.cat(
        [
            held.reshape(-1).double().cpu()
            for held in run.state.models["model"].state_dict().values()
        ]
    )


@pytest.mark.gpu
@needs_two
def test_two_ranks_normalise_as_one_process_does_a_batch_of_both(ranks: Ranks) -> None:
    first, second = ranks(2, on_cuda)
    assert torch.equal(first, second)
    (alone,) = ranks(1, on_cuda, sync_batch_norm=False, micro_batch_size=16)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@needs_one
def test_in_one_process_it_changes_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(device="cuda", console=True), run_of(device="cuda", sync_batch_norm=False)]
    for run in runs:
        run.train()
    one, other = (list(run.state.models["model"].state_dict().values()) for run in runs)
    torch.testing.assert_close(one, other)
    assert "sync_batch_norm has no effect in one process" in capsys.readouterr().out
    assert any(
        "another number of ranks changes the results" in line
        for line in summary.batch_arithmetic(runs[0].parts, None)
    )
