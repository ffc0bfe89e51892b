"""Optimizers around other optimizers, and optimizers with state in unusual places: all of it is
saved, restored and skipped, or refused by name. (6 s)
"""

from __future__ import annotations

import json
import math
from collections import ChainMap, OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import surefoot as sf
from refused import refused
from surefoot.optim.in_place import Restoring
from surefoot.optim.kinds.kind import inner_optimizers
from surefoot.optim.skip_step import skipping
from surefoot.optim.user_optimizer import complete
from with_closures import SAM, batches, build, loss, weights

Adam = partial(torch.optim.Adam, lr=0.05)


class Around(torch.optim.Optimizer):
    """A wrapper as timm's Lookahead is written: without torch's constructor, with an empty state
    and the `state_dict` of the optimizer inside.
    """

    def __init__(self, inner: torch.optim.Optimizer, state: Any = None) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = defaultdict(dict) if state is None else state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class ByProperties(Around):
    """A wrapper whose state and groups are those of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Slow(torch.optim.Optimizer):
    """A lookahead with a state of its own beside that of the optimizer inside, and a
    `load_state_dict` after which the two have separate groups.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups = inner.param_groups
        self.defaults = {}
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        with torch.no_grad():
            for group in self.param_groups:
                group["counter"] = group.get("counter", 0) + 1
                for each in group["params"]:
                    slow = self.state[each].setdefault("slow", each.detach().clone())
                    if group["counter"] % 3 == 0:
                        slow.lerp_(each, 0.5)
                        each.copy_(slow)

    def state_dict(self) -> Any:
        mine = super().state_dict()
        inner = self.optimizer.state_dict()
        return {"slow": mine["state"], "fast": inner["state"], "param_groups": mine["param_groups"]}

    def load_state_dict(self, state_dict: Any) -> None:
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["slow"], "param_groups": groups})
        self.optimizer.load_state_dict({"state": state_dict["fast"], "param_groups": groups})


class Nested(Around):
    """A lookahead with its slow weights in attributes, and a `state_dict` in which that of the
    optimizer inside lies.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        members = [each for group in inner.param_groups for each in group["params"]]
        self.slow = [each.detach().clone() for each in members]
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.calls += 1
        members = [each for group in self.param_groups for each in group["params"]]
        if self.calls % 3 == 0:
            for slow, each in zip(self.slow, members, strict=True):
                slow.lerp_(each.detach(), 0.5)
                each.data.copy_(slow)

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "calls": self.calls}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.slow = state_dict["slow"]
        self.calls = state_dict["calls"]


class Warming(Nested):
    """A wrapper that sets learning rates itself, and stays with its groups after a load."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.01 * (self.calls + 1)
        super().step()


class Numbered(Around):
    """A wrapper whose `state_dict` numbers its averages in the order of its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for each in group["params"]:
                mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                mean.lerp_(each.detach(), 0.1)
                each.data.lerp_(mean, 0.01)

    def state_dict(self) -> Any:
        means = dict(enumerate(self.state.values()))
        return {"inner": self.inner.state_dict(), "means": means}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        members = [each for group in self.param_groups for each in group["params"]]
        for number, entries in state_dict["means"].items():
            self.state[members[number]] = entries


class Both(torch.optim.Optimizer):
    """Two optimizers, for matrices and for the rest, and a state that merges theirs in each
    access.
    """

    def __init__(self, params: Any, of_rest: Any = Adam) -> None:
        members = [each for group in params for each in group["params"]]
        self.matrices = torch.optim.SGD([p for p in members if p.ndim > 1], lr=0.1, momentum=0.9)
        self.rest = of_rest([each for each in members if each.ndim < 2])
        self.param_groups = [*self.matrices.param_groups, *self.rest.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {**self.matrices.state, **self.rest.state}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.matrices.step()
        self.rest.step()

    def state_dict(self) -> Any:
        return {"matrices": self.matrices.state_dict(), "rest": self.rest.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.matrices.load_state_dict(state_dict["matrices"])
        self.rest.load_state_dict(state_dict["rest"])


class Chained(Both):
    """Two optimizers whose groups are put together in each access too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        del self.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return ChainMap(self.rest.state, self.matrices.state)

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [*self.matrices.param_groups, *self.rest.param_groups]

    @param_groups.deleter
    def param_groups(self) -> None:
        pass

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        pass


