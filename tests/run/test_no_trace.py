"""Law 5 for all that is tried on a run or asked of it: every bit of the run stays as it was, and
what changes meanwhile has a name. (15 s)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
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
TRIALS: dict[str, Callable[[sf.Run], Any]] = {
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


def plain(value: Any) -> Any:
    """Nested values with every tensor as its bytes, and every array as a list."""
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().numpy()
        return str(value.dtype), list(value.shape), array.tobytes()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def everything(run: sf.Run) -> dict[str, Any]:
    """All that changes while a run goes on, and the three generators."""
    whole = run.parts.run_state
    state = run.state
    models = [*state.models.values()]
    models += (average.model for average in state.ema_models.values())
    values: dict[str, Any] = {
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
        "watches": [watch.state() for watch in whole.watches],
        "generators": (random.getstate(), np.random.get_state()[1], torch.get_rng_state()),  # type: ignore[index]
    }
    for name, trained in state.optimizers.items():
        optimizer = trained.optimizer
        states = []
        for parameter in trained.parameters:
            has_state = parameter in optimizer.state
            states.append(sorted(optimizer.state[parameter].items()) if has_state else None)
        groups = []
        for group in optimizer.param_groups:
            groups.append({key: value for key, value in group.items() if key != "params"})
        values[f"optimizer {name}"] = (states, groups, trained.bad_in_a_row)
    return {name: plain(value) for name, value in values.items()}


@contextmanager
def leaving_no_trace(run: sf.Run) -> Iterator[None]:
    """Fail if the block changes anything of a run, and name it."""
    before = everything(run)
    yield
    after = everything(run)
    assert [name for name in before if before[name] != after[name]] == []


def try_in_the_middle(trial: str, **changes: Any) -> None:
    """Try it in the body of a step, with a layer in evaluation mode."""
    run = build(None, length="9 steps", **changes)
    model = run.state.models["model"]
    with run:
        run.register_state("seen", {"noise": torch.rand(3), "steps": 2})
        for step in run:
            if step.index == 4:
                model[3].eval()
                with leaving_no_trace(run):
                    TRIALS[trial](run)
                model[3].train()


@pytest.mark.slow
@in_one
@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_in_its_middle_is_left_as_it_was_with_every_optimizer(
    trial: str, optimizer: str
) -> None:
    try_in_the_middle(trial, optimizer=OPTIMIZERS[optimizer])


@in_one
@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "fp16"}, {"model": Buffered}], ids=["plain", "fp16", "buffer"]
)
def test_a_run_in_its_middle_is_left_as_it_was(trial: str, changes: dict[str, Any]) -> None:
    try_in_the_middle(trial, **changes)


def times_of_files(run_dir: Path) -> dict[Path, int]:
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


def end_and_draws(run: sf.Run, at_step_6: Callable[[], None]) -> tuple[dict[str, Any], list[float]]:
    """Train a run; how it ends, and the random numbers that its body drew."""
    draws = []
    with run:
        for step in run:
            if step.index == 6:
                at_step_6()
            draws.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
    end = everything(run)
    return {name: end[name] for name in ("tensors", "optimizer model", "step")}, draws


@pytest.mark.fast("adamw-find_lr")
@pytest.mark.parametrize(
    ("optimizer", "trial"),
    [
        ("adamw", "find_lr"),
        ("adamw", "find_batch"),
        ("sgd", "find_lr"),
        ("sgd", "find_batch"),
        ("nadam", "find_lr"),
        ("rmsprop", "find_lr"),
    ],
)
def test_training_afterwards_is_that_of_a_run_that_tried_nothing(
    optimizer: str, trial: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"length": "10 steps", "optimizer": OPTIMIZERS[optimizer]}
    plain_run = build(tmp_path / "plain", **settings)
    expected = end_and_draws(plain_run, at_step_6=lambda: None)

    run_dir = tmp_path / "trying"
    run = build(run_dir, **settings)
    with leaving_no_trace(run):
        TRIALS[trial](run)
    assert not run_dir.exists()

    def try_once_more() -> None:
        assert run.parts.checkpointing is not None
        run.parts.checkpointing.writer.wait()  # of a checkpoint of the run's own
        before = times_of_files(run_dir)
        TRIALS[trial](run)
        assert times_of_files(run_dir) == before

    assert end_and_draws(run, at_step_6=try_once_more) == expected


def test_a_resumed_run_keeps_what_was_not_asked_for_yet(tmp_path: Path) -> None:
    first = build(tmp_path / "run", length="8 steps", stop_after="4 steps")
    first.register_state("seen", {"noise": torch.ones(3)})
    first.train()
    with build(tmp_path / "run", length="8 steps") as run:
        sf.tune.find_lr(run, steps=10)
        seen = run.register_state("seen", {"noise": torch.zeros(3)})

    assert torch.equal(seen["noise"], torch.ones(3))


def test_a_run_that_is_not_open_is_tried_from_the_weights_that_it_would_start_with(
    tmp_path: Path,
) -> None:
    build(tmp_path / "run", length="4 steps").train()
    with build(None, init_from=tmp_path / "run") as opened:
        expected = sf.tune.find_lr(opened, steps=10).losses.tolist()
    run = build(None, init_from=tmp_path / "run")
    with leaving_no_trace(run):
        losses = sf.tune.find_lr(run, steps=10).losses.tolist()

    assert losses == expected
    from_the_beginning = sf.tune.find_lr(build(None), steps=10).losses.tolist()
    assert from_the_beginning != expected


def test_choices_of_another_run_do_not_stay() -> None:
    run = build(None, precision="auto", channels_last="auto", compile="auto")
    parts = run.parts
    plan = parts.plan
    precision = parts.run_state.precision.name
    with parts.snapshot():
        parts.compute_as({"precision": "bf16", "channels_last": True, "compile": True})
        assert parts.run_state.precision.name == "bf16"
        assert parts.evaluator.compiles

    assert parts.run_state.precision.name == precision
    assert not parts.layout.channels_last
    assert parts.plan == plan
    assert parts.evaluator.compiles == plan.compiles


def test_an_error_while_trying_leaves_the_run_as_it_was() -> None:
    run = build(None)

    def fail() -> None:
        with trial_steps(run) as parts:
            for parameter in parts.state.parameters:
                parameter.data.zero_()
                parameter.grad = torch.ones_like(parameter)
            torch.rand(3)
            raise ZeroDivisionError

    with leaving_no_trace(run), pytest.raises(ZeroDivisionError):
        fail()


@pytest.mark.parametrize("trial", TRIALS)
def test_a_run_without_a_loss_cannot_be_tried(trial: str) -> None:
    with refused("run-without-loss"):
        TRIALS[trial](build(None, loss=None, splits=None, early_stopping=None))


@pytest.mark.parametrize("trial", TRIALS)
def test_a_run_in_the_middle_of_a_step_cannot_be_tried(trial: str) -> None:
    with build(None) as run:
        step = next(run.steps())
        sf.forward_backward(step)
        with refused("run-in-the-middle-of-a-step", step=0):
            TRIALS[trial](run)
        sf.update(step)


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
    with leaving_no_trace(run):
        assert len(sf.tune.find_lr(run, steps=10, max_lr=1.0).rates) > 4
        assert sf.tune.find_batch_size(run, memory="1 GB").largest.size == 8


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

    passes_of_phases = sum(clock.total_s.values()) + sum(clock.window_s.values())
    assert passes_of_phases <= 3 * 2  # those of the run's own steps
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
        random.random()
        np.random.rand()
        torch.rand(3)
        torch.rand(3, generator=hidden.noise)
        self.names.put(changed_names(before, snapshot(run)))


def changed_names(before: Snapshot, after: Snapshot) -> set[str]:
    return {change.name for change in changed_values(before, after)}


PLANTED = {
    *("loss.passes", "model.calls", "model.seen['calls'][0]", "model.mask", "model.noise"),
    *("model.1.running_mean", "model.2.training", "registered['seen']['noise']"),
    *("global random", "global numpy.random", "global torch"),
}


def snapshot(run: sf.Run) -> Snapshot:
    """All that a snapshot compares, of the averages too."""
    state = run.state
    models = dict(state.models)
    for name, average in state.ema_models.items():
        models[f"average of {name}"] = average.model
    return Snapshot(
        models,
        run.parts.task.loss,
        {name: trained.optimizer for name, trained in state.optimizers.items()},
        user_state=run.parts.run_state.user_state.objects,
    )


def planted_run(run_dir: Path | None, **changes: Any) -> tuple[sf.Run, Planting]:
    loss = Planting()
    run = build(run_dir, model=Hidden, loss=loss, length="9 steps", **changes)
    run.register_state("seen", {"noise": torch.zeros(3)})
    return run, loss


def assert_named_and_restored(run: sf.Run, loss: Planting, use: Callable[[], Any]) -> None:
    loss.run = run
    before = snapshot(run)
    with leaving_no_trace(run):
        use()
    assert changed_values(before, snapshot(run)) == []
    loss.run = None
    assert loss.names.qsize() > 0
    while loss.names.qsize():
        assert loss.names.get() == PLANTED


@in_one
@pytest.mark.parametrize("trial", TRIALS | PROFILED)
def test_what_a_trial_changes_is_named_and_comes_back(trial: str) -> None:
    run, loss = planted_run(None, check_state=False)
    use = (TRIALS | PROFILED)[trial]
    assert_named_and_restored(run, loss, lambda: use(run))  # not open
    with run:
        for step in run:
            if step.index == 4:
                assert_named_and_restored(run, loss, lambda: use(run))


@in_one
@pytest.mark.parametrize("use", OF_SAVED)
def test_what_a_checkpoint_is_asked_changes_no_bit_of_the_run(use: str, tmp_path: Path) -> None:
    earlier, _ = planted_run(tmp_path / "run", check_state=False)
    earlier.train()
    run, loss = planted_run(tmp_path / "run", check_state=False)

    if use == "predict":  # calls no loss
        with leaving_no_trace(run):
            OF_SAVED[use](sf.load(run))
    else:
        assert_named_and_restored(run, loss, lambda: OF_SAVED[use](sf.load(run)))


def test_the_inspection_of_a_step_leaves_no_trace() -> None:
    run, loss = planted_run(None, check_state=False)
    with closing(run.parts.pipeline.feed(workers=0)) as feed:
        feed.start(0, stop=1)
        step = Step(0, feed.micro_batches(0), run.parts.task, run.state)
        registered = run.parts.run_state.user_state.objects
        assert_named_and_restored(run, loss, lambda: look(step, user_state=registered))


@in_one
@pytest.mark.parametrize("use", [sf.Run.evaluate, sf.Run.sample])
def test_an_evaluation_changes_no_buffer_no_mode_and_no_generator(
    use: Callable[[sf.Run], Any],
) -> None:
    def change_and_draw(model: nn.Module) -> str:
        assert model[1].training is False  # type: ignore[index]
        model[1].running_mean.data += 1  # type: ignore[index, operator, union-attr]
        random.random()
        np.random.rand()
        torch.rand(3)
        return ""

    class Changing(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            if not self.training:
                change_and_draw(self)
            return torch.as_tensor(super().forward(inputs))

    run = build(None, model=Changing, length="9 steps", sample_fn=change_and_draw)
    with run:
        for step in run:
            if step.index == 4:
                run.state.models["model"][2].eval()  # type: ignore[index]
                before = snapshot(run)
                use(run)
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
            names = changed_names(before, snapshot(run))
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
    feeding = closing(parts.pipeline.feed(workers=0))
    with leaving_no_trace(run), parts.snapshot(), feeding as feed:
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

    after = parts.packed()
    assert after.step == before.step
    for file, tensors in before.files.items():
        assert after.files[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert plain(after.files[file][name]) == plain(tensor), (file, name)
    clock = before.saved.clock
    assert replace(after.saved, clock=clock) == before.saved


# --- ranks ----------------------------------------------------------------------------------------


def evaluated_on_ranks(run_dir: str, parallel: str) -> set[str]:
    """What changes in a run that evaluates a checkpoint of an earlier one."""
    settings: dict[str, Any] = {"parallel": parallel, "length": "9 steps", "check_state": False}
    build(run_dir, **settings).train()
    run = build(run_dir, **settings)
    before = snapshot(run)
    assert sf.load(run).evaluate(checkpoint=8)["val/loss"] > 0
    assert run.state.step == 0
    return changed_names(before, snapshot(run))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_that_evaluate_a_checkpoint_keep_their_run(
    parallel: str, ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")
    assert ranks(2, evaluated_on_ranks, run_dir=run_dir, parallel=parallel) == [set(), set()]


def trained_in_a_block(parallel: str) -> list[set[str]]:
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
            during = changed_names(before, snapshot(run))
        return [during, changed_names(before, snapshot(run))]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_name_the_tensors_that_changed(parallel: str, ranks: Ranks) -> None:
    for during, afterwards in ranks(2, trained_in_a_block, parallel=parallel):
        assert {"model.0.weight", "model.4.bias", "model.1.running_var"} <= during
        assert any(name.endswith("0.weight']['exp_avg']") for name in during)
        assert afterwards == set()
