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
from same_bits import assert_same_bits, weights
from surefoot.optim.in_place import Restoring
from surefoot.optim.kinds.kind import inner_optimizers
from surefoot.optim.skip_step import skipping
from surefoot.optim.user_optimizer import complete
from with_closures import SAM, batches, build, data, loss

Adam = partial(torch.optim.Adam, lr=0.05)


def parameters_of(groups: Any) -> list[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]


def zeros_like_each(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(parameter) for parameter in parameters]


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
                for parameter in group["params"]:
                    start = parameter.detach().clone()
                    slow = self.state[parameter].setdefault("slow", start)
                    if group["counter"] % 3 == 0:
                        slow.lerp_(parameter, 0.5)
                        parameter.copy_(slow)

    def state_dict(self) -> Any:
        slow = super().state_dict()
        fast = self.optimizer.state_dict()
        return {"slow": slow["state"], "fast": fast["state"], "param_groups": slow["param_groups"]}

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
        parameters = parameters_of(inner.param_groups)
        self.slow = [parameter.detach().clone() for parameter in parameters]
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.calls += 1
        if self.calls % 3 == 0:
            parameters = parameters_of(self.param_groups)
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)

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
        for parameter in parameters_of(self.param_groups):
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter.detach(), 0.1)
            parameter.data.lerp_(mean, 0.01)

    def state_dict(self) -> Any:
        means = dict(enumerate(self.state.values()))
        return {"inner": self.inner.state_dict(), "means": means}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        parameters = parameters_of(self.param_groups)
        for number, entries in state_dict["means"].items():
            self.state[parameters[number]] = entries


