"""Each script of examples/ is the plain loop to the bit, a killed one ends with the same bits, and
its README is right. (20 s)
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR

import surefoot as sf
from gallery import EXAMPLES, NAMES, Plain, batches, example, train_plainly
from rank_processes import Ranks
from run_files import newest_checkpoint, newest_tensor_hashes, records_of


def sgd_that_decays_matrices(parameters: Any) -> SGD:
    """Return the optimizer of timm's train.py, which decays no bias and no parameter of a norm."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 2e-5}, {"params": vectors, "weight_decay": 0.0}]
    return SGD(groups, lr=0.05, momentum=0.9, fused=True)


STEPS = 6
SMALL: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "console": False,
    "report": False,
    "splits": {},
    "early_stopping": None,
    "best": None,
    "sample_fn": None,
}
adam = partial(Adam, fused=True)
dcgan_adam = partial(adam, lr=2e-3, betas=(0.5, 0.999))
gan_adam = partial(adam, lr=1e-3, betas=(0.5, 0.99))
wgan_adam = partial(adam, lr=1e-3, betas=(0.5, 0.999))
OPTIMIZERS: dict[str, dict[str, Callable[..., Any]]] = {
    "bert_classification": {"model": partial(AdamW, lr=1e-3, weight_decay=0.0, fused=True)},
    "clip": {"model": partial(AdamW, lr=3e-3, fused=True)},
    "cross_validation": {"model": partial(adam, lr=1e-2)},
    "dcgan": {"generator": dcgan_adam, "discriminator": dcgan_adam},
    "ddpm": {"model": partial(adam, lr=2e-3)},
    "distillation": {"student": partial(SGD, lr=0.05, momentum=0.9, fused=True)},
    "gan": {"generator": gan_adam, "discriminator": gan_adam},
    "gpt2_lora_chat": {"model": partial(AdamW, lr=1e-2, weight_decay=0.0, fused=True)},
    "gradient_surgery": {"model": partial(adam, lr=1e-2)},
    "graph_network": {"model": partial(adam, lr=0.01, weight_decay=5e-4)},
    "image_folder": {"model": sgd_that_decays_matrices},
    "mnist": {"model": partial(Adadelta, lr=1.0)},
    "multi_task": {"model": partial(adam, lr=1e-2)},
    "reinforce": {"model": partial(adam, lr=1e-2)},
    "sam": {"model": partial(SGD, lr=0.2, momentum=0.9, fused=True)},
    "simclr": {"model": partial(adam, lr=1e-3)},
    "tabular": {"model": partial(AdamW, lr=3e-3, weight_decay=0.05, fused=True)},
    "time_series": {"model": partial(LBFGS, lr=0.8)},
    "vae": {"model": partial(adam, lr=1e-3)},
    "wgan_gp": {"generator": wgan_adam, "critic": wgan_adam},
    "word_lm": {"model": partial(adam, lr=5e-3)},
}
# of what would be slow, or what a plain loop has no counterpart of
CHANGES: dict[str, dict[str, Any]] = {
    "bert_classification": {"batch_size": 8},
    "clip": {"batch_size": 32, "micro_batch_size": None},
    "mnist": {"batch_size": 16},
    "reinforce": {"batch_size": 4},
    "simclr": {"batch_size": 32, "micro_batch_size": None},
    "time_series": {"length": "1 steps"},
}


def teacher(module: Any) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = module.teacher_network()
    return network.eval().requires_grad_(False)


# the factors are proved in tests/schedules
SCHEDULERS: dict[str, Callable[..., Any]] = {
    "bert_classification": LambdaLR,
    "gpt2_lora_chat": LambdaLR,
    "image_folder": LambdaLR,
    "mnist": lambda optimizer, _: StepLR(optimizer, 20, gamma=0.7),
}
# imports of seconds; an LSTM under LBFGS
SLOW = ("bert_classification", "gpt2_lora_chat", "time_series")
NOT_BIT_EQUAL: dict[str, float] = {}  # by name, the tolerance; `examples/README.md` has the reason


def build(name: str, **changes: Any) -> tuple[Any, sf.Run]:
    """The module of a script, and a small run of it."""
    if name == "image_folder":
        skip_without_timm()
    module = example(name)
    arguments = [teacher(module)] if name == "distillation" else []
    settings = {"length": f"{STEPS} steps"} | SMALL | CHANGES.get(name, {}) | changes
    return module, module.build(*arguments, **settings)


