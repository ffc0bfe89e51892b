"""Micro-batch sizes: which are tried, what is measured of them, and which is recommended; 6
seconds.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import surefoot as sf
import with_closures
from rank_processes import Ranks
from refused import refused
from small_runs import build
from surefoot.tools.tune import micro_batch_trial
from surefoot.tools.tune.batch_size_search import SizeTrial, recommend, search_sizes
from surefoot.tools.tune.find_batch import what_changes_with_it
from surefoot.train import timed_pass
from waiting import LogicalClock


def divisors(whole: int) -> list[int]:
    return [size for size in range(1, whole + 1) if whole % size == 0]


class Device:
    """Needs `fixed + per_sample * size` bytes, and runs out past `holds`."""

    def __init__(self, whole: int, *, fixed: int, per_sample: int, holds: int) -> None:
        self.whole = whole
        self.fixed = fixed
        self.per_sample = per_sample
        self.holds = holds
        self.tried: list[int] = []

    def needs(self, size: int) -> int:
        return self.fixed + self.per_sample * size

    def attempt(self, size: int) -> SizeTrial:
        self.tried.append(size)
        needs = self.needs(size)
        if needs > self.holds:
            return SizeTrial(size, self.whole // size, needs, problem="out of memory")
        return SizeTrial(
            size,
            self.whole // size,
            needs,
            samples_per_s=size / (1 + 0.01 * size),
            targets_per_s=1.0,
        )


@given(whole=st.integers(1, 2000), per_sample=st.integers(1, 100), holds=st.integers(1, 100_000))
def test_the_largest_divisor_that_fits_is_found_and_none_that_does_not_is_tried(
    whole: int, per_sample: int, holds: int
) -> None:
    device = Device(whole, fixed=500, per_sample=per_sample, holds=holds)
    rows = search_sizes(device.attempt, divisors(whole), deadly_bytes=holds, standing_bytes=500)

    fitting = [size for size in divisors(whole) if device.needs(size) <= holds]
    failed = [size for size in device.tried if device.needs(size) > holds]
    sizes = [row.size for row in rows]
    assert [row.size for row in rows if row.fits][-1:] == fitting[-1:]
    assert failed in ([], [1])
    assert len(set(device.tried)) == len(device.tried)
    assert all(row.size * row.accumulation == whole for row in rows)
    assert sizes == sorted(sizes)


def test_what_is_not_tried_is_shown_with_what_it_would_need() -> None:
    device = Device(96, fixed=100, per_sample=10, holds=600)
    *_, last = search_sizes(device.attempt, divisors(96), deadly_bytes=600, standing_bytes=100)

    assert (last.size, last.memory_bytes) == (96, 1060)
    assert str(last.problem).startswith("not tried")
    assert not last.fits


def test_running_out_of_memory_against_the_prediction_ends_in_the_next_smaller_size() -> None:
    def attempt(size: int) -> SizeTrial:
        if size < 48:
            return SizeTrial(size, 96 // size, 10 * size, float(size))
        return SizeTrial(size, 96 // size, 10_001, None)

    rows = search_sizes(attempt, divisors(96), deadly_bytes=10_000, standing_bytes=0)

    assert max(row.size for row in rows if row.fits) == 32


@pytest.mark.parametrize(
    ("rates", "recommended", "fastest"),
    [
        ((50, 97.5, 100, 90), 2, 4),
        ((50, 96, 99, 100), 4, 8),
        ((100, 90, 80, 70), 1, 1),
        ((50, 60, 70, 100), 8, 8),
    ],
)
def test_the_smallest_within_three_percent_of_the_fastest_is_recommended(
    rates: tuple[float, ...], recommended: int, fastest: int
) -> None:
    rows = []
    for size, rate in zip((1, 2, 4, 8), rates, strict=True):
        rows.append(SizeTrial(size, 8 // size, 10, rate, rate))
    found = recommend(rows, batch_size=8, unit="samples", limit_bytes=99)

    assert found is not None
    assert found.recommended.size == recommended
    assert found.fastest.size == fastest
    assert found.largest.size == 8
    assert found.flags == f"--batch-size 8 --micro-batch-size {recommended}"
    assert ("3%" in found.reason) == (recommended != fastest)


# --- of a run -------------------------------------------------------------------------------------

WIDE = 256


def mlp_run(**changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(32, WIDE), nn.ReLU(), nn.Linear(WIDE, 10)),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "train_data": (
            torch.randn(200, 32, generator=generator),
            torch.randint(10, (200,), generator=generator),
        ),
        "batch_size": 24,
        "length": "12 epochs",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def test_every_row_keeps_the_batch_and_its_memory_is_constant_plus_a_line_in_the_size() -> None:
    found = sf.tune.find_batch_size(mlp_run(batch_size=2048), memory="1 GB")

    assert {row.size * row.accumulation for row in found.tried} == {2048}
    weight_bytes = 4 * sum(parameter.numel() for parameter in mlp_run().state.parameters)
    data_bytes = 2048 * (32 * 4 + 8)
    memory_bytes = {}
    for row in found.tried:
        # gradients are added up in a tree, which holds those of whole subtrees of micro-batches
        sum_bytes = weight_bytes * (row.accumulation.bit_length() - 1)
        memory_bytes[row.size] = (row.memory_bytes or 0) - sum_bytes
    # weights, two averages of AdamW's, gradients
    assert 4 * weight_bytes <= memory_bytes[1] - data_bytes < 4.8 * weight_bytes
    per_sample = (memory_bytes[512] - memory_bytes[256]) / 256
    assert (memory_bytes[1024] - memory_bytes[512]) / 512 == pytest.approx(per_sample, rel=0.02)
    # of each sample: two layers of activations, and gradients of them
    assert 4 * 2 * WIDE <= per_sample <= 4 * 5 * WIDE


def test_what_needs_more_than_nine_tenths_of_the_memory_does_not_fit() -> None:
    run = mlp_run(batch_size=1024)
    whole = sf.tune.find_batch_size(run, memory="1 GB").tried[-1]
    limited = 0.6 * (whole.memory_bytes or 0)

    found = sf.tune.find_batch_size(run, memory=f"{limited / 1e6:.3f} MB")

    too_large = found.tried[-1]
    assert found.limit_bytes == pytest.approx(0.9 * limited, rel=1e-3)
    assert found.largest.size < 1024
    assert found.largest.memory_bytes is not None
    assert too_large.memory_bytes is not None
    assert found.largest.memory_bytes <= found.limit_bytes < too_large.memory_bytes
    assert too_large.problem == "does not fit"


def test_what_would_take_more_than_the_cpu_has_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = mlp_run(batch_size=1024)
    whole = sf.tune.find_batch_size(run, memory="1 GB").tried[-1]
    free_bytes = int(0.6 * (whole.memory_bytes or 0))
    monkeypatch.setattr("surefoot.tools.tune.find_batch.free_bytes", lambda device: free_bytes)

    for memory in (None, "1 GB"):
        last = sf.tune.find_batch_size(run, memory=memory).tried[-1]
        assert last.size == 1024
        assert not last.fits
        assert str(last.problem).startswith("not tried")


def test_sizes_that_take_less_than_smaller_ones_are_found() -> None:
    """As a loss that is computed in pieces from some size on."""
    tried: list[int] = []

    def attempt(size: int) -> SizeTrial:
        tried.append(size)
        needs = 10 * size if size < 16 else 60 + size
        samples_per_s = float(size) if needs <= 100 else None
        return SizeTrial(size, 96 // size, needs, samples_per_s)

    rows = search_sizes(attempt, divisors(96), deadly_bytes=1000, standing_bytes=0)

    assert [row.size for row in rows if row.fits] == [1, 2, 4, 8, 16, 24, 32]
    assert tried == [1, 2, 4, 8, 16, 32, 96, 48, 24]


def test_nothing_that_fits_is_an_error_that_says_what_it_needs() -> None:
    with refused("micro-batch-exceeds-memory", size=1, limit_bytes=9000) as error:
        sf.tune.find_batch_size(mlp_run(), memory="10 kB")
    assert error.value.fields["needed_bytes"] > 9000


def test_another_batch_can_be_asked_for() -> None:
    found = sf.tune.find_batch_size(mlp_run(), batch_size=40, memory="1 GB")

    assert found.batch_size == 40
    assert {row.size for row in found.tried} <= set(divisors(40))
    assert found.flags.startswith("--batch-size 40 ")


def test_a_batch_in_tokens_is_refused_for_samples_of_unknown_lengths() -> None:
    with refused("batch-size-of-unknown-lengths", setting="batch_size"):
        sf.tune.find_batch_size(mlp_run(), batch_size="4096 tokens")


@pytest.mark.slow
def test_a_size_that_the_model_refuses_is_told_and_left_out() -> None:
    class Normalised(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    found = sf.tune.find_batch_size(mlp_run(model=Normalised), memory="1 GB")

    of_one = found.tried[0]
    assert (of_one.size, of_one.fits) == (1, False)
    assert "batch normalization" in str(of_one.problem)
    assert found.largest.size == 24
    assert "900 MB" in found.reason
    with refused("micro-batch-exceeds-memory", size=2) as error:
        sf.tune.find_batch_size(mlp_run(model=Normalised), memory="5 kB")
    assert str(of_one.problem) in str(error.value.reason)
    with refused("micro-batches-too-small", size=1):
        sf.tune.find_batch_size(mlp_run(model=Normalised, batch_size=1), memory="1 GB")


@pytest.mark.parametrize(
    ("layers", "ending"),
    [
        ([], "do not depend on the micro-batch size"),
        ([nn.Dropout(0.0)], "do not depend on the micro-batch size"),
        (
            [nn.Dropout(0.1)],
            "do not depend on the micro-batch size; the units that dropout drops do",
        ),
        (
            [nn.BatchNorm1d(8)],
            "do not depend on the micro-batch size; the statistics of batch normalization do",
        ),
        (
            [nn.BatchNorm1d(8), nn.Dropout(0.1)],
            "dropout drops and the statistics of batch normalization do",
        ),
    ],
)
def test_what_another_size_changes_is_told_of_what_the_model_has(
    layers: list[nn.Module], ending: str
) -> None:
    run = mlp_run(model=lambda: nn.Sequential(nn.Linear(32, 8), *layers, nn.Linear(8, 10)))
    assert what_changes_with_it(run).endswith(ending)


@pytest.mark.slow
def test_an_error_of_the_loss_at_every_size_is_raised_as_it_is() -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        sf.tune.find_batch_size(mlp_run(loss=broken), memory="1 GB")


def test_out_of_memory_is_caught_and_what_was_taken_is_let_go() -> None:
    def greedy(model: Any, batch: Any) -> Tensor:
        if len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = mlp_run(loss=greedy)
    found = sf.tune.find_batch_size(run, memory="1 GB")

    assert found.largest.size == 8
    assert "out of memory" in {row.problem for row in found.tried}
    assert all(parameter.grad is None for parameter in run.state.parameters)


class Ragged:
    """Samples of 1 to 40 tokens."""

    lengths = np.random.default_rng(0).integers(1, 41, size=300)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> Tensor:
        return torch.full((int(self.lengths[sample]),), float(sample))


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)


def test_batches_by_tokens_are_measured_in_tokens_with_the_fullest_of_them() -> None:
    seen: SimpleQueue[tuple[int, int]] = SimpleQueue()  # a list would be put back

    def loss(model: Any, batch: Tensor) -> Tensor:
        seen.put((batch.shape[0], batch.shape[1]))
        return model(batch[..., None]).square().mean()

    run = mlp_run(
        train_data=Ragged(),
        collate_fn=padded,
        model=lambda: nn.Linear(1, 4),
        loss=loss,
        count_fn=lambda batch: int((batch >= 0).sum()),
        batch_size="960 tokens",
    )
    found = sf.tune.find_batch_size(run, memory="1 GB")

    assert found.unit == "tokens"
    assert {row.size for row in found.tried} <= {size for size in divisors(960) if size >= 40}
    micro_batch = f"{found.recommended.size} tokens"
    assert found.flags == f'--batch-size "960 tokens" --micro-batch-size "{micro_batch}"'
    shapes = [seen.get() for _ in range(seen.qsize())]
    assert max(rows * length for rows, length in shapes) > 0.9 * 960
    assert max(length for _, length in shapes) == 40
    with refused("batch-size-in-other-unit", value=64, expected="tokens"):
        sf.tune.find_batch_size(run, batch_size=64)


def test_windows_of_tokens_are_samples_of_one_length() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    tokens = np.arange(4000, dtype=np.uint16) % 50
    run = mlp_run(
        train_data=sf.data.TrainWindows(tokens, context=16, seed=0),
        model=lambda: nn.Embedding(50, 50),
        loss=loss,
        batch_size="256 tokens",
    )
    found = sf.tune.find_batch_size(run, memory="1 GB")

    assert found.unit == "samples"
    assert found.batch_size == run.parts.pipeline.sizes.batch_size
    assert f"--batch-size {found.batch_size} " in found.flags


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LogicalClock:
    """What times are measured by: nothing moves it but a test."""
    clock = LogicalClock()
    monkeypatch.setattr(micro_batch_trial, "perf_counter", clock)
    monkeypatch.setattr(timed_pass, "perf_counter", clock)
    monkeypatch.setattr(timed_pass, "process_time", clock)
    return clock


def test_throughput_counts_every_pass_and_the_update(
    clock: LogicalClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loss that takes 2 ms whatever its batch, and an update of 4 ms."""
    update = micro_batch_trial.update

    def slow_update(step: Any) -> None:
        clock.advance(0.004)
        update(step)

    def slow_loss(model: Any, batch: Any) -> Tensor:
        clock.advance(0.002)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    monkeypatch.setattr(micro_batch_trial, "update", slow_update)
    run = build(None, loss=slow_loss, micro_batch_size=None, model=lambda: nn.Linear(8, 3))
    found = sf.tune.find_batch_size(run, memory="1 GB")

    rates = {row.size: row.samples_per_s or 0.0 for row in found.tried}
    assert rates[8] == pytest.approx(8 / 0.006)
    assert rates[1] == pytest.approx(8 / 0.020)
    assert found.recommended.size == 8