class Both(torch.optim.Optimizer):
    """Two optimizers, for matrices and for the rest, and a state that merges theirs in each
    access.
    """

    def __init__(self, params: Any, of_rest: Any = Adam) -> None:
        matrices = [parameter for parameter in parameters_of(params) if parameter.ndim > 1]
        rest = [parameter for parameter in parameters_of(params) if parameter.ndim < 2]
        self.matrices = torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
        self.rest = of_rest(rest)
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
        groups = [{"params": [parameter]} for parameter in group["params"]]
        super().__init__(groups, {"lr": 0.05})
        self.optimizers = [inner([group]) for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


class Momentum(torch.optim.SGD):
    """Momentum whose buffers are kept where `buffers` says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)

    def buffers(self, parameters: Any) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = parameters_of(self.param_groups)
        for buffer, parameter in zip(self.buffers(parameters), parameters, strict=True):
            parameter.grad.copy_(buffer.mul_(0.9).add_(parameter.grad))
        super().step()


class InGroups(Momentum):
    def buffers(self, parameters: Any) -> Any:
        first_group = self.param_groups[0]
        if "buffers" not in first_group:
            first_group["buffers"] = zeros_like_each(parameters)
        return first_group["buffers"]


class ByText(Momentum):
    def buffers(self, parameters: Any) -> Any:
        self.state["step"] = self.state.get("step", 0) + 1
        if "buffers" not in self.state:
            self.state["buffers"] = zeros_like_each(parameters)
        return self.state["buffers"]


class ByParameter(Momentum):
    def buffers(self, parameters: Any) -> Any:
        if "all" not in self.state:
            buffers = zip(parameters, zeros_like_each(parameters), strict=True)
            self.state["all"] = dict(buffers)
        return self.state["all"].values()


class ByTuple(Momentum):
    def buffers(self, parameters: Any) -> Any:
        state_of_first = self.state[parameters[0]]
        if "all" not in state_of_first:
            state_of_first["all"] = {}
            for number, buffer in enumerate(zeros_like_each(parameters)):
                state_of_first["all"][0, number, 0.5] = buffer
        return state_of_first["all"].values()


class InQueue(Momentum):
    def buffers(self, parameters: Any) -> Any:
        queue = self.state[parameters[0]].setdefault("queue", deque(maxlen=8))
        if not queue:
            queue.extend(zeros_like_each(parameters))
        return queue


class InStateDict(Momentum):
    """Buffers in an attribute, which only its own `state_dict` has."""

    own: Any = None

    def buffers(self, parameters: Any) -> Any:
        if self.own is None:
            self.own = zeros_like_each(parameters)
        return self.own

    def state_dict(self) -> Any:
        return super().state_dict() | {"own": self.own}

    def load_state_dict(self, state_dict: Any) -> None:
        of_torch = dict(state_dict)
        self.own = of_torch.pop("own")
        super().load_state_dict(of_torch)


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

    def buffers(self, parameters: Any) -> Any:
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                rows = parameter.shape[0]
                state["buffer"] = torch.zeros_like(parameter)
                state["basis"] = torch.eye(rows).add(0.1).t().contiguous().t()
                state["bases"] = [torch.linalg.qr(torch.eye(rows) + 0.1)[0].t()]
            matrix = parameter.grad.reshape(parameter.shape[0], -1)
            turned = state["basis"].t() @ state["bases"][0] @ matrix
            parameter.grad.copy_(turned.reshape(parameter.shape))
            state["basis"].add_(0.01 * (matrix @ matrix.t()))
            buffers.append(state["buffer"])
        return buffers


class InState(Momentum):
    """Buffers in the usual place."""

    def buffers(self, parameters: Any) -> Any:
        for parameter in parameters:
            if "buffer" not in self.state[parameter]:
                self.state[parameter]["buffer"] = torch.zeros_like(parameter)
        return [self.state[parameter]["buffer"] for parameter in parameters]


class Infinite(InState):
    """Settings that are not finite, as Prodigy's `growth_rate`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group |= {"growth_rate": math.inf, "bounds": (-math.inf, np.float64(2.0)), "d": 1e-6}
        self.limit = math.inf
        self.defaults["growth_rate"] = math.inf

    def buffers(self, parameters: Any) -> Any:
        for group in self.param_groups:
            group["d"] = min(group["d"] * 2.0, group["growth_rate"])
        return super().buffers(parameters)


class NumPyNumbers(InState):
    def buffers(self, parameters: Any) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", np.int64(0)) + 1
            group["share"] = group.get("share", np.float32(0.1)) * 1.5
            for parameter in group["params"]:
                parameter.grad.mul_(float(group["share"] * 0.1))
        return super().buffers(parameters)


def around_shared_state(inner: torch.optim.Optimizer) -> Around:
    return Around(inner, inner.state)


WRAPPED: dict[str, Any] = {
    "around": lambda groups: Around(Adam(groups)),
    "around, shared state": lambda groups: around_shared_state(Adam(groups)),
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


def timm_lookahead(groups: Any) -> Any:
    return pytest.importorskip("timm.optim.lookahead").Lookahead(Adam(groups), k=3)


def torch_optimizer_lookahead(groups: Any) -> Any:
    return pytest.importorskip("torch_optimizer").Lookahead(Adam(groups), k=3)


def pytorch_optimizer_lookahead(groups: Any) -> Any:
    return pytest.importorskip("pytorch_optimizer").Lookahead(Adam(groups), k=3)


def prodigy(groups: Any) -> Any:
    return pytest.importorskip("prodigyopt").Prodigy(groups, lr=1.0)


def schedule_free(groups: Any, kind: str = "AdamWScheduleFree") -> Any:
    package = pytest.importorskip("schedulefree")
    return getattr(package, kind)(groups, lr=0.05)


# of packages that are not required: a test skips without its package
OF_PACKAGES: dict[str, Any] = {
    "timm": timm_lookahead,
    "torch_optimizer": torch_optimizer_lookahead,
    "pytorch_optimizer": pytorch_optimizer_lookahead,
    "prodigyopt": prodigy,
    "schedulefree": schedule_free,
}
EVERY = WRAPPED | PLACES | OF_PACKAGES
RATES = {"constant": sf.schedules.constant(), "cosine": sf.schedules.cosine()}


@pytest.mark.parametrize("schedule", RATES)
@pytest.mark.parametrize("name", EVERY)
def test_a_resumed_run_has_the_bits_of_a_whole_one(
    name: str, schedule: str, tmp_path: Path
) -> None:
    def trained(run_dir: Path | None, **changes: Any) -> sf.Run:
        run = build(EVERY[name], run_dir=run_dir, schedule=RATES[schedule], **changes)
        run.train()
        return run

    whole = trained(None)
    trained(tmp_path / "run", stop_after="4 steps")
    resumed = trained(tmp_path / "run")

    assert_same_bits(weights(resumed), weights(whole))
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step-00000008")
    state = json.loads((newest / "state.json").read_text(), parse_constant=pytest.fail)
    assert state["identity"]["optimizer"]["name"]
    assert sf.load(tmp_path / "run").verify().problems == []


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_of_a_state_dict_is_in_the_file(name: str) -> None:
    run = build(EVERY[name], length="4 steps")
    run.train()

    checkpoint = run.parts.packed()
    saved = set()
    for file in ("optimizer", "state"):
        for tensor in checkpoint.tensors(file).values():
            saved.add(bits_of(tensor))
    optimizer: Any = run.state.optimizers["model"].optimizer
    inner = inner_optimizers(optimizer).values()
    states = [part.state_dict() for part in (optimizer, *inner)]
    in_state_dict = [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]
    assert in_state_dict
    for tensor in in_state_dict:
        assert bits_of(tensor) in saved


def bits_of(tensor: Tensor) -> tuple[torch.Size, bytes]:
    return tensor.shape, tensor.contiguous().numpy().tobytes()


def momentum_sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda groups: Around(momentum_sgd(groups)), id="around"),
        pytest.param(lambda groups: around_shared_state(momentum_sgd(groups)), id="shared"),
        pytest.param(lambda groups: ByProperties(momentum_sgd(groups)), id="properties"),
        pytest.param(lambda groups: Around(Around(momentum_sgd(groups))), id="twice"),
        pytest.param(lambda groups: Several(groups, momentum_sgd), id="several"),
        pytest.param(lambda groups: Both(groups, momentum_sgd), id="both"),
        pytest.param(InGroups, id="in groups"),
        pytest.param(InStateDict, id="attribute"),
    ],
)
def test_a_bad_step_off_the_cpu_changes_no_bit_of_a_wrapped_state(make: Any) -> None:
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
    optimizer = make([{"params": parameters}])
    complete(optimizer)

    def set_gradients(value: float) -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)

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
    """The parameters and the tensors of the state of an optimizer."""
    if isinstance(optimizer, Several):
        tensors = []
        for part in optimizer.optimizers:
            tensors += tensors_of(part)
        return tensors
    leaves = pytree.tree_leaves(optimizer.state_dict())
    state = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [*parameters_of(optimizer.param_groups), *state]


