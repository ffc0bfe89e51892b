"""A snapshot names every value that changed, of every kind, and restores it. (2 s)"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.checkpoint import snapshot as module
from surefoot.checkpoint.fingerprint import (
    equal_fingerprints,
    near_sketches,
    read_fingerprints,
    sketch,
    tensor_fingerprint,
)
from surefoot.checkpoint.snapshot import (
    ChangedValue,
    Kind,
    NotPutBackError,
    Snapshot,
    changed_values,
)
from surefoot.errors import ConfigError


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Net(nn.Module):
    """State of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.plain: Any = 1
        self.rows = [1, [2]]
        self.table = {"n": 0}
        self.queue = deque([1])
        self.array = np.zeros(2)
        self.own_tensor = torch.zeros(2)
        self.noise = torch.Generator().manual_seed(5)
        self.slots = Slots()


class Loss:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        raise AssertionError


class Everything:
    """A model, a loss, an optimizer that has made a step, and registered objects."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.loss = Loss()
        self.registered: dict[str, Any] = {"counts": [0], "memory": torch.zeros(2)}
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.1)
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def snapshot(self, **options: Any) -> Snapshot:
        return Snapshot(
            {"model": self.net},
            self.loss,
            {"model": self.optimizer},
            user_state=self.registered,
            **options,
        )


def add_to(tensor: Tensor) -> None:
    tensor.data.view(-1)[-1] += 1  # not seen by version counters


@dataclass(frozen=True)
class Mutation:
    """A change of one value, the kind of that value, and whether a checkpoint holds it."""

    kind: Kind
    apply: Callable[[Everything], Any]
    saved: bool


def saved(kind: Kind, apply: Callable[[Everything], Any]) -> Mutation:
    return Mutation(kind, apply, saved=True)


def unsaved(kind: Kind, apply: Callable[[Everything], Any]) -> Mutation:
    return Mutation(kind, apply, saved=False)


MUTATIONS = {
    "model.head.weight": saved("weight", lambda all_: add_to(all_.net.head.weight)),
    "model.trunk.bias": saved("weight", lambda all_: add_to(all_.net.trunk.bias)),
    "model.norm.running_mean": saved("buffer", lambda all_: add_to(all_.net.norm.running_mean)),
    "model.norm.num_batches_tracked": saved(
        "buffer", lambda all_: all_.net.norm.num_batches_tracked.add_(1)
    ),
    "model.head.weight.grad": saved("gradient", lambda all_: add_to(all_.net.head.weight.grad)),
    "model.norm.training": saved("mode", lambda all_: all_.net.norm.eval()),
    "model.trunk.weight.requires_grad": saved(
        "mode", lambda all_: all_.net.trunk.weight.requires_grad_(True)
    ),
    "optimizer.state['head.weight']['exp_avg']": saved(
        "optimizer", lambda all_: add_to(all_.optimizer.state[all_.net.head.weight]["exp_avg"])
    ),
    "optimizer.param_groups[0].lr": saved(
        "optimizer", lambda all_: all_.optimizer.param_groups[0].update(lr=0.2)
    ),
    "global random": saved("generator", lambda _: random.random()),
    "global numpy.random": saved("generator", lambda _: np.random.rand()),
    "global torch": saved("generator", lambda _: torch.rand(())),
    "registered['counts'][0]": saved(
        "registered", lambda all_: all_.registered["counts"].__setitem__(0, 1)
    ),
    "registered['memory']": saved("registered", lambda all_: add_to(all_.registered["memory"])),
    "model.hidden": unsaved("buffer", lambda all_: add_to(all_.net.hidden)),
    "model.noise": unsaved("generator", lambda all_: torch.rand((), generator=all_.net.noise)),
    "model.plain": unsaved("attribute", lambda all_: setattr(all_.net, "plain", 2)),
    "model.rows[1][0]": unsaved("attribute", lambda all_: all_.net.rows[1].__setitem__(0, 3)),
    "model.rows[1]": unsaved("attribute", lambda all_: all_.net.rows[1].append(3)),
    "model.table['n']": unsaved("attribute", lambda all_: all_.net.table.update(n=1)),
    "model.queue": unsaved("attribute", lambda all_: all_.net.queue.append(2)),
    "model.array": unsaved("attribute", lambda all_: all_.net.array.__setitem__(0, 1.0)),
    "model.own_tensor": unsaved("attribute", lambda all_: add_to(all_.net.own_tensor)),
    "model.slots.n": unsaved("attribute", lambda all_: setattr(all_.net.slots, "n", 1)),
    "loss.seen": unsaved("attribute", lambda all_: setattr(all_.loss, "seen", 1)),
}


def changed_names(before: Snapshot, after: Snapshot) -> list[str]:
    return [change.name for change in changed_values(before, after)]


@pytest.mark.parametrize("keep", [False, True])
def test_nothing_changes_between_two_snapshots(keep: bool) -> None:
    everything = Everything()
    assert changed_values(everything.snapshot(keep=keep), everything.snapshot()) == []


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_is_named_with_its_kind(name: str, keep: bool) -> None:
    mutation = MUTATIONS[name]
    everything = Everything()
    before = everything.snapshot(keep=keep)

    mutation.apply(everything)

    expected = ChangedValue(name, mutation.kind, mutation.saved)
    assert changed_values(before, everything.snapshot()) == [expected]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_is_undone(name: str) -> None:
    everything = Everything()
    before = everything.snapshot(keep=True)
    MUTATIONS[name].apply(everything)

    before.restore()

    assert changed_names(before, everything.snapshot()) == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_only_what_a_checkpoint_holds_is_restored_if_that_is_asked(name: str) -> None:
    mutation = MUTATIONS[name]
    everything = Everything()
    before = everything.snapshot(keep=True)
    mutation.apply(everything)

    before.restore(only_saved=True)

    assert changed_names(before, everything.snapshot()) == ([] if mutation.saved else [name])


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_what_a_checkpoint_holds_only_the_rest_is_compared(name: str) -> None:
    mutation = MUTATIONS[name]
    everything = Everything()
    before = everything.snapshot(saved=False)

    mutation.apply(everything)

    changed = changed_names(before, everything.snapshot(saved=False))
    assert changed == ([] if mutation.saved else [name])


def test_a_new_attribute_and_a_replaced_tensor_are_undone() -> None:
    everything = Everything()
    buffer = everything.net.norm.running_mean
    before = everything.snapshot(keep=True)
    everything.net.new = 3  # type: ignore[assignment]
    everything.net.norm.running_mean = torch.ones(2)
    everything.net.head.register_forward_hook(lambda *_: None)

    before.restore()

    assert not hasattr(everything.net, "new")
    assert everything.net.norm.running_mean is buffer
    assert not everything.net.head._forward_hooks


def test_a_weight_that_was_given_other_memory_has_its_own_again() -> None:
    everything = Everything()
    weight = everything.net.head.weight
    address = weight.data_ptr()
    before = everything.snapshot(keep=True)
    weight.data = torch.ones(1, 2)

    before.restore()

    assert weight.data_ptr() == address
    assert changed_names(before, everything.snapshot()) == []


def test_state_that_an_optimizer_made_is_taken_back() -> None:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters())
    before = Snapshot({"model": net}, None, {"model": optimizer}, keep=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    before.restore()

    assert not optimizer.state
    assert changed_names(before, Snapshot({"model": net}, None, {"model": optimizer})) == []


def test_in_a_block_gradients_are_none_and_all_is_restored_at_its_end() -> None:
    everything = Everything()
    gradient = everything.net.head.weight.grad

    def snapshot(**options: Any) -> Snapshot:
        models = {"model": everything.net}
        return Snapshot(models, everything.loss, user_state=everything.registered, **options)

    expected = snapshot()
    before = snapshot(keep=True)
    with suppress(ZeroDivisionError), before:
        assert everything.net.head.weight.grad is None
        for name, mutation in MUTATIONS.items():
            if not name.endswith(".grad") and not name.startswith("optimizer"):
                mutation.apply(everything)
        everything.net.head.weight.grad = torch.zeros(1, 2)
        before.restore(only_saved=True)
        assert everything.net.head.weight.grad is None
        assert everything.loss.seen == 1
        raise ZeroDivisionError

    assert everything.net.head.weight.grad is gradient
    assert changed_names(expected, snapshot()) == []


def test_gradients_of_a_loss_and_of_registered_objects_are_restored() -> None:
    scale = nn.Parameter(torch.ones(1))
    critic = nn.Linear(1, 1)
    loss = Loss()
    loss.scale = scale  # type: ignore[attr-defined]
    models = {"model": nn.Linear(1, 1)}
    with Snapshot(models, loss, user_state={"critic": critic}, keep=True) as before:
        (scale * critic(torch.ones(1))).sum().backward()
        before.restore(only_saved=True)
        assert scale.grad is None
        assert critic.weight.grad is None
        (scale * critic(torch.ones(1))).sum().backward()
    assert scale.grad is None
    assert critic.weight.grad is None


def test_weights_that_are_left_out_are_neither_compared_nor_restored() -> None:
    everything = Everything()
    before = everything.snapshot(keep=True, weights=False)
    add_to(everything.net.head.weight)
    add_to(everything.net.norm.running_mean)

    changed = changed_names(before, everything.snapshot(weights=False))
    assert changed == ["model.norm.running_mean"]

    weight = everything.net.head.weight.detach().clone()
    before.restore()
    assert torch.equal(everything.net.head.weight, weight)


def test_a_weight_in_a_list_of_the_loss_is_a_weight() -> None:
    everything = Everything()
    everything.loss.weights = [everything.net.head.weight]  # type: ignore[attr-defined]
    before = everything.snapshot()

    add_to(everything.net.head.weight)

    assert changed_names(before, everything.snapshot()) == ["model.head.weight"]


def test_only_the_outermost_name_is_given() -> None:
    everything = Everything()
    before = everything.snapshot()

    everything.net.rows.insert(0, 7)

    assert changed_names(before, everything.snapshot()) == ["model.rows"]


def test_a_large_tensor_that_no_checkpoint_holds_is_compared_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_UNSAVED_BYTES", 8)
    everything = Everything()
    everything.net.own_tensor = torch.zeros(3)
    before = everything.snapshot()

    everything.net.own_tensor.add_(1)

    assert changed_names(before, everything.snapshot()) == ["model.own_tensor"]


def test_above_a_sum_of_bytes_unsaved_tensors_are_not_copied_and_a_change_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_UNSAVED_BYTES", 8)
    net = nn.Linear(1, 1)
    net.rows = [torch.zeros(2), torch.zeros(2)]  # type: ignore[assignment]
    net.register_buffer("mask", torch.zeros(3), persistent=False)
    before = Snapshot({"model": net}, keep=True)
    assert before.copied_bytes == 4 * (2 + 2 + 3)  # weight and bias, the first row, the buffer
    assert changed_names(before, Snapshot({"model": net})) == []

    net.mask.add_(1)
    net.rows[0].add_(1)
    net.rows[1].add_(1)
    with pytest.raises(NotPutBackError) as caught:
        before.restore()

    assert "model.rows[1]" in caught.value.fields["causes"][0]
    assert net.rows[0].sum() == 0
    assert net.mask.sum() == 0


def test_what_appears_and_what_vanishes_is_named() -> None:
    everything = Everything()
    before = everything.snapshot()
    everything.net.new = 3  # type: ignore[assignment]
    everything.net.head.weight.grad = None
    del everything.loss.seen
    everything.net.register_buffer("late", torch.zeros(1))

    changes = changed_values(before, everything.snapshot())

    assert {change.name: change.how for change in changes} == {
        "model.new": "appeared",
        "model.late": "appeared",
        "model.head.weight.grad": "changed",
        "loss.seen": "vanished",
    }


class SavesItself(nn.Linear):
    calls = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(SavesItself.calls)

    def set_extra_state(self, state: Tensor) -> None:
        SavesItself.calls = int(state)


def test_extra_state_is_compared_and_restored() -> None:
    models = {"model": SavesItself(1, 1)}
    before = Snapshot(models, keep=True)

    SavesItself.calls = 3
    assert changed_names(before, Snapshot(models)) == ["model.extra_state"]

    before.restore()
    assert SavesItself.calls == 0


def test_values_with_one_name_are_all_compared() -> None:
    nets = {"a": nn.Linear(1, 1), "c": nn.Linear(1, 1)}
    parameters = [*nets["a"].parameters(), *nets["c"].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = Snapshot(nets, None, {"both": optimizer})

    add_to(optimizer.state[nets["c"].weight]["momentum_buffer"])

    changed = changed_names(before, Snapshot(nets, None, {"both": optimizer}))
    assert changed == ["optimizer['both'].state['c.weight']['momentum_buffer']"]


def test_two_hooks_of_one_module_are_both_compared() -> None:
    net = nn.Linear(1, 1)
    counts = [{"n": 0}, {"n": 0}]
    for count in counts:
        net.register_forward_hook(lambda *_, count=count: None)

    for count in counts:
        before = Snapshot({"model": net})
        count["n"] = 1
        assert len(changed_names(before, Snapshot({"model": net}))) == 1


def test_a_tensor_that_cannot_be_copied_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(Tensor, "to", no_memory)
    with pytest.raises(RuntimeError, match="allocate memory"):
        Snapshot({"model": nn.Linear(1, 1)}, keep=True)


def test_a_snapshot_to_compare_cannot_restore() -> None:
    with pytest.raises(AssertionError, match="to compare"):
        Snapshot({"model": nn.Linear(1, 1)}).restore()


def test_thousands_of_changes_are_named() -> None:
    net = nn.Linear(1, 1)
    net.table = {f"{index}": [index] for index in range(2000)}  # type: ignore[assignment]
    before = Snapshot({"model": net})

    for entry in net.table.values():
        entry[0] += 1

    assert len(changed_names(before, Snapshot({"model": net}))) == 2000


def test_a_tuple_of_two_groups_is_of_each_of_them() -> None:
    net = nn.Linear(1, 1)
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    optimizer = torch.optim.Adam(groups)
    first, second = optimizer.param_groups
    assert first["betas"] is second["betas"]

    def snapshot() -> Snapshot:
        return Snapshot({"model": net}, None, {"model": optimizer})

    before = snapshot()
    for group in (first, second):
        group["betas"] = (*group["betas"],)  # equal, in objects of its own
    assert first["betas"] is not second["betas"]
    assert changed_names(before, snapshot()) == []

    second["betas"] = (0.5, 0.5)
    assert set(changed_names(before, snapshot())) == {
        "optimizer.param_groups[1].betas[0]",
        "optimizer.param_groups[1].betas[1]",
    }


def resize(norm: nn.BatchNorm1d) -> None:
    norm.running_mean.resize_(5).zero_()  # type: ignore[union-attr]


WRITES: dict[str, Callable[[nn.BatchNorm1d], Any]] = {
    "numbers": lambda norm: norm.running_mean.add_(1),  # type: ignore[union-attr]
    "through data": lambda norm: norm.running_mean.data.add_(1),  # type: ignore[union-attr]
    "another shape": resize,
    "other memory": lambda norm: setattr(norm.running_mean, "data", torch.ones(7)),
    "another tensor": lambda norm: setattr(norm, "running_mean", torch.ones(2)),
    "none": lambda norm: setattr(norm, "running_mean", None),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_buffer_comes_back_with_its_memory_and_shape(
    write: Callable[[nn.BatchNorm1d], Any], whole: bool
) -> None:
    norm = nn.BatchNorm1d(2)
    buffer = norm.running_mean
    assert buffer is not None
    address = buffer.data_ptr()
    version = buffer._version
    if whole:
        before = Snapshot({"model": norm}, keep=True)
    else:
        before = Snapshot({}, keep=True)
        before.keep_buffer(norm, "running_mean")
    with before:
        pass
    assert buffer._version == version  # a pass that is under way may have saved it

    with before:
        write(norm)

    assert norm.running_mean is buffer
    assert buffer.tolist() == [0.0, 0.0]
    assert buffer.data_ptr() == address or write is resize


def test_no_other_thread_uses_the_generators_in_a_block() -> None:
    before = Snapshot({"model": nn.Linear(1, 1)}, keep=True)
    codes: list[str] = []

    def enter() -> None:
        try:
            before.__enter__()
        except ConfigError as problem:
            codes.append(problem.code)

    with before:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    assert codes == ["runs-in-two-threads"]


# --- what is compared of a tensor ----------------------------------------------------------------


class Allocated(TorchDispatchMode):
    """The largest tensor that an operator made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        inputs = {tensor.data_ptr() for tensor in tensors_in(args)}
        for tensor in tensors_in(returned):
            if tensor.data_ptr() not in inputs:
                self.largest = max(self.largest, tensor.nbytes)
        return returned


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.view(1000, 3000).t(),
    "channels last": lambda tensor: tensor.view(100, 100, 100, 3).permute(0, 3, 1, 2),
    "at an offset": lambda tensor: tensor[1:],
}


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("summarize", [tensor_fingerprint, sketch])
def test_a_tensor_is_not_copied_to_be_compared(summarize: Any, view: Any) -> None:
    tensor = view(torch.randn(3_000_000))
    summarize(tensor[:100])  # makes the factors

    with Allocated() as allocated:
        summarize(tensor)

    assert allocated.largest < tensor.nbytes / 2


