"""State that no checkpoint holds is refused by name when a run begins, and looking for it leaves no
trace. (9 s)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small_runs
import surefoot as sf
from rank_processes import Ranks
from refused import refused
from same_bits import assert_same_bits, changed_names, weights
from stated import numbers_in
from surefoot.config.tree import layered
from surefoot.recipes import images

ROWS = 24
WIDTH = 4
CLASSES = 3
STEPS = 6
GLOBAL_CALLS = [0]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    return inputs, labels


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(run_dir: Path | str | None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data(),
        "batch_size": 8,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.adamw(lr=0.05),
        "precision": "fp32",
        "device": "cpu",
        "console": False,
        "report": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def make_steps(run: sf.Run, *losses: Any) -> None:
    """Train in steps of one's own, with these losses or the run's."""
    with run:
        for step in run.steps():
            for step_loss in losses or (None,):
                sf.forward_backward(step, step_loss)
            sf.update(step)


def train(run: sf.Run, *, own_steps: bool) -> None:
    if own_steps:
        make_steps(run)
    else:
        run.train()


class Net(nn.Module):
    """Two blocks, which subclasses fill with state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x)))  # type: ignore[no-any-return]


# --- the six kinds --------------------------------------------------------------------------------


class WithBuffer(Net):
    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return super().forward(x - self.mean)


class Block(nn.Linear):
    """Counts its calls in `state`, of whatever type it is, and lets the count matter."""

    def __init__(self, state: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.state = state

    def count_call(self) -> int:
        match self.state:
            case int():
                self.state += 1
                return self.state
            case list():
                self.state.append(1.0)
                return len(self.state)
            case dict():
                self.state["n"] += 1
                return int(self.state["n"])
        self.state = self.state + 1
        return int(self.state)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.count_call())  # type: ignore[no-any-return]


def with_attribute(state: Any) -> Net:
    model = Net()
    model.blocks[0] = Block(state)
    return model


def with_counting_hook() -> Net:
    model = Net()
    calls = 0

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output / calls

    model.blocks[0].register_forward_hook(hook)
    return model


class WithGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.noise))


class Loss:
    """Weighs its batches by how many it has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.seen += 1
        return loss(model, batch) / self.seen

    def method(self, model: Any, batch: Any) -> Tensor:
        return self(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def closure() -> Callable[[Any, Any], Tensor]:
    seen = 0

    def weighed(model: Any, batch: Any) -> Tensor:
        nonlocal seen
        seen += 1
        return loss(model, batch) / seen

    return weighed


def of_argument(calls: dict[str, int], model: Any, batch: Any) -> Tensor:
    calls["n"] += 1
    return loss(model, batch) / calls["n"]


def of_global(model: Any, batch: Any) -> Tensor:
    GLOBAL_CALLS[0] += 1
    return loss(model, batch) / GLOBAL_CALLS[0]


class Rounds(torch.optim.SGD):
    """Lowers its rate with every step that it counts."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.5)
        self.rounds = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.rounds += 1
        for group in self.param_groups:
            group["lr"] /= self.rounds
        return super().step(closure)


class LateRounds(Rounds):
    """Counts in an attribute that its first step makes."""

    rounds = 0

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        del self.rounds


@dataclass(frozen=True)
class Case:
    """The name of a state that no checkpoint holds, and settings of a run that has it, made
    anew.
    """

    state: str
    changes: Callable[[], dict[str, Any]]