# --- what no checkpoint holds ---------------------------------------------------------------------


class InAttribute(Momentum):
    """Buffers that its first step makes, in an attribute that no `state_dict` has."""

    def buffers(self, parameters: Any) -> Any:
        if "own" not in vars(self):
            self.own = zeros_like_each(parameters)
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

    def buffers(self, parameters: Any) -> Any:
        self.state[parameters[0]]["projector"] = object()
        return zeros_like_each(parameters)


class Computed(Momentum):
    """Buffers in an attribute, which a state shows that cannot be loaded."""

    own: Any = ()

    def buffers(self, parameters: Any) -> Any:
        if not self.own:
            self.own = zeros_like_each(parameters)
        return self.own

    @property
    def state(self) -> Any:  # type: ignore[override]
        buffers = zip(parameters_of(self.param_groups), self.own, strict=False)
        return {parameter: {"own": buffer} for parameter, buffer in buffers}

    @state.setter
    def state(self, state: Any) -> None:
        pass

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = parameters_of(self.param_groups)
        for buffer, parameter in zip(self.buffers(parameters), parameters, strict=True):
            parameter.data.sub_(0.05 * buffer.mul_(0.9).add_(parameter.grad))


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


SCHEDULE_FREE = ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"]


def total_loss(model: Any) -> float:
    return float(loss(model, data()).detach())


def plain_model() -> nn.Module:
    """The model with which each run here begins."""
    return build(sf.optim.sgd(0.1)).state.model


def plain_scores(kind: str) -> list[float]:
    """The loss over all samples after each step of the loop that the package documents."""
    model = plain_model()
    optimizer = schedule_free([{"params": [*model.parameters()]}], kind)
    scores = []
    for batch in batches():
        optimizer.train()
        optimizer.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.eval()
        scores.append(total_loss(model))
    return scores


def build_schedule_free(kind: str, **changes: Any) -> sf.Run:
    """A run that evaluates after each step."""
    splits = {"all": sf.Split(data())}
    optimizer = partial(schedule_free, kind=kind)
    return build(optimizer, splits=splits, evaluate_every="1 steps", **changes)


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_schedulefree_is_its_own_loop_with_train_and_eval(kind: str) -> None:
    pytest.importorskip("schedulefree")

    with build_schedule_free(kind) as run:
        scores = [step.metrics["all/loss"] for step in run]

    assert scores == pytest.approx(plain_scores(kind), rel=1e-5)


@pytest.mark.parametrize("kind", SCHEDULE_FREE)
def test_schedulefree_has_the_same_bits_evaluated_resumed_or_neither(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("schedulefree")
    evaluated = build_schedule_free(kind)
    evaluated.train()
    unobserved = build(partial(schedule_free, kind=kind))
    unobserved.train()

    build_schedule_free(kind, run_dir=tmp_path / "run", stop_after="5 steps").train()
    resumed = build_schedule_free(kind, run_dir=tmp_path / "run")
    resumed.train()

    assert_same_bits(weights(evaluated), weights(unobserved))
    assert_same_bits(weights(resumed), weights(unobserved))
    loaded = sf.load(tmp_path / "run").load_model(plain_model())
    assert total_loss(loaded) == pytest.approx(plain_scores(kind)[-1], rel=1e-5)


def test_an_average_beside_schedulefree_is_refused() -> None:
    with refused("average-of-averaging-optimizer", value=0.9):
        build(schedule_free, ema=0.9)


def test_the_wrapper_of_schedulefree_is_refused() -> None:
    package = pytest.importorskip("schedulefree")
    with refused("schedule-free-wrapper", value="ScheduleFreeWrapper"):
        build(lambda groups: package.ScheduleFreeWrapper(Adam(groups)))
