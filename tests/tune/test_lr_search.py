"""The range test of the learning rate: its steps are the run's own, and its suggestion holds; 4
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from small_runs import build
from stated import numbers_in
from surefoot.distributed.shards import local_part
from surefoot.errors import Command
from surefoot.recipes import images
from surefoot.recipes.optimizer_settings import Optimizer
from surefoot.tools.tune import lr_search as module


def quadratic(**changes: Any) -> sf.Run:
    """w^2 / 2 on data of no influence: gradient w, so a step of rate r multiplies w by 1 - r."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    settings: dict[str, Any] = {
        "model": Weight,
        "loss": lambda model, batch: model.weight.square().sum() / 2 + 0 * batch[0].sum(),
        "train_data": (torch.zeros(64, 1),),
        "optimizer": sf.optim.sgd(0.5),
        "batch_size": 8,
        "length": "100 epochs",
        "clip": "off",
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def test_each_loss_is_that_after_the_updates_with_its_rate_and_all_before() -> None:
    found = sf.tune.find_lr(quadratic(), min_lr=1e-3, max_lr=0.5, steps=20)

    rates = [1e-3 * 500 ** (place / 19) for place in range(20)]
    assert found.rates.tolist() == pytest.approx(rates)
    weight = 1.0
    losses = []
    for rate in rates:
        weight *= 1 - rate
        losses.append(weight**2 / 2)
    assert found.losses.tolist() == pytest.approx(losses, rel=1e-6)
    assert found.end == "highest"


def test_a_quadratic_diverges_past_two() -> None:
    found = sf.tune.find_lr(quadratic(), min_lr=1e-3, max_lr=1e3, steps=200)

    assert found.end == "diverged"
    assert found.diverged_at is not None
    assert found.diverged_at > 2.0
    assert found.suggested is not None
    assert found.suggested < 2.0


def test_a_run_that_is_not_open_says_that_its_directory_is_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def numbers_of_note(run: sf.Run) -> list[float]:
        """Those of the note that a test prints, none without a note."""
        capsys.readouterr()
        sf.tune.find_lr(run, min_lr=1e-3, max_lr=1e-2, steps=10)
        printed = capsys.readouterr().out
        return numbers_in(printed) if "note: " in printed else []

    def built(**changes: Any) -> sf.Run:
        return quadratic(
            run_dir=tmp_path / "run", console=True, report=False, length="40 steps", **changes
        )

    assert numbers_of_note(built()) == []
    trained = built(stop_after="3 steps")
    trained.train()
    assert numbers_of_note(trained) == []
    assert numbers_of_note(built()) == [3]
    with built() as resumed:
        assert numbers_of_note(resumed) == []


