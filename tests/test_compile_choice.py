"""What "auto" makes of `compile`: estimated first, measured only where it could pay, stored with the run, and without a trace. 3 s."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot import compile_choice, pace, plan
from surefoot.checkpoint import Store
from surefoot.cli.flags import configured
from surefoot.parts import Parts
from surefoot.recipes.images import Config


class Net(nn.Sequential):
    """With dropout and batch statistics, of which passes must leave no trace."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def built(out: Path | None = None, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator))
    arguments: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train": data,
        "batch_size": 16,
        "length": "6 steps",
        "optimizer": sf.adamw(lr=1e-2),
        "compile": "auto",
        "report": False,
        "out": out,
        "console": False,
    }
    return sf.Run(**(arguments | changes))


class Compiled(nn.Module):
    """What is called in a model's place as if torch had compiled it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that a pass seems to take; nothing is really compiled, and what would be is counted."""
    seconds = {"eager": 100.0, "compiled": 50.0, "made": 0.0}
    real = pace.passed

    def compiled(models: dict[str, nn.Module]) -> dict[str, Any]:
        seconds["made"] += 1
        return {name: Compiled(model) for name, model in models.items()}

    def passed(parts: Parts, micro_batch: Any) -> tuple[float, int, float]:
        _, targets, value = real(parts, micro_batch)
        return seconds["compiled" if isinstance(parts.task.forward, Compiled) else "eager"], targets, value

    monkeypatch.setattr(compile_choice, "passed", passed)
    monkeypatch.setattr(compile_choice, "_graphs", lambda: 0)
    monkeypatch.setattr("torch.compiler.reset", lambda: None)  # which imports seconds of torch
    for where in ("compile_choice", "parts", "run"):
        monkeypatch.setattr(f"surefoot.{where}.compiled", compiled)
    monkeypatch.setattr("torch.compile", lambda model, **_: Compiled(model))  # what scores
    return seconds


@pytest.mark.parametrize(("compiled_s", "chosen"), [(50.0, True), (90.0, True), (95.0, False), (200.0, False)])
def test_models_are_compiled_where_that_is_clearly_quicker(
    compiled_s: float, chosen: bool, passes: dict[str, float]
) -> None:
    passes["compiled"] = compiled_s
    run = built()
    run.train()
    assert run.parts.compiled == run.parts.described["compile"] == chosen
    assert isinstance(run.parts.task.forward, Compiled) == chosen


@pytest.mark.parametrize(("eager_s", "made"), [(90.0, 0), (110.0, 1)])  # 6 steps; 30 s are a twentieth of 600
def test_nothing_is_compiled_where_the_run_is_too_short_to_earn_it_back(
    eager_s: float, made: int, passes: dict[str, float]
) -> None:
    passes |= {"eager": eager_s, "compiled": eager_s}
    _, why = compile_choice.settle_compile(built().parts)
    assert passes["made"] == made
    too_short = "auto: a run of about 9m00s is too short to earn back compiling"
    assert why == ("auto: compiled it is 1.00 times as fast" if made else too_short)


def test_a_resumed_run_computes_as_it_began_whatever_would_be_measured_now(
    tmp_path: Path, passes: dict[str, float]
) -> None:
    built(tmp_path / "run", stop_after="2 steps").train()
    passes |= {"eager": 1e-3, "made": 0}
    resumed = built(tmp_path / "run")
    resumed.train()
    assert isinstance(resumed.parts.task.forward, Compiled)
    assert resumed.parts.described["compile"] is True
    assert passes["made"] == 1  # to train: nothing is tried again
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    again = built()
    again.load(newest[0])
    assert again.parts.compiled  # and is scored as it was
    with pytest.raises(sf.CheckpointError, match="compile was True, now False"):
        built(tmp_path / "run", compile=False).train()


def test_a_finished_run_is_verified_and_replayed_as_it_was_chosen(tmp_path: Path, passes: dict[str, float]) -> None:
    run = built(tmp_path / "run", save_every="2 steps", log_every="1 steps", keep=9)
    run.train()
    passes["eager"] = 1e-3
    verdict = sf.verify(built(tmp_path / "run"), steps="all")
    assert verdict.exit_status == 0, verdict
    again = sf.replayed(built(tmp_path / "run"), step=3)
    assert any("uncompiled" in note for note in again.notes)


def test_measuring_leaves_no_trace(passes: dict[str, float]) -> None:
    run = built()
    before = {name: held.clone() for name, held in run.state.models["model"].state_dict().items()}
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index, union-attr]
    parts, why = compile_choice.settle_compile(run.parts)
    assert why == "auto: 2.00 times as fast, compiled in 0 s"
    for name, held in run.state.models["model"].state_dict().items():
        assert torch.equal(held, before[name])
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.state.parameters)
    assert random.getstate() == drawn[0]
    assert np.random.get_state()[1].tolist() == drawn[1]  # type: ignore[index, union-attr]
    assert torch.equal(torch.get_rng_state(), drawn[2])
    assert compile_choice.settle_compile(parts)[1] is None  # settled


def _fails(_: Any) -> dict[str, Any]:
    def forward(_: Tensor) -> Tensor:
        raise RuntimeError("no compiler here\nand more")

    return {"model": forward}