CASES = {
    "a buffer that is not persistent": Case("model.mean", lambda: {"model": WithBuffer}),
    "an attribute, counter": Case(
        "model.blocks.0.state", lambda: {"model": lambda: with_attribute(0)}
    ),
    "an attribute, list": Case(
        "model.blocks.0.state", lambda: {"model": lambda: with_attribute([])}
    ),
    "an attribute, dict": Case(
        "model.blocks.0.state['n']", lambda: {"model": lambda: with_attribute({"n": 0})}
    ),
    "an attribute, tensor": Case(
        "model.blocks.0.state", lambda: {"model": lambda: with_attribute(torch.zeros(1))}
    ),
    "a hook that counts": Case(
        "model.blocks.0._forward_hooks.calls", lambda: {"model": with_counting_hook}
    ),
    "a generator of the model's own": Case("model.noise", lambda: {"model": WithGenerator}),
    "a loss, callable": Case("loss.seen", lambda: {"loss": Loss()}),
    "a loss, bound method": Case("loss.seen", lambda: {"loss": Loss().method}),
    "a loss, closure": Case("loss.seen", lambda: {"loss": closure()}),
    "a loss, partial": Case("loss.args[0]['n']", lambda: {"loss": partial(of_argument, {"n": 0})}),
    "a loss, with a global": Case("GLOBAL_CALLS[0]", lambda: {"loss": of_global}),
    "an optimizer of one's own": Case("optimizer.rounds", lambda: {"optimizer": Rounds}),
    "a value that the first update makes": Case(
        "optimizer.rounds", lambda: {"optimizer": LateRounds}
    ),
}


@contextmanager
def refused_for(name: str, **fields: Any) -> Iterator[pytest.ExceptionInfo[sf.SurefootError]]:
    """Expect the refusal of state whose first name is this one, or ends with it."""
    with refused("state-not-saved", **fields) as caught:
        yield caught
    assert caught.value.fields["names"][0].endswith(name)


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    GLOBAL_CALLS[0] = 0


@pytest.mark.parametrize("name", CASES)
def test_what_a_pass_or_an_update_changes_and_no_checkpoint_holds_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]

    with refused_for(case.state) as caught:
        build(tmp_path / "run", **case.changes()).train()

    remedies = str(caught.value.remedies)
    assert "run.register_state" in remedies
    assert "check_state" in remedies
    assert ("register_buffer" in remedies) == case.state.startswith("model.")


@pytest.mark.fast(
    "a buffer that is not persistent",
    "an attribute, counter",
    "a generator of the model's own",
    "a loss, callable",
    "an optimizer of one's own",
)
@pytest.mark.parametrize("name", CASES)
def test_without_the_check_it_would_resume_as_another_run(name: str, tmp_path: Path) -> None:
    """A process that begins anew has built all objects anew: so here the same."""

    def trained_anew(run_dir: Path, **changes: Any) -> sf.Run:
        GLOBAL_CALLS[0] = 0
        run = build(run_dir, check_state=False, **CASES[name].changes(), **changes)
        run.train()
        return run

    whole = trained_anew(tmp_path / "whole")
    trained_anew(tmp_path / "cut", stop_after="3 steps")
    resumed = trained_anew(tmp_path / "cut")

    assert resumed.state.step == whole.state.step == STEPS
    assert changed_names(weights(resumed), weights(whole)) != []


