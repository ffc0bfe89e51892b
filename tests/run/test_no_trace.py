"""Law 5 for all that is tried on a run or asked of it: every bit of the run stays as it was, and
what changes meanwhile has a name. (15 s)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import surefoot as sf
from in_one import in_one
from rank_processes import Ranks
from refused import refused
from small_runs import Augmented, Batches, Net, build
from surefoot.checkpoint.snapshot import Snapshot, changed_values
from surefoot.run.run import trial_steps
from surefoot.tools.replay.inspect_step import look
from surefoot.train.loop import Step, forward_backward, update
from surefoot.train.model_weights import weights_of

Optimizers = dict[str, Any]
OPTIMIZERS: Optimizers = {
    "adamw": sf.optim.adamw(lr=1e-2, weight_decay=0.05),
    "sgd": sf.optim.sgd(0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True),
}
TRIED: dict[str, Callable[[sf.Run], Any]] = {
    "find_lr": lambda run: sf.tune.find_lr(run, min_lr=1e-4, max_lr=100.0, steps=12),
    "find_batch": lambda run: sf.tune.find_batch_size(run, memory="1 GB"),
}
PROFILED: dict[str, Callable[[sf.Run], Any]] = {
    "profile": lambda run: sf.profile.measure(run, steps=4, speedups=(), peak_flops=1e9)
}
# of a run that is not open, with the directory of an earlier one
OF_SAVED: dict[str, Callable[[sf.SavedRun], Any]] = {
    "evaluate": lambda saved: saved.evaluate(checkpoint=8),
    "predict": lambda saved: saved.predict("val", checkpoint=8),
    "replay": lambda saved: saved.replay(6),
    "verify": lambda saved: saved.verify(steps=4, windows=1, seed=1),
}


class Buffered(Net):
    """Changes a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return torch.as_tensor(super().forward(inputs))


def plain(held: Any) -> Any:
    """Nested values with every tensor as its bytes."""
    if isinstance(held, Tensor):
        return str(held.dtype), list(held.shape), held.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(held, dict):
        return {key: plain(value) for key, value in held.items()}
    if isinstance(held, list | tuple):
        return [plain(value) for value in held]
    return held


def everything(run: sf.Run) -> dict[str, Any]:
    """All that changes while a run goes on, and the three generators."""
    whole = run.parts.run_state
    state = run.state
    models = [*state.models.values(), *(average.model for average in state.ema_models.values())]
    found: dict[str, Any] = {
        "tensors": [list(model.parameters()) + list(model.buffers()) for model in models],
        "gradients": [parameter.grad for parameter in state.parameters],
        "modes": [[part.training for part in model.modules()] for model in models],
        "step": state.step,
        "statistics": (state.buffers.passes, state.buffers.started),
        "precision": (
            whole.precision.name,
            whole.precision.tensors(),
            run.parts.plan.identity,
        ),
        "meter": (whole.meter.table(), whole.meter.logged_table()),
        "bad steps": whole.meter.skipped_in_a_row,
        "phases": (whole.clock.phase, whole.clock.window_s, whole.clock.total_s),
        "kept": (whole.user_state.objects, whole.user_state.tensors, whole.user_state.unclaimed),
        "watches": [each.state() for each in whole.watches],
        "generators": (random.getstate(), np.random.get_state()[1], torch.get_rng_state()),  # type: ignore[index]
    }
    for name, trained in state.optimizers.items():
        optimizer = trained.optimizer
        states = [
            sorted(optimizer.state[parameter].items()) if parameter in optimizer.state else None
            for parameter in trained.parameters
        ]
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        found[f"optimizer {name}"] = (states, groups, trained.bad_in_a_row)
    found["generators"][1].flags.writeable = False
    return {key: plain(value) for key, value in found.items()} | {
        "numpy": found["generators"][1].tolist()
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    before["generators"][1] = after["generators"][1] = None  # NumPy's is compared as a list
    return [name for name in before if before[name] != after[name]]


@pytest.mark.slow
@in_one
@pytest.mark.parametrize("tried", TRIED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_in_its_middle_is_left_as_it_was_with_every_optimizer(
    tried: str, optimizer: str
) -> None:
    leave_as_it_was(tried, optimizer=OPTIMIZERS[optimizer])


@in_one
@pytest.mark.parametrize("tried", TRIED)
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "fp16"}, {"model": Buffered}], ids=["plain", "fp16", "buffer"]
)
def test_a_run_in_its_middle_is_left_as_it_was(tried: str, changes: dict[str, Any]) -> None:
    leave_as_it_was(tried, **changes)


