"""Law 4: what would be saved right after a restore equals what was read; what cannot promise that
is refused at the resume.

Restored is into objects as a new process builds them, of another seed, so that nothing is equal by
chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import surefoot as sf
from equal_checkpoints import newest_intact
from module_protocols import KINDS, WIDTH, Cloning, equal_bits, network
from recorded import records_of_kind
from refused import refused
from surefoot.checkpoint import Store
from surefoot.errors import CheckpointError

FAST_KINDS = ("two keys for one weight", "clones", "extra state: nested", "a wrapper")
MARKED_KINDS = [
    pytest.param(kind, marks=[] if kind in FAST_KINDS else pytest.mark.slow) for kind in KINDS
]
INPUTS = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3))
TARGETS = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(4))


def loss(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def build(run_dir: Path | None, model: Callable[[], nn.Module], **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": (INPUTS, TARGETS),
        "batch_size": 4,
        "micro_batch_size": 4,
        "length": "6 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "save_every": "1000 steps",
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def what_is_saved(run: sf.Run) -> dict[str, Any]:
    """Every tensor and every plain value of a checkpoint made now, but for the clock and the
    machine.
    """
    packed = run.parts.packed()
    saved: dict[str, Any] = {}
    for file in packed.files:
        for name, tensor in packed.tensors(file).items():
            saved[f"{file}: {name}"] = tensor
    plain = dict(packed.state)
    for key in ("clock", "machine", "identity", "fingerprints"):
        plain.pop(key, None)
    saved["plain"] = json.dumps(plain, sort_keys=True)
    return saved


def list_differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names in which two are not equal to the bit."""
    names = []
    for name in {**one, **other}:
        if name not in one or name not in other:
            names.append(name)
        elif name == "plain":
            if one[name] != other[name]:
                names.append(name)
        elif not equal_bits(one[name], other[name]):
            names.append(name)
    return names


def assert_same_tensors(run: sf.Run, expected: sf.Run) -> None:
    """The plain values have what depends on how often a run was logged and saved."""
    assert list_differences(what_is_saved(run), what_is_saved(expected)) in ([], ["plain"])


def load_newest_checkpoint(run: sf.Run, run_dir: Path) -> None:
    checkpoint, _ = newest_intact(Store(run_dir / "checkpoints"))
    assert checkpoint is not None
    run.load_checkpoint(checkpoint)


def outputs_of(model: nn.Module) -> Tensor:
    outputs: Tensor = model.eval()(INPUTS)
    return outputs


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_be_saved_right_after_a_restore_is_what_was_read(
    kind: str, tmp_path: Path
) -> None:
    trained = build(tmp_path / "run", lambda: network(kind), stop_after="4 steps")
    trained.train()
    saved = what_is_saved(trained)
    restored = build(None, lambda: network(kind), seed=5)
    assert list_differences(what_is_saved(restored), saved)

    load_newest_checkpoint(restored, tmp_path / "run")

    assert list_differences(what_is_saved(restored), saved) == []


@pytest.mark.parametrize("kind", MARKED_KINDS)
def test_a_run_stopped_and_resumed_is_the_one_that_was_left_alone(
    kind: str, tmp_path: Path
) -> None:
    whole = build(None, lambda: network(kind))
    whole.train()

    build(tmp_path / "run", lambda: network(kind), stop_after="4 steps").train()
    resumed = build(tmp_path / "run", lambda: network(kind))
    resumed.train()

    assert_same_tensors(resumed, whole)
    assert equal_bits(outputs_of(resumed.state.model), outputs_of(whole.state.model))


@pytest.mark.parametrize(
    "kind", [kind for kind in MARKED_KINDS if kind.values != ("the old weight norm",)]
)
def test_averages_of_such_a_model_come_back_and_are_what_is_scored(
    kind: str, tmp_path: Path
) -> None:
    trained = build(tmp_path / "run", lambda: network(kind), stop_after="4 steps", ema=0.5)
    trained.train()
    restored = build(None, lambda: network(kind), seed=5, ema=0.5)
    load_newest_checkpoint(restored, tmp_path / "run")
    loaded = network(kind)
    sf.load(tmp_path / "run").load_model(loaded)

    assert list_differences(what_is_saved(restored), what_is_saved(trained)) == []
    average = trained.state.ema_models["model"].model
    assert extra_state_of(average) == extra_state_of(trained.state.model)
    outputs = outputs_of(average)
    assert equal_bits(outputs_of(restored.state.ema_models["model"].model), outputs)
    assert equal_bits(loaded(INPUTS), outputs)


def extra_state_of(model: nn.Module) -> dict[str, str]:
    return {name: repr(state) for name, state in model.state_dict().items() if "_extra" in name}