@pytest.mark.fast(
    "a buffer that is not persistent",
    "an attribute, counter",
    "a generator of the model's own",
    "a loss, callable",
    "an optimizer of one's own",
)
@pytest.mark.parametrize("name", CASES)
def test_in_steps_of_ones_own_it_is_refused_too(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    run = build(tmp_path / "run", **case.changes())

    with refused_for(case.state):
        make_steps(run)

    assert run.state.step <= 2


def test_the_batches_of_step_0_are_not_kept_after_step_1(tmp_path: Path) -> None:
    with build(tmp_path / "run", loss=None) as run:
        for step in run.steps():
            sf.forward_backward(step, loss)
            sf.update(step)
        assert run.session is not None
        check = run.session.watches.state_check
        assert check is not None
        assert check.has_passed
        assert check.earlier == []


def test_what_the_losses_of_a_users_own_steps_remember_is_refused(tmp_path: Path) -> None:
    registered = Loss()
    other = Loss()
    run = build(tmp_path / "run", loss=None)
    run.register_state("first", registered)

    with refused_for("loss.seen"):
        make_steps(run, registered, other)

    assert registered.seen == 1
    assert other.seen == 1


class TwoLatestBatches:
    """A loss that remembers what it has last seen: of passes of one batch alone, always the same."""

    def __init__(self) -> None:
        self.latest = (0.0, 0.0)

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.latest = (self.latest[1], float(batch[0].sum()))
        return loss(model, batch)


def test_in_steps_of_ones_own_the_passes_that_are_compared_follow_one_of_another_step(
    tmp_path: Path,
) -> None:
    run = build(tmp_path / "run", loss=None)
    with refused_for("loss.latest[0]"):
        make_steps(run, TwoLatestBatches())
    assert run.state.step == 2


def two_losses(passed: dict[str, Tensor], *, emptied: bool) -> tuple[Any, Any]:
    """A loss that leaves its outputs in `passed`, and one that empties it if `emptied`."""

    def first(model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0])
        passed[f"outputs {len(passed)}"] = outputs
        return torch.as_tensor(outputs.square().mean())

    def second(model: Any, batch: Any) -> Tensor:
        if emptied:
            passed.clear()
        return torch.as_tensor(model(batch[0]).mean())

    return first, second


def test_what_one_loss_of_a_step_passes_to_the_next_is_no_state(tmp_path: Path) -> None:
    run = build(tmp_path / "run", loss=None)

    make_steps(run, *two_losses({}, emptied=True))

    assert run.state.step == STEPS


def test_what_the_losses_of_a_step_pass_to_those_of_the_next_is_state(tmp_path: Path) -> None:
    run = build(tmp_path / "run", loss=None)

    with refused_for("loss.passed", when="in every pass"):
        make_steps(run, *two_losses({}, emptied=False))


@dataclass(slots=True)
class Slots:
    n: int = 0