def leave_as_it_was(tried: str, **changes: Any) -> None:
    run = build(None, length="9 steps", **changes)
    model = run.state.models["model"]
    with run:
        run.register_state("seen", {"noise": torch.rand(3), "steps": 2})
        for step in run:
            if step.index == 4:
                model[3].eval()
                before = everything(run)
                TRIED[tried](run)
                assert compared(before, everything(run)) == []
                model[3].train()


@pytest.mark.parametrize(
    ("optimizer", "tried"),
    [
        ("adamw", "find_lr"),
        pytest.param("adamw", "find_batch", marks=pytest.mark.slow),
        *(
            pytest.param(name, "find_lr", marks=pytest.mark.slow)
            for name in OPTIMIZERS
            if name != "adamw"
        ),
        pytest.param("sgd", "find_batch", marks=pytest.mark.slow),
    ],
)
def test_training_afterwards_is_that_of_a_run_that_tried_nothing(
    tried: str, optimizer: str, tmp_path: Path
) -> None:
    def trained(run_dir: Path, *, trying: bool) -> tuple[dict[str, Any], list[float]]:
        run = build(run_dir, length="10 steps", optimizer=OPTIMIZERS[optimizer])
        if trying:
            assert compared(everything(run), (TRIED[tried](run), everything(run))[1]) == []
            assert not run_dir.exists()
        drawn = []
        with run:
            for step in run:
                if trying and step.index == 6:
                    assert run.parts.checkpointing is not None
                    run.parts.checkpointing.writer.wait()  # of a checkpoint of the run's own
                    files = {
                        path: path.stat().st_mtime_ns
                        for path in run_dir.rglob("*")
                        if path.is_file()
                    }
                    TRIED[tried](run)
                    assert {
                        path: path.stat().st_mtime_ns
                        for path in run_dir.rglob("*")
                        if path.is_file()
                    } == files
                drawn.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
        found = everything(run)
        return {name: found[name] for name in ("tensors", "optimizer model", "step")}, drawn

    assert trained(tmp_path / "a", trying=True) == trained(tmp_path / "b", trying=False)


def test_a_resumed_run_keeps_what_was_not_asked_for_yet(tmp_path: Path) -> None:
    first = build(tmp_path / "run", length="8 steps", stop_after="4 steps")
    first.register_state("seen", {"noise": torch.ones(3)})
    first.train()
    run = build(tmp_path / "run", length="8 steps")
    with run:
        sf.tune.find_lr(run, steps=10)
        assert torch.equal(
            run.register_state("seen", {"noise": torch.zeros(3)})["noise"], torch.ones(3)
        )


def test_a_run_that_is_not_open_is_tried_from_the_weights_that_it_would_start_with(
    tmp_path: Path,
) -> None:
    build(tmp_path / "run", length="4 steps").train()
    plainly = build(None, init_from=tmp_path / "run")
    with plainly:
        opened = sf.tune.find_lr(plainly, steps=10)
    run = build(None, init_from=tmp_path / "run")
    before = everything(run)
    assert sf.tune.find_lr(run, steps=10).losses.tolist() == opened.losses.tolist()
    assert compared(before, everything(run)) == []
    assert sf.tune.find_lr(build(None), steps=10).losses.tolist() != opened.losses.tolist()


