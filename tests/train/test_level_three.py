"""Loops of the user's own from `run.steps()`, `forward_backward` and `update`: as exact as the one
on the page. (31 s)
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from gallery import example
from refused import refused
from surefoot.checkpoint.store import Store
from surefoot.tracking.jsonl import records

# --- SAM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [50, 10])
def test_sam_is_a_hand_written_sam_step_for_step(micro_batch_size: int) -> None:
    sam = example("sam")
    settings: dict[str, Any] = {
        "length": "30 steps",
        "splits": None,
        "clip": "norm 1.0",
        "precision": "fp32",
        "device": "cpu",
        "console": False,
        "micro_batch_size": micro_batch_size,
    }
    batches = []
    plain = sam.build(**settings)
    with plain:
        for step in plain:
            inputs, labels = zip(*(part.batch for part in step.micro_batches), strict=True)
            batches.append((torch.cat(inputs), torch.cat(labels)))
    run = sam.build(**settings)
    reference = sam.build(**settings).state.model
    rates = [run.parts.task.factors(step) * 0.2 for step in range(30)]

    sam.train(run, radius=0.05)
    sam_by_hand(reference, sam.loss, batches, rates, radius=0.05)

    weights = dict(run.state.model.named_parameters())
    torch.testing.assert_close(weights, dict(reference.named_parameters()), rtol=1e-4, atol=1e-5)
    distances = []
    for one, other in zip(weights.values(), plain.state.model.parameters(), strict=True):
        distances.append(float((one - other).detach().abs().max()))
    assert max(distances) > 1e-3  # SAM is not SGD


def sam_by_hand(
    model: nn.Module, loss: Any, batches: Sequence[Any], rates: Sequence[float], *, radius: float
) -> None:
    """SAM around SGD with a momentum of 0.9, whose gradients are clipped to a norm of 1."""
    weights = list(model.parameters())
    momenta = [torch.zeros_like(weight) for weight in weights]
    for batch, rate in zip(batches, rates, strict=True):
        starts = [weight.detach().clone() for weight in weights]
        gradients = torch.autograd.grad(loss(model, batch), weights)
        norm = norm_of(gradients)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(radius * gradient / norm)
        gradients = torch.autograd.grad(loss(model, batch), weights)
        clip = min(1.0, 1.0 / float(norm_of(gradients)))
        with torch.no_grad():
            for momentum, gradient in zip(momenta, gradients, strict=True):
                momentum.mul_(0.9).add_(gradient * clip)
            for weight, start, momentum in zip(weights, starts, momenta, strict=True):
                weight.copy_(start - rate * momentum)


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    squares = [gradient.square().sum() for gradient in gradients]
    return torch.stack(squares).sum().sqrt()


def test_sam_learns_the_spirals() -> None:
    sam = example("sam")
    val = sf.Split(sam.spirals(), metrics=sf.metrics.accuracy)
    run = sam.build(
        console=False, length="60 epochs", splits={"val": val}, evaluate_every="60 epochs"
    )
    sam.train(run)

    assert run.evaluate()["val/accuracy"] > 0.8


# --- two models, two optimizers, real kills -------------------------------------------------------

PROGRAM = """
import json, os, random, signal, sys
import torch
import surefoot as sf
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from gallery import example
gan = example("gan")
from torch.utils.tensorboard import writer

def spread(points, _):
    return sf.Mean(points.norm(dim=1).sum(), len(points))
predict = lambda models, batch: (gan.generate(models, batch), batch[0])
splits = {"ring": sf.Split((torch.ones(64, 2),), metrics=spread, predict=predict, loss=False)}

def session(run_dir, kill_at, drawing):
    passes = [0]
    def killing(loss):
        def counted(models, batch):
            passes[0] += 1
            if passes[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(models, batch)
        return counted
    gan.discriminator_loss, gan.generator_loss = killing(gan.discriminator_loss), killing(gan.generator_loss)
    run = gan.build(run_dir=run_dir, length="24 steps", batch_size=32, micro_batch_size=16, splits=splits,
                    evaluate_every="5 steps", save_every="4 steps",
                    log_every="3 steps", ema=0.9, clip="norm 1.0", console=False, check_state=False)
    if not drawing:
        return gan.train(run)
    drawn = run.register_state("drawn", {"numbers": []})
    with run:
        for step in run.steps():  # random numbers of the body's own, before and after the step is made
            drawn["numbers"].append(random.random() + float(torch.rand(())))
            sf.forward_backward(step, gan.discriminator_loss)
            sf.update(step, "discriminator")
            sf.forward_backward(step, gan.generator_loss)
            sf.update(step, "generator")
            drawn["numbers"].append(float(torch.rand(())))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            session(**json.loads(line))
            status = 0
        except BaseException as problem:
            print(repr(problem), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Session = Callable[..., int]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Runs the example in a process of its own, forked from one that has imported torch; returns
    its exit status.
    """
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests = process.stdin
        answers = process.stdout

        def run_session(run_dir: Path, *, kill_at: int = 0, drawing: bool = False) -> int:
            request = {"run_dir": str(run_dir), "kill_at": kill_at, "drawing": drawing}
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            return int(answers.readline())

        yield run_session
        requests.close()


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that a run leaves, without its times."""
    newest = Store(run_dir / "checkpoints").newest_intact()
    assert newest is not None
    checkpoint, _ = newest
    tensors = {}
    for file, tensors_of_file in checkpoint.files.items():
        for name, tensor in tensors_of_file.items():
            tensors[f"{file}/{name}"] = tensor.numpy().tobytes()
    state = dict(checkpoint.state)
    del state["clock"], state["machine"]
    timeless = []
    names = {"kind", "step", "loss", "grad_norm", "targets", "skipped"}
    names |= {"generator_loss", "ring/spread"}
    for line in records(run_dir / "metrics.jsonl"):
        if line["kind"] in ("train", "eval"):
            timeless.append({name: line[name] for name in names & line.keys()})
    return {"step": checkpoint.step, "tensors": tensors, "state": state, "records": timeless}


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["as in the example", "drawing in the body"],
)
def uninterrupted(
    request: pytest.FixtureRequest, session: Session, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Any]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "gan"
    assert session(run_dir, drawing=request.param) == 0
    return request.param, outcome(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[1], [31, 17], [18], [60], [95]], ids=str)