class Metric(Net):
    """With a metric that counts in its own attributes, which its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip(
            "torchmetrics", reason="torchmetrics is no part of this installation"
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.accuracy.update(outputs, torch.zeros(len(outputs)))
        return outputs


def test_slots_are_looked_into_and_put_back(tmp_path: Path) -> None:
    slots = Slots()

    def counting(model: Any, batch: Any) -> Tensor:
        slots.n += 1
        return loss(model, batch)

    with refused_for("loss.slots.n", when="in every pass"):
        build(tmp_path / "run", loss=counting).train()

    assert slots.n == 0


@pytest.mark.slow
def test_a_metric_in_the_model_is_refused(tmp_path: Path) -> None:
    with refused("state-not-saved", when="in every pass") as caught:
        build(tmp_path / "run", model=Metric).train()

    assert all(name.startswith("model.accuracy.") for name in caught.value.fields["names"])


@pytest.mark.slow
def test_a_metric_in_the_model_may_be_kept(tmp_path: Path) -> None:
    def trained_metric(run_dir: Path, stop_after: str | None = None) -> Any:
        run = build(run_dir, model=Metric, stop_after=stop_after)
        metric = run.register_state("accuracy", run.state.models["model"].accuracy)
        run.train()
        return metric

    whole = trained_metric(tmp_path / "whole")
    trained_metric(tmp_path / "cut", "3 steps")
    resumed = trained_metric(tmp_path / "cut")

    assert repr(resumed.metric_state) == repr(whole.metric_state)
    assert resumed.update_count == whole.update_count == STEPS


# --- the cures ------------------------------------------------------------------------------------


def trained_with_kept_loss(
    run_dir: Path, *, inside: bool = False, stop_after: str | None = None
) -> sf.Run:
    """The loss is registered before the run is opened, or `inside` of it."""
    counting_loss = Loss()
    run = build(run_dir, loss=counting_loss, stop_after=stop_after)
    if inside:
        with run:
            run.register_state("loss", counting_loss)
            for _ in run:
                pass
    else:
        run.register_state("loss", counting_loss)
        run.train()
    return run


@pytest.mark.parametrize("inside", [False, True])
def test_a_kept_loss_is_not_refused_and_resumes_bit_equal(inside: bool, tmp_path: Path) -> None:
    whole = trained_with_kept_loss(tmp_path / "whole", inside=inside)
    trained_with_kept_loss(tmp_path / "cut", inside=inside, stop_after="3 steps")
    resumed = trained_with_kept_loss(tmp_path / "cut", inside=inside)

    assert_same_bits(weights(resumed), weights(whole))


@pytest.mark.parametrize("again", ["a new run", "the same"])
def test_in_one_process_a_kept_loss_goes_on_with_what_it_is_by_then(
    again: str, tmp_path: Path
) -> None:
    """As in a notebook: its loss is compared with that of the beginning by the state of the
    beginning.
    """
    counting_loss = Loss()

    def build_cell() -> sf.Run:
        run = build(tmp_path / "cut", loss=counting_loss)
        run.register_state("loss", counting_loss)
        return run

    whole = trained_with_kept_loss(tmp_path / "whole")
    run = build_cell()
    with run:
        for step in run:
            if step.index == 2:
                break

    if again == "a new run":
        run = build_cell()
    run.train()

    assert run.state.step == STEPS
    assert_same_bits(weights(run), weights(whole))


def test_a_persistent_buffer_is_not_refused(tmp_path: Path) -> None:
    build(tmp_path / "run", model=lambda: WithBuffer(persistent=True)).train()


class SavesItself(Net):
    """An attribute that is part of its state_dict by torch's own protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class LossModule(nn.Module):
    """A loss with a centre that moves, saved only where it is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, model: Any, batch: Any) -> Tensor:
        outputs = model(batch[0])
        self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return F.cross_entropy(outputs - self.centre, batch[1])


def test_an_attribute_in_a_modules_extra_state_is_not_refused(tmp_path: Path) -> None:
    run = build(tmp_path / "run", model=SavesItself)

    run.train()

    assert run.state.step == STEPS


def test_a_loss_that_is_a_module_is_refused_where_it_is_not_kept(tmp_path: Path) -> None:
    with refused_for("loss.centre"):
        build(tmp_path / "run", loss=LossModule()).train()


def test_a_loss_that_is_a_module_may_be_kept(tmp_path: Path) -> None:
    module = LossModule()
    run = build(tmp_path / "run", loss=module)
    run.register_state("loss", module)

    run.train()

    assert run.state.step == STEPS


def test_an_object_that_refers_to_the_run_hides_nothing_of_it_when_it_is_kept(
    tmp_path: Path,
) -> None:
    counting_loss = Loss()
    run = build(tmp_path / "run", loss=counting_loss, model=lambda: with_attribute(0))
    counting_loss.model = run.state.models["model"]  # type: ignore[attr-defined]
    run.register_state("loss", counting_loss)

    with refused_for("model.blocks.0.state"):
        run.train()


def test_what_a_loss_depends_on_is_refused_where_it_has_no_name(tmp_path: Path) -> None:
    numbers = itertools.count(1)

    def counted_loss(model: Any, batch: Any) -> Tensor:
        return loss(model, batch) / next(numbers)

    with refused("state-not-saved", when="in every pass") as caught:
        build(tmp_path / "run", loss=counted_loss).train()

    (name,) = caught.value.fields["names"]
    first, second = numbers_in(name)
    assert second < first  # of the same samples


class Carried(Net):
    """Adds what it computed for the batch before, except in the first step of the data."""

    carried: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x[:, :-1])
        if self.carried is not None:
            y = y + self.carried * x[:, -1:]
        self.carried = y.detach()
        return y


class CarriedByLoss:
    def __init__(self) -> None:
        self.carried = torch.zeros(8, CLASSES)

    def __call__(self, model: Any, batch: Any) -> Tensor:
        y = model(batch[0][:, :-1]) + self.carried * batch[0][:, -1:]
        self.carried = y.detach()
        return F.cross_entropy(y, batch[1])


@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_value_that_is_carried_from_step_to_step_is_refused_though_the_first_step_begins_anew(
    where: str, own_steps: bool, tmp_path: Path
) -> None:
    inputs, labels = data()
    goes_on = torch.ones(ROWS, 1)
    goes_on[:8] = 0
    carrying: dict[str, Any] = {"model": {"model": Carried}, "loss": {"loss": CarriedByLoss()}}
    run = build(
        tmp_path / "run",
        train_data=(torch.cat([inputs, goes_on], dim=1), labels),
        order="sequential",
        **carrying[where],
    )

    with refused_for(f"{where}.carried", when="in every pass"):
        train(run, own_steps=own_steps)

    assert run.state.step <= 2


# --- where it is looked for -----------------------------------------------------------------------


def test_a_refused_run_leaves_no_checkpoint_and_the_cured_one_begins(tmp_path: Path) -> None:
    for _ in range(2):  # the second start is a first one too
        with refused_for("model.mean"):
            build(tmp_path / "run", model=WithBuffer).train()
    build(tmp_path / "run", model=lambda: WithBuffer(persistent=True)).train()


def test_a_run_that_goes_on_from_step_0_is_looked_at(tmp_path: Path) -> None:
    with build(tmp_path / "run", loss=Loss()):
        pass  # step 0 is committed

    with refused_for("loss.seen"):
        build(tmp_path / "run", loss=Loss()).train()


def test_a_run_that_goes_on_from_a_later_step_is_not_looked_at(tmp_path: Path) -> None:
    build(tmp_path / "run", loss=Loss(), check_state=False, stop_after="2 steps").train()
    counting_loss = Loss()

    build(tmp_path / "run", loss=counting_loss).train()

    assert counting_loss.seen == STEPS - 2


@pytest.mark.parametrize("check_state", [True, False])
def test_the_flag_reaches_a_recipes_run(check_state: bool, tmp_path: Path) -> None:
    changes = {"run_dir": str(tmp_path / "run"), "check_state": check_state}
    layers = [("preset", images.PRESETS["tiny"]), ("test", changes)]
    config, *_ = layered(images.Config, layers)

    run = images.build(config)

    assert run.parts.settings.check_state == check_state


def test_a_run_that_saves_nothing_is_not_looked_at() -> None:
    counting_loss = Loss()

    build(None, loss=counting_loss).train()

    assert counting_loss.seen == STEPS


def test_a_pass_that_fails_is_left_to_the_step(tmp_path: Path) -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(ZeroDivisionError):
        build(tmp_path / "run", loss=broken).train()

    assert (tmp_path / "run" / "checkpoints" / "step-00000000").is_dir()


# --- what is no state -----------------------------------------------------------------------------


class WithCaches(Net):
    """What is set once, or by the batch alone, or derived from what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.longest = 0
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.zeros(0), persistent=False)
        self.derived = torch.zeros(())
        self.shapes: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.longest < len(x):
            self.table = torch.ones(WIDTH)
            self.longest = len(x)
            self.mask = torch.ones(WIDTH)
        self.shapes.setdefault(tuple(x.shape), torch.ones(WIDTH))
        self.last = self.norm(x)
        self.derived = self.norm.running_mean.sum()  # type: ignore[operator]
        self.noise = torch.rand(2), random.random(), np.random.rand(2)
        return super().forward(self.last * self.table * self.mask * self.shapes[tuple(x.shape)])