@pytest.mark.parametrize("saved", [True, False])
def test_bytes_are_counted_on_a_device_without_numbers_too(saved: bool) -> None:
    with torch.device("meta"):
        net = nn.Linear(1000, 1000, bias=False)

    to_compare = Snapshot({"model": net}, saved=saved)
    to_restore = Snapshot({"model": net}, keep=True)

    assert to_compare.hashed_bytes == (4_000_000 if saved else 0)
    assert to_compare.copied_bytes == 0
    assert to_restore.copied_bytes == 4_000_000


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 300_000])
def test_a_fingerprint_sees_each_bit(dtype: torch.dtype, count: int) -> None:
    tensor = torch.ones(count, dtype=dtype)
    assert have_equal_fingerprints(tensor, tensor.clone())
    for index in {0, count // 2, count - 1}:
        other = tensor.clone()
        other.view(torch.uint8)[index * tensor.element_size()] ^= 1
        assert not have_equal_fingerprints(tensor, other)


def have_equal_fingerprints(tensor: Tensor, other: Tensor) -> bool:
    pair = (tensor_fingerprint(tensor), tensor_fingerprint(other))
    (are_equal,) = equal_fingerprints([pair])
    return are_equal


def test_a_fingerprint_sees_numbers_that_change_places_and_two_signs() -> None:
    tensor = torch.randn(1000)
    signs = tensor.clone()
    signs[:2] *= -1

    assert not have_equal_fingerprints(tensor, tensor.roll(1))
    assert not have_equal_fingerprints(tensor, signs)
    assert not have_equal_fingerprints(tensor, tensor.view(10, 100))


def test_equal_numbers_in_another_layout_are_another_tensor() -> None:
    square = torch.randn(4, 4)
    assert not have_equal_fingerprints(square, square.t().contiguous().t())

    narrow = torch.randn(3, 1)  # a dimension of size 1 has no place in memory
    assert have_equal_fingerprints(narrow, narrow.t().contiguous().t())


def test_fingerprints_are_read_in_their_order() -> None:
    fingerprints = [tensor_fingerprint(torch.randn(count)) for count in (3, 400_000, 1)]

    together = read_fingerprints(fingerprints)

    alone = []
    for fingerprint in fingerprints:
        alone += read_fingerprints([fingerprint])
    assert together == alone
    assert [len(numbers) for numbers in together] == [1, 2, 1]


@pytest.mark.parametrize("count", [3, 4096, 100_000, 4_000_000])
def test_a_sketch_allows_rounding_and_sees_a_change_of_one_number(count: int) -> None:
    tensor = torch.randn(count)
    tensor[0] = 26.0
    rounded = tensor + 1e-6 * torch.randn(count)
    changed = tensor.clone()
    changed[-1] += 0.01 * 26.0

    assert near_sketches(sketch(tensor), sketch(rounded))
    assert not near_sketches(sketch(tensor), sketch(changed))


def test_sketches_of_nothing_are_near() -> None:
    assert near_sketches(sketch(torch.zeros(0)), sketch(torch.zeros(0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("summarize", [tensor_fingerprint, sketch])
def test_a_tensor_is_not_changed_by_being_compared(summarize: Any, dtype: torch.dtype) -> None:
    tensor = torch.tensor([-1.0, float("nan"), float("inf"), 0.5], dtype=dtype)
    before = tensor.clone()

    summarize(tensor)

    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


def test_rounding_is_measured_by_the_largest_number_of_a_tensor() -> None:
    numbers = torch.tensor([26.0, 1e-7, -3.0])
    near = numbers + torch.tensor([0.0, 1e-5, 0.0])
    far = numbers + torch.tensor([0.0, 1e-2, 0.0])

    assert near_sketches(sketch(numbers), sketch(near))
    assert not near_sketches(sketch(numbers), sketch(far))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_equals_itself_in_a_sketch(value: float) -> None:
    tensor = torch.tensor([1.0, value])
    assert near_sketches(sketch(tensor), sketch(tensor.clone()))
    assert not near_sketches(sketch(tensor), sketch(torch.tensor([1.0, 2.0])))


def test_without_exact_only_floating_values_may_be_rounded() -> None:
    everything = Everything()
    everything.net.plain = 1.0
    everything.net.own_tensor = torch.ones(2)
    before = everything.snapshot(exact=False)

    everything.net.plain = 1.0 + 1e-9
    everything.net.own_tensor += 1e-9
    with torch.no_grad():
        everything.net.head.weight *= 1 + 1e-7
    assert changed_names(before, everything.snapshot(exact=False)) == []

    everything.net.norm.num_batches_tracked += 1
    changed = changed_names(before, everything.snapshot(exact=False))
    assert changed == ["model.norm.num_batches_tracked"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", [False, True])
def test_on_a_gpu_a_change_is_named_and_restored(keep: bool) -> None:
    net = nn.Linear(2, 2).cuda()
    before = Snapshot({"model": net}, keep=keep)
    assert changed_names(before, Snapshot({"model": net})) == []

    add_to(net.weight)
    assert changed_names(before, Snapshot({"model": net})) == ["model.weight"]

    if keep:
        before.restore()
        assert changed_names(before, Snapshot({"model": net})) == []
