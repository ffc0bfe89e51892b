"""Buffers of other kinds and on other devices than batch statistics; what those come to is in
tests/identities. (1 s)
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from refused import refused
from surefoot.config.behavior import FIRST
from surefoot.distributed.rank_sums import RankSums
from surefoot.train.batch_norm_buffers import BatchStatistics


@dataclass
class Ranks:
    """A world of so many ranks, on a device that holds no numbers: torch's meta device refuses what
    CUDA does.
    """

    size: int
    rank = 0

    def add_up(self, tensor: Tensor) -> None:
        assert tensor.is_meta


@pytest.fixture
def idle_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks have made no pass: sums and maxima over ranks are those of this one."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _, op: None)

    def total(_: RankSums, tree: Any, *, like: Tensor) -> Tensor:
        if tree.subtrees:
            return tree.total()  # type: ignore[no-any-return]
        return like

    monkeypatch.setattr(RankSums, "of_tree", total)


@pytest.mark.usefixtures("idle_others")
@pytest.mark.parametrize("size", [1, 2])
def test_buffers_may_lie_elsewhere_than_weights_that_are_kept_on_the_cpu(size: int) -> None:
    norm = nn.BatchNorm1d(2, device="meta")
    world: Any = Ranks(size)
    statistics = BatchStatistics({"model": norm}, behavior=FIRST, world=world)
    for _ in range(2):
        statistics.start_pass()
        norm(torch.zeros(3, 2, device="meta"))
        statistics.end_pass()
    statistics.finish(torch.zeros(()))

    assert all(buffer.is_meta for buffer in statistics.tensors())


class Noting(nn.Module):
    """Adds to a floating buffer in each pass, counts passes, and raises a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.tensor([-0.0, 1.0, 2.0]))
        self.register_buffer("passes", torch.tensor(7))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, amounts: Tensor) -> None:
        self.added = self.added + amounts
        self.passes = self.passes + 1
        self.flag = torch.tensor(True)


class OneProcess:
    size = 1

    def add_up(self, tensor: Tensor) -> None:
        pytest.fail("one process adds nothing up")


