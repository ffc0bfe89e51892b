"""Law 5: watching a run changes no bit of it: how often it logs, evaluates, saves or samples, looks
at its layers, with which workers. (8 s)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
import watched_runs
from rank_processes import Ranks
from small_runs import FEATURES, build

ONLY_AT_THE_END = {
    "log_every": "1000 steps",
    "evaluate_every": "1000 steps",
    "save_every": "1000 steps",
    "layer_stats_every": None,
    "early_stopping": None,
    "length": "10 steps",
}


def bits(run: sf.Run) -> str:
    """A hash of every weight, buffer, average and number of the optimizer's."""
    tensors: list[Tensor] = []
    for name, model in run.state.models.items():
        tensors += model.state_dict().values()
        if name in run.state.ema_models:
            run.state.ema_models[name].refresh(model)
            tensors += run.state.ema_models[name].model.parameters()
        trained = run.state.optimizers[name]
        for parameter in trained.parameters:
            state = trained.optimizer.state.get(parameter, {})
            tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
    bits = sha256()
    for tensor in tensors:
        bits.update(tensor.detach().numpy().tobytes())
    return bits.hexdigest()


def train(run_dir: Path | None, **changes: Any) -> tuple[str, list[float]]:
    """The bits after training, and what the body of the loop drew from the three generators after
    each step.
    """
    run = build(run_dir, **(ONLY_AT_THE_END | changes))
    drawn = []
    with run:
        for _ in run:
            drawn.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
    return bits(run), drawn


@pytest.fixture(scope="module")
def unwatched() -> tuple[str, list[float]]:
    return train(None, splits=None)


def assert_same_weights(run: dict[str, Any], other: dict[str, Any]) -> None:
    """To the bit."""
    assert run["weights"].keys() == other["weights"].keys()
    for name, weight in run["weights"].items():
        assert torch.equal(weight, other["weights"][name]), name


@pytest.mark.fast(
    "log_every0",
    "log_every,save_every",
    "evaluate_every,ema",
    "save_every,keep_last,keep_every",
    "layer_stats_every,log_every",
    "workers,evaluate_every,log_every,save_every",
    "best,evaluate_every",
    "early_stopping,evaluate_every,evaluate_at_start",
    "sample_fn",
    "panels_fn",
)
@pytest.mark.parametrize(
    "changes",
    [
        {"log_every": "1 steps"},
        {"log_every": "7 steps"},
        {"log_every": "auto", "save_every": "auto"},
        {"evaluate_every": "1 steps"},
        {"evaluate_every": "3 steps", "ema": 0.9},
        {"save_every": "1 steps"},
        {"save_every": "1 steps", "keep_last": 1, "keep_every": "4 steps"},
        {"layer_stats_every": "1 steps"},
        {"layer_stats_every": "3 steps", "log_every": "2 steps"},
        {"workers": 2},
        {
            "workers": 1,
            "evaluate_every": "2 steps",
            "log_every": "3 steps",
            "save_every": "5 steps",
        },
        {"best": "min val/loss", "evaluate_every": "1 steps"},
        {
            "early_stopping": sf.EarlyStopping("min val/loss", patience=1000),
            "evaluate_every": "2 steps",
            "evaluate_at_start": True,
        },
        {"sample_fn": lambda model: str(float(model(torch.randn(4, 8)).sum()) + random.random())},
        {"panels_fn": lambda model: [model(torch.randn(4, 8)), np.random.rand(), random.random()]},
    ],
    ids=",".join,
)
def test_watching_a_run_changes_no_bit_of_it(
    changes: dict[str, Any], unwatched: Any, tmp_path: Path
) -> None:
    assert train(tmp_path / "run", **changes) == unwatched