@pytest.mark.parametrize(
    ("name", "evaluations", "state_bytes"),
    [
        ("twice", 2, 0),
        # a history of 100 pairs, of 67 parameters
        ("lbfgs with a line search", 3, 4 * 67 * (2 * 100 + 2)),
    ],
)
def test_a_step_with_a_closure_counts_all_its_evaluations_and_its_whole_history(
    name: str, evaluations: int, state_bytes: int, clock: LogicalClock
) -> None:
    """With a learning rate of 0, a line search divides by 0, and LBFGS without one stops at once
    and keeps no history.
    """

    def slow_loss(model: Any, batch: Any) -> Tensor:
        clock.advance(0.002)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = with_closures.build(with_closures.source(name), loss=slow_loss)
    before = with_closures.weights(run.state.model)
    found = sf.tune.find_batch_size(run, memory="1 GB")

    rates = {row.size: row.samples_per_s or 0.0 for row in found.tried}
    assert rates[8] == pytest.approx(8 / (0.002 * evaluations))
    assert rates[1] == pytest.approx(1 / (0.002 * evaluations))
    assert min(row.memory_bytes or 0 for row in found.tried) > state_bytes
    assert all(map(torch.equal, with_closures.weights(run.state.model), before))


def searched_on_rank() -> None:
    with refused("find-batch-size-on-ranks"):
        sf.tune.find_batch_size(build(None))


def test_ranks_are_refused_before_they_measure_different_sizes(ranks: Ranks) -> None:
    ranks(2, searched_on_rank)