class Reassigned(WithBuffer):
    """Puts another tensor in its buffer's place."""

    def __init__(self) -> None:
        super().__init__(persistent=True)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return Net.forward(self, x - self.mean)


def of_old_norms() -> nn.Module:
    first = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    second = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(first, second)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x[:, None])
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]


class Caching(torch.optim.SGD):
    """Makes in its first and its second step what it needs in all that follow."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.scale: Tensor | None = None
        self.length: int | None = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.scale is None:
            self.scale = torch.ones(3)
        elif self.length is None:
            self.length = len(self.scale)
        return super().step(closure)


def writing(model: Any, batch: Any) -> Tensor:
    batch[0].mul_(0.5)  # its own copy in every pass
    return loss(model, batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": WithCaches},
        {"model": of_old_norms},
        {"model": Reassigned},
        {"model": Recurrent},
        {"loss": writing},
        {"optimizer": Caching},
        {"optimizer": sf.optim.muon(0.01)},
        {"optimizer": lambda groups: torch.optim.Rprop(groups, lr=0.01)},
        {"optimizer": sf.optim.schedule_free(lr=0.01)},
        {"ema": 0.9, "micro_batch_size": 4},
    ],
)
def test_a_cache_is_no_state(changes: dict[str, Any], tmp_path: Path) -> None:
    looked = build(tmp_path / "looked", **changes)
    looked.train()
    plain = build(tmp_path / "plain", check_state=False, **changes)
    plain.train()

    assert_same_bits(weights(looked), weights(plain))


# --- no trace -------------------------------------------------------------------------------------


class Everything(Net):
    """State of every kind, and things that a pass does to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.array = np.zeros(2)
        self.python = random.Random(3)
        self.numpy = np.random.default_rng(4)
        self.torch = torch.Generator().manual_seed(5)
        self.old = np.random.RandomState(6)
        self.list: list[float] = [1]
        self.tuple = (2, [3])
        self.set = {1}
        self.whole = torch.zeros(2)
        self.view = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        for tensor in (self.count, self.hidden, self.whole):
            tensor.add_(1)
        self.view.data = self.view.data + 1
        self.array += 1
        self.list.append(self.python.random())
        self.tuple[1][0] += 1  # type: ignore[index]
        self.set.add(len(self.set) + 1)
        self.numpy.random()
        self.old.rand()
        torch.rand((), generator=self.torch)
        self.new = 7
        with torch.no_grad():
            self.blocks[0].weight.mul_(1.5)
        self.blocks[1].register_forward_hook(lambda *_: None)
        self.training = False
        return super().forward(x)


