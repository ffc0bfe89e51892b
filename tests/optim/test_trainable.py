"""Freezing and unfreezing while a run goes on, and the modes of models that no optimizer trains.
(about 10 s)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from forked import Forked
from rank_processes import Ranks
from refused import refused
from stated import lines_naming, numbers_in
from surefoot.checkpoint.store import Store
from surefoot.optim.skip_step import skipping

SAMPLES, BATCH, STEPS = 32, 8, 8
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: sf.optim.adamw(1e-2, weight_decay=0.1),
    "layer decay": lambda: sf.optim.adamw(
        1e-2, weight_decay=0.1, lr_multipliers=sf.optim.layer_decay(0.5)
    ),
    "sgd": lambda: sf.optim.sgd(1e-2, momentum=0.9, weight_decay=0.1),
    "lion": lambda: sf.optim.lion(1e-3, weight_decay=0.1),
    "adafactor": lambda: sf.optim.adafactor(1e-2, weight_decay=0.1),
    "muon": lambda: sf.optim.muon(1e-2, weight_decay=0.1),
    "nadam": lambda: sf.optim.nadam(1e-2),
    "adamw8bit": lambda: (
        pytest.importorskip("bitsandbytes") and sf.optim.adamw8bit(1e-2, weight_decay=0.1)
    ),
    "schedule_free": lambda: sf.optim.schedule_free(1e-2, weight_decay=0.1),
    "a user's": lambda: lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
}

FAST = ("adamw", "sgd", "muon", "schedule_free", "a user's")


class Net(nn.Sequential):
    """A backbone (a matrix large enough for 8 bits, batch statistics), a hidden layer and a
    head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.hidden = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)


def frozen_backbone() -> Net:
    net = Net()
    net.backbone.requires_grad_(False)
    return net


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 64, generator=generator), torch.randint(
        3, (SAMPLES,), generator=generator
    )


def build(run_dir: Path | str | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": frozen_backbone,
        "loss": loss,
        "train_data": data(),
        "batch_size": BATCH,
        "micro_batch_size": BATCH // 2,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.adamw(1e-2, weight_decay=0.1),
        "save_every": "100 steps",
        "log_every": "1 steps",
        "precision": "fp32",
        "device": "cpu",
        "run_dir": run_dir,
        "report": False,
        "console": False,
    }
    return sf.Run(**(settings | changes))


Body = Callable[[sf.Run, int], object]


def made(run: sf.Run, body: Body) -> sf.Run:
    with run:
        for step in run:
            body(run, step.index)
    return run


def thaw(run: sf.Run, index: int) -> None:
    if index == 2:
        run.state.models["model"].get_submodule("backbone").requires_grad_(True)


def thaw_and_freeze(run: sf.Run, index: int) -> None:
    thaw(run, index)
    if index in (4, 6):
        run.state.models["model"].get_submodule("hidden").requires_grad_(index == 6)


def everything(run_dir: Path) -> dict[str, Any]:
    """All tensors of the newest checkpoint, and the facts beside them that a resume needs."""
    contents, damaged = Store(run_dir / "checkpoints").newest_intact()
    assert not damaged
    tensors = {
        f"{file}/{name}": held.whole() if not isinstance(held, Tensor) else held
        for file, named in contents.files.items()
        for name, held in named.items()
    }
    return tensors | {
        key: contents.state.get(key)
        for key in ("param_groups", "trainable", "optimizer", "eval_mode")
    }


def assert_equal_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    unlike = [
        name
        for name, held in one.items()
        if not (torch.equal(held, other[name]) if isinstance(held, Tensor) else held == other[name])
    ]
    assert not unlike


# --- the modes of models that no optimizer trains -------------------------------------------------