def test_choices_of_another_run_do_not_stay() -> None:
    run = build(None, precision="auto", channels_last="auto", compile="auto")
    parts = run.parts
    plan = parts.plan
    precision = parts.run_state.precision.name
    with parts.snapshot():
        parts.compute_as({"precision": "bf16", "channels_last": True, "compile": True})
        assert (parts.run_state.precision.name, parts.evaluator.compiles) == ("bf16", True)
    assert (parts.run_state.precision.name, parts.layout.channels_last) == (precision, False)
    assert (parts.plan, parts.evaluator.compiles) == (plan, plan.compiles)


def test_an_error_while_trying_leaves_the_run_as_it_was() -> None:
    run = build(None)
    before = everything(run)

    def failing() -> None:
        with trial_steps(run) as parts:
            for parameter in parts.state.parameters:
                parameter.data.zero_()
                parameter.grad = torch.ones_like(parameter)
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert compared(before, everything(run)) == []


@pytest.mark.parametrize("tried", TRIED)
def test_runs_that_cannot_be_tried_are_refused(tried: str) -> None:
    with refused("run-without-loss"):
        TRIED[tried](build(None, loss=None, splits=None, early_stopping=None))
    run = build(None)
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            with refused("run-in-the-middle-of-a-step", step=0):
                TRIED[tried](run)
            sf.update(step)
            break


