"""Each script of examples/ is the plain loop to the bit, a killed one ends with the same bits, and
its README is right. (20 s)
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from hashlib import sha256
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
from surefoot.tracking.jsonl import records


def matrices_decayed(parameters: Any) -> SGD:
    """Return the optimizer of timm's train.py, which decays no bias and no parameter of a norm."""
    matrices, others = (
        [each for each in parameters if (each.ndim > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 2e-5}, {"params": others, "weight_decay": 0.0}]
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
gan_adam = partial(adam, lr=2e-3, betas=(0.5, 0.999))
OPTIMIZERS: dict[str, dict[str, Callable[..., Any]]] = {
    "bert_classification": {"model": partial(AdamW, lr=1e-3, weight_decay=0.0, fused=True)},
    "clip": {"model": partial(AdamW, lr=3e-3, fused=True)},
    "cross_validation": {"model": partial(adam, lr=1e-2)},
    "dcgan": {"generator": gan_adam, "discriminator": gan_adam},
    "ddpm": {"model": partial(adam, lr=2e-3)},
    "distillation": {"student": partial(SGD, lr=0.05, momentum=0.9, fused=True)},
    "gan": dict.fromkeys(("generator", "discriminator"), partial(adam, lr=1e-3, betas=(0.5, 0.99))),
    "gpt2_lora_chat": {"model": partial(AdamW, lr=1e-2, weight_decay=0.0, fused=True)},
    "gradient_surgery": {"model": partial(adam, lr=1e-2)},
    "graph_network": {"model": partial(adam, lr=0.01, weight_decay=5e-4)},
    "image_folder": {"model": matrices_decayed},
    "mnist": {"model": partial(Adadelta, lr=1.0)},
    "multi_task": {"model": partial(adam, lr=1e-2)},
    "reinforce": {"model": partial(adam, lr=1e-2)},
    "sam": {"model": partial(SGD, lr=0.2, momentum=0.9, fused=True)},
    "simclr": {"model": partial(adam, lr=1e-3)},
    "tabular": {"model": partial(AdamW, lr=3e-3, weight_decay=0.05, fused=True)},
    "time_series": {"model": partial(LBFGS, lr=0.8)},
    "vae": {"model": partial(adam, lr=1e-3)},
    "wgan_gp": {
        name: partial(adam, lr=1e-3, betas=(0.5, 0.999)) for name in ("generator", "critic")
    },
    "word_lm": {"model": partial(adam, lr=5e-3)},
}
CHANGES: dict[
    str, dict[str, Any]
] = {  # of what would be slow, or what a plain loop has no counterpart of
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


ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "distillation": lambda module: (teacher(module),)
}
SCHEDULERS: dict[str, Callable[..., Any]] = {  # the factors are proved in tests/schedules
    "bert_classification": LambdaLR,
    "gpt2_lora_chat": LambdaLR,
    "image_folder": LambdaLR,
    "mnist": lambda optimizer, _: StepLR(optimizer, 20, gamma=0.7),
}
SLOW = (
    "bert_classification",
    "gpt2_lora_chat",
    "time_series",
)  # imports of seconds; an LSTM under LBFGS
NOT_BIT_EQUAL: dict[str, float] = {}  # by name, the tolerance; `examples/README.md` has the reason


def built(name: str, **changes: Any) -> tuple[Any, sf.Run]:
    if name == "image_folder":
        vision()
    module = example(name)
    arguments = ARGUMENTS.get(name, lambda _: ())(module)
    return module, module.build(
        *arguments, **({"length": f"{STEPS} steps"} | SMALL | CHANGES.get(name, {}) | changes)
    )


def vision() -> None:
    """Skip if timm or torchvision do not load beside this torch: the torchvision of the usual index
    needs its own build.
    """
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError) as problem:
        pytest.skip(f"timm does not load beside this torch: {problem}")


def trained_both(
    name: str, place: Path, **changes: Any
) -> tuple[sf.Run, list[float], sf.Run, list[float]]:
    """Train a script, and the plain loop over the same batches; return both runs and the loss of
    each step. Only the script has the `changes`."""
    module, run = built(name, run_dir=place / "run", log_every="1 steps", **changes)
    inputs = batches(built(name)[1])
    module.train(run)
    losses = [
        record["loss"]
        for record in records(place / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]

    plain_module, plain_run = built(name)
    plain = Plain(plain_run, inputs, OPTIMIZERS[name])
    if name in SCHEDULERS:
        plain.schedulers = [
            SCHEDULERS[name](plain.optimizers["model"], plain_run.parts.task.factors)
        ]
    plain_losses = train_plainly(plain_module, plain)
    assert len(losses) == run.state.step == len(inputs) > 0
    return run, losses, plain_run, plain_losses


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES]
)
def test_a_script_is_its_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, losses, plain_run, plain_losses = trained_both(name, tmp_path)
    tolerance = NOT_BIT_EQUAL.get(name, 0.0)
    torch.testing.assert_close(losses, plain_losses, rtol=tolerance, atol=0)
    for model, reference in zip(
        run.state.models.values(), plain_run.state.models.values(), strict=True
    ):
        torch.testing.assert_close(
            model.state_dict(), reference.state_dict(), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("name", ["clip", "simclr"])
def test_a_contrastive_script_in_micro_batches_has_the_losses_of_a_plain_loop_over_the_whole_batch(
    name: str, tmp_path: Path
) -> None:
    run, losses, _, plain_losses = trained_both(name, tmp_path, micro_batch_size=8)
    assert run.parts.settings.batch_size == 4 * 8
    torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=0)  # sums in another order


def session(name: str, run_dir: str, kill_at: int) -> None:
    """Train a script; SIGKILL in the forward pass `kill_at` of its last model, from 1."""
    module, run = built(
        name, run_dir=run_dir, save_every="2 steps", log_every="3 steps", check_state=False
    )
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1
        if passes[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    next(reversed(run.state.models.values())).register_forward_pre_hook(count)
    module.train(run)


def outcome(run_dir: Path) -> tuple[str, dict[str, str], list[Any]]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    losses = [
        line["loss"] for line in records(run_dir / "metrics.jsonl") if line["kind"] == "train"
    ]
    return (
        newest.name,
        {file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")},
        losses,
    )


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
    def status(run_dir: Path, kill_at: int) -> int:
        (end,) = ranks.outcomes(
            ranks.start(1, session, name=name, run_dir=str(run_dir), kill_at=kill_at)
        )
        return end.status

    if name == "image_folder":
        vision()
    last = {"wgan_gp": 13, "gradient_surgery": 9}.get(name, 5)
    assert status(tmp_path / "complete", 0) == 0
    assert status(tmp_path / "killed", last) == -signal.SIGKILL
    assert status(tmp_path / "killed", 0) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "complete")


def test_readme_of_the_examples_has_a_row_and_the_lines_of_each_script() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\.py\]\((\w+)\.py\) .*\| (\d+) \|[^|]*\|$",
        (EXAMPLES / "README.md").read_text(),
        re.M,
    )
    lines = {name: len((EXAMPLES / f"{name}.py").read_text().splitlines()) for name in NAMES}
    assert {first: int(count) for first, second, count in rows if first == second} == lines
    assert max(lines.values()) < 60
    assert len(lines) >= 16
