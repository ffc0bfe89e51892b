"""Runs in which passes, steps or ranks use different parameters; how each ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from identities.world_runs import weights_of_models
from surefoot.distributed.world import joined

SAMPLES, FEATURES, CLASSES = 96, 6, 3
LATE = 32  # the first sample of step 2
# whether the second part is used, by the first sample of a micro-batch of four, and by the rank
USES: dict[str, Callable[[int, int], bool]] = {
    "always": lambda sample, rank: True,
    "early": lambda sample, rank: sample < LATE,
    "early on rank 1": lambda sample, rank: sample < LATE or rank == 0,
    "not in the last pass of rank 1": lambda sample, rank: sample % 16 < 12,
    "in every other step": lambda sample, rank: sample // 16 % 2 == 0,
    # of two ranks with two micro-batches each: consecutive ones, or every other one
    "in the first passes": lambda sample, rank: sample < LATE or sample % 8 < 4,
    "in the first pass": lambda sample, rank: sample < LATE or sample % 16 < 8,
}


class Net(nn.Module):
    """Two parts that any pass may leave out, and blocks of which it may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.out = nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(
        self, inputs: Tensor, *, second: bool = True, third: bool = True, without: int = -1
    ) -> Tensor:
        hidden = torch.tanh(self.into(inputs))
        if second:
            hidden = hidden + self.second(hidden)
        if third:
            hidden = hidden + self.third(hidden)
        for index, block in enumerate(self.blocks):
            if index != without:
                hidden = hidden + torch.tanh(block(hidden))
        return self.out(hidden)


def built(**changes: Any) -> sf.Run:
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    settings: dict[str, Any] = {
        "train_data": (inputs, labels, torch.arange(SAMPLES)),
        "order": "sequential",
        "batch_size": 16,
        "micro_batch_size": 4,
        "length": "5 steps",
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.1),
        "console": False,
        "report": False,
        "device": "cpu",
        "precision": "fp32",
    }
    if "strategy" in changes:
        function, arguments = changes.pop("strategy")
        settings["parallel"] = getattr(sf, function)(**arguments)
    return sf.Run(**(settings | changes))


def result_of(run: sf.Run, train: Callable[[], object]) -> dict[str, Any]:
    """The weights, or the error on this rank, and the number of updates."""
    before = weights_of_models(run)
    try:
        train()
    except sf.ConfigError as error:
        return {"code": error.code, "steps": run.state.step, **error.fields}
    weights = weights_of_models(run)
    return {
        "steps": run.state.step,
        "moved": any(not torch.equal(before[name], weights[name]) for name in weights),
        "weights": weights,
    }


def of_one_model(*, use: str, of: str = "second", **changes: Any) -> dict[str, Any]:
    """One model, whose second part, or a block, only some passes use."""
    rank = joined("cpu").rank

    def loss(model: Any, batch: Any) -> Tensor:
        inputs, labels, samples = batch
        is_used = USES[use](int(samples[0]), rank)
        match of:
            case "block":
                outputs = model(inputs, without=-1 if is_used else 1)
            case "one of two":  # rank 0 leaves out one block, and rank 1 another
                outputs = model(inputs, without=-1 if is_used else rank)
            case "part":
                outputs = model(inputs, second=is_used or rank == 0, third=is_used or rank == 1)
            case _:
                outputs = model(inputs, second=is_used)
        return F.cross_entropy(outputs, labels)

    run = built(model=Net, loss=loss, **changes)
    return result_of(run, run.train)


def of_two_models(*, use: str, **changes: Any) -> dict[str, Any]:
    """Two models in steps of the user's own, of which only some passes use the second."""
    rank = joined("cpu").rank

    def loss(models: Any, batch: Any) -> Tensor:
        inputs, labels, samples = batch
        outputs = models["first"](inputs)
        if USES[use](int(samples[0]), rank):
            outputs = outputs + models["second"](inputs)
        return F.cross_entropy(outputs, labels)

    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    run = built(
        model={"first": small, "second": small},
        optimizer=dict.fromkeys(("first", "second"), sf.optim.sgd(lr=0.1)),
        **changes,
    )

    def train() -> None:
        with run:
            for step in run.steps():
                sf.forward_backward(step, loss)
                sf.update(step)

    return result_of(run, train)


def of_two_losses(*, unfreezes: bool = False, **changes: Any) -> dict[str, Any]:
    """Steps of two passes, each of which uses another part; or of one, and the body unfreezes a
    part that no pass uses.
    """

    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.third.requires_grad_(False)

    def loss_without_third(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], third=False), batch[1])

    def loss_without_second(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], second=False), batch[1])

    run = built(model=Frozen if unfreezes else Net, **changes)

    def train() -> None:
        with run:
            for step in run.steps():
                sf.forward_backward(step, loss_without_third)
                sf.update(step)
                if not unfreezes:
                    sf.forward_backward(step, loss_without_second)
                    sf.update(step)
                elif step.index == 1:
                    run.state.model.third.requires_grad_(True)

    return result_of(run, train)


def agreed() -> list[bool]:
    """Of an equal number, of the rank, of an equal number of 32 bits, and of minus the rank."""
    world = joined("cpu")
    return [world.agree(5), world.agree(world.rank), world.agree(1 << 31), world.agree(-world.rank)]