class TwoProcesses:
    """The other one has made no pass, so it adds nothing."""

    size = 2
    rank = 0

    def add_up(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.uint8 or tensor == 4  # bytes of integers, or the passes


@pytest.mark.usefixtures("idle_others")
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("world", [None, OneProcess(), TwoProcesses()])
def test_floating_buffers_move_by_the_mean_of_the_passes_and_others_once(
    world: Any, skipped: bool
) -> None:
    """Also where the passes add up to exactly 1, and a buffer that no pass touched keeps its
    bits.
    """
    model = Noting()
    statistics = BatchStatistics({"model": model}, behavior=FIRST, world=world)
    for _ in range(4):
        statistics.start_pass()
        model(torch.tensor([-0.0, 0.25, 0.5]))
        statistics.end_pass()
    statistics.finish(torch.tensor(float(skipped)))

    if skipped:
        added = torch.tensor([-0.0, 1.0, 2.0])
        passes, flag = 7, False
    else:
        added = torch.tensor([-0.0, 1.25, 2.5])
        passes, flag = 8, True
    assert torch.equal(model.added, added)
    assert torch.equal(model.added.signbit(), added.signbit())
    assert (int(model.passes), bool(model.flag)) == (passes, flag)


class Masked(nn.Module):
    """A constant mask of one megabyte, a counter, and a running mean that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((512, 512), float("-inf")).triu(1))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("running", torch.zeros(3))

    def forward(self, amounts: Tensor) -> None:
        self.count += 1
        self.running = 0.5 * self.running + amounts


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_writes_no_buffer_that_its_passes_left_alone(passes: int) -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    mask = model.mask.clone()
    for _ in range(2):
        version = model.mask._version
        for _ in range(passes):
            statistics.start_pass()
            model(torch.ones(3))
            statistics.end_pass()
        assert model.mask._version == version
        statistics.finish(torch.zeros(()))
    assert torch.equal(model.mask, mask)
    assert int(model.count) == 2
    assert model.running.tolist() == [1.5] * 3


def fill_data(mask: Tensor) -> None:
    mask.data.fill_(7.0)


def fill_array(mask: Tensor) -> None:
    mask.numpy().fill(7.0)


# `.data` and NumPy change a buffer without changing its version
hidden_writes = pytest.mark.parametrize("write", [fill_data, fill_array])


@hidden_writes
@pytest.mark.parametrize("passes", [1, 3])
def test_a_bad_step_undoes_what_autograd_does_not_see(passes: int, write: Any) -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    mask = model.mask.clone()
    for index in range(passes):
        statistics.start_pass()
        assert torch.equal(model.mask, mask), f"pass {index} starts from the buffers of the step"
        write(model.mask)
        statistics.end_pass()
    statistics.finish(torch.ones(()))
    assert torch.equal(model.mask, mask)


def one_step(statistics: BatchStatistics, pass_fn: Any, *, skipped: bool = False) -> None:
    statistics.start_pass()
    pass_fn()
    statistics.end_pass()
    statistics.finish(torch.tensor(float(skipped)))


@hidden_writes
def test_a_hidden_write_that_begins_in_a_later_step_is_undone_by_a_bad_step(write: Any) -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    mask = model.mask.clone()
    for _ in range(5):
        one_step(statistics, lambda: None)

    one_step(statistics, lambda: write(model.mask), skipped=True)

    assert torch.equal(model.mask, mask)


@hidden_writes
def test_a_hidden_write_between_steps_stays_after_a_bad_step(write: Any) -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    for _ in range(5):
        one_step(statistics, lambda: None)

    write(model.mask)
    one_step(statistics, lambda: model.mask.fill_(9.0), skipped=True)

    assert torch.equal(model.mask, torch.full((512, 512), 7.0))


def copies_by_step(statistics: BatchStatistics, pass_fn: Any) -> int:
    """How often the large buffer is copied because of a step."""
    one_step(statistics, lambda: None)
    (group,) = [group for group in statistics.groups if group.is_large]
    version = group.before._version
    one_step(statistics, pass_fn)
    one_step(statistics, lambda: None)
    return group.before._version - version


def test_a_large_buffer_is_copied_only_if_its_bits_changed() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)

    assert copies_by_step(statistics, lambda: None) == 0
    assert copies_by_step(statistics, lambda: fill_data(model.mask)) == 1


def test_a_large_buffer_that_changes_is_compared_at_one_step_of_64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statistics = BatchStatistics({"model": Masked()}, behavior=FIRST)
    comparisons = []

    def unequal(*pair: Tensor) -> bool:
        comparisons.append(pair)
        return False

    with monkeypatch.context() as patch:
        patch.setattr("surefoot.train.buffer_groups.equal_on_cpu", unequal)
        one_step(statistics, lambda: None)
        comparisons.clear()
        for _ in range(128):
            one_step(statistics, lambda: None)
        assert len(comparisons) == 2

    for _ in range(64):
        one_step(statistics, lambda: None)
    assert copies_by_step(statistics, lambda: None) == 0  # it no longer changes


@pytest.mark.parametrize("bits", [0x7FC00001, 0x80000000])
def test_a_bad_step_restores_the_bits_of_a_nan_and_of_a_negative_zero(bits: int) -> None:
    """Numbers that are compared as numbers would not do: -0.0 equals 0.0."""
    model = nn.Module()
    model.register_buffer("table", torch.zeros(300, 300).t()[:, :299])  # with gaps
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    for _ in range(3):
        one_step(statistics, lambda: None)
    signed = torch.tensor(bits, dtype=torch.int64).to(torch.int32)  # of the same 32 bits
    model.table.data[7, 7] = signed.view(torch.float32)

    one_step(statistics, lambda: model.table.fill_(1.0), skipped=True)

    assert int(model.table[7, 7].view(torch.int32)) & 0xFFFFFFFF == bits


def test_a_bad_step_restores_buffers_beside_one_that_became_none_between_steps() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    one_step(statistics, lambda: None)
    model._buffers["running"] = None

    one_step(statistics, lambda: model.mask.fill_(9.0), skipped=True)

    assert model.running is None
    assert not (model.mask == 9.0).any()


def test_large_statistics_are_restored_though_a_norm_writes_past_the_version_counter() -> None:
    """Also if the norm was in evaluation mode in the first steps, when its statistics were
    constant.
    """
    norm = nn.BatchNorm1d(70_000).eval()
    statistics = BatchStatistics({"model": norm}, behavior=FIRST)
    for _ in range(4):
        one_step(statistics, lambda: norm(torch.randn(2, 70_000)))
    before = [buffer.clone() for buffer in norm.buffers()]

    norm.train()
    one_step(statistics, lambda: norm(torch.full((2, 70_000), torch.nan)), skipped=True)

    assert all(map(torch.equal, norm.buffers(), before))


@pytest.mark.parametrize("size", [1, 3])
def test_a_skipped_step_restores_the_shape_of_a_buffer(size: int) -> None:
    model = Masked()
    model.running = torch.full((size,), 2.0)
    statistics = BatchStatistics({"model": model}, behavior=FIRST)

    one_step(statistics, lambda: setattr(model, "running", torch.zeros(5, 3)), skipped=True)

    assert model.running.tolist() == [2.0] * size
    assert not statistics.started


def test_a_buffer_may_have_another_shape_in_the_next_step() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    for size in (3, 5):
        model.running = torch.zeros(size)
        for _ in range(2):
            statistics.start_pass()
            model(torch.arange(float(size)))
            statistics.end_pass()
        statistics.finish(torch.zeros(()))
        assert model.running.tolist() == list(range(size))


def test_passes_that_are_repeated_within_a_step_change_nothing() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    statistics.start_pass()
    model(torch.ones(3))
    statistics.end_pass()

    with statistics.repeated():
        statistics.start_pass()
        assert model.running.tolist() == [0.0] * 3
        model(torch.full((3,), 9.0))
        statistics.end_pass()
    assert model.running.tolist() == [1.0] * 3

    statistics.start_pass()
    model(torch.full((3,), 3.0))
    statistics.end_pass()
    statistics.finish(torch.zeros(()))
    assert model.running.tolist() == [2.0] * 3


def test_a_pass_that_fails_is_undone_where_the_pass_before_it_changed_nothing() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    mask = model.mask.clone()
    for _ in range(2):
        statistics.start_pass()
        model(torch.ones(3))
        statistics.end_pass()

    statistics.start_pass()
    model.mask.fill_(2.0)  # and then an exception
    statistics.undo()

    assert torch.equal(model.mask, mask)


class Extremes(nn.Module):
    """A running minimum that begins at infinity, a large counter, and the last of some amounts."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((3,), float("inf")))
        self.register_buffer("moved", torch.full((3,), 1000.0))
        self.register_buffer("last", torch.zeros(count, dtype=torch.int64))

    def forward(self, amount: float) -> None:
        self.low.clamp_(max=amount)
        self.moved.fill_(amount)
        self.last.fill_(int(amount))


class OnDevice:
    """A flag that is read on a device only."""

    def __init__(self, flag: Tensor) -> None:
        self.flag = flag
        self.is_cpu = False

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return self.flag == other

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_one_pass_leaves_its_own_bits_on_a_device_too(skipped: float) -> None:
    model = Extremes()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    flag = OnDevice(torch.tensor(skipped))
    statistics.start_pass()
    model(0.1)
    statistics.end_pass()
    after_pass = [buffer.clone() for buffer in model.buffers()]

    statistics.finish(flag)  # type: ignore[arg-type]

    if skipped:
        assert model.low.tolist() == [float("inf")] * 3
        assert model.moved.tolist() == [1000.0] * 3
    else:
        assert all(map(torch.equal, model.buffers(), after_pass))


@pytest.mark.parametrize("count", [3, 70_000])
def test_an_integer_buffer_of_any_size_has_its_last_value(count: int) -> None:
    model = Extremes(count)
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    for amount in (5.0, 0.0):  # the last pass leaves what the step began with
        statistics.start_pass()
        model(amount)
        statistics.end_pass()
    statistics.finish(torch.zeros(()))
    assert model.last.eq(0).all()


@pytest.mark.usefixtures("idle_others")
def test_integers_of_several_ranks_stay_exact() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # five bytes before the next buffer
            self.register_buffer("flags", torch.zeros(5, dtype=torch.bool))
            self.register_buffer("count", torch.tensor(2**60 + 1))

    model = Large()
    world: Any = SimpleNamespace(size=2, rank=0, add_up=lambda _: None)
    shares = [range(1), range(1, 2)]
    statistics = BatchStatistics({"model": model}, behavior=FIRST, world=world, shares=shares)
    statistics.start_pass()
    model.count += 2  # type: ignore[operator]
    statistics.end_pass()
    statistics.finish(torch.zeros(()))
    assert int(model.count) == 2**60 + 3  # type: ignore[arg-type]


def test_a_skipped_step_undoes_what_repeated_passes_left_alone() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    mask = model.mask.clone()
    statistics.start_pass()
    model.mask.fill_(5.0)
    statistics.end_pass()
    with statistics.repeated():
        statistics.start_pass()
        statistics.end_pass()
    assert model.mask.eq(5.0).all()

    statistics.finish(torch.ones(()))
    assert torch.equal(model.mask, mask)


def test_a_buffer_that_appears_within_a_step_is_refused() -> None:
    model = Masked()
    statistics = BatchStatistics({"model": model}, behavior=FIRST)
    model.count = None  # type: ignore[assignment]
    statistics.start_pass()
    model.count = torch.tensor(1)

    with refused("buffer-none"):
        statistics.finish(torch.zeros(()))
