"""A value shared by two losses of a step, and gradients of one's own: further laws of the examples,
and kills. (6 s)
"""

from __future__ import annotations

import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefoot as sf
from gallery import batches, example
from rank_processes import Ranks
from surefoot.tracking.jsonl import records

SMALL: dict[str, Any] = {
    "length": "12 steps",
    "batch_size": 16,
    "precision": "fp32",
    "device": "cpu",
    "console": False,
}


def state(models: Any) -> dict[str, dict[str, Tensor]]:
    return {
        name: {key: each.detach() for key, each in model.state_dict().items()}
        for name, model in models.items()
    }


def test_pictures_are_generated_once_in_a_step() -> None:
    dcgan = example("dcgan")
    calls = [0]
    run = dcgan.build(**SMALL, micro_batch_size=8, check_state=False)
    run.state.models["generator"].register_forward_pre_hook(
        lambda *_: calls.__setitem__(0, calls[0] + 1)
    )
    dcgan.train(run)

    assert calls == [12 * 2]  # once for each micro-batch


def test_sharing_changes_no_result_beside_generating_twice() -> None:
    dcgan = example("dcgan")
    shared = dcgan.build(**SMALL, micro_batch_size=8)
    twice = dcgan.build(**SMALL, micro_batch_size=8)
    dcgan.train(shared)

    def generator_loss(models: Any, batch: Any) -> Tensor:
        buffers = [(each, each.clone()) for each in models["generator"].buffers()]
        fake = models["generator"](torch.randn(len(batch[0]), 8, 1, 1))
        for each, before in buffers:
            each.data.copy_(before)  # its statistics count the pictures once
        logits = models["discriminator"](fake)
        return torch.as_tensor(dcgan.criterion(logits, torch.ones_like(logits)))

    with twice:
        for step in twice.steps():
            sf.forward_backward(step, dcgan.discriminator_loss)
            sf.update(step, "discriminator")
            sf.forward_backward(step, generator_loss)
            sf.update(step, "generator")

    torch.testing.assert_close(
        state(shared.state.models), state(twice.state.models), rtol=0, atol=0
    )


def test_projected_gradients_are_those_of_a_plain_loop() -> None:
    surgery = example("gradient_surgery")
    settings = SMALL | {"optimizer": sf.optim.sgd(lr=0.05), "clip": "off"}
    run, plain = surgery.build(**settings), surgery.build(**settings)
    steps = batches(surgery.build(**settings))
    surgery.train(run)

    weights = list(plain.state.model.parameters())
    conflicts = 0
    for batch in steps:
        tasks = [
            torch.cat(
                [
                    each.flatten()
                    for each in torch.autograd.grad(loss(plain.state.model, batch), weights)
                ]
            )
            for loss in (surgery.class_loss, surgery.distance_loss)
        ]
        dot = tasks[0] @ tasks[1]
        conflicts += bool(dot < 0)
        total = tasks[0] + tasks[1]
        if dot < 0:
            total = (
                total
                - dot / (tasks[1] @ tasks[1]) * tasks[1]
                - dot / (tasks[0] @ tasks[0]) * tasks[0]
            )
        with torch.no_grad():
            for weight, part in zip(
                weights, total.split([each.numel() for each in weights]), strict=True
            ):
                weight.sub_(0.05 * part.view_as(weight))

    assert conflicts > 0
    torch.testing.assert_close(list(run.state.model.parameters()), weights, rtol=1e-5, atol=1e-6)


def session(name: str, run_dir: str, kill_at: int) -> None:
    """Train an example; SIGKILL in the forward pass `kill_at` of its steps, from 1."""
    module = example(name)
    passes = [0]
    run = module.build(
        run_dir=run_dir,
        **SMALL,
        micro_batch_size=8,
        save_every="4 steps",
        log_every="3 steps",
        report=False,
        check_state=False,
    )

    def count(*_: Any) -> None:
        passes[0] += 1
        if passes[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    next(reversed(run.state.models.values())).register_forward_pre_hook(count)
    module.train(run)


def outcome(run_dir: Path) -> Any:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    values = ("step", "loss", "grad_norm", "generator_loss", "distance_loss")
    lines = [line for line in records(run_dir / "metrics.jsonl") if line["kind"] == "train"]
    tensors = {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    }
    return newest.name, tensors, [{key: line.get(key) for key in values} for line in lines]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("dcgan", [29]),
        pytest.param("gradient_surgery", [23], marks=pytest.mark.slow),
        pytest.param(
            "dcgan", [1, 13, 35, 6], marks=pytest.mark.slow
        ),  # six passes of the discriminator in a step
    ],
)
def test_a_killed_example_ends_with_the_same_bits(
    name: str, kills: list[int], ranks: Ranks, tmp_path: Path
) -> None:
    def status(run_dir: Path, kill_at: int) -> int:
        (end,) = ranks.outcomes(
            ranks.start(1, session, name=name, run_dir=str(run_dir), kill_at=kill_at)
        )
        return end.status

    assert status(tmp_path / "whole", 0) == 0
    assert [status(tmp_path / "killed", at) for at in kills] == [-signal.SIGKILL] * len(kills)
    assert status(tmp_path / "killed", 0) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