class Statistics(nn.Sequential):
    """Notes the mode in which it is called."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 3), nn.BatchNorm1d(3))
        self.modes: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append(self.training)
        return torch.as_tensor(super().forward(inputs))


def distilled(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        target = models["teacher"](batch[0])
    return F.mse_loss(models["student"](batch[0]), target)


def with_teacher(run_dir: Path | None, teacher: nn.Module, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": {"student": Statistics, "teacher": teacher},
        "optimizer": {"student": sf.optim.sgd(0.1)},
        "loss": distilled,
        "splits": {"val": sf.Split(data())},
        "evaluate_every": "2 steps",
    }
    return build(run_dir, **(settings | changes))


def observe(run: sf.Run, _: int) -> None:
    run.evaluate()


def test_a_teacher_in_evaluation_mode_stays_in_it_and_keeps_its_statistics(tmp_path: Path) -> None:
    teachers = [Statistics().eval().requires_grad_(False) for _ in range(2)]
    before = {name: held.clone() for name, held in teachers[0].state_dict().items()}
    teachers[1].load_state_dict(before)
    made(
        with_teacher(tmp_path, teachers[0], stop_after="4 steps", ema=0.5, check_state=False),
        observe,
    )
    run = made(with_teacher(tmp_path, teachers[1], ema=0.5, check_state=False), observe)  # goes on
    assert run.state.step == STEPS
    for teacher in teachers:
        assert set(teacher.modes) == {False}
        assert not any(part.training for part in teacher.modules())
        assert all(torch.equal(held, before[name]) for name, held in teacher.state_dict().items())
    student: Any = run.state.models["student"]
    assert set(student.modes) == {True}


def test_a_trained_model_in_evaluation_mode_is_still_put_into_training_mode() -> None:
    run = with_teacher(
        None, Statistics().eval(), model={"student": Statistics().eval(), "teacher": Statistics()}
    )
    assert [run.state.models[name].training for name in ("student", "teacher")] == [True, True]


def follow_student(run: sf.Run, index: int) -> None:
    student = run.state.models["student"]
    teacher = run.state.models["teacher"]
    with torch.no_grad():
        for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
            own.lerp_(other, 0.1)
    teacher.train(index % 3 != 1)


def test_statistics_of_a_momentum_encoder_are_those_of_its_mode_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    def teacher() -> nn.Module:
        return Statistics().requires_grad_(False)

    whole = made(
        with_teacher(
            tmp_path / "whole",
            teacher(),
            model={"student": Statistics, "teacher": teacher},
            check_state=False,
        ),
        follow_student,
    )
    for until in (3, 4, 5, STEPS):
        made(
            with_teacher(
                tmp_path / "parts",
                teacher(),
                model={"student": Statistics, "teacher": teacher},
                stop_after=f"{until} steps",
                check_state=False,
            ),
            follow_student,
        )
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))
    norm: Any = whole.state.models["teacher"][1]  # type: ignore[index]
    assert int(norm.num_batches_tracked) == sum(
        index == 0 or (index - 1) % 3 != 1 for index in range(STEPS)
    )


def test_a_bad_step_changes_no_statistics_of_a_momentum_encoder() -> None:
    def poisoned(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = distilled(models, batch)
        return value * torch.where(bad, torch.nan, 1.0)

    bad = torch.tensor(False)
    run = with_teacher(None, Statistics().requires_grad_(False), loss=poisoned, splits=None)
    held: list[dict[str, Tensor]] = []
    with run:
        for step in run:
            bad.fill_(step.index == 3)
            held.append(
                {
                    name: each.clone()
                    for name, each in run.state.models["teacher"].state_dict().items()
                }
            )
    unchanged = [
        all(torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(held)
    ]
    assert unchanged == [index == 3 for index in range(STEPS - 1)]


def test_one_optimizer_beside_a_frozen_model_is_refused_with_what_to_write() -> None:
    with refused("optimizer-of-frozen-model", model="teacher", trainable=["student"]):
        with_teacher(None, Statistics().requires_grad_(False), optimizer=sf.optim.sgd(0.1))


# --- unfreezing -----------------------------------------------------------------------------------


def smooth() -> Net:
    """Without random numbers, and without biases whose gradient is only rounding."""
    net = Net()
    net.hidden[2] = nn.Identity()
    net.backbone[1] = nn.LayerNorm(64)
    net.backbone.requires_grad_(False)
    return net


def test_an_unfrozen_parameter_is_trained_as_after_torchs_add_param_group() -> None:
    """Against torch's AdamW over the same batches, which too keeps the state of a parameter that is
    frozen for two steps.
    """
    run = build(
        model=smooth,
        micro_batch_size=None,
        clip="off",
        optimizer=sf.optim.adamw(1e-2, weight_decay=0.0),
    )
    plain = smooth()
    plain.load_state_dict(run.state.models["model"].state_dict())
    optimizer = torch.optim.AdamW(
        [*plain.hidden.parameters(), *plain.head.parameters()], lr=1e-2, weight_decay=0.0
    )
    with run:
        for step in run:
            (micro_batch,) = step.micro_batches
            optimizer.zero_grad()
            loss(plain, micro_batch.batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            thaw_and_freeze(run, step.index)
            if step.index == 2:
                optimizer.add_param_group(
                    {"params": [*plain.backbone.requires_grad_(True).parameters()]}
                )
            if step.index in (4, 6):
                plain.hidden.requires_grad_(step.index == 6)
    for name, held in run.state.models["model"].state_dict().items():
        torch.testing.assert_close(held, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.fast("adamw", "muon")
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)
def test_what_was_frozen_and_unfrozen_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """Stopped in the very step of each change, and before and after it."""
    settings = {
        "optimizer": OPTIMIZERS[name](),
        "ema": None if name == "schedule_free" else 0.9,
        "clip": "auto 0.9",
    }
    start = build(**settings).state.models["model"].get_submodule("backbone.0")
    before = [held.detach().clone() for held in start.parameters()]
    whole = made(build(tmp_path / "whole", **settings), thaw_and_freeze)
    after = [*whole.state.models["model"].get_submodule("backbone.0").parameters()]
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    for until in (3, 4, 5, 7, STEPS):
        made(build(tmp_path / "parts", stop_after=f"{until} steps", **settings), thaw_and_freeze)
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))


def test_a_frozen_parameter_stays_frozen_after_a_resume(tmp_path: Path) -> None:
    def freeze(run: sf.Run, index: int) -> None:
        if index == 2:
            run.state.models["model"].get_submodule("hidden").requires_grad_(False)

    made(build(tmp_path, stop_after="4 steps"), freeze)
    then = everything(tmp_path)
    made(build(tmp_path), freeze)
    assert all(
        torch.equal(then[f"model/hidden.0.{name}"], everything(tmp_path)[f"model/hidden.0.{name}"])
        for name in ("weight", "bias")
    )


def test_what_is_trained_is_the_checkpoints_where_the_script_froze_something_else(
    tmp_path: Path, capfd: Any
) -> None:
    """Whether it froze less or more than at the start."""
    made(build(tmp_path / "whole"), thaw_and_freeze)

    def head_alone() -> Net:
        net = frozen_backbone()
        net.hidden.requires_grad_(False)
        return net

    made(build(tmp_path / "parts", stop_after="2 steps"), thaw_and_freeze)
    made(build(tmp_path / "parts", stop_after="5 steps", model=Net), thaw_and_freeze)
    made(build(tmp_path / "parts", model=head_alone, console=True), thaw_and_freeze)
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))
    said = capfd.readouterr().out
    (restored,) = lines_naming(said, "note: ", ": backbone.0.weight ... backbone.1.bias")
    assert numbers_in(restored) == [4]
    (thawed,) = lines_naming(said, ": hidden.0.weight ... hidden.0.bias")
    assert numbers_in(thawed) == [7, 2]  # the step, and parameters


def test_rates_that_the_body_changed_resume_too(tmp_path: Path) -> None:
    def slower(run: sf.Run, index: int) -> None:
        if index == 2:
            for group in run.state.optimizers["model"].optimizer.param_groups:
                group["initial_lr"] *= 0.1
                group["weight_decay"] = 0.01
        thaw(run, index)

    whole = made(build(tmp_path / "whole"), slower)
    made(build(tmp_path / "parts", stop_after="4 steps"), slower)
    made(build(tmp_path / "parts"), slower)
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))
    assert [
        group["initial_lr"] for group in whole.state.optimizers["model"].optimizer.param_groups
    ] == [1e-3, 1e-3]


def test_a_run_that_was_killed_after_an_unfreezing_ends_with_the_same_bits(tmp_path: Path) -> None:
    made(build(tmp_path / "whole"), thaw_and_freeze)

    def killed(run: sf.Run, index: int) -> None:
        thaw_and_freeze(run, index)
        if index == 5:
            assert run.parts.checkpointing is not None
            run.parts.checkpointing.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    with open(os.devnull, "w") as nowhere:
        process = Forked(
            lambda: made(build(tmp_path / "killed", save_every="3 steps"), killed), stdout=nowhere
        )
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoints" / "step-00000003").exists()
    made(build(tmp_path / "killed"), thaw_and_freeze)
    assert int(everything(tmp_path / "killed")["optimizer/backbone.0.weight/step"]) == 5
    assert_equal_bits(everything(tmp_path / "killed"), everything(tmp_path / "whole"))


def test_what_a_body_froze_is_not_proved_and_not_wrong(tmp_path: Path) -> None:
    made(build(tmp_path, save_every="2 steps", keep_last=100), thaw)
    verdict = sf.load(build(tmp_path)).verify()
    assert not verdict.problems
    assert [2, 4] in [numbers_in(line) for line in verdict.not_proved]
    (later,) = [each for each in verdict.outcomes if each.window.start == 4]
    assert (later.window.stop, later.exact) == (8, True)
    assert (len(later.records), later.checkpoints) == (4, [6, 8])


def test_unfreezing_in_a_sample_function_counts_where_the_run_trains_by_itself() -> None:
    def unfreeze(model: nn.Module) -> str:
        model.get_submodule("backbone").requires_grad_(True)
        return ""

    run = build(sample_fn=unfreeze, sample_every="4 steps")
    weight = run.state.models["model"].get_parameter("backbone.0.weight")
    before = weight.detach().clone()
    run.train()
    assert not torch.equal(weight, before)
    assert int(run.state.optimizers["model"].optimizer.state[weight]["step"]) == 4


def test_what_a_loss_unfreezes_is_trained_from_the_next_step_without_this_ones_gradient() -> None:
    passes = []

    def unfreezing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        passes.append(None)
        if len(passes) == 3:
            model.get_submodule("backbone").requires_grad_(True)
        return loss(model, batch)

    runs = (
        made(build(loss=unfreezing, micro_batch_size=None), lambda run, index: None),
        made(build(micro_batch_size=None), thaw),
    )
    one, other = (dict(run.state.models["model"].state_dict()) for run in runs)
    assert_equal_bits(one, other)


@pytest.mark.parametrize("clip", ["norm 0.1", "adaptive 0.01", "auto 0.5", "value 0.01"])
def test_gradients_of_what_was_unfrozen_are_limited_too(clip: str) -> None:
    """One that is unfrozen before the first step is trained like one that never was frozen."""
    limited, never = (build(model=model, clip=clip, ema=0.5) for model in (frozen_backbone, Net))
    limited.state.models["model"].requires_grad_(True)
    for run in (limited, never):
        run.train()
    for average, other in zip(
        limited.state.ema_models.values(), never.state.ema_models.values(), strict=True
    ):
        assert_equal_bits(dict(average.model.state_dict()), dict(other.model.state_dict()))
    assert_equal_bits(
        dict(limited.state.models["model"].state_dict()),
        dict(never.state.models["model"].state_dict()),
    )


def test_what_a_run_counts_and_remembers_outlives_an_unfreezing() -> None:
    bad = torch.tensor(False)

    def poisoned(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) * torch.where(bad, torch.nan, 1.0)

    run = build(loss=poisoned, clip="auto 0.9")
    counted = []
    remembered = []
    with run:
        for step in run:
            bad.fill_(step.index in (0, 1, 2))
            counted.append(float(run.state.optimizers["model"].bad_in_a_row))
            thaw(run, step.index)
            remembered.append(int(run.state.optimizers["model"].clipping.remembered["entered"]))
    weight = run.state.models["model"].get_parameter("backbone.0.weight")
    assert int(run.state.optimizers["model"].optimizer.state[weight]["step"]) == 4
    assert counted == [0, 1, 2, 3, 0, 0, 0, 0]
    assert remembered == [1, 1, 1, 1, 2, 3, 4, 5]


def test_an_average_of_what_is_unfrozen_begins_where_that_stands_now() -> None:
    def fill_and_thaw(run: sf.Run, index: int) -> None:
        thaw(run, index - 4)
        torch.nn.init.ones_(run.state.models["model"].get_parameter("backbone.0.weight"))

    run = made(build(ema=0.9, stop_after="7 steps"), fill_and_thaw)
    assert torch.equal(
        run.state.ema_models["model"].model.get_parameter("backbone.0.weight"), torch.ones(64, 64)
    )


def test_the_mean_of_schedule_free_is_of_the_last_step_if_something_was_unfrozen_after_it() -> None:
    settings = {"optimizer": sf.optim.schedule_free(1e-2), "stop_after": "3 steps"}
    averages = []
    for body in (thaw, lambda run, index: None):
        run = made(build(**settings), body)
        run.state.ema_models["model"].refresh(run.state.models["model"])
        averages.append(dict(run.state.ema_models["model"].model.state_dict()))
    assert_equal_bits(*averages)


def test_hooks_of_an_optimizer_outlive_an_unfreezing() -> None:
    run = build()
    called = []
    run.state.optimizers["model"].optimizer.register_step_post_hook(
        lambda *_: called.append(run.state.step)
    )
    run.state.optimizers["model"].skip = skipping(
        run.state.optimizers["model"].optimizer, torch.device("cpu")
    )
    made(run, thaw)
    assert called == list(range(STEPS))


# --- steps of one's own, and several models -------------------------------------------------------


def own_steps(
    run: sf.Run, *, before: Body = lambda run, index: None, after: Body = lambda run, index: None
) -> sf.Run:
    with run:
        for step in run.steps():
            before(run, step.index)
            sf.forward_backward(step)
            sf.update(step)
            after(run, step.index)
    return run


def test_in_a_loop_of_ones_own_what_is_unfrozen_before_the_gradients_is_trained_in_that_step() -> (
    None
):
    def one_later(run: sf.Run, index: int) -> None:
        thaw(run, index - 1)

    untouched = dict(build().state.models["model"].named_parameters())
    runs = [
        own_steps(build(), before=one_later),
        own_steps(build(), after=thaw),
        made(build(), thaw),
    ]
    assert not any(
        torch.equal(held, untouched[name])
        for name, held in runs[0].state.models["model"].named_parameters()
        if "0" in name
    )
    for other in runs[1:]:
        assert_equal_bits(
            dict(runs[0].state.models["model"].state_dict()),
            dict(other.state.models["model"].state_dict()),
        )


def adversarial(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    """Two models, of which each is frozen while the other is trained; the second one's first layer
    longer than that.
    """

    def both(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(models["second"](models["first"](batch[0])), batch[1])

    def second() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        net[0].requires_grad_(False)
        return net

    named = {"first": lambda: nn.Linear(64, 8), "second": second}
    run = build(
        run_dir,
        model=named,
        loss=both,
        optimizer=dict.fromkeys(named, sf.optim.adamw(1e-2)),
        **changes,
    )
    with run:
        for step in run.steps():
            first, last = (run.state.models[name] for name in named)
            for name in named:
                first.requires_grad_(name == "first")
                last.requires_grad_(name == "second")
                last[0].requires_grad_(name == "second" and step.index >= 4)  # type: ignore[index,operator]
                sf.forward_backward(step)
                sf.update(step, name)
    return run


def test_models_that_take_turns_keep_their_optimizers_state_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    run = adversarial(tmp_path / "whole")
    made_steps = {
        name: [int(state["step"]) for state in trained.optimizer.state.values()]
        for name, trained in run.state.optimizers.items()
    }
    assert made_steps == {"first": [8, 8], "second": [8, 8, 4, 4]}
    for until in (3, 4, 5, 8):
        adversarial(tmp_path / "parts", stop_after=f"{until} steps")
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))


@pytest.mark.slow
def test_compiled_runs_that_unfreeze_resume_to_the_same_bits_too(tmp_path: Path) -> None:
    made(build(tmp_path / "whole", compile=True), thaw_and_freeze)
    for until in (4, 6, STEPS):
        torch.compiler.reset()
        made(build(tmp_path / "parts", compile=True, stop_after=f"{until} steps"), thaw_and_freeze)
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))


# --- what is refused ------------------------------------------------------------------------------


def frozen_by_rates(run: sf.Run, _: int) -> None:
    run.state.models["model"].get_submodule("head").requires_grad_(True)


def without_an_optimizer(run: sf.Run, _: int) -> None:
    run.state.models["teacher"].requires_grad_(True)


def another_layer(run: sf.Run, _: int) -> None:
    vars(run.state.models["model"])["_modules"]["head"] = nn.Linear(8, 3)


def a_new_parameter(run: sf.Run, _: int) -> None:
    run.state.models["model"].get_submodule("hidden.1").register_parameter(
        "slope", nn.Parameter(torch.ones(()))
    )


def another_model(run: sf.Run, _: int) -> None:
    run.state.models["teacher"] = Statistics()


TEACHER = ["teacher.0.weight", "teacher.0.bias", "teacher.1.weight", "teacher.1.bias"]


def other_groups(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Two groups as long as there are few parameters."""
    every = [parameter for group in groups for parameter in group["params"]]
    return torch.optim.SGD(
        [{"params": every}]
        if len(every) > 4
        else [{"params": every[:1]}, {"params": every[1:], "lr": 0.2}],
        lr=0.1,
    )