def describe(model: Everything) -> str:
    """The state of a model, of each kind."""
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    names = sorted(attributes)
    generators = {
        "python": attributes.pop("python").getstate(),
        "numpy": attributes.pop("numpy").bit_generator.state,
        "torch": attributes.pop("torch").get_state().tolist(),
        "old": attributes.pop("old").get_state()[1].tolist(),
    }
    buffers = dict(model.named_buffers())
    parameters = dict(model.named_parameters())
    gradients = [parameter.grad for parameter in parameters.values()]
    hook_count = len(model.blocks[1]._forward_hooks)
    return repr([names, generators, attributes, buffers, parameters, gradients, hook_count])


def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    """At the first step all is what it was when the run was built: attributes, generators, buffers,
    weights, kept objects.
    """
    counting_loss = Loss()
    passes_file = tmp_path / "passes"  # a list would be put back too

    def describing_loss(model: Any, batch: Any) -> Tensor:
        with passes_file.open("a") as file:
            file.write(f"{describe(model)}{counting_loss.seen}\n--\n")
        return counting_loss(model, batch)

    run = build(tmp_path / "run", model=Everything, loss=describing_loss, micro_batch_size=8)
    run.register_state("loss", counting_loss)
    model: Any = run.state.models["model"]
    before = f"{describe(model)}0"
    python_state = random.getstate()
    torch_state = torch.get_rng_state()

    with refused_for("model.array"):
        run.train()

    *passes, _ = passes_file.read_text().split("\n--\n")
    assert len(passes) == 3
    assert passes[0] == before
    assert passes[1] != before
    assert f"{describe(model)}{counting_loss.seen}" == before
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_what_a_kept_loss_learns_in_a_pass_is_put_back_before_the_next(tmp_path: Path) -> None:
    """Or the passes would differ, and a run that is looked at would end otherwise than one that is
    not.
    """
    counting_loss = Loss()
    run = build(tmp_path / "run", loss=counting_loss)
    run.register_state("loss", counting_loss)

    run.train()

    assert counting_loss.seen == STEPS


