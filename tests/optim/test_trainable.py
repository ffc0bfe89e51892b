"""Freezing and unfreezing while a run goes on, and the modes of models that no optimizer trains.
(about 10 s)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
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
from same_bits import assert_same_bits, changed_names, newest_checkpoint, tensors_of, weights
from stated import lines_naming, numbers_in
from surefoot.checkpoint import Checkpoint
from surefoot.optim.skip_step import skipping

SAMPLES = 32
BATCH = 8
STEPS = 8
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
    "adamw8bit": lambda: sf.optim.adamw8bit(1e-2, weight_decay=0.1),
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
    inputs = torch.randn(SAMPLES, 64, generator=generator)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    return inputs, labels


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


def train(run: sf.Run, body: Body) -> sf.Run:
    with run:
        for step in run:
            body(run, step.index)
    return run


def do_nothing(run: sf.Run, index: int) -> None:
    pass


def thaw(run: sf.Run, index: int) -> None:
    if index == 2:
        run.state.models["model"].get_submodule("backbone").requires_grad_(True)


def thaw_and_freeze(run: sf.Run, index: int) -> None:
    thaw(run, index)
    if index in (4, 6):
        run.state.models["model"].get_submodule("hidden").requires_grad_(index == 6)


def train_in_parts(build_part: Callable[..., sf.Run], body: Body, *, stops: Sequence[int]) -> None:
    """Train a run that stops after each of these steps, and then to its end."""
    for stop in stops:
        train(build_part(stop_after=f"{stop} steps"), body)
    train(build_part(), body)


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a resume needs beside tensors."""
    keys = ("param_groups", "trainable", "optimizer", "eval_mode")
    return {key: checkpoint.state.get(key) for key in keys}


def assert_same_end(run_dir: Path, expected_dir: Path) -> None:
    """The newest checkpoints of two runs have the same tensors and facts."""
    checkpoint = newest_checkpoint(run_dir)
    expected = newest_checkpoint(expected_dir)
    assert_same_bits(tensors_of(checkpoint), tensors_of(expected))
    assert facts_of(checkpoint) == facts_of(expected)


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


def with_teacher(
    run_dir: Path | None, teacher: nn.Module | Callable[[], nn.Module], **changes: Any
) -> sf.Run:
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


def frozen_statistics() -> Statistics:
    return Statistics().requires_grad_(False)


def test_a_teacher_in_evaluation_mode_stays_in_it_and_keeps_its_statistics(tmp_path: Path) -> None:
    teacher = frozen_statistics().eval()
    before = deepcopy(teacher.state_dict())
    resumed_teacher = frozen_statistics().eval()
    resumed_teacher.load_state_dict(before)
    settings: dict[str, Any] = {"ema": 0.5, "check_state": False}

    train(with_teacher(tmp_path, teacher, stop_after="4 steps", **settings), observe)
    run = train(with_teacher(tmp_path, resumed_teacher, **settings), observe)

    assert run.state.step == STEPS
    for observed in (teacher, resumed_teacher):
        assert set(observed.modes) == {False}
        assert not any(part.training for part in observed.modules())
        assert_same_bits(observed.state_dict(), before)
    student: Any = run.state.models["student"]
    assert set(student.modes) == {True}


def test_a_trained_model_in_evaluation_mode_is_still_put_into_training_mode() -> None:
    models = {"student": Statistics().eval(), "teacher": Statistics()}

    run = build(model=models, optimizer={"student": sf.optim.sgd(0.1)}, loss=distilled)

    assert run.state.models["student"].training
    assert run.state.models["teacher"].training


def follow_student(run: sf.Run, index: int) -> None:
    student = run.state.models["student"]
    teacher = run.state.models["teacher"]
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    teacher.train(index % 3 != 1)


def test_statistics_of_a_momentum_encoder_are_those_of_its_mode_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    def build_student(run_dir: Path, **changes: Any) -> sf.Run:
        return with_teacher(run_dir, frozen_statistics, check_state=False, **changes)

    whole = train(build_student(tmp_path / "whole"), follow_student)
    train_in_parts(partial(build_student, tmp_path / "parts"), follow_student, stops=[3, 4, 5])

    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    norm: Any = whole.state.models["teacher"].get_submodule("1")
    in_training_mode = [0, 1, 3, 4, 6, 7]  # steps: the body follows a step
    assert int(norm.num_batches_tracked) == len(in_training_mode)