def skip_without_timm() -> None:
    """Skip if timm or torchvision do not load beside this torch: the torchvision of the usual index
    needs its own build.
    """
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError) as problem:
        pytest.skip(f"timm does not load beside this torch: {problem}")


@dataclass
class Training:
    """A run that was trained, and the loss of each of its steps."""

    run: sf.Run
    losses: list[float]


def train_script(name: str, run_dir: Path, **changes: Any) -> Training:
    module, run = build(name, run_dir=run_dir, log_every="1 steps", **changes)
    module.train(run)
    return Training(run, [record["loss"] for record in records_of(run_dir, "train")])


def train_plain_loop(name: str) -> Training:
    """Train the plain loop that a script replaces, over the same batches."""
    _, unused_run = build(name)
    inputs = batches(unused_run)
    module, run = build(name)
    plain = Plain(run, inputs, OPTIMIZERS[name])
    if name in SCHEDULERS:
        scheduler = SCHEDULERS[name](plain.optimizers["model"], run.parts.task.factors)
        plain.schedulers = [scheduler]
    losses = train_plainly(module, plain)
    assert len(losses) == len(inputs) > 0
    return Training(run, losses)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else pytest.param(name)
        for name in NAMES
    ],
)
def test_a_script_is_its_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tolerance = NOT_BIT_EQUAL.get(name, 0.0)

    script = train_script(name, tmp_path / "run")
    plain = train_plain_loop(name)

    assert script.run.state.step == len(script.losses)
    torch.testing.assert_close(script.losses, plain.losses, rtol=tolerance, atol=0)
    models = script.run.state.models
    references = plain.run.state.models
    assert models.keys() == references.keys()
    for role, model in models.items():
        expected = references[role].state_dict()
        torch.testing.assert_close(model.state_dict(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["clip", "simclr"])
def test_a_contrastive_script_in_micro_batches_has_the_losses_of_a_plain_loop_over_the_whole_batch(
    name: str, tmp_path: Path
) -> None:
    script = train_script(name, tmp_path / "run", micro_batch_size=8)
    plain = train_plain_loop(name)

    assert script.run.parts.settings.batch_size == 4 * 8
    # sums in another order
    torch.testing.assert_close(script.losses, plain.losses, rtol=1e-6, atol=0)


def train_and_die(name: str, run_dir: str, kill_at: int) -> None:
    """Train a script; SIGKILL in the forward pass `kill_at` of its last model, from 1."""
    module, run = build(
        name, run_dir=run_dir, save_every="2 steps", log_every="3 steps", check_state=False
    )
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    *_, last_model = run.state.models.values()
    last_model.register_forward_pre_hook(count)
    module.train(run)


def outcome(run_dir: Path) -> dict[str, Any]:
    """What must be equal to the bit."""
    return {
        "step": newest_checkpoint(run_dir).name,
        "tensors": newest_tensor_hashes(run_dir),
        "losses": [record["loss"] for record in records_of(run_dir, "train")],
    }


@pytest.mark.fast("wgan_gp", "word_lm")
@pytest.mark.parametrize(
    "name",
    [
        "wgan_gp",
        "word_lm",
        "ddpm",
        "distillation",
        "gpt2_lora_chat",
        "gradient_surgery",
        "image_folder",
        "mnist",
    ],
)
def test_a_killed_script_ends_with_the_same_bits(name: str, ranks: Ranks, tmp_path: Path) -> None:
    def status_of_session(run_dir: Path, kill_at: int) -> int:
        session = ranks.start(1, train_and_die, name=name, run_dir=str(run_dir), kill_at=kill_at)
        (end,) = ranks.outcomes(session)
        return end.status

    if name == "image_folder":
        skip_without_timm()
    last_pass = {"wgan_gp": 13, "gradient_surgery": 9}.get(name, 5)

    assert status_of_session(tmp_path / "complete", 0) == 0
    assert status_of_session(tmp_path / "killed", last_pass) == -signal.SIGKILL
    assert status_of_session(tmp_path / "killed", 0) == 0

    assert outcome(tmp_path / "killed") == outcome(tmp_path / "complete")


def test_readme_of_the_examples_has_a_row_and_the_lines_of_each_script() -> None:
    page = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"(?m)^\| \[(\w+)\.py\]\(\1\.py\) .*\| (\d+) \|[^|]*\|$", page)
    lines = {name: len((EXAMPLES / f"{name}.py").read_text().splitlines()) for name in NAMES}

    assert {name: int(count) for name, count in rows} == lines
    assert max(lines.values()) < 60
    assert len(lines) >= 16