class Critic:
    """A loss with a module of its own, which the body of the loop trains."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Linear(CLASSES, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def __call__(self, model: Any, batch: Any) -> Tensor:
        return loss(model, batch) + self.net(model(batch[0])).square().mean()


def test_gradients_of_what_the_body_trains_are_not_left_by_the_look(tmp_path: Path) -> None:
    def trained_weight(check_state: bool) -> Tensor:
        critic = Critic()
        run = build(tmp_path / str(check_state), loss=critic, check_state=check_state)
        with run:
            run.register_state("critic", critic.net)
            run.register_state("critic optimizer", critic.optimizer)
            for _ in run:
                critic.optimizer.step()
                critic.optimizer.zero_grad()
        return critic.net.weight.detach()

    assert torch.equal(trained_weight(True), trained_weight(False))


def test_a_run_that_is_looked_at_is_the_same_run(tmp_path: Path) -> None:
    looked = small_runs.build(tmp_path / "looked", check_state=True)
    small_runs.train(looked)
    plain = small_runs.build(tmp_path / "plain", check_state=False)
    small_runs.train(plain)

    assert_same_bits(weights(looked), weights(plain))
    assert "check_state" not in looked.parts.plan.identity


# --- several ranks --------------------------------------------------------------------------------


class OnRank(Net):
    """Counts on one rank, or on all of them."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self.rank = rank
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        import os

        self.calls += self.rank is None or os.environ["RANK"] == str(self.rank)
        return super().forward(x)