@pytest.mark.parametrize("kind", MARKED_KINDS)
def test_weights_are_loaded_for_use_and_as_a_start(kind: str, tmp_path: Path) -> None:
    trained = build(tmp_path / "run", lambda: network(kind))
    trained.train()
    outputs = outputs_of(trained.state.model)

    loaded = network(kind)
    sf.load(tmp_path / "run").load_model(loaded)
    assert equal_bits(loaded(INPUTS), outputs)

    if kind in ("extra state: nested", "a wrapper"):
        return  # of a start only the tensors are taken
    started = build(
        None, lambda: network(kind), init_from=tmp_path / "run", seed=5, length="1 steps"
    )
    with started:
        assert equal_bits(outputs_of(started.state.model), outputs)


@pytest.mark.parametrize("kind", MARKED_KINDS)
def test_the_best_checkpoint_is_scored_with_its_weights_and_the_run_has_its_own_again(
    kind: str, tmp_path: Path
) -> None:
    """At a rate at which steps make it worse."""
    run = build(
        tmp_path / "run",
        lambda: network(kind),
        optimizer=sf.optim.sgd(lr=30.0, momentum=0.0),
        clip="off",
        splits={
            "val": sf.Split((INPUTS, TARGETS)),
            "test": sf.Split((INPUTS, TARGETS), at_end=True),
        },
        evaluate_every="1 steps",
        best="min val/loss",
        save_every="1 steps",
        keep_last=10,
    )
    last_weights: dict[str, Tensor] = {}
    with run:
        for _ in run:
            for name, parameter in run.state.model.named_parameters():
                last_weights[name] = parameter.detach().clone()

    evaluations = records_of_kind(tmp_path / "run", "eval")
    best = min(evaluations, key=lambda record: float(record["val/loss"]))
    assert best["step"] != 6
    (end,) = records_of_kind(tmp_path / "run", "final_eval")
    assert end["weights_step"] == best["step"]
    assert end["test/loss"] == best["val/loss"]
    for name, parameter in run.state.model.named_parameters():
        if type(parameter) is nn.Parameter:
            assert equal_bits(parameter, last_weights[name])


# --- what cannot promise it -----------------------------------------------------------------------


class Forgetful(Cloning):
    """Saves clones, and loads nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        pass


class Halved(Cloning):
    """Saves its weights in half precision."""

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        state = super().state_dict(*arguments, **named)
        return {name: tensor.half() for name, tensor in state.items()}


class Clamped(Cloning):
    """Loads no number below 0."""

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "weight"].clamp(min=0))
            self.bias.copy_(state[prefix + "bias"])


class Leaving(nn.Linear):
    """Does not save its weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_post_hook(leave_out)


def leave_out(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    del state[prefix + "weight"]


class Replacing(nn.Linear):
    """Loads by putting another parameter there."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.weight = nn.Parameter(state[prefix + "weight"].clone())
        self.bias = nn.Parameter(state[prefix + "bias"].clone())


class Drifting(nn.Linear):
    """Its buffer is another one after each load."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("loads", torch.zeros(()))
        self.register_load_state_dict_post_hook(count_loads)


def count_loads(module: nn.Module, _: Any) -> None:
    module.loads += 1  # type: ignore[operator,assignment]


@pytest.mark.parametrize("layer", [Forgetful, Halved, Clamped, Leaving])
def test_a_weight_that_would_not_come_back_is_refused_before_the_first_step(
    layer: Any, tmp_path: Path
) -> None:
    with refused("weights-saved-with-loss", CheckpointError, model="model", tensor="weight"):
        build(tmp_path / "run", layer).train()


def test_trying_that_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    tried = build(tmp_path / "run", lambda: network("two keys for one weight"))
    untried = build(None, lambda: network("two keys for one weight"))
    tried.train()
    untried.train()
    assert_same_tensors(tried, untried)


class Counting(nn.Linear):
    """Its extra state is a number that it does not take back."""

    passes = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(inputs)

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("layer", "name"), [(Replacing, "weight"), (Drifting, "loads"), (Counting, "_extra_state")]
)
def test_a_model_that_is_not_what_was_read_is_refused_at_the_resume(
    layer: Any, name: str, tmp_path: Path
) -> None:
    build(tmp_path / "run", layer, stop_after="3 steps").train()
    with pytest.raises(CheckpointError) as caught:
        build(tmp_path / "run", layer).train()
    assert name in str(caught.value)