class Merged(Around):
    """A state that is merged after each step, and that lies beside the one of which it is made."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.state = dict(self.inner.state)


class Bare(Around):
    """A wrapper without what torch's constructor sets, and with plain dicts of hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        del self.state, self.defaults
        hooks: Any = {}
        self._optimizer_step_pre_hooks = hooks


class Several(torch.optim.Optimizer):
    """A list of optimizers, one for each group."""

    def __init__(self, params: Any, inner: Any = Adam) -> None:
        (group,) = params
        groups = [{"params": [each]} for each in group["params"]]
        super().__init__(groups, {"lr": 0.05})
        self.optimizers = [inner([group]) for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


class Momentum(torch.optim.SGD):
    """Momentum whose buffers are kept where `buffers` says."""

    where = ""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)

    def buffers(self) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        members = [each for group in self.param_groups for each in group["params"]]
        for buffer, each in zip(self.buffers(members), members, strict=True):
            each.grad.copy_(buffer.mul_(0.9).add_(each.grad))
        super().step()


class InGroups(Momentum):
    def buffers(self, members: Any) -> Any:
        first = self.param_groups[0]
        return first.setdefault("buffers", [torch.zeros_like(each) for each in members])


class ByText(Momentum):
    def buffers(self, members: Any) -> Any:
        self.state["step"] = self.state.get("step", 0) + 1
        return self.state.setdefault("buffers", [torch.zeros_like(each) for each in members])


class ByParameter(Momentum):
    def buffers(self, members: Any) -> Any:
        buffers = self.state.setdefault("all", {each: torch.zeros_like(each) for each in members})
        return buffers.values()


class ByTuple(Momentum):
    def buffers(self, members: Any) -> Any:
        of_first = self.state[members[0]]
        return of_first.setdefault(
            "all", {(0, n, 0.5): torch.zeros_like(each) for n, each in enumerate(members)}
        ).values()


class InQueue(Momentum):
    def buffers(self, members: Any) -> Any:
        queue = self.state[members[0]].setdefault("queue", deque(maxlen=8))
        queue.extend(torch.zeros_like(each) for each in members[len(queue) :])
        return queue


class InStateDict(Momentum):
    """Buffers in an attribute, which only its own `state_dict` has."""

    own: Any = None

    def buffers(self, members: Any) -> Any:
        self.own = self.own or [torch.zeros_like(each) for each in members]
        return self.own

    def state_dict(self) -> Any:
        return super().state_dict() | {"own": self.own}

    def load_state_dict(self, state_dict: Any) -> None:
        self.own = state_dict["own"]
        super().load_state_dict({key: each for key, each in state_dict.items() if key != "own"})