class Breaking(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        raise ZeroDivisionError("of the user's own")


def broken_on_ranks(run_dir: str, parallel: str, where: str) -> str:
    def broken(model: Any, batch: Any) -> Tensor:
        model(batch[0])
        raise ZeroDivisionError("of the user's own")

    changes: dict[str, Any] = {"model": {"model": Breaking}, "loss": {"loss": broken}}
    try:
        build(run_dir, parallel=parallel, micro_batch_size=4, **changes[where]).train()
    except Exception as problem:
        return repr(problem)
    return ""


@pytest.mark.fast("ddp-model", "fsdp-loss")
@pytest.mark.parametrize("where", ["model", "loss"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_pass_that_fails_on_ranks_fails_in_the_step_with_its_own_error(
    parallel: str, where: str, ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")

    errors = ranks(2, broken_on_ranks, run_dir=run_dir, parallel=parallel, where=where)

    assert all("of the user's own" in error for error in errors)


def refusal_on_a_rank(
    run_dir: str, parallel: str, counting_rank: int | None, loop: str, plain: bool = False
) -> dict[str, Any]:
    """What ends a run whose model counts on one rank (None: on all), and at which step."""
    model = Net if plain else partial(OnRank, counting_rank)
    run = build(run_dir, model=model, parallel=parallel, micro_batch_size=4)
    refusal: dict[str, Any] = {"code": None, "names": []}
    try:
        match loop:
            case "train":
                run.train()
            case "body":
                with run:
                    for _ in run:
                        pass
            case "own steps":
                make_steps(run)
    except sf.ConfigError as problem:
        refusal = {"code": problem.code, "names": problem.fields["names"]}
    return refusal | {"step": run.state.step}


def resumed_on_ranks(run_dir: str) -> Any:
    """What the loss of a whole run and that of a resumed one has seen, and their weights."""

    def train_to(directory: str, stop_after: str | None) -> tuple[int, dict[str, Tensor]]:
        counting_loss = Loss()
        run = build(
            directory,
            loss=counting_loss,
            micro_batch_size=4,
            stop_after=stop_after,
            optimizer=sf.optim.sgd(lr=0.5),
        )
        run.register_state("loss", counting_loss)
        run.train()
        return counting_loss.seen, weights(run)

    whole = train_to(f"{run_dir}/whole", None)
    train_to(f"{run_dir}/cut", "3 steps")
    resumed = train_to(f"{run_dir}/cut", None)
    return whole, resumed


def test_passes_when_ranks_begin_leave_a_kept_loss_as_it_was(ranks: Ranks, tmp_path: Path) -> None:
    """Or each resume would have it count passes that no step made."""
    for whole, resumed in ranks(2, resumed_on_ranks, run_dir=str(tmp_path)):
        seen, final_weights = resumed
        expected_seen, expected_weights = whole
        assert seen == expected_seen == STEPS
        assert_same_bits(final_weights, expected_weights)


@pytest.mark.fast("ddp")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_one_rank_remembers_ends_all_ranks_with_one_sentence(
    parallel: str, ranks: Ranks, tmp_path: Path
) -> None:
    cases: list[dict[str, Any]] = [
        {"counting_rank": 1, "loop": "train"},
        {"counting_rank": 0, "loop": "body"},
        {"counting_rank": 1, "loop": "own steps"},
        {"counting_rank": None, "loop": "train", "plain": True},
    ]
    for number, case in enumerate(cases):
        case["run_dir"] = str(tmp_path / str(number))

    *refusals, plain = ranks.each(2, refusal_on_a_rank, cases, parallel=parallel)

    for on_first, on_second in refusals:
        assert on_first["code"] == "state-not-saved"
        assert on_first["names"] == ["model.calls"]
        assert on_second == on_first
    assert plain == [{"code": None, "names": [], "step": STEPS}] * 2


# --- putting back ---------------------------------------------------------------------------------


class Conjugate(Net):
    """Tensors whose bits stand in memory otherwise than they are read."""

    def __init__(self) -> None:
        super().__init__()
        spectrum = torch.fft.rfft(torch.ones(WIDTH))
        self.filter = spectrum.conj()
        self.negative = spectrum.conj().imag
        self.norm = nn.BatchNorm1d(WIDTH)
        assert self.filter.is_conj()
        assert self.negative.is_neg()

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)
        return super().forward(self.norm(filtered))


@pytest.mark.parametrize("own_steps", [False, True])
def test_views_that_are_conjugate_or_negative_are_put_back(own_steps: bool, tmp_path: Path) -> None:
    looked = build(tmp_path / "looked", model=Conjugate)
    train(looked, own_steps=own_steps)
    plain = build(tmp_path / "plain", model=Conjugate, check_state=False)
    train(plain, own_steps=own_steps)

    assert_same_bits(weights(looked), weights(plain))
    assert weights(looked)["norm.num_batches_tracked"] == STEPS


class Sealed(dict):  # type: ignore[type-arg]
    """What cannot be changed back: it only grows."""

    def clear(self) -> None:
        raise TypeError("sealed")


@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.parametrize("check", [False, True])
def test_what_cannot_be_changed_back_is_refused_after_all_else_is_back(
    check: bool, own_steps: bool, tmp_path: Path
) -> None:
    entries = Sealed()

    def growing(model: Any, batch: Any) -> Tensor:
        entries[len(entries)] = 1
        return loss(model, batch)

    model = partial(WithBuffer, persistent=True)
    run = build(tmp_path / "run", model=model, loss=growing, check_state=check)
    before = weights(run)

    with refused("state-not-restored", causes=["TypeError: sealed"]):
        train(run, own_steps=own_steps)

    if not own_steps:
        assert_same_bits(weights(run), before)