def test_a_bad_step_changes_no_statistics_of_a_momentum_encoder() -> None:
    bad = torch.tensor(False)

    def poisoned(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return distilled(models, batch) * torch.where(bad, torch.nan, 1.0)

    run = with_teacher(None, frozen_statistics(), loss=poisoned, splits=None)
    teachers = []
    with run:
        for step in run:
            bad.fill_(step.index == 3)
            teachers.append(weights(run, "teacher"))

    changes = [changed_names(after, before) for before, after in pairwise(teachers)]
    statistics = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert changes == [statistics] * 3 + [[]] + [statistics] * 3


def test_one_optimizer_beside_a_frozen_model_is_refused_with_what_to_write() -> None:
    with refused("optimizer-of-frozen-model", model="teacher", trainable=["student"]):
        with_teacher(None, frozen_statistics(), optimizer=sf.optim.sgd(0.1))


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
    adamw = sf.optim.adamw(1e-2, weight_decay=0.0)
    run = build(model=smooth, micro_batch_size=None, clip="off", optimizer=adamw)
    plain = smooth()
    plain.load_state_dict(run.state.models["model"].state_dict())
    trained = [*plain.hidden.parameters(), *plain.head.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)

    with run:
        for step in run:
            (micro_batch,) = step.micro_batches
            optimizer.zero_grad()
            loss(plain, micro_batch.batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            thaw_and_freeze(run, step.index)
            if step.index == 2:
                plain.backbone.requires_grad_(True)
                optimizer.add_param_group({"params": [*plain.backbone.parameters()]})
            if step.index == 4:
                plain.hidden.requires_grad_(False)
            if step.index == 6:
                plain.hidden.requires_grad_(True)

    torch.testing.assert_close(weights(run), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.fast("adamw", "muon")
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS],
)
def test_what_was_frozen_and_unfrozen_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """Stopped in the very step of each change, and before and after it."""
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    settings = {
        "optimizer": OPTIMIZERS[name](),
        "ema": None if name == "schedule_free" else 0.9,
        "clip": "auto 0.9",
    }
    untrained = weights(build(**settings))

    whole = train(build(tmp_path / "whole", **settings), thaw_and_freeze)
    build_part = partial(build, tmp_path / "parts", **settings)
    train_in_parts(build_part, thaw_and_freeze, stops=[3, 4, 5, 7])

    assert {"backbone.0.weight", "backbone.0.bias"} <= {*changed_names(weights(whole), untrained)}
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def test_a_frozen_parameter_stays_frozen_after_a_resume(tmp_path: Path) -> None:
    def freeze(run: sf.Run, index: int) -> None:
        if index == 2:
            run.state.models["model"].get_submodule("hidden").requires_grad_(False)

    stopped = train(build(tmp_path, stop_after="4 steps"), freeze)
    finished = train(build(tmp_path), freeze)

    changed = changed_names(weights(finished), weights(stopped))
    assert "head.weight" in changed
    assert {"hidden.0.weight", "hidden.0.bias"}.isdisjoint(changed)


def test_what_is_trained_is_the_checkpoints_where_the_script_froze_something_else(
    tmp_path: Path, capfd: Any
) -> None:
    """Whether it froze less or more than at the start."""

    def head_alone() -> Net:
        net = frozen_backbone()
        net.hidden.requires_grad_(False)
        return net

    train(build(tmp_path / "whole"), thaw_and_freeze)
    train(build(tmp_path / "parts", stop_after="2 steps"), thaw_and_freeze)
    train(build(tmp_path / "parts", stop_after="5 steps", model=Net), thaw_and_freeze)
    train(build(tmp_path / "parts", model=head_alone, console=True), thaw_and_freeze)

    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    console = capfd.readouterr().out
    (restored,) = lines_naming(console, "note: ", ": backbone.0.weight ... backbone.1.bias")
    assert numbers_in(restored) == [4]
    (thawed,) = lines_naming(console, ": hidden.0.weight ... hidden.0.bias")
    assert numbers_in(thawed) == [7, 2]  # the step, and parameters


def test_rates_that_the_body_changed_resume_too(tmp_path: Path) -> None:
    def slower(run: sf.Run, index: int) -> None:
        if index == 2:
            for group in run.state.optimizers["model"].optimizer.param_groups:
                group["initial_lr"] *= 0.1
                group["weight_decay"] = 0.01
        thaw(run, index)

    whole = train(build(tmp_path / "whole"), slower)
    train_in_parts(partial(build, tmp_path / "parts"), slower, stops=[4])

    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    groups = whole.state.optimizers["model"].optimizer.param_groups
    assert [group["initial_lr"] for group in groups] == [1e-3, 1e-3]


def test_a_run_that_was_killed_after_an_unfreezing_ends_with_the_same_bits(tmp_path: Path) -> None:
    def thaw_freeze_and_die(run: sf.Run, index: int) -> None:
        thaw_and_freeze(run, index)
        if index == 5:
            assert run.parts.checkpointing is not None
            run.parts.checkpointing.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    killed = partial(build, tmp_path / "killed")
    train(build(tmp_path / "whole"), thaw_and_freeze)
    with open(os.devnull, "w") as nowhere:
        process = Forked(
            lambda: train(killed(save_every="3 steps"), thaw_freeze_and_die), stdout=nowhere
        )
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoints" / "step-00000003").exists()

    train(killed(), thaw_and_freeze)

    updates = tensors_of(newest_checkpoint(tmp_path / "killed"))["optimizer/backbone.0.weight/step"]
    assert int(updates) == 5
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


def test_what_a_body_froze_is_not_proved_and_not_wrong(tmp_path: Path) -> None:
    train(build(tmp_path, save_every="2 steps", keep_last=100), thaw)

    verdict = sf.load(build(tmp_path)).verify()

    assert not verdict.problems
    assert [2, 4] in [numbers_in(line) for line in verdict.not_proved]
    (later,) = [outcome for outcome in verdict.outcomes if outcome.window.start == 4]
    assert later.window.stop == 8
    assert later.exact
    assert len(later.records) == 4
    assert later.checkpoints == [6, 8]


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
    passes = 0

    def unfreezing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 3:
            model.get_submodule("backbone").requires_grad_(True)
        return loss(model, batch)

    by_loss = train(build(loss=unfreezing, micro_batch_size=None), do_nothing)
    by_body = train(build(micro_batch_size=None), thaw)

    assert_same_bits(weights(by_loss), weights(by_body))


@pytest.mark.parametrize("clip", ["norm 0.1", "adaptive 0.01", "auto 0.5", "value 0.01"])
def test_gradients_of_what_was_unfrozen_are_limited_too(clip: str) -> None:
    """One that is unfrozen before the first step is trained like one that never was frozen."""
    unfrozen = build(model=frozen_backbone, clip=clip, ema=0.5)
    unfrozen.state.models["model"].requires_grad_(True)
    never_frozen = build(model=Net, clip=clip, ema=0.5)

    unfrozen.train()
    never_frozen.train()

    assert_same_bits(weights(unfrozen), weights(never_frozen))
    assert_same_bits(average_of(unfrozen), average_of(never_frozen))


def average_of(run: sf.Run) -> dict[str, Tensor]:
    return dict(run.state.ema_models["model"].model.state_dict())


def test_what_a_run_counts_and_remembers_outlives_an_unfreezing() -> None:
    bad = torch.tensor(False)

    def poisoned(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) * torch.where(bad, torch.nan, 1.0)

    run = build(loss=poisoned, clip="auto 0.9")
    bad_in_a_row = []
    remembered_norms = []
    with run:
        for step in run:
            bad.fill_(step.index in (0, 1, 2))
            bad_in_a_row.append(float(run.state.optimizers["model"].bad_in_a_row))
            thaw(run, step.index)
            clipping = run.state.optimizers["model"].clipping
            remembered_norms.append(int(clipping.remembered["entered"]))

    weight = run.state.models["model"].get_parameter("backbone.0.weight")
    assert int(run.state.optimizers["model"].optimizer.state[weight]["step"]) == 4
    assert bad_in_a_row == [0, 1, 2, 3, 0, 0, 0, 0]
    assert remembered_norms == [1, 1, 1, 1, 2, 3, 4, 5]


def test_an_average_of_what_is_unfrozen_begins_where_that_stands_now() -> None:
    def fill_and_thaw(run: sf.Run, index: int) -> None:
        thaw(run, index - 4)
        torch.nn.init.ones_(run.state.models["model"].get_parameter("backbone.0.weight"))

    run = train(build(ema=0.9, stop_after="7 steps"), fill_and_thaw)

    assert torch.equal(average_of(run)["backbone.0.weight"], torch.ones(64, 64))


def test_the_mean_of_schedule_free_is_of_the_last_step_if_something_was_unfrozen_after_it() -> None:
    def average_after(body: Body) -> dict[str, Tensor]:
        optimizer = sf.optim.schedule_free(1e-2)
        run = train(build(optimizer=optimizer, stop_after="3 steps"), body)
        run.state.ema_models["model"].refresh(run.state.models["model"])
        return average_of(run)

    assert_same_bits(average_after(thaw), average_after(do_nothing))


def test_hooks_of_an_optimizer_outlive_an_unfreezing() -> None:
    run = build()
    managed = run.state.optimizers["model"]
    steps_of_calls = []
    managed.optimizer.register_step_post_hook(lambda *_: steps_of_calls.append(run.state.step))
    managed.skip = skipping(managed.optimizer, torch.device("cpu"))

    train(run, thaw)

    assert steps_of_calls == list(range(STEPS))


# --- steps of one's own, and several models -------------------------------------------------------


def train_in_own_steps(
    run: sf.Run, *, before: Body = do_nothing, after: Body = do_nothing
) -> sf.Run:
    with run:
        for step in run.steps():
            before(run, step.index)
            sf.forward_backward(step)
            sf.update(step)
            after(run, step.index)
    return run


def thaw_before_step_3(run: sf.Run, index: int) -> None:
    thaw(run, index - 1)


def test_in_a_loop_of_ones_own_what_is_unfrozen_before_the_gradients_is_trained_in_that_step() -> (
    None
):
    untrained = weights(build())

    before = train_in_own_steps(build(), before=thaw_before_step_3)
    after = train_in_own_steps(build(), after=thaw)
    in_body = train(build(), thaw)

    assert {"backbone.0.weight", "backbone.0.bias"} <= {*changed_names(weights(before), untrained)}
    assert_same_bits(weights(after), weights(before))
    assert_same_bits(weights(in_body), weights(before))


def adversarial(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    """Two models, of which each is frozen while the other is trained; the second one's first layer
    longer than that.
    """

    def loss_of_both(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(models["second"](models["first"](batch[0])), batch[1])

    def build_second() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        net[0].requires_grad_(False)
        return net

    run = build(
        run_dir,
        model={"first": lambda: nn.Linear(64, 8), "second": build_second},
        loss=loss_of_both,
        optimizer={"first": sf.optim.adamw(1e-2), "second": sf.optim.adamw(1e-2)},
        **changes,
    )
    first = run.state.models["first"]
    second = run.state.models["second"]
    with run:
        for step in run.steps():
            first.requires_grad_(True)
            second.requires_grad_(False)
            sf.forward_backward(step)
            sf.update(step, "first")

            first.requires_grad_(False)
            second.requires_grad_(True)
            second.get_submodule("0").requires_grad_(step.index >= 4)
            sf.forward_backward(step)
            sf.update(step, "second")
    return run


def test_models_that_take_turns_keep_their_optimizers_state_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    whole = adversarial(tmp_path / "whole")
    for stop in (3, 4, 5, 8):
        adversarial(tmp_path / "parts", stop_after=f"{stop} steps")

    updates = {}
    for name, trained in whole.state.optimizers.items():
        updates[name] = [int(state["step"]) for state in trained.optimizer.state.values()]
    assert updates == {"first": [8, 8], "second": [8, 8, 4, 4]}
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
def test_compiled_runs_that_unfreeze_resume_to_the_same_bits_too(tmp_path: Path) -> None:
    def build_compiled(run_dir: Path, **changes: Any) -> sf.Run:
        torch.compiler.reset()
        return build(run_dir, compile=True, **changes)

    train(build_compiled(tmp_path / "whole"), thaw_and_freeze)
    build_part = partial(build_compiled, tmp_path / "parts")
    train_in_parts(build_part, thaw_and_freeze, stops=[4, 6])

    assert_same_end(tmp_path / "parts", tmp_path / "whole")


# --- what is refused ------------------------------------------------------------------------------


def unfreeze_head(run: sf.Run, _: int) -> None:
    run.state.models["model"].get_submodule("head").requires_grad_(True)


def unfreeze_teacher(run: sf.Run, _: int) -> None:
    run.state.models["teacher"].requires_grad_(True)


def replace_head(run: sf.Run, _: int) -> None:
    vars(run.state.models["model"])["_modules"]["head"] = nn.Linear(8, 3)


def add_parameter(run: sf.Run, _: int) -> None:
    run.state.models["model"].get_submodule("hidden.1").register_parameter(
        "slope", nn.Parameter(torch.ones(()))
    )


def replace_teacher(run: sf.Run, _: int) -> None:
    run.state.models["teacher"] = Statistics()


TEACHER = ["teacher.0.weight", "teacher.0.bias", "teacher.1.weight", "teacher.1.bias"]


def other_groups(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Two groups as long as there are few parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(parameters) > 4:
        return torch.optim.SGD(parameters, lr=0.1)
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.2}], lr=0.1)


def with_frozen_head() -> sf.Run:
    optimizer = sf.optim.adamw(1e-2, lr_multipliers=sf.optim.frozen("head.*"))
    return build(model=Net, optimizer=optimizer)


def test_what_has_no_learning_rate_cannot_be_unfrozen() -> None:
    with refused("unfrozen-without-learning-rate"):
        train(with_frozen_head(), unfreeze_head)


def test_what_has_no_optimizer_cannot_be_unfrozen() -> None:
    with refused("unfrozen-without-optimizer", names=TEACHER):
        train(with_teacher(None, frozen_statistics()), unfreeze_teacher)


def test_another_layer_in_the_place_of_one_of_the_start_is_refused() -> None:
    names = ["head.weight", "head.bias"]

    with refused("parameters-replaced", names=names, found="is now another tensor"):
        train(build(), replace_head)


def test_another_model_in_the_place_of_one_of_the_start_is_refused() -> None:
    run = with_teacher(None, Statistics())

    with refused("parameters-replaced", names=TEACHER, found="is now another tensor"):
        train(run, replace_teacher)


def test_a_new_parameter_is_refused() -> None:
    with refused("parameters-replaced", names=["hidden.1.slope"], found="is new"):
        train(build(), add_parameter)


def test_a_factory_that_makes_other_groups_of_more_parameters_is_refused() -> None:
    with refused("groups-of-factory-changed"):
        train(build(optimizer=other_groups), thaw)


def test_modules_without_parameters_may_come_and_go() -> None:
    def swap(run: sf.Run, index: int) -> None:
        model: Any = run.state.models["model"]
        activations = [nn.ReLU(), nn.GELU()]
        model.hidden[1] = activations[index % 2]

    run = train(build(), swap)

    assert run.state.step == STEPS


# --- several processes ----------------------------------------------------------------------------


def train_on_a_rank(
    run_dir: str | None = None, stop: int = STEPS, *, early: bool = False
) -> dict[str, Tensor]:
    """Unfrozen after step 3 or (`early`) before the run is opened, a part frozen after step 5 and
    no longer after step 7.

    In float64, the averages too.
    """
    inputs, labels = data()
    run = build(
        run_dir,
        model=lambda: frozen_backbone().double(),
        train_data=(inputs.double(), labels),
        ema=0.9,
        stop_after=f"{stop} steps",
    )
    run.state.models["model"].get_submodule("backbone").requires_grad_(early)
    train(run, thaw_and_freeze)
    averages = run.state.ema_models["model"].model.named_parameters(prefix="ema")
    return weights(run) | dict(averages)


def test_two_processes_unfreeze_as_one_does_and_resume_to_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole_dir = str(tmp_path / "whole")
    parts_dir = str(tmp_path / "parts")
    cases: list[dict[str, Any]] = [{"early": True}, {"run_dir": whole_dir}]
    for stop in (3, 5, 7, 8):
        cases.append({"run_dir": parts_dir, "stop": stop})

    early, whole, *_, resumed = ranks.each(2, train_on_a_rank, cases)

    alone_early = train_on_a_rank(early=True)
    alone = train_on_a_rank()
    for rank in (0, 1):
        torch.testing.assert_close(early[rank], alone_early, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(whole[rank], alone, rtol=1e-9, atol=1e-9)
        assert_same_bits(resumed[rank], whole[rank])
    assert_same_end(tmp_path / "parts", tmp_path / "whole")


def rank_1_unfreezes(run: sf.Run, index: int) -> None:
    if not run.parts.world.is_main:
        thaw(run, index)


def rank_1_freezes(run: sf.Run, index: int) -> None:
    if index == 2 and not run.parts.world.is_main:
        run.state.models["model"].get_submodule("hidden").requires_grad_(False)


def unfreeze_all(run: sf.Run, _: int) -> None:
    run.state.models["model"].requires_grad_(True)


def do_what_ranks_cannot_follow(what: str, run_dir: str) -> None:
    match what:
        case "unfreezes":
            train(build(model=smooth, parallel="ddp"), rank_1_unfreezes)
        case "freezes":
            train(build(model=smooth, parallel="ddp"), rank_1_freezes)
        case "starts":
            run = build()
            backbone = run.state.models["model"].get_submodule("backbone")
            backbone.requires_grad_(not run.parts.world.is_main)
            run.train()
        case "unused":
            train(build(model=with_spare), unfreeze_all)
        case "own steps":
            train_in_own_steps(build(), before=thaw)
        case "fsdp":
            train(build(model=smooth, parallel="fsdp"), thaw)
        case "fsdp resumes":
            train(build(run_dir, model=smooth, parallel="ddp", stop_after="4 steps"), thaw)
            train(build(run_dir, model=smooth, parallel="fsdp"), thaw)


def with_spare() -> nn.Module:
    net = frozen_backbone()
    net.hidden.register_parameter("spare", nn.Parameter(torch.ones(2), requires_grad=False))
    return net


@pytest.mark.fast("unused")
@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param(
            "unfreezes",
            "after step 3 rank 1 trains other parameters than other ranks: "
            "4 parameters unfrozen: backbone.0.",
            id="unfreezes",
        ),
        pytest.param(
            "freezes",
            "after step 3 rank 1 trains other parameters than other ranks: "
            "2 parameters frozen: hidden.0.weight",
            id="freezes",
        ),
        pytest.param(
            "starts",
            "frozen: rank 0 has 'backbone.0.weight, backbone.0.bias, backbone.1.weight, back",
            id="starts",
        ),
        pytest.param(
            "unused",
            "1 parameter gets no gradient, and other processes would wait for it: hidden.spare",
            id="unused",
        ),
        pytest.param("own steps", "[unfrozen-inside-step]", id="own steps"),
        pytest.param("fsdp", "[frozen-under-fsdp]", id="fsdp"),
        pytest.param("fsdp resumes", "[checkpoint-of-other-frozen-parameters]", id="fsdp resumes"),
    ],
)
def test_what_several_processes_cannot_follow_ends_all_of_them(
    what: str, message: str, ranks: Ranks, tmp_path: Path
) -> None:
    place = ranks.start(2, do_what_ranks_cannot_follow, what=what, run_dir=str(tmp_path))

    outcomes = ranks.outcomes(place)

    assert all(outcome.status > 0 for outcome in outcomes)
    assert message in "".join(outcome.text for outcome in outcomes)  # one of them says it