def test_a_model_may_be_one_of_several() -> None:
    def loss(models: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(models["head"](models["body"](batch[0])), batch[1])

    run = build(
        None,
        model={"body": lambda: nn.Linear(8, 16), "head": lambda: nn.Linear(16, 3)},
        optimizer={"head": sf.optim.sgd(0.1), "body": sf.optim.adamw(0.01)},
        loss=loss,
        splits=None,
        early_stopping=None,
    )
    before = everything(run)
    assert len(sf.tune.find_lr(run, steps=10, max_lr=1.0).rates) > 4
    assert sf.tune.find_batch_size(run, memory="1 GB").largest.size == 8
    assert compared(before, everything(run)) == []


def test_the_time_that_trying_takes_belongs_to_no_phase_of_the_run() -> None:
    passes: SimpleQueue[None] = SimpleQueue()  # a number of our own would be put back

    def slow(model: Any, batch: Any) -> Tensor:
        passes.put(None)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = build(None, loss=slow, length="3 steps", splits=None, early_stopping=None)
    clock = run.parts.run_state.clock
    clock.now = lambda: float(passes.qsize())
    clock.since = 0.0
    with run:
        for step in run:
            if step.index == 2:
                continue
            before = passes.qsize() - clock.since
            sf.tune.find_lr(run, steps=10)
            assert passes.qsize() - clock.since == before
    assert (
        sum(clock.total_s.values()) + sum(clock.window_s.values()) <= 3 * 2
    )  # passes of the run's own steps
    assert passes.qsize() > 40


# --- what changes meanwhile has a name, and comes back --------------------------------------------


class Hidden(Net):
    """Has state of each kind that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.calls = 0
        self.seen = {"calls": [0]}
        self.noise = torch.Generator().manual_seed(3)


class Planting:
    """A loss that changes state of every kind in its passes."""

    def __init__(self) -> None:
        self.passes = 0
        self.run: sf.Run | None = None  # whose registered state changes too
        self.names: SimpleQueue[set[str]] = SimpleQueue()  # other containers would be put back
        self.before: Snapshot | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.run is not None:
            self.plant(self.run)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def plant(self, run: sf.Run) -> None:
        hidden: Any = run.state.models["model"]
        before = snapshot(run)
        self.passes += 1
        hidden.calls += 1
        hidden.seen["calls"][0] += 1
        hidden.mask[0] += 1
        hidden[1].running_mean.data += 1  # not seen by version counters
        hidden[2].training = not hidden[2].training
        run.parts.run_state.user_state.objects["seen"]["noise"] += 1
        for draw in (random.random, np.random.rand, lambda: torch.rand(3)):
            draw()
        torch.rand(3, generator=hidden.noise)
        self.names.put({change.name for change in changed_values(before, snapshot(run))})


PLANTED = {
    *("loss.passes", "model.calls", "model.seen['calls'][0]", "model.mask", "model.noise"),
    *("model.1.running_mean", "model.2.training", "registered['seen']['noise']"),
    *("global random", "global numpy.random", "global torch"),
}


def snapshot(run: sf.Run) -> Snapshot:
    """All that a snapshot compares, of the averages too."""
    state = run.state
    averages = {f"average of {name}": each.model for name, each in state.ema_models.items()}
    return Snapshot(
        state.models | averages,
        run.parts.task.loss,
        {name: each.optimizer for name, each in state.optimizers.items()},
        user_state=run.parts.run_state.user_state.objects,
    )


def planted_run(run_dir: Path | None, **changes: Any) -> tuple[sf.Run, Planting]:
    loss = Planting()
    run = build(run_dir, model=Hidden, loss=loss, length="9 steps", **changes)
    run.register_state("seen", {"noise": torch.zeros(3)})
    return run, loss


def assert_named_and_restored(
    run: sf.Run, loss: Planting, use: Callable[[], Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    loss.run = run
    before = snapshot(run)
    contents = everything(run)
    use()
    after = snapshot(run)
    assert changed_values(before, after) == []
    assert compared(contents, everything(run)) == []
    loss.run = None
    named = [loss.names.get() for _ in range(loss.names.qsize())]
    assert named
    assert all(names == PLANTED for names in named)
    return before.values, after.values


@in_one
@pytest.mark.parametrize("tried", TRIED | PROFILED)
def test_what_a_trial_changes_is_named_and_comes_back(tried: str) -> None:
    run, loss = planted_run(None, check_state=False)
    use = (TRIED | PROFILED)[tried]
    assert_named_and_restored(run, loss, lambda: use(run))  # not open
    with run:
        for step in run:
            if step.index == 4:
                assert_named_and_restored(run, loss, lambda: use(run))


@in_one
@pytest.mark.parametrize("asked", OF_SAVED)
def test_what_a_checkpoint_is_asked_changes_no_bit_of_the_run(asked: str, tmp_path: Path) -> None:
    planted_run(tmp_path / "run", check_state=False)[0].train()
    run, loss = planted_run(tmp_path / "run", check_state=False)
    if asked == "predict":  # calls no loss
        before = everything(run)
        OF_SAVED[asked](sf.load(run))
        assert compared(before, everything(run)) == []
    else:
        assert_named_and_restored(run, loss, lambda: OF_SAVED[asked](sf.load(run)))


def test_the_inspection_of_a_step_leaves_no_trace() -> None:
    run, loss = planted_run(None, check_state=False)
    with closing(run.parts.pipeline.feed(workers=0)) as feed:
        feed.start(0, stop=1)
        step = Step(0, feed.micro_batches(0), run.parts.task, run.state)
        registered = run.parts.run_state.user_state.objects
        assert_named_and_restored(run, loss, lambda: look(step, user_state=registered))


@in_one
@pytest.mark.parametrize("loss_of", ["evaluate", "sample"])
def test_an_evaluation_changes_no_buffer_no_mode_and_no_generator(loss_of: str) -> None:
    def sampled(model: nn.Module) -> str:
        assert model[1].training is False  # type: ignore[index]
        model[1].running_mean.data += 1  # type: ignore[index, operator, union-attr]
        random.random(), np.random.rand(), torch.rand(3)
        return ""

    class Changing(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            if not self.training:
                sampled(self)
            return torch.as_tensor(super().forward(inputs))

    run = build(None, model=Changing, length="9 steps", sample_fn=sampled)
    with run:
        for step in run:
            if step.index == 4:
                run.state.models["model"][2].eval()  # type: ignore[index]
                before = snapshot(run)
                run.evaluate() if loss_of == "evaluate" else run.sample()
                assert changed_values(before, snapshot(run)) == []
                run.state.models["model"][2].train()  # type: ignore[index]


def test_the_weights_of_another_checkpoint_leave_no_trace(tmp_path: Path) -> None:
    run, _ = planted_run(tmp_path / "run", check_state=False)
    with run:
        for step in run:
            if step.index == 7:
                break
        run.state.ema_models["model"].refresh(run.state.models["model"])
        checkpoint = run.parts.checkpointing.at(4)  # type: ignore[union-attr]
        before = snapshot(run)
        with weights_of(run.state, checkpoint):
            names = {change.name for change in changed_values(before, snapshot(run))}
        assert {"model.0.weight", "average of model.0.weight"} <= names
        assert changed_values(before, snapshot(run)) == []


def test_a_block_that_trains_leaves_what_a_checkpoint_would_hold(tmp_path: Path) -> None:
    data = Augmented()
    run = build(
        tmp_path / "run",
        length="18 steps",
        precision="fp16",
        clip="adaptive 1.0",
        plateau=sf.ReduceLROnPlateau("min val/loss", patience=1),
        train_data=DataLoader(data, batch_sampler=Batches()),  # type: ignore[arg-type]
        batch_size=None,
        micro_batch_size=None,
    )
    with run:
        for step in run:
            if step.index == 10:
                break
    parts = run.parts
    before = parts.packed()
    contents = everything(run)
    with parts.snapshot(), closing(parts.pipeline.feed(workers=0)) as feed:
        feed.start(11)
        for index in range(11, 14):
            inner = Step(index, feed.micro_batches(index), parts.task, parts.state)
            forward_backward(inner)
            update(inner)
            parts.state.step += 1
            parts.run_state.meter.add(inner)
            parts.run_state.watches[0].improved(index, -1.0)
            parts.run_state.feedback.update(index, 1e9)  # type: ignore[union-attr]
            parts.run_state.updated_parameters.add(f"planted {index}")
        parts.run_state.user_state.unclaimed["planted"] = 1
        parts.run_state.clock.window()
    assert compared(contents, everything(run)) == []
    after = parts.packed()
    assert after.step == before.step
    for file, tensors in before.files.items():
        assert after.files[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert plain(after.files[file][name]) == plain(tensor), (file, name)
    without_times = [
        {key: value for key, value in vars(each.saved).items() if key != "clock"}
        for each in (before, after)
    ]
    assert without_times[0] == without_times[1]


# --- ranks ----------------------------------------------------------------------------------------


def evaluated_on_ranks(run_dir: str, parallel: str) -> list[str]:
    """What changes in a run that evaluates a checkpoint of an earlier one."""

    def built() -> sf.Run:
        return build(run_dir, parallel=parallel, length="9 steps", check_state=False)

    built().train()
    run = built()
    before = snapshot(run)
    assert sf.load(run).evaluate(checkpoint=8)["val/loss"] > 0
    assert run.state.step == 0
    return [change.name for change in changed_values(before, snapshot(run))]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_evaluate_a_checkpoint_keep_their_run(
    parallel: str, ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")
    assert ranks(2, evaluated_on_ranks, run_dir=run_dir, parallel=parallel) == [[], []]


def trained_in_a_block(parallel: str) -> list[list[str]]:
    """The names of what a step changes in the block of a snapshot, and of what is left of it."""
    run = build(None, parallel=parallel, length="9 steps", splits=None, early_stopping=None)
    with run:
        for step in run:
            if step.index == 2:
                break
        parts = run.parts
        before = snapshot(run)
        with run._together("the test"), parts.snapshot():
            with closing(parts.pipeline.feed(workers=0)) as feed:
                feed.start(3, stop=4)
                inner = Step(3, feed.micro_batches(3), parts.task, parts.state)
                forward_backward(inner)
                update(inner)
            during = [change.name for change in changed_values(before, snapshot(run))]
        return [during, [change.name for change in changed_values(before, snapshot(run))]]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_name_the_tensors_that_changed(parallel: str, ranks: Ranks) -> None:
    for during, afterwards in ranks(2, trained_in_a_block, parallel=parallel):
        assert {"model.0.weight", "model.4.bias", "model.1.running_var"} <= {*during}
        assert any(name.endswith("0.weight']['exp_avg']") for name in during)
        assert afterwards == []
