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
from recorded import training_records

SMALL: dict[str, Any] = {
    "length": "12 steps",
    "batch_size": 16,
    "precision": "fp32",
    "device": "cpu",
    "console": False,
}


def state(models: Any) -> dict[str, dict[str, Tensor]]:
    """The tensors of each model."""
    return {name: model.state_dict() for name, model in models.items()}


def test_pictures_are_generated_once_in_a_step() -> None:
    dcgan = example("dcgan")
    calls = []
    run = dcgan.build(**SMALL, micro_batch_size=8, check_state=False)
    run.state.models["generator"].register_forward_pre_hook(lambda *_: calls.append(1))
    dcgan.train(run)

    assert len(calls) == 12 * 2  # once for each micro-batch


def test_sharing_changes_no_result_beside_generating_twice() -> None:
    dcgan = example("dcgan")
    shared = dcgan.build(**SMALL, micro_batch_size=8)
    twice = dcgan.build(**SMALL, micro_batch_size=8)
    dcgan.train(shared)

    def generator_loss(models: Any, batch: Any) -> Tensor:
        generator = models["generator"]
        before = [buffer.clone() for buffer in generator.buffers()]
        fake = generator(torch.randn(len(batch[0]), 8, 1, 1))
        for buffer, start in zip(generator.buffers(), before, strict=True):
            buffer.data.copy_(start)  # its statistics count the pictures once
        logits = models["discriminator"](fake)
        return torch.as_tensor(dcgan.criterion(logits, torch.ones_like(logits)))

    with twice:
        for step in twice.steps():
            sf.forward_backward(step, dcgan.discriminator_loss)
            sf.update(step, "discriminator")
            sf.forward_backward(step, generator_loss)
            sf.update(step, "generator")

    expected = state(twice.state.models)
    torch.testing.assert_close(state(shared.state.models), expected, rtol=0, atol=0)


def test_projected_gradients_are_those_of_a_plain_loop() -> None:
    surgery = example("gradient_surgery")
    settings = SMALL | {"optimizer": sf.optim.sgd(lr=0.05), "clip": "off"}
    run = surgery.build(**settings)
    model = surgery.build(**settings).state.model
    weights = list(model.parameters())
    sizes = [weight.numel() for weight in weights]

    def flat_gradient(loss: Tensor) -> Tensor:
        gradients = torch.autograd.grad(loss, weights)
        return torch.cat([gradient.flatten() for gradient in gradients])

    surgery.train(run)
    conflicts = 0
    for batch in batches(surgery.build(**settings)):
        one = flat_gradient(surgery.class_loss(model, batch))
        other = flat_gradient(surgery.distance_loss(model, batch))
        total = one + other
        dot = one @ other
        if dot < 0:
            conflicts += 1
            total = total - dot / (other @ other) * other - dot / (one @ one) * one
        with torch.no_grad():
            for weight, part in zip(weights, total.split(sizes), strict=True):
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
    tensors = {}
    for file in newest.glob("*.safetensors"):
        tensors[file.name] = sha256(file.read_bytes()).hexdigest()
    values = []
    for record in training_records(run_dir):
        names = ("step", "loss", "grad_norm", "generator_loss", "distance_loss")
        values.append([record.get(name) for name in names])
    return newest.name, tensors, values


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("dcgan", [29]),
        pytest.param("gradient_surgery", [23], marks=pytest.mark.slow),
        # six passes of the discriminator in a step
        pytest.param("dcgan", [1, 13, 35, 6], marks=pytest.mark.slow),
    ],
)
def test_a_killed_example_ends_with_the_same_bits(
    name: str, kills: list[int], ranks: Ranks, tmp_path: Path
) -> None:
    def status(run_dir: Path, kill_at: int) -> int:
        started = ranks.start(1, session, name=name, run_dir=str(run_dir), kill_at=kill_at)
        (end,) = ranks.outcomes(started)
        return end.status

    assert status(tmp_path / "whole", 0) == 0
    for kill_at in kills:
        assert status(tmp_path / "killed", kill_at) == -signal.SIGKILL
    assert status(tmp_path / "killed", 0) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