class Hiding:
    """An object in which an optimizer is not looked for."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


class Hidden(Around):
    """A wrapper that hides the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        del self.inner
        self.hiding = Hiding(inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            return self.hiding.inner
        raise AttributeError(name)


class Rotated(Momentum):
    """A state by columns in memory: its products are rounded otherwise than those of rows."""

    def buffers(self, members: Any) -> Any:
        buffers = []
        for each in members:
            state = self.state[each]
            if not state:
                rows = each.shape[0]
                state["buffer"] = torch.zeros_like(each)
                state["basis"] = torch.eye(rows).add(0.1).t().contiguous().t()
                state["bases"] = [torch.linalg.qr(torch.eye(rows) + 0.1)[0].t()]
            matrix = each.grad.reshape(each.shape[0], -1)
            turned = state["basis"].t() @ state["bases"][0] @ matrix
            each.grad.copy_(turned.reshape(each.shape))
            state["basis"].add_(0.01 * (matrix @ matrix.t()))
            buffers.append(state["buffer"])
        return buffers


class Infinite(Momentum):
    """Settings that are not finite, as Prodigy's `growth_rate`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group |= {"growth_rate": math.inf, "bounds": (-math.inf, np.float64(2.0)), "d": 1e-6}
        self.limit = math.inf
        self.defaults["growth_rate"] = math.inf

    def buffers(self, members: Any) -> Any:
        for group in self.param_groups:
            group["d"] = min(group["d"] * 2.0, group["growth_rate"])
        return [self.state[each].setdefault("buffer", torch.zeros_like(each)) for each in members]


class NumPyNumbers(Momentum):
    def buffers(self, members: Any) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", np.int64(0)) + 1
            group["share"] = group.get("share", np.float32(0.1)) * 1.5
            for each in group["params"]:
                each.grad.mul_(float(group["share"] * 0.1))
        return [self.state[each].setdefault("buffer", torch.zeros_like(each)) for each in members]


WRAPPED: dict[str, Any] = {
    "around": lambda groups: Around(Adam(groups)),
    "around, shared state": lambda groups: Around(inner := Adam(groups), inner.state),
    "around another": lambda groups: Around(Slow(Adam(groups))),
    "by properties": lambda groups: ByProperties(Adam(groups)),
    "slow": lambda groups: Slow(Adam(groups)),
    "around its state_dict": lambda groups: Around(InStateDict(groups)),
    "several": Several,
    "hidden": lambda groups: Hidden(Adam(groups)),
    "nested": lambda groups: Nested(Adam(groups)),
    "nested twice": lambda groups: Nested(Nested(Adam(groups))),
    "nested, sets rates": lambda groups: Warming(Adam(groups)),
    "numbered": lambda groups: Numbered(Adam(groups)),
    "matrices and the rest": Both,
    "chained": Chained,
    "merged": lambda groups: Merged(Adam(groups)),
    "bare": lambda groups: Bare(Adam(groups)),
    "sam": sf.optim.with_closure(partial(SAM, lr=0.1, momentum=0.9)),
}
PLACES: dict[str, Any] = {
    "in groups": InGroups,
    "by text": ByText,
    "by parameter": ByParameter,
    "by tuple": ByTuple,
    "in a queue": InQueue,
    "in its state_dict": InStateDict,
    "by columns": Rotated,
    "infinite settings": Infinite,
    "numbers of NumPy": NumPyNumbers,
}


def of_packages() -> dict[str, Any]:
    """Optimizers of packages that are not required; a test skips without its package."""
    return {
        "timm": lambda groups: _package("timm.optim.lookahead").Lookahead(Adam(groups), k=3),
        "torch_optimizer": lambda groups: _package("torch_optimizer").Lookahead(Adam(groups), k=3),
        "pytorch_optimizer": lambda groups: _package("pytorch_optimizer").Lookahead(
            Adam(groups), k=3
        ),
        "prodigyopt": lambda groups: _package("prodigyopt").Prodigy(groups, lr=1.0),
        "schedulefree": lambda groups: _package("schedulefree").AdamWScheduleFree(groups, lr=0.05),
    }


def _package(name: str) -> Any:
    return pytest.importorskip(name)


EVERY = WRAPPED | PLACES | of_packages()


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_has_the_bits_of_a_whole_one(
    name: str, schedule: str, tmp_path: Path
) -> None:
    rates = sf.schedules.cosine() if schedule == "cosine" else sf.schedules.constant()

    def trained(run_dir: Path | None, **changes: Any) -> sf.Run:
        run = build(EVERY[name], run_dir=run_dir, schedule=rates, **changes)
        run.train()
        return run

    whole = trained(None)
    trained(tmp_path / "run", stop_after="4 steps")
    resumed = trained(tmp_path / "run")

    assert all(map(torch.equal, weights(resumed.state.model), weights(whole.state.model)))
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step-00000008")
    state = json.loads((newest / "state.json").read_text(), parse_constant=pytest.fail)
    assert state["identity"]["optimizer"]["name"]
    assert sf.load(tmp_path / "run").verify().problems == []


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_of_a_state_dict_is_in_the_file(name: str) -> None:
    run = build(EVERY[name], length="4 steps")
    run.train()

    checkpoint = run.parts.packed()
    tensors = checkpoint.tensors("optimizer").values(), checkpoint.tensors("state").values()
    saved = {(tuple(each.shape), each.numpy().tobytes()) for file in tensors for each in file}
    optimizer: Any = run.state.optimizers["model"].optimizer
    inner = inner_optimizers(optimizer).values()
    states = [each.state_dict() for each in (optimizer, *inner)]
    in_state_dict = [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]
    assert in_state_dict
    for each in in_state_dict:
        assert (tuple(each.shape), each.contiguous().numpy().tobytes()) in saved


@pytest.mark.parametrize(
    "name", ["around", "shared", "properties", "twice", "several", "both", "in groups", "attribute"]
)
def test_a_bad_step_off_the_cpu_changes_no_bit_of_a_wrapped_state(name: str) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    makers: dict[str, Any] = {
        "around": lambda groups: Around(sgd(groups)),
        "shared": lambda groups: Around(inner := sgd(groups), inner.state),
        "properties": lambda groups: ByProperties(sgd(groups)),
        "twice": lambda groups: Around(Around(sgd(groups))),
        "several": lambda groups: Several(groups, sgd),
        "both": lambda groups: Both(groups, sgd),
        "in groups": InGroups,
        "attribute": InStateDict,
    }
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    optimizer = makers[name]([{"params": parameters}])
    complete(optimizer)

    def set_gradients(value: float) -> None:
        for each in parameters:
            each.grad = torch.full_like(each, value)

    for value in (1.0, 2.0):
        set_gradients(value)
        optimizer.step()
    skip = skipping(optimizer, torch.device("meta"))
    assert isinstance(skip, Restoring)
    before = [leaf.detach().clone() for leaf in tensors_of(optimizer)]
    assert len(before) >= 2 * len(parameters)

    set_gradients(math.nan)
    skip.apply(optimizer, torch.tensor(1.0))
    assert all(map(torch.equal, tensors_of(optimizer), before))

    set_gradients(1.0)
    skip.apply(optimizer, torch.tensor(0.0))
    assert not any(map(torch.equal, tensors_of(optimizer), before))


def test_a_counter_of_a_wrapper_is_refused_off_the_cpu() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Nested(torch.optim.SGD([parameter], lr=0.1))
    complete(optimizer)
    skip = skipping(optimizer, torch.device("meta"))
    with refused("optimizer-state-on-host", setting="optimizer", value="Nested"):
        skip.apply(optimizer, torch.tensor(1.0))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    if isinstance(optimizer, Several):
        parts = [tensors_of(each) for each in optimizer.optimizers]
        return [leaf for part in parts for leaf in part]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    leaves = pytree.tree_leaves(optimizer.state_dict())
    return [*parameters, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]


# --- what no checkpoint holds ---------------------------------------------------------------------


class InAttribute(Momentum):
    """Buffers that its first step makes, in an attribute that no `state_dict` has."""

    def buffers(self, members: Any) -> Any:
        if "own" not in vars(self):
            self.own = [torch.zeros_like(each) for each in members]
        return self.own


class Counting(Around):
    """A wrapper that counts, and gives the `state_dict` of another optimizer."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        self.inner.param_groups[0]["lr"] /= self.calls
        return super().step(closure)


class WithObject(Momentum):
    """State that is neither a tensor nor a number."""

    def buffers(self, members: Any) -> Any:
        self.state[members[0]]["projector"] = object()
        return [torch.zeros_like(each) for each in members]


class Computed(Momentum):
    """Buffers in an attribute, which a state shows that cannot be loaded."""

    own: Any = ()

    def buffers(self, members: Any) -> Any:
        self.own = self.own or [torch.zeros_like(each) for each in members]
        return self.own

    @property
    def state(self) -> Any:  # type: ignore[override]
        members = [each for group in self.param_groups for each in group["params"]]
        return {each: {"own": own} for each, own in zip(members, self.own, strict=False)}

    @state.setter
    def state(self, state: Any) -> None:
        pass

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        members = [each for group in self.param_groups for each in group["params"]]
        for buffer, each in zip(self.buffers(members), members, strict=True):
            each.data.sub_(0.05 * buffer.mul_(0.9).add_(each.grad))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Computed, "optimizer.own[0]"),
        (InAttribute, "optimizer.own[0]"),
        (lambda groups: Counting(Adam(groups)), "optimizer.calls"),
        (lambda groups: Around(InAttribute(groups)), "optimizer.inner.own[0]"),
    ],
)
def test_state_of_an_optimizer_that_no_state_dict_has_is_refused_at_the_start(
    make: Any, name: str, tmp_path: Path
) -> None:
    with refused("state-not-saved", when="in every update") as caught:
        build(make, run_dir=tmp_path / "run").train()
    assert caught.value.fields["names"][0] == name