@pytest.mark.parametrize(
    ("run", "body", "code", "fields"),
    [
        (
            lambda: build(
                model=Net, optimizer=sf.optim.adamw(1e-2, lr_multipliers=sf.optim.frozen("head.*"))
            ),
            frozen_by_rates,
            "unfrozen-without-learning-rate",
            {},
        ),
        (
            lambda: with_teacher(None, Statistics().requires_grad_(False)),
            without_an_optimizer,
            "unfrozen-without-optimizer",
            {"names": TEACHER},
        ),
        (
            build,
            another_layer,
            "parameters-replaced",
            {"names": ["head.weight", "head.bias"], "found": "is now another tensor"},
        ),
        (
            build,
            a_new_parameter,
            "parameters-replaced",
            {"names": ["hidden.1.slope"], "found": "is new"},
        ),
        (
            lambda: with_teacher(None, Statistics()),
            another_model,
            "parameters-replaced",
            {"names": TEACHER, "found": "is now another tensor"},
        ),
        (lambda: build(optimizer=other_groups), thaw, "groups-of-factory-changed", {}),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    run: Callable[[], sf.Run], body: Body, code: str, fields: dict[str, Any]
) -> None:
    with refused(code, **fields):
        made(run(), body)


def test_modules_without_parameters_may_come_and_go() -> None:
    def swap(run: sf.Run, index: int) -> None:
        model: Any = run.state.models["model"]
        model.hidden[1] = nn.GELU() if index % 2 else nn.ReLU()

    assert made(build(), swap).state.step == STEPS


# --- several processes ----------------------------------------------------------------------------


def widened(samples: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return samples[0].double(), samples[1]


def on_a_rank(
    run_dir: str | None = None, until: int = STEPS, *, early: bool = False
) -> dict[str, Tensor]:
    """Unfrozen after step 3 or (`early`) before the run is opened, a part frozen after step 5 and
    no longer after step 7.

    In float64, the averages too.
    """
    run = build(
        run_dir,
        model=lambda: frozen_backbone().double(),
        train_data=widened(data()),
        ema=0.9,
        stop_after=f"{until} steps",
    )
    run.state.models["model"].get_submodule("backbone").requires_grad_(early)
    made(run, thaw_and_freeze)
    return {
        **run.state.models["model"].state_dict(),
        **dict(run.state.ema_models["model"].model.named_parameters(prefix="ema")),
    }


def test_two_processes_unfreeze_as_one_does_and_resume_to_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    cases: list[dict[str, Any]] = [{"early": True}, {"run_dir": str(tmp_path / "whole")}]
    cases += [{"run_dir": str(tmp_path / "parts"), "until": until} for until in (3, 5, 7, 8)]
    early, whole, *_, last = ranks.each(2, on_a_rank, cases)
    for together, alone in ((early, on_a_rank(early=True)), (whole, on_a_rank())):
        for of_rank in together:
            for name, held in alone.items():
                torch.testing.assert_close(of_rank[name], held, rtol=1e-9, atol=1e-9)
    for one, other in zip(whole, last, strict=True):
        assert_equal_bits(one, other)
    assert_equal_bits(everything(tmp_path / "parts"), everything(tmp_path / "whole"))


def unlike_on_ranks(what: str, run_dir: str) -> None:
    """Rank 1, or both, do what several processes cannot follow."""

    def body(run: sf.Run, index: int) -> None:
        model = run.state.models["model"]
        first = run.parts.world.is_main
        if index == 2 and not (first and what in ("unfreezes", "freezes")):
            model.get_submodule("hidden" if what == "freezes" else "backbone").requires_grad_(
                what != "freezes"
            )

    if what == "starts":
        run = build()
        run.state.models["model"].get_submodule("backbone").requires_grad_(
            not run.parts.world.is_main
        )
        run.train()
    elif what == "own steps":
        own_steps(build(), before=body)
    elif what == "unused":
        made(build(model=with_spare), lambda run, _: run.state.models["model"].requires_grad_(True))
    elif what == "fsdp resumes":
        made(build(run_dir, model=smooth, parallel="ddp", stop_after="4 steps"), body)
        made(build(run_dir, model=smooth, parallel="fsdp"), body)
    else:
        made(build(model=smooth, parallel="fsdp" if what == "fsdp" else "ddp"), body)


def with_spare() -> nn.Module:
    net = frozen_backbone()
    net.hidden.register_parameter("spare", nn.Parameter(torch.ones(2), requires_grad=False))
    return net


@pytest.mark.fast(
    "unused-1 parameter gets no gradient, and other processes would wait for it: hidden.spare"
)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "unfreezes",
            "after step 3 rank 1 trains other parameters than other ranks: 4 parameters unfrozen: backbone.0.",
        ),
        (
            "freezes",
            "after step 3 rank 1 trains other parameters than other ranks: 2 parameters frozen: hidden.0.weight",
        ),
        (
            "starts",
            "frozen: rank 0 has 'backbone.0.weight, backbone.0.bias, backbone.1.weight, back",
        ),
        (
            "unused",
            "1 parameter gets no gradient, and other processes would wait for it: hidden.spare",
        ),
        (
            "own steps",
            "[unfrozen-inside-step]",
        ),
        (
            "fsdp",
            "[frozen-under-fsdp]",
        ),
        (
            "fsdp resumes",
            "[checkpoint-of-other-frozen-parameters]",
        ),
    ],
)
def test_what_several_processes_cannot_follow_ends_all_of_them(
    what: str, says: str, ranks: Ranks, tmp_path: Path
) -> None:
    outcomes = ranks.outcomes(ranks.start(2, unlike_on_ranks, what=what, run_dir=str(tmp_path)))
    assert all(outcome.status > 0 for outcome in outcomes)
    assert says in "".join(
        outcome.text for outcome in outcomes
    )  # what all of them end of, one says
