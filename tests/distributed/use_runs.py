"""Runs in which passes, steps or ranks use different parameters; how each ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from identities.world_runs import whole
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
        self.into, self.out = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
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
    strategy, arguments = changes.pop("strategy", (None, {}))
    if strategy is not None:
        settings["parallel"] = getattr(sf, strategy)(**arguments)
    return sf.Run(**(settings | changes))


def ended(run: sf.Run, train: Callable[[], object]) -> dict[str, Any]:
    """The weights, or the error on this rank, and the number of updates."""
    with torch.no_grad():
        before = {
            name: whole(each)
            for model in run.state.models.values()
            for name, each in model.state_dict().items()
        }
    try:
        train()
    except sf.ConfigError as error:
        return {"code": error.code, "steps": run.state.step, **error.fields}
    return {
        "steps": run.state.step,
        "moved": any(
            not torch.equal(before[name], whole(each))
            for model in run.state.models.values()
            for name, each in model.state_dict().items()
        ),
        "weights": {
            f"{model} {name}": whole(each)
            for model, module in run.state.models.items()
            for name, each in module.state_dict().items()
        },
    }


def of_one_model(*, use: str, of: str = "second", **changes: Any) -> dict[str, Any]:
    """One model, whose second part, or a block, only some passes use."""
    rank = joined("cpu").rank

    def loss(model: Any, batch: Any) -> Tensor:
        used = USES[use](int(batch[2][0]), rank)
        if of == "block":
            outputs = model(batch[0], without=-1 if used else 1)
        elif of == "one of two":  # rank 0 leaves out one block, and rank 1 another
            outputs = model(batch[0], without=-1 if used else rank)
        elif of == "part":
            outputs = model(batch[0], second=used or rank == 0, third=used or rank == 1)
        else:
            outputs = model(batch[0], second=used)
        return F.cross_entropy(outputs, batch[1])

    run = built(model=Net, loss=loss, **changes)
    return ended(run, run.train)


def of_two_models(*, use: str, **changes: Any) -> dict[str, Any]:
    """Two models in steps of the user's own, of which only some passes use the second."""
    rank = joined("cpu").rank

    def loss(models: Any, batch: Any) -> Tensor:
        outputs = models["first"](batch[0])
        if USES[use](int(batch[2][0]), rank):
            outputs = outputs + models["second"](batch[0])
        return F.cross_entropy(outputs, batch[1])

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

    return ended(run, train)


def of_two_losses(*, unfreezes: bool = False, **changes: Any) -> dict[str, Any]:
    """Steps of two passes, each of which uses another part; or of one, and the body unfreezes a
    part that no pass uses.
    """

    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.third.requires_grad_(False)

    def loss_of(**parts: bool) -> Callable[[Any, Any], Tensor]:
        return lambda model, batch: F.cross_entropy(model(batch[0], **parts), batch[1])

    run = built(model=Frozen if unfreezes else Net, **changes)

    def train() -> None:
        with run:
            for step in run.steps():
                sf.forward_backward(step, loss_of(third=False))
                sf.update(step)
                if unfreezes and step.index == 1:
                    run.state.model.third.requires_grad_(True)
                elif not unfreezes:
                    sf.forward_backward(step, loss_of(second=False))
                    sf.update(step)

    return ended(run, train)


def agreed() -> list[bool]:
    world = joined("cpu")
    return [world.agree(5), world.agree(world.rank), world.agree(1 << 31), world.agree(-world.rank)]