def test_a_start_from_weights_that_a_model_does_not_take_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "run", lambda: nn.Linear(WIDTH, WIDTH)).train()
    with refused("saved-state-not-restored", CheckpointError) as caught:
        build(None, Forgetful, init_from=tmp_path / "run").train()
    assert caught.value.fields["difference"].startswith("bias")
    assert str(tmp_path / "run") in caught.value.places[0]


def test_extra_state_that_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"set": {1, 2}}

    with refused("value-not-saved", CheckpointError, setting="extra/_extra_state/set", value="set"):
        build(tmp_path / "run", lambda: Odd(WIDTH, WIDTH)).train()


def test_an_average_that_cannot_be_copied_is_refused_in_words() -> None:
    with refused("model-not-copied", setting="ema") as caught:
        build(None, lambda: network("the old weight norm"), ema=0.5)
    assert "parametrizations.weight_norm" in str(caught.value.remedies[0])


# --- optimizers -----------------------------------------------------------------------------------


class Lookahead(torch.optim.SGD):
    """State outside of `.state`, and a protocol that saves it: slow weights, and how often they
    were moved.
    """

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, lr=lr)
        self.steps = 0
        self.losses = [float("inf")]
        self.fast: list[Tensor] = []
        for group in self.param_groups:
            self.fast += group["params"]
        self.slow = [parameter.detach().clone() for parameter in self.fast]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        self.state["all"] = {"steps": self.steps, 3: torch.full((2,), float(self.steps))}
        first_parameter = self.fast[0]
        self.state[first_parameter]["history"] = [
            torch.full((1,), float(self.steps)),
            None,
            (self.steps, "text"),
        ]
        if self.steps % 3 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, self.fast, strict=True):
                    slow.add_(fast - slow, alpha=0.5)
                    fast.copy_(slow)

    def state_dict(self) -> Any:
        return super().state_dict() | {
            "slow": dict(enumerate(self.slow)),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Any) -> None:
        state = dict(state)
        self.steps = state.pop("steps")
        for index, slow in state.pop("slow").items():
            self.slow[index].copy_(slow)
        super().load_state_dict(state)


class Careless(Lookahead):
    """Forgets its slow weights when it is loaded."""

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        torch.optim.SGD.load_state_dict(self, state)


def test_an_optimizer_with_state_of_its_own_goes_on_as_if_left_alone(tmp_path: Path) -> None:
    settings = {
        "optimizer": lambda groups: Lookahead(groups, lr=0.05),
        "model": lambda: nn.Linear(WIDTH, WIDTH),
    }
    whole = build(None, **settings)
    whole.train()

    for stop in ("2 steps", "4 steps", None):
        resumed = build(tmp_path / "run", **settings, stop_after=stop)
        resumed.train()

    assert_same_tensors(resumed, whole)


def with_hooks(groups: Any) -> torch.optim.Optimizer:
    """State that hooks save and load."""
    optimizer = torch.optim.SGD(groups, lr=0.05)
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            optimizer.param_groups[0]["params"][0].data.mul_(2)

    def save(_: Any, state: Any) -> Any:
        return state | {"steps": steps}

    def load(_: Any, state: Any) -> None:
        nonlocal steps
        steps = state["steps"]

    optimizer.register_step_post_hook(count)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    return optimizer


def test_an_optimizer_with_hooks_that_save_and_load_goes_on_as_if_left_alone(
    tmp_path: Path,
) -> None:
    settings = {"optimizer": with_hooks, "model": lambda: nn.Linear(WIDTH, WIDTH)}
    whole = build(None, **settings)
    whole.train()

    for stop in ("2 steps", None):
        resumed = build(tmp_path / "run", **settings, stop_after=stop)
        resumed.train()

    assert_same_tensors(resumed, whole)


def test_an_optimizer_that_forgets_is_refused_at_the_resume(tmp_path: Path) -> None:
    settings = {
        "optimizer": lambda groups: Careless(groups, lr=0.05),
        "model": lambda: nn.Linear(WIDTH, WIDTH),
    }
    build(tmp_path / "run", **settings, stop_after="4 steps").train()
    with refused("saved-state-not-restored", CheckpointError, name="Careless"):
        build(tmp_path / "run", **settings).train()


# --- what restores besides ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["extra state: nested", pytest.param("two keys for one weight", marks=pytest.mark.slow)]
)
def test_such_a_run_is_verified_and_exported(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_every": "2 steps", "keep_last": 5}
    run = build(tmp_path / "run", lambda: network(kind), log_every="1 steps", **settings)
    run.train()

    verdict = sf.load(build(tmp_path / "run", lambda: network(kind), **settings)).verify()
    sf.load(tmp_path / "run").export(tmp_path / "weights")

    assert verdict.sound, str(verdict)
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    state = run.state.model.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert equal_bits(exported[name], tensor)