def test_a_model_that_does_not_compile_trains_as_it_is(
    passes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_choice, "compiled", _fails)
    run = built()
    parts, why = compile_choice.settle_compile(run.parts)
    assert why == "auto: it does not compile (RuntimeError: no compiler here)"
    assert not parts.compiled
    run.train()


def _counted(each: Callable[[int], int]) -> tuple[Callable[[Any], dict[str, Any]], Callable[[], int]]:
    """What seems to be compiled into so many graphs in its n-th pass, and how many there are by now."""
    made: list[int] = []

    def compiled(models: dict[str, nn.Module]) -> dict[str, Any]:
        def forward(x: Tensor) -> Any:
            made.append(each(len(made)))
            return models["model"](x)

        return {"model": forward}

    return compiled, lambda: sum(made)


@pytest.mark.parametrize(
    ("each", "why"),
    [
        (lambda call: 9 * (call == 0), "auto: the model falls into more than 8 graphs when it is compiled"),
        (lambda call: int(call < 4), "auto: it is compiled anew in pass after pass"),
        (lambda call: int(call < 2), "auto: compiled it is 1.00 times as fast"),
    ],
)
def test_many_graphs_and_ever_new_ones_are_not_kept(
    each: Callable[[int], int], why: str, passes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, graphs = _counted(each)
    monkeypatch.setattr(compile_choice, "compiled", compiled)
    monkeypatch.setattr(compile_choice, "_graphs", graphs)
    assert compile_choice.settle_compile(built().parts)[1] == why


def test_micro_batches_of_several_shapes_are_not_compiled_for(passes: dict[str, float]) -> None:
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.stack(list(part)) for part in zip(*samples, strict=True))
        more = int(targets.sum()) % 3  # padding, by what is longest
        return torch.cat([inputs, inputs[: more + 1]]), torch.cat([targets, targets[: more + 1]])

    class Samples:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
            return torch.ones(8), torch.tensor(sample % 4)

    run = built(train=Samples(), collate=collate, count=lambda batch: len(batch[1]))
    assert (
        compile_choice.settle_compile(run.parts)[1]
        == "auto: micro-batches have other shapes in other steps, and each would be compiled anew"
    )
    assert passes["made"] == 0


def test_steps_of_ones_own_and_a_loss_that_fails_are_left_as_they_are(passes: dict[str, float]) -> None:
    own = built(loss=None)
    assert compile_choice.settle_compile(own.parts)[1] == "auto: not measured, the steps are the program's own"
    wrong = (torch.randn(64, 8), torch.full((64,), 500))
    with pytest.raises(sf.DataError, match="target 500 is out of range at step 0"):
        built(train=wrong).train()


def test_precision_is_chosen_first_and_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("surefoot.run.compiled", lambda models: {name: Compiled(held) for name, held in models.items()})

    def passed(parts: Parts, _: Any) -> tuple[float, int, float]:
        seen.append(type(parts.task.forward))
        return (1.0 if parts.whole.precision.name == "fp32" else 0.5), 16, 1.0

    monkeypatch.setattr(pace, "passed", passed)
    run = built(compile=True, model=lambda: nn.Linear(8, 20_000))
    assert pace.settle_precision(run.parts) == "auto: 2.0 times as fast as fp32"
    assert set(seen) == {nn.Linear}


def test_layers_of_a_model_that_was_chosen_to_be_compiled_have_no_hooks(passes: dict[str, float]) -> None:
    run = built()
    with run:
        assert run.sitting is not None
        assert run.sitting.between.layers.modules == {}


def test_the_header_and_the_plan_say_what_was_chosen_and_why(
    passes: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    built(console=True).train()
    said = capsys.readouterr().out
    assert "compile on (auto: 2.00 times as fast, compiled in 0 s)" in said
    assert "device  cpu, fp32, compiled" in said
    chosen = str(plan.sections(built().parts)[-1])
    assert "compile auto, tried when the run begins: it takes about 10m00s, compiling 30 s" in chosen
    passes["eager"] = 1.0
    chosen = str(plan.sections(built().parts)[-1])
    assert "compile off (auto: a run of about 6s is too short to earn back compiling)" in chosen
    assert passes["made"] == 2  # by the run


def test_auto_is_typed_like_true_and_nothing_else_is() -> None:
    for typed, meant in (("auto", "auto"), ("true", True), ("False", False)):
        config, _ = configured(Config, [], ["--compile", typed], verb="surefoot train images")
        assert config.compile == meant
    with pytest.raises(sf.ConfigError, match="--compile"):
        configured(Config, [], ["--compile", "often"], verb="surefoot train images")
    with pytest.raises(sf.ConfigError, match="compile = 'often'"):
        built(compile="often")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_run_that_chose_to_compile_resumes_to_the_same_bits_and_is_one_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_choice, "_COST_S", {"cpu": 0.0})
    monkeypatch.setattr(compile_choice, "_WORTH_IT", 0.0)
    named, whole, stopped = built(compile=True), built(), built(tmp_path / "run", stop_after="3 steps")
    for run in (named, whole, stopped):
        run.train()
        torch.compiler.reset()
    resumed = built(tmp_path / "run")
    resumed.train()
    assert whole.parts.compiled
    assert resumed.parts.compiled
    held = [run.state.models["model"].state_dict() for run in (named, whole, resumed)]
    for name, value in held[0].items():
        assert all(torch.equal(value, other[name]) for other in held[1:]), name