class WithFrozenPart(nn.Module):
    """A part in evaluation mode, for which torch takes a quicker way where nothing looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.TransformerEncoderLayer(
            FEATURES, 2, 64, activation="gelu", batch_first=True
        ).eval()
        self.frozen.requires_grad_(False)
        self.out = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs[:, None] * torch.arange(1, 8)[:, None]
        filled = torch.arange(7).expand(len(rows), 7) > 4
        return torch.as_tensor(self.out(self.frozen(rows, src_key_padding_mask=filled).mean(1)))


def counted_by_itself(model: Any, batch: Any) -> sf.Mean:
    """Over the samples of two of three classes: another number in each micro-batch, and no `count=`
    tells it.
    """
    return sf.losses.cross_entropy(model(batch[0]), batch[1].where(batch[1] > 0, -100))


EVERYTHING = {
    "layer_stats_every": "1 steps",
    "log_every": "1 steps",
    "evaluate_every": "3 steps",
    "save_every": "4 steps",
}


@pytest.mark.fast("micro_batch_size,clip", "optimizer,ema,schedule")
@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": None},
        {"micro_batch_size": 2, "clip": "adaptive 0.01"},
        {"precision": "fp16"},
        {"precision": "bf16", "ema": None},
        {"optimizer": sf.optim.muon(1e-2), "ema": None},
        {"optimizer": sf.optim.schedule_free(1e-2), "ema": None, "schedule": None},
        {"optimizer": lambda groups: torch.optim.RMSprop(groups, lr=1e-3), "clip": "auto 0.9"},
        {"model": WithFrozenPart},
        {"loss": counted_by_itself},
    ],
    ids=",".join,
)
def test_with_everything_on_a_run_ends_with_the_bits_of_one_that_nobody_looks_at(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    watched = train(tmp_path / "run", **changes, **EVERYTHING)
    unwatched = train(None, splits=None, **changes)
    assert watched == unwatched


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"sharding": {}},
    "replicas": {"sharding": {"replicas": 2}},
}
ResultsOf = Callable[[str, str | None], list[Any]]


@pytest.fixture(scope="module")
def results_of(ranks: Ranks) -> ResultsOf:
    """The results of two ranks, by their strategy and how often they look at their layers."""

    @cache
    def train_on_ranks(strategy: str, layer_stats_every: str | None) -> list[Any]:
        settings = STRATEGIES[strategy]
        return ranks(2, watched_runs.watched, layer_stats_every=layer_stats_every, **settings)

    return train_on_ranks


@pytest.mark.fast("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_watching_the_layers_of_several_ranks_changes_no_bit(
    strategy: str, results_of: ResultsOf
) -> None:
    watched_ranks = results_of(strategy, "1 steps")
    unwatched_ranks = results_of(strategy, None)
    for watched, unwatched in zip(watched_ranks, unwatched_ranks, strict=True):
        assert watched["layers"]
        assert unwatched["layers"] == []
        assert_same_weights(watched, unwatched)


@pytest.mark.slow
def test_watching_a_compiled_run_changes_no_bit(ranks: Ranks) -> None:
    cases: list[dict[str, Any]] = [{"layer_stats_every": "1 steps"}, {"layer_stats_every": None}]
    (watched,), (unwatched,) = ranks.each(1, watched_runs.watched, cases, compile=True)
    assert len(watched["layers"]) == 3
    assert [record["activation_rms"] for record in watched["layers"]] == [{}, {}, {}]
    assert_same_weights(watched, unwatched)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Any:
    (result,) = ranks(1, watched_runs.watched, layer_stats_every="1 steps")
    return result


@pytest.mark.fast("ddp", "fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_several_ranks_the_layers_are_those_of_one_process(
    strategy: str, results_of: ResultsOf, alone: Any
) -> None:
    on_rank_0, on_rank_1 = results_of(strategy, "1 steps")
    assert on_rank_0["seen"] == on_rank_1["seen"] == alone["seen"]
    for record, expected in zip(on_rank_0["layers"], alone["layers"], strict=True):
        expected_names = set(expected)
        assert "grad_noise" in expected_names
        if strategy != "ddp":
            # of what is sharded no rank has a first micro-batch's gradient
            expected_names.remove("grad_noise")
        assert record.keys() == expected_names
        for name, value in record.items():
            if isinstance(value, dict):
                assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-9, nan_ok=True), name
            else:
                assert value == expected[name]


def test_the_console_changes_no_bit(
    unwatched: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = train(tmp_path / "run", console=True, log_every="1 steps", evaluate_every="4 steps")
    assert "step=10/10" in capsys.readouterr().out
    assert watched == unwatched


def test_another_seed_changes_the_bits(unwatched: Any) -> None:
    """The comparison above can fail."""
    assert train(None, splits=None, seed=1) != unwatched


class Drawing(nn.Module):
    """Draws random numbers whenever it is used, and notes the modes it was used in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(3)
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append(self.mode())
        random.random()
        np.random.rand()
        torch.rand(())
        return torch.as_tensor(self.frozen(self.inner(inputs)))

    def mode(self) -> tuple[bool, bool, bool]:
        """Whether the model, its dropout and its frozen part are in training mode."""
        return self.training, self.inner[1].training, self.frozen.training


# its user keeps the frozen part in evaluation mode
TRAINING_MODE = (True, True, False)
EVALUATION_MODE = (False, False, False)


def generator_states() -> tuple[Any, Any, Any]:
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    )


def make_panels(model: nn.Module) -> list[Any]:
    model(torch.randn(4, 8))
    return []


def test_evaluating_and_sampling_leave_generators_modes_and_weights_as_they_were() -> None:
    run = build(
        None,
        model=Drawing,
        ema=None,
        sample_fn=lambda model: str(model(torch.randn(4, 8)).sum()),
        panels_fn=make_panels,
        length="6 steps",
    )
    model: Any = run.state.models["model"]
    model.frozen.eval()
    model.modes.clear()
    with run:
        for step in run:
            states_before = generator_states()
            weights_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

            run.evaluate()
            run.sample()
            run.make_panels()

            assert generator_states() == states_before
            assert model.mode() == TRAINING_MODE
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, weights_before[name])
            for parameter in model.parameters():
                assert parameter.grad is None
            assert step.index == run.state.step - 1
    assert set(model.modes) == {TRAINING_MODE, EVALUATION_MODE}


def test_a_score_that_raises_leaves_generators_and_modes_as_they_were() -> None:
    from surefoot.data.loader import MicroBatch
    from surefoot.train.evaluate import Split, evaluate_batches
    from surefoot.train.precision import precision

    def broken(outputs: Any, targets: Any) -> sf.Mean:
        raise ZeroDivisionError

    model = Drawing()
    model.frozen.eval()
    batch = torch.randn(4, 8, generator=torch.Generator()), torch.zeros(4)
    no_ids = np.zeros(0, dtype=np.int64)
    states_before = generator_states()

    with pytest.raises(ZeroDivisionError):
        evaluate_batches(
            model,
            [MicroBatch(batch, 4, 0, no_ids, no_ids)],
            Split(None, metrics=[broken], loss=False),
            loss=None,
            precision=precision("fp32", torch.device("cpu")),
            seed=0,
        )

    assert generator_states() == states_before
    assert model.mode() == TRAINING_MODE


def test_sampling_gives_the_same_whenever_it_is_asked_for() -> None:
    run = build(
        None, sample_fn=lambda model: str(model(torch.randn(4, 8)).sum().item()), length="4 steps"
    )
    with run:
        for _ in run:
            torch.rand(7)
            assert run.sample() == run.sample()