class AsList(Around):
    def state_dict(self) -> Any:
        return [self.inner.state_dict()]


def test_a_state_dict_that_is_no_dict_is_refused_before_the_first_update(tmp_path: Path) -> None:
    run = build(lambda groups: AsList(Adam(groups)), run_dir=tmp_path / "run")
    with refused("optimizer-state-dict", setting="optimizer", value="list"):
        run.train()
    assert run.state.step == 0


def test_state_that_cannot_be_saved_is_refused_after_the_first_step(tmp_path: Path) -> None:
    run = build(WithObject, run_dir=tmp_path / "run", save_every="8 steps")
    with refused("value-not-saved", sf.CheckpointError, value="object"):
        run.train()
    assert run.state.step <= 1


# --- optimizers that switch weights ---------------------------------------------------------------


def schedule_free(groups: Any, kind: str = "AdamWScheduleFree") -> Any:
    package = pytest.importorskip("schedulefree")
    return getattr(package, kind)(groups, lr=0.05)


def total_loss(model: Any) -> float:
    inputs, labels = (torch.cat(each) for each in zip(*batches(length="4 steps"), strict=True))
    return float(loss(model, (inputs, labels)).detach())


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedulefree_is_its_own_loop_with_train_and_eval(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    model = build(sf.optim.sgd(0.1)).state.model
    plain = schedule_free([{"params": [*model.parameters()]}], kind)
    scores = []
    for batch in batches():
        plain.train()
        plain.zero_grad()
        loss(model, batch).backward()
        plain.step()
        plain.eval()
        scores.append(total_loss(model))

    def run(**changes: Any) -> sf.Run:
        split = {"all": sf.Split(build(sf.optim.sgd(0.1)).parts.settings.train_data)}
        return build(
            partial(schedule_free, kind=kind), splits=split, evaluate_every="1 steps", **changes
        )

    with run() as evaluated:
        found = [step.metrics["all/loss"] for step in evaluated]
    assert found == pytest.approx(scores, rel=1e-5)
    with build(partial(schedule_free, kind=kind)) as unobserved:
        for _ in unobserved:
            pass
    expected = weights(unobserved.state.model)
    assert all(map(torch.equal, weights(evaluated.state.model), expected))

    run(run_dir=tmp_path / "run", stop_after="5 steps").train()
    resumed = run(run_dir=tmp_path / "run")
    resumed.train()
    assert all(map(torch.equal, weights(resumed.state.model), expected))
    loaded = sf.load(tmp_path / "run").load_model(build(sf.optim.sgd(0.1)).state.model)
    assert total_loss(loaded) == pytest.approx(scores[-1], rel=1e-5)


def test_what_does_not_go_with_schedulefree_is_refused() -> None:
    with refused("average-of-averaging-optimizer", value=0.9):
        build(schedule_free, ema=0.9)
    package = pytest.importorskip("schedulefree")
    with refused("schedule-free-wrapper", value="ScheduleFreeWrapper"):
        build(lambda groups: package.ScheduleFreeWrapper(Adam(groups)))