@pytest.mark.parametrize(
    ("call", "verb"),
    [
        (sf.tune.find_lr, "find-lr"),
        (sf.tune.find_batch_size, "find-batch-size"),
        (sf.profile.measure, "profile"),
    ],
)
def test_a_path_is_no_run(call: Callable[[Any], object], verb: str) -> None:
    with refused("call-needs-a-run", value="str") as error:
        call("runs/a")
    _, (_, command) = error.value.remedies
    assert command == Command(f"surefoot {verb} RUN")


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_what_is_found_does_not_depend_on_how_many_losses_are_read_at_once(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sf.tune.find_lr(quadratic(), min_lr=1e-3, max_lr=1e3, steps=60)
    monkeypatch.setattr(module, "_BLOCK", block)
    found = sf.tune.find_lr(quadratic(), min_lr=1e-3, max_lr=1e3, steps=60)

    assert found.losses.tolist() == expected.losses.tolist()
    assert found.reason == expected.reason


def test_groups_keep_the_ratio_of_their_rates_and_the_rate_is_that_of_the_settings() -> None:
    seen: list[list[float]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append([group["lr"] for group in self.param_groups])
            super().step(closure)

    def two(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        (parameters,) = [group["params"] for group in groups]
        return Watched([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.1)

    sf.tune.find_lr(build(None, optimizer=two), min_lr=1e-4, max_lr=1e-2, steps=10)

    rates = [1e-4 * 100 ** (place / 9) for place in range(10)]
    assert [first for first, _ in seen[:10]] == pytest.approx(rates)
    for first, second in seen:
        assert second / first == pytest.approx(0.2)


def test_samples_and_random_numbers_are_those_of_the_next_steps_of_training() -> None:
    notes: SimpleQueue[Any] = SimpleQueue()  # a list would be put back

    def noted(model: Any, batch: Any) -> Tensor:
        if model.training:
            notes.put((batch[0].tolist(), torch.rand(()).item()))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = build(None, loss=noted, length="40 steps", splits=None, early_stopping=None)
    with run:
        for step in run:
            if step.index == 2:
                break
        take_all(notes)
        sf.tune.find_lr(run, min_lr=1e-6, max_lr=1e-3, steps=10)
        of_test = take_all(notes)
        for step in run:
            if step.index == 13:
                break
    of_training = take_all(notes)

    # two micro-batches; one step more, for the loss after the last rate
    assert len(of_test) == 2 * 11
    assert of_test == of_training[: len(of_test)]


def take_all(notes: SimpleQueue[Any]) -> list[Any]:
    """Empty a queue."""
    return [notes.get() for _ in range(notes.qsize())]


def test_what_a_loss_counts_for_itself_is_what_it_was() -> None:
    passes = [0]

    def counting(model: Any, batch: Any) -> Tensor:
        passes[0] += 1
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = build(None, loss=counting, check_state=False)
    sf.tune.find_lr(run, min_lr=1e-6, max_lr=1e-3, steps=10)

    assert passes == [0]


@pytest.mark.parametrize("bad", [0, 3, 30])
def test_a_loss_that_is_not_finite_ends_the_test_where_it_comes(bad: int) -> None:
    passes = [0]

    def breaking(model: Any, batch: Any) -> Tensor:
        passes[0] += 1
        if passes[0] > bad:
            return model.weight.square().sum() * math.nan
        return model.weight.square().sum() / 2

    found = sf.tune.find_lr(quadratic(loss=breaking), min_lr=1e-3, max_lr=0.1, steps=50)

    assert found.end == "not finite"
    assert len(found.losses) == max(bad - 1, 0)
    if bad == 0:
        assert found.diverged_at is None
    else:
        assert found.diverged_at == pytest.approx(1e-3 * 100 ** ((bad - 1) / 49))
    assert passes[0] <= bad + 10  # read in blocks


def test_a_gradient_that_is_not_finite_ends_the_test_too() -> None:
    passes = [0]

    def breaking(model: Any, batch: Any) -> Tensor:
        passes[0] += 1
        loss = model.weight.square().sum() / 2
        if passes[0] > 20:
            loss = (
                loss + (model.weight * 0).sum().sqrt()
            )  # 0, with a derivative of infinity times 0
        return loss

    found = sf.tune.find_lr(quadratic(loss=breaking), min_lr=1e-3, max_lr=0.1, steps=50)

    assert found.end == "not finite"
    assert len(found.losses) == 19


def test_an_overflow_of_the_loss_scale_is_no_divergence() -> None:
    found = sf.tune.find_lr(build(None, precision="fp16"), min_lr=1e-6, max_lr=1e-3, steps=30)

    assert found.end == "highest"
    assert len(found.losses) == 30


def test_a_finished_run_is_refused() -> None:
    run = build(None, length="3 steps")
    run.train()
    with refused("find-lr-of-finished-run", step=3):
        sf.tune.find_lr(run)


def test_watching_is_told_every_loss_with_its_rate() -> None:
    seen: list[tuple[float, float]] = []
    found = sf.tune.find_lr(
        quadratic(),
        min_lr=1e-3,
        max_lr=1e3,
        steps=60,
        progress_fn=lambda rate, loss: seen.append((rate, loss)),
    )
    assert seen == list(zip(found.rates.tolist(), found.losses.tolist(), strict=True))


def find_lr_on_rank(*, parallel: str) -> dict[str, Any]:
    """What a rank has of a test in the midst of a run, and whether it left anything behind."""
    losses_shown: list[float] = []

    def show(_: float, loss: float) -> None:
        losses_shown.append(loss)

    run = build(
        None,
        parallel=parallel,
        length="5 steps",
        micro_batch_size=2,
        splits=None,
        early_stopping=None,
    )
    with run:
        for step in run:
            if step.index == 2:
                before = state_of(run)
                found = sf.tune.find_lr(run, min_lr=1e-5, max_lr=0.1, steps=12, progress_fn=show)
                is_restored = all(map(torch.equal, before, state_of(run)))
    return {
        "losses": torch.from_numpy(found.losses),
        "losses shown": losses_shown,
        "is_restored": is_restored,
        "loss": float(step.loss or 0.0),
    }


def state_of(run: sf.Run) -> list[Tensor]:
    """This rank's part of weights, buffers, averages and optimizer state."""
    tensors = [*run.state.model.state_dict().values()]
    for average in run.state.ema_models.values():
        tensors += average.model.state_dict().values()
    for trained in run.state.optimizers.values():
        for parameter in trained.parameters:
            tensors += trained.optimizer.state[parameter].values()
    return [local_part(tensor)[0].clone() for tensor in tensors]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_find_the_losses_of_one_process_and_put_their_rows_back(
    ranks: Ranks, parallel: str
) -> None:
    (alone,) = ranks(1, find_lr_on_rank, parallel="auto")
    first, second = ranks(2, find_lr_on_rank, parallel=parallel)

    torch.testing.assert_close(first["losses"], alone["losses"])
    assert torch.equal(first["losses"], second["losses"])
    assert first["loss"] == second["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert alone["is_restored"]
    assert first["is_restored"]
    assert second["is_restored"]
    assert len(first["losses shown"]) == 12
    assert second["losses shown"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_digits_are_learned_better_at_the_suggestion_than_at_a_tenth_of_it(name: str) -> None:
    """60 seconds: four short runs for each optimizer."""

    def built(lr: float) -> sf.Run:
        optimizer = Optimizer(name=name, lr=lr)
        config = images.Config(
            run_dir=None, length="5 epochs", precision="fp32", optimizer=optimizer
        )
        return images.build(config)

    def loss_with(lr: float) -> float:
        run = built(lr)
        run.train()
        return run.evaluate("val")["val/loss"]

    suggested = sf.tune.find_lr(built(1e-2)).suggested

    assert suggested is not None
    assert loss_with(suggested) < 0.7 * loss_with(suggested / 10)
