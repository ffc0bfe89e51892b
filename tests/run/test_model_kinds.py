"""Kinds of models: a run that is killed and resumed ends with the bits of one that is left alone;
others are refused by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from forked import Forked
from refused import refused
from surefoot.checkpoint import Store
from surefoot.errors import CheckpointError

LAST = 8  # step
WIDTH = 8
CLASSES = 4
INPUTS = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(CLASSES, (32,), generator=torch.Generator().manual_seed(1))
Body = Callable[[sf.Run, sf.Step], None]


class Tied(nn.Module):
    """Two layers with one weight, dropout, and a head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.b(x))
        return self.head(self.drop(x))


class MoCo(nn.Module):
    """Queries, keys by a momentum encoder, and a queue of keys:
    https://arxiv.org/abs/1911.05722.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 4)
        self.key = nn.Linear(WIDTH, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(16, 4), dim=1))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self.queue: Tensor
        self.filled: Tensor

    def forward(self, x: Tensor) -> Tensor:
        queries = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.key(x + 0.1 * torch.randn_like(x)), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ self.queue.clone().T
        logits = torch.cat([positive, negative], dim=1)
        if self.training:
            rows = (self.filled + torch.arange(len(keys))) % len(self.queue)
            self.queue[rows] = keys
            self.filled += len(keys)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.lerp_(query, 0.1)


def classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def distill(models: Any, batch: Any) -> Tensor:
    logits = models["student"](batch[0])
    with torch.no_grad():
        targets = models["teacher"](batch[0]).softmax(-1)
    return F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits, targets)


def nothing(run: sf.Run, step: sf.Step) -> None:
    pass


def follow_student(run: sf.Run, step: sf.Step) -> None:
    teacher = run.state.models["teacher"].parameters()
    student = run.state.models["student"].parameters()
    with torch.no_grad():
        for slow, fast in zip(teacher, student, strict=True):
            slow.lerp_(fast, 0.1)


def unfreeze(run: sf.Run, step: sf.Step) -> None:
    run.state.model.get_submodule("a").requires_grad_(step.index >= 3)


def frozen_trunk() -> nn.Module:
    model = Tied()
    model.a.requires_grad_(False)
    return model


def instance() -> Tied:
    """The same weights in every process, as of a pretrained model."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Tied()


def two() -> dict[str, Any]:
    teacher = instance().eval().requires_grad_(False)
    models = {"student": Tied, "teacher": teacher}
    return {"model": models, "loss": distill, "optimizer": {"student": sf.optim.adamw(lr=1e-2)}}


# of each kind its settings, and what the body does
KINDS: dict[str, tuple[Callable[[], dict[str, Any]], Body]] = {
    "tied": (lambda: {"model": Tied, "ema": 0.9}, nothing),
    "teacher": (two, nothing),
    "EMA teacher": (two, follow_student),
    "queue": (
        lambda: {"model": MoCo, "loss": lambda model, batch: model(batch[0])},
        lambda run, step: run.state.model.follow(),  # type: ignore[operator]
    ),
    "unfrozen at step 3": (lambda: {"model": frozen_trunk, "ema": 0.9}, unfreeze),
}


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Tied,
        "loss": classify,
        "optimizer": sf.optim.adamw(lr=1e-2),
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "save_every": "2 steps",
        "keep_last": 9,
        "train_data": (INPUTS, LABELS),
        "batch_size": 8,
        "length": f"{LAST} steps",
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run, body: Body = nothing, *, dies_at: int | None = None) -> sf.Run:
    with run:
        for step in run:
            body(run, step)
            if step.index + 1 == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return run


def kill(call: Callable[[], object]) -> None:
    with Forked(call, stdout=subprocess.PIPE) as process:
        assert process.wait() == -signal.SIGKILL