def test_a_killed_gan_ends_bit_equal(
    kills: list[int], session: Session, uninterrupted: Any, tmp_path: Path
) -> None:
    """Four passes a step: two micro-batches through each of the two losses; a kill falls between
    the two updates too.
    """
    drawing, expected = uninterrupted
    for kill_at in kills:
        assert session(tmp_path / "gan", kill_at=kill_at, drawing=drawing) == -signal.SIGKILL
    assert session(tmp_path / "gan", drawing=drawing) == 0

    end = outcome(tmp_path / "gan")
    for name, tensor in expected["tensors"].items():
        assert end["tensors"][name] == tensor, name
    assert end == expected


def test_each_model_is_moved_by_its_own_optimizer_only() -> None:
    gan = example("gan")
    run = gan.build(length="3 steps", splits=None, console=False)
    generator = run.state.models["generator"]
    discriminator = run.state.models["discriminator"]

    with run:
        for step in run.steps():
            of_generator = copies_of(generator)
            of_discriminator = copies_of(discriminator)
            sf.forward_backward(step, gan.discriminator_loss)
            sf.update(step, "discriminator")
            assert all(map(torch.equal, generator.parameters(), of_generator))
            assert not any(map(torch.equal, discriminator.parameters(), of_discriminator))

            of_discriminator = copies_of(discriminator)
            sf.forward_backward(step, gan.generator_loss)
            sf.update(step, "generator")
            assert all(map(torch.equal, discriminator.parameters(), of_discriminator))
            for weight in (*generator.parameters(), *discriminator.parameters()):
                assert weight.grad is None


def copies_of(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize("bad", [(), ("first",), ("second",), ("first", "second")])
def test_a_step_of_which_any_update_was_skipped_is_a_skipped_one(bad: tuple[str, ...]) -> None:
    run = sf.Run(
        model={"first": lambda: nn.Linear(2, 1), "second": lambda: nn.Linear(2, 1)},
        loss=None,
        train_data=(torch.ones(4, 2),),
        batch_size=4,
        length="1 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        console=False,
    )
    with run:
        for step in run.steps():
            for name in ("first", "second"):
                scale = math.nan if name in bad else 1.0

                def loss(models: Any, batch: Any, name: str = name, scale: float = scale) -> Tensor:
                    return models[name](batch[0]).square().mean() * scale  # type: ignore[no-any-return]

                sf.forward_backward(step, loss)
                sf.update(step, name)

            assert step.skipped is not None
            assert float(step.skipped) == (1.0 if bad else 0.0)


@pytest.mark.slow
def test_the_gan_finds_the_ring() -> None:
    gan = example("gan")
    run = gan.build(console=False, length="400 steps")
    angles = torch.arange(8) * (torch.pi / 4)
    centers = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)

    def distance() -> float:
        torch.manual_seed(0)
        with torch.no_grad():
            points = gan.generate(run.state.models, (torch.zeros(512, 2),))
            to_nearest = torch.cdist(points, centers).amin(dim=1)
            return float(to_nearest.mean())

    before = distance()
    gan.train(run)

    assert distance() < before / 2


def test_update_without_a_gradient_says_what_to_call() -> None:
    run = example("gan").build(length="1 steps", splits=None, console=False)
    with run:
        step = next(iter(run.steps()))
    with refused("update-without-gradient"):
        sf.update(step, "generator")


def test_a_step_without_any_loss_asks_for_one() -> None:
    run = example("gan").build(length="1 steps", splits=None, console=False)
    with run, refused("run-without-loss", setting="loss"):
        sf.forward_backward(next(iter(run.steps())))
