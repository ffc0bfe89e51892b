"""Batch normalisation over all processes: what it is made of, and where it is refused. (1 s; on
CUDA 20 s)
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from stated import lines_naming
from surefoot.config.batch_size import batching
from surefoot.distributed.ddp import synchronized
from surefoot.distributed.sync_batch_norm import synchronize_on_cpu
from surefoot.distributed.world import joined
from surefoot.models import ResNet
from surefoot.run.build_state import refuse_unequal_passes
from surefoot.tools.plan import summary

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
    names = list(model.state_dict())
    norms = sum(isinstance(part, nn.BatchNorm2d) for part in model.modules())
    found = synchronized({"model": model})["model"]
    kinds = [type(part) for part in found.modules()]
    assert list(found.state_dict()) == names
    assert (kinds.count(nn.SyncBatchNorm), kinds.count(nn.BatchNorm2d)) == (norms, 0)
    on_a_gpu = str(found)
    synchronize_on_cpu([found])
    assert str(found) == on_a_gpu  # a run goes on with the same model on either device


def test_a_model_without_any_is_refused() -> None:
    with refused("sync-batch-norm-without-batch-norm"):
        synchronized({"model": nn.Linear(2, 2)})


def normalized_by_both(*, axes: int, affine: bool, momentum: float | None) -> list[Tensor]:
    """What a rank has of the batch of both: outputs, gradients, and statistics."""
    torch.set_default_dtype(torch.float64)
    rank = joined("cpu").rank
    kind = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[axes]
    norm = kind(3, affine=affine, momentum=momentum)
    whole = torch.randn(6, 3, *[4] * axes, generator=torch.Generator().manual_seed(1)) * 2 + 5
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    synchronous = synchronized({"model": nn.Sequential(deepcopy(norm))})["model"]
    synchronize_on_cpu([synchronous])
    own = slice(0, 4) if rank == 0 else slice(4, 6)
    results = []
    for model, rows in ((synchronous, own), (norm, slice(0, 6))):
        inputs = whole[rows].clone().requires_grad_()
        for _ in range(2):
            outputs = model(inputs)
            (outputs * weights[rows]).sum().backward()
        of_parameters = [parameter.grad for parameter in model.parameters()]
        if model is synchronous:
            for gradient in of_parameters:
                dist.all_reduce(gradient)
        model.eval()
        of_rows = [outputs, inputs.grad, model(inputs)]
        if model is norm:
            of_rows = [tensor[own] for tensor in of_rows]
        results.append([*of_rows, *of_parameters, *model.buffers()])
    return [torch.cat([each.detach().double().reshape(-1) for each in every]) for every in results]


def test_ranks_on_a_cpu_normalize_as_one_process_does_a_batch_of_both(ranks: Ranks) -> None:
    cases = [
        {"axes": 0, "affine": True, "momentum": 0.1},
        {"axes": 2, "affine": True, "momentum": None},
        {"axes": 2, "affine": False, "momentum": 0.3},
    ]
    for by_rank in ranks.each(2, normalized_by_both, cases):
        for synchronous, alone in by_rank:
            torch.testing.assert_close(synchronous, alone, rtol=1e-12, atol=1e-12)


def test_a_run_on_a_cpu_has_the_statistics_of_both_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, trained_on, device="cpu")
    assert torch.equal(first, second)
    (alone,) = ranks(1, trained_on, device="cpu", sync_batch_norm=False, micro_batch_size=16)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
    (one,) = ranks(1, trained_on, device="cpu", micro_batch_size=16)
    assert torch.equal(one, alone)
    for by_rank in ranks.each(
        2, trained_on, [{"parallel": "fsdp"}, {"converted": True}], device="cpu"
    ):
        for own in by_rank:
            torch.testing.assert_close(own, alone, rtol=1e-5, atol=1e-6)


def test_ranks_with_unequal_shares_are_refused() -> None:
    """Each pass waits for all ranks."""
    sizes = batching(16, 4)
    refuse_unequal_passes(sizes, ranks=2)
    with refused("sync-batch-norm-of-unequal-shares", ranks=3, micro_batches=4):
        refuse_unequal_passes(sizes, ranks=3)


def trained_on(*, converted: bool = False, **changes: Any) -> Tensor:
    """The state of a trained model. With `converted`, the model is converted before the run."""
    if converted:
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        changes |= {"model": lambda: convert(Net()), "sync_batch_norm": False}
    run = run_of(**changes)
    run.train()
    state: dict[str, Any] = run.state.models["model"].state_dict()
    tensors = [
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for tensor in state.values()
    ]
    return torch.cat([tensor.reshape(-1).double().cpu() for tensor in tensors])


@pytest.mark.gpu
@needs_two
def test_two_ranks_normalise_as_one_process_does_a_batch_of_both(ranks: Ranks) -> None:
    first, second = ranks(2, trained_on, device="cuda")
    assert torch.equal(first, second)
    (alone,) = ranks(1, trained_on, device="cuda", sync_batch_norm=False, micro_batch_size=16)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@needs_one
def test_in_one_process_it_changes_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(device="cuda", console=True), run_of(device="cuda", sync_batch_norm=False)]
    for run in runs:
        run.train()
    one, other = (list(run.state.models["model"].state_dict().values()) for run in runs)
    torch.testing.assert_close(one, other)
    assert len(lines_naming(capsys.readouterr().out, "note: ", "sync_batch_norm")) == 1
    with_note, without = (summary.batch_arithmetic(run.parts, None) for run in runs)
    assert len(with_note) == len(without) + 1