def tensors(run: Path, step: int = LAST) -> dict[str, Tensor]:
    """All tensors of a checkpoint but those of the meter, which has times."""
    checkpoint = Store(run / "checkpoints").at(step)
    by_name = {}
    for file in checkpoint.files:
        for name, tensor in checkpoint.tensors(file).items():
            if not f"{file}/{name}".startswith("state/meter"):
                by_name[f"{file}/{name}"] = tensor
    return by_name


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.fast("tied-6", "teacher-3", "EMA teacher-6", "queue-3", "unfrozen at step 3-6")
@pytest.mark.parametrize("dies_at", [3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_with_the_same_bits(kind: str, dies_at: int, tmp_path: Path) -> None:
    settings, body = KINDS[kind]
    train(build(tmp_path / "alone", **settings()), body)
    kill(lambda: train(build(tmp_path / "killed", **settings()), body, dies_at=dies_at))
    train(build(tmp_path / "killed", **settings()), body)
    assert_equal_bits(tensors(tmp_path / "alone"), tensors(tmp_path / "killed"))


def names_in_file(run: Path, step: int, file: str) -> set[str]:
    """The tensors that a file of this checkpoint has, without those of an earlier one."""
    return set(load_file(run / "checkpoints" / f"step-{step:08d}" / f"{file}.safetensors"))


def test_a_tied_weight_is_once_in_checkpoint_optimizer_and_export(tmp_path: Path) -> None:
    run = train(build(tmp_path / "run"))
    sf.load(tmp_path / "run").export(tmp_path / "exported")

    names = {"a.weight", "head.weight", "head.bias"}
    groups = run.state.optimizers["model"].optimizer.param_groups
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert names_in_file(tmp_path / "run", LAST, "model") == names
    of_optimizer = names_in_file(tmp_path / "run", LAST, "optimizer")
    assert [name for name in of_optimizer if name.startswith("b.")] == []
    assert set(load_file(tmp_path / "exported" / "model.safetensors")) == names


@pytest.mark.parametrize("was_tied", [True, False])
def test_a_tie_that_a_resume_would_break_or_make_is_named(was_tied: bool, tmp_path: Path) -> None:
    train(build(tmp_path, model=lambda: Tied(tied=was_tied), stop_after="2 steps"))
    with refused("model-of-other-tensors", CheckpointError) as caught:
        train(build(tmp_path, model=lambda: Tied(tied=not was_tied)))

    (difference,) = caught.value.fields["differences"]
    before, after = difference.split(", and ")
    assert before.startswith("b.weight was ")
    assert ("a.weight" in before) == was_tied
    assert ("a.weight" in after) != was_tied


def test_an_untied_model_may_be_used_with_tied_weights(tmp_path: Path) -> None:
    train(build(tmp_path, length="2 steps"))
    used = sf.load(tmp_path).load_model(lambda: Tied(tied=False))

    assert torch.equal(used.get_parameter("a.weight"), used.get_parameter("b.weight"))


def test_a_frozen_teacher_is_written_once_keeps_its_mode_and_has_no_optimizer(
    tmp_path: Path,
) -> None:
    run = train(build(tmp_path, **two()))
    assert set(run.state.optimizers) == {"student"}
    assert not any(part.training for part in run.state.models["teacher"].modules())
    assert names_in_file(tmp_path, 0, "model-teacher") == {"a.weight", "head.weight", "head.bias"}
    assert names_in_file(tmp_path, LAST, "model-teacher") == set()


def test_a_frozen_trunk_is_written_again_only_after_it_is_unfrozen(tmp_path: Path) -> None:
    train(build(tmp_path, model=frozen_trunk), unfreeze)
    assert "a.weight" not in names_in_file(tmp_path, 2, "model")
    assert "a.weight" in names_in_file(
        tmp_path, 4, "model"
    )  # unfrozen for step 4, and then trained
    assert "a.weight" in names_in_file(tmp_path, LAST, "model")


def compiled(part: nn.Module) -> Any:
    return torch.compile(part, backend="eager")


def inside() -> nn.Module:
    model = Tied()
    model.a = compiled(model.a)
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("model", [lambda: compiled(Tied()), inside], ids=["model", "submodule"])
def test_a_compiled_model_is_unwrapped_and_compiled_by_the_run(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    run = build(tmp_path, model=model)

    assert list(run.state.model.state_dict()) == list(Tied().state_dict())
    assert run.parts.compiled
    assert not build(None, model=Tied).parts.compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    train(build(tmp_path / "alone", model=torch.compile(instance())))
    kill(lambda: train(build(tmp_path / "killed", model=torch.compile(instance())), dies_at=5))
    train(build(tmp_path / "killed", model=torch.compile(instance())))
    assert_equal_bits(tensors(tmp_path / "alone"), tensors(tmp_path / "killed"))
    names = {"a.weight", "head.weight", "head.bias"}
    assert names_in_file(tmp_path / "killed", LAST, "model") == names


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def inferred() -> nn.Module:
    with torch.inference_mode():
        return Tied()


def quantized() -> nn.Module:
    first = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})
    return nn.Sequential(first, nn.Linear(8, 4))


REFUSED: list[tuple[Callable[[], Any], str, dict[str, str]]] = [
    (lambda: nn.DataParallel(Tied()), "model-wrapped-for-ranks", {"module": "model"}),
    (lambda: torch.jit.script(nn.Linear(8, 4)), "model-of-torchscript", {"module": "model"}),
    (quantized, "model-of-legacy-quantization", {"module": "model.0.0"}),
    (on_meta, "model-on-meta-device", {"tensor": "a.weight"}),
    (inferred, "model-of-inference-mode", {"tensor": "a.weight"}),
    (lambda: nn.LazyLinear(4), "model-without-shapes", {"tensor": "weight"}),
    (lambda: "resnet18", "not-a-model", {"value": "str"}),
    (lambda: Tied().state_dict(), "not-a-model", {"value": "Tensor", "model": "a.weight"}),
    (lambda: 3, "not-a-model", {"value": "int"}),
]


@pytest.mark.filterwarnings("ignore")  # deprecated kinds warn
@pytest.mark.parametrize(("make", "code", "fields"), REFUSED)
def test_what_cannot_be_trained_or_saved_is_refused(
    make: Callable[[], Any], code: str, fields: dict[str, str]
) -> None:
    with refused(code, **fields):
        build(None, model=make())
