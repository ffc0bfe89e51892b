"""Buffers that passes change end as in a plain loop, or as their rule says, on any number of ranks.
(6 s)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from surefoot.checkpoint.reader import read

WIDTH = 4
ROWS = 48
BATCH = 12
STEPS = 3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    return inputs, torch.randint(3, (ROWS,), generator=generator)


class Net(nn.Module):
    """A layer whose output a subclass moves by what it keeps in buffers."""

    in_evaluation = False  # buffers are written in evaluation mode too

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.keep()

    def keep(self) -> None: ...

    def note(self, features: Tensor, labels: Tensor) -> Tensor | float:
        return 0.0

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        features = self.layer(inputs)
        if self.training or self.in_evaluation:
            features = features + self.note(features.detach(), labels)
        return F.cross_entropy(features, labels)


class Queue(Net):
    """MoCo's queue: rows, and the place where the next ones go."""

    def keep(self) -> None:
        self.register_buffer("queue", torch.zeros(40, 3))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def note(self, features: Tensor, labels: Tensor) -> Tensor:
        seen = self.queue.mean(0)
        rows = (self.pointer + torch.arange(len(features))) % len(self.queue)
        self.queue[rows] = F.normalize(features, dim=1)
        self.pointer.copy_((self.pointer + len(features)) % len(self.queue))
        return seen


class Counter(Net):
    """Of samples by label, of passes, and whether there was one."""

    def keep(self) -> None:
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int32))
        self.register_buffer("begun", torch.tensor(False))

    def note(self, features: Tensor, labels: Tensor) -> float:
        self.counts += torch.bincount(labels, minlength=3)
        self.passes += 1
        self.begun.fill_(True)
        return 0.0


class FirstBatch(Net):
    """A shift and a scale that the first micro-batch initializes, as ActNorm's."""

    def keep(self) -> None:
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("begun", torch.tensor(0, dtype=torch.uint8))

    def note(self, features: Tensor, labels: Tensor) -> Tensor:
        if self.begun.item() == 0:
            self.shift.copy_(-features.mean(0))
            self.begun.fill_(1)
        return self.shift  # type: ignore[return-value]


class Extremes(Net):
    """Running extremes, as an observer of quantization."""

    def keep(self) -> None:
        self.register_buffer("low", torch.full((3,), torch.inf))
        self.register_buffer("high", torch.full((3,), -torch.inf))

    def note(self, features: Tensor, labels: Tensor) -> float:
        self.low.copy_(torch.minimum(self.low, features.amin(0)))
        self.high = torch.maximum(self.high, features.amax(0))
        return 0.0


class Resized(Net):
    """A running minimum that the first pass gives its shape."""

    def keep(self) -> None:
        self.register_buffer("low", torch.zeros(0))

    def note(self, features: Tensor, labels: Tensor) -> float:
        lowest = features.amin(0)
        if self.low.numel():
            lowest = torch.minimum(self.low, lowest)
        self.low.resize_(3).copy_(lowest)
        return 0.0


class Codebook(Net):
    """Codes that follow the features nearest to them, written past the version counter."""

    def keep(self) -> None:
        codes = torch.linspace(-1, 1, 12).reshape(4, 3)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(4))

    def note(self, features: Tensor, labels: Tensor) -> Tensor:
        nearest = torch.cdist(features, self.codes).argmin(1)
        chosen = F.one_hot(nearest, 4).float()
        self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        sums = chosen.T @ features
        self.codes.data.mul_(0.9).add_(sums / self.sizes[:, None], alpha=0.1)
        return self.codes[0]


class OwnNorm(Net):
    """A normalization that is none of torch's."""

    def keep(self) -> None:
        self.register_buffer("running", torch.zeros(3))

    def note(self, features: Tensor, labels: Tensor) -> float:
        self.running = 0.9 * self.running + 0.1 * features.mean(0)
        return 0.0


class Replaced(Net):
    """Features of the last micro-batches, in a new tensor each time."""

    def keep(self) -> None:
        self.register_buffer("recent", torch.zeros(20, 3))

    def note(self, features: Tensor, labels: Tensor) -> Tensor:
        self.recent = torch.cat([features, self.recent])[:20]
        return self.recent.mean(0)


KINDS: dict[str, type[Net]] = {
    "Queue": Queue,
    "Counter": Counter,
    "FirstBatch": FirstBatch,
    "Extremes": Extremes,
    "Resized": Resized,
    "Codebook": Codebook,
    "OwnNorm": OwnNorm,
    "Replaced": Replaced,
}


def loss(model: Any, batch: Any) -> Tensor:
    return model(*batch)  # type: ignore[no-any-return]


def run_of(model: Callable[[], nn.Module] | dict[str, Any], **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": data(),
        "batch_size": BATCH,
        "micro_batch_size": 2,
        "order": "sequential",
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "precision": "fp32",
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def copy_of(model: nn.Module, kind: Callable[[], nn.Module]) -> nn.Module:
    """Another model of its kind with the same state."""
    other = kind()
    other.load_state_dict(deepcopy(model.state_dict()))
    return other


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the bit."""
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def plain_loop(model: nn.Module, *, micro_batch_size: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pieces = BATCH // micro_batch_size
    inputs, labels = data()
    for step in range(STEPS):
        for piece in range(pieces):
            first = step * BATCH + piece * micro_batch_size
            rows = slice(first, first + micro_batch_size)
            mean = loss(model, (inputs[rows], labels[rows]))
            (mean / pieces).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("micro_batch_size", [2, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_in_one_process_buffers_end_as_in_a_plain_loop(kind: str, micro_batch_size: int) -> None:
    run = run_of(KINDS[kind], micro_batch_size=micro_batch_size)
    reference = copy_of(run.state.model, KINDS[kind])

    run.train()
    plain_loop(reference, micro_batch_size=micro_batch_size)

    torch.testing.assert_close(run.state.model.state_dict(), reference.state_dict())


@pytest.mark.parametrize("micro_batch_size", [2, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_every_buffer_as_it_was(kind: str, micro_batch_size: int) -> None:
    inputs, labels = data()
    inputs[BATCH + 3] = torch.nan  # in the second step
    run = run_of(
        KINDS[kind],
        micro_batch_size=micro_batch_size,
        train_data=(inputs, labels),
        length="2 steps",
    )
    ends = []
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)
            ends.append(buffers(run.state.model))

    before, after = ends
    assert_same(after, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_first_step_restores_the_buffers_of_the_start(kind: str) -> None:
    inputs, labels = data()
    inputs[3] = torch.nan
    run = run_of(KINDS[kind], train_data=(inputs, labels), length="1 steps")
    before = buffers(run.state.model)
    run.train()

    assert_same(buffers(run.state.model), before)


def test_an_update_changes_a_buffer() -> None:
    with run_of(Queue) as run:
        step = next(run.steps())
        before = buffers(run.state.model)
        sf.forward_backward(step)
        sf.update(step)
        after = buffers(run.state.model)

    assert not torch.equal(before["queue"], after["queue"])


def test_passes_without_an_update_change_no_buffer() -> None:
    run = run_of(Queue)
    before = buffers(run.state.model)
    with refused("gradients-unused"), run:
        for step in run.steps():
            sf.forward_backward(step)

    assert_same(buffers(run.state.model), before)


class Spectral(nn.Module):
    """Spectral normalization, old and new, whose buffers do not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.old = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, 3))
        self.new = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.old(inputs) + self.new(inputs), labels)


@pytest.mark.parametrize("micro_batch_size", [2, 6, 12])
def test_a_buffer_that_does_not_depend_on_the_batch_advances_once_a_step(
    micro_batch_size: int,
) -> None:
    run = run_of(Spectral, length="1 steps", micro_batch_size=micro_batch_size)
    reference = copy_of(run.state.model, Spectral)
    start = buffers(reference)
    inputs, labels = data()
    reference(inputs[:2], labels[:2])
    run.train()

    expected = buffers(reference)
    ends = buffers(run.state.model)
    assert set(ends) == {
        "old.weight_u",
        "old.weight_v",
        "new.parametrizations.weight.0._u",
        "new.parametrizations.weight.0._v",
    }
    torch.testing.assert_close(ends, expected)  # rounds by where a vector lies in memory
    assert not torch.allclose(ends["old.weight_u"], start["old.weight_u"], atol=1e-2)


def test_a_vector_that_has_converged_is_known_by_its_writing() -> None:
    """Power iterations at the start leave nothing to change before the weights move."""
    model = Spectral()
    for _ in range(200):
        model(*data())
    run = run_of(lambda: model)
    run.train()
    findings = run.state.buffers.findings
    assert findings is not None
    assert len(findings.once) == 4


def test_two_losses_of_one_step_advance_such_a_buffer_once_and_a_queue_twice() -> None:
    """A GAN's discriminator, called by both losses; the second loss is known in the step only."""

    def parts() -> dict[str, nn.Module]:
        return {"real": Spectral(), "fake": Spectral(), "queue": Queue()}

    def of_real(models: Any, batch: Any) -> Tensor:
        return models["real"](*batch) + models["queue"](*batch)  # type: ignore[no-any-return]

    def of_both(models: Any, batch: Any) -> Tensor:
        return of_real(models, batch) + models["fake"](*batch)  # type: ignore[no-any-return]

    models = parts()
    references = {"real": deepcopy(models["real"]), "fake": deepcopy(models["fake"])}
    run = run_of(models, loss=None, length="1 steps")
    with run:
        for step in run.steps():
            sf.forward_backward(step, of_real)
            sf.forward_backward(step, of_both)
            sf.update(step)

    inputs, labels = data()
    for name, reference in references.items():
        reference(inputs[:2], labels[:2])
        torch.testing.assert_close(buffers(models[name]), buffers(reference))
    assert int(models["queue"].pointer) == 2 * BATCH  # type: ignore[arg-type]
    findings = run.state.buffers.findings
    assert findings is not None
    assert set(findings.in_order) == {"queue.queue", "queue.pointer"}
    assert len(findings.once) == 8


DECLARED: dict[str, dict[str, str]] = {
    "Queue": {"queue": "in order", "pointer": "in order"},
    "Counter": {"counts": "sum", "passes": "sum"},
    "FirstBatch": {"shift": "in order", "begun": "in order"},
    "Extremes": {"low": "min", "high": "max"},
    "Codebook": {"*": "in order"},
    "OwnNorm": {"running": "mean"},
    "Replaced": {"*": "in order"},
}


def train_declared(*, kind: str) -> dict[str, Any]:
    """The state after a run, as text: what each rank has."""
    run = run_of(KINDS[kind], buffers=DECLARED[kind])
    run.train()
    return {name: repr(tensor.tolist()) for name, tensor in run.state.model.state_dict().items()}


def of_each_kind(
    ranks: Ranks, size: int, function: Callable[..., Any], kinds: Iterable[str], **common: Any
) -> dict[str, list[Any]]:
    """What a function returns on each rank, by kind. The ranks take one kind after the other."""
    kinds = [*kinds]
    ends = ranks.each(size, function, [{"kind": kind} for kind in kinds], **common)
    return dict(zip(kinds, ends, strict=True))


@pytest.fixture(scope="module")
def declared_ends(ranks: Ranks) -> dict[int, dict[str, list[Any]]]:
    """The state after a run of each kind on each rank, by the number of ranks."""
    kinds = {1: [*DECLARED], 2: [*DECLARED], 3: ["Queue"]}
    return {size: of_each_kind(ranks, size, train_declared, kinds[size]) for size in kinds}


@pytest.mark.parametrize("kind", DECLARED)
def test_with_a_rule_buffers_and_weights_are_equal_to_the_bit_on_any_number_of_ranks(
    kind: str, declared_ends: dict[int, dict[str, list[Any]]]
) -> None:
    (alone,) = declared_ends[1][kind]
    assert declared_ends[2][kind] == [alone] * 2
    if kind == "Queue":
        assert declared_ends[3][kind] == [alone] * 3


def test_in_order_is_what_one_process_does_without_a_rule() -> None:
    with_rule = run_of(Queue, buffers=DECLARED["Queue"])
    without = run_of(Queue)
    with_rule.train()
    without.train()

    assert_same(with_rule.state.model.state_dict(), without.state.model.state_dict())


class Numbers(Net):
    """Buffers that each pass sets or moves by the mean of its labels."""

    def keep(self) -> None:
        for name in ("mean", "sum", "max", "min"):
            self.register_buffer(name, torch.full((2,), 10.0))
        self.register_buffer("count", torch.tensor(2**60 + 1))

    def note(self, features: Tensor, labels: Tensor) -> float:
        value = labels.float().mean()
        for name in ("mean", "sum", "max", "min"):
            self.get_buffer(name).add_(value)
        self.count += len(labels)
        return 0.0


@pytest.mark.parametrize("micro_batch_size", [2, 4, 12])
def test_each_rule_has_its_closed_form(micro_batch_size: int) -> None:
    rules = {name: name for name in ("mean", "sum", "max", "min")} | {"count": "sum"}
    run = run_of(Numbers, buffers=rules, micro_batch_size=micro_batch_size, length="1 steps")
    run.train()

    _, labels = data()
    means = labels[:BATCH].reshape(-1, micro_batch_size).float().mean(1)
    ends = buffers(run.state.model)
    assert float(ends["mean"][0]) == pytest.approx(10 + float(means.mean()))
    assert float(ends["sum"][0]) == pytest.approx(10 + float(means.sum()))
    assert float(ends["max"][0]) == pytest.approx(10 + float(means.max()))
    assert float(ends["min"][0]) == pytest.approx(10 + float(means.min()))
    assert int(ends["count"]) == 2**60 + 1 + BATCH


def refused_on_a_rank(*, changes: dict[str, Any], kind: str) -> Any:
    try:
        run_of(KINDS[kind], **changes).train()
    except sf.ConfigError as error:
        return [error.code, error.fields.get("names")]
    return "trained"


NEED_A_RULE = {
    "Queue": ["pointer", "queue"],
    "Counter": ["counts", "passes"],
    "FirstBatch": ["shift"],
    "Extremes": ["high", "low"],
    "Codebook": ["codes", "sizes"],
    "OwnNorm": ["running"],
    "Replaced": ["recent"],
}


@pytest.fixture(scope="module")
def undeclared_ends(ranks: Ranks) -> dict[str, list[Any]]:
    return of_each_kind(ranks, 2, refused_on_a_rank, NEED_A_RULE, changes={})


@pytest.mark.parametrize(("kind", "names"), NEED_A_RULE.items())
def test_several_ranks_refuse_a_buffer_without_a_rule_by_name(
    kind: str, names: list[str], undeclared_ends: dict[str, list[Any]]
) -> None:
    assert undeclared_ends[kind] == [["buffer-needs-rule", names]] * 2


class LateCounter(Net):
    """Counts the samples of all passes, once it is told to."""

    is_counting = False

    def keep(self) -> None:
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3))

    def note(self, features: Tensor, labels: Tensor) -> Tensor:
        if self.is_counting:
            self.seen += len(labels)
        return self.mask


def counted_late(*, rules: dict[str, Any] | None) -> Any:
    run = run_of(LateCounter, buffers=rules)
    try:
        with run:
            for step in run:
                run.state.models["model"].is_counting = True
                last = step.index
    except sf.ConfigError as error:
        return [error.code, error.fields["names"], run.state.step]
    return [int(run.state.models["model"].seen), last]


def test_a_buffer_that_begins_to_change_after_the_first_step_is_refused_before_the_update(
    ranks: Ranks,
) -> None:
    expected = (STEPS - 1) * BATCH
    without, declared = ranks.each(2, counted_late, [{"rules": None}, {"rules": {"seen": "sum"}}])
    assert without == [["buffer-needs-rule", ["seen"], 1]] * 2
    assert declared == [[expected, STEPS - 1]] * 2
    assert ranks(1, counted_late, rules=None) == [[expected, STEPS - 1]]


def together_on_a_rank() -> Any:
    whole = sf.losses.whole_batch(encode, spread)
    run = run_of(Queue, loss=None, buffers=DECLARED["Queue"])
    try:
        with run:
            for step in run.steps():
                sf.forward_backward(step, whole)
                sf.update(step)
    except sf.ConfigError as error:
        return [error.code, error.fields["names"]]
    return "trained"


def test_a_coupled_loss_of_one_call_cannot_keep_an_order_either(ranks: Ranks) -> None:
    ends = ranks(2, together_on_a_rank)
    assert ends == [["buffer-order-impossible", ["queue", "pointer"]]] * 2


def test_ranks_whose_passes_happen_at_once_cannot_keep_an_order(ranks: Ranks) -> None:
    changes = {"buffers": DECLARED["Queue"], "parallel": "fsdp"}
    ends = ranks(2, refused_on_a_rank, changes=changes, kind="Queue")
    assert ends == [["buffer-order-impossible", ["queue", "pointer"]]] * 2


def test_a_rule_that_fits_no_buffer_is_refused() -> None:
    with refused("buffer-unknown", setting="buffers", value="que"):
        run_of(Queue, buffers={"que": "in order"})
    with refused("buffer-rule-misfit", name="pointer"):
        run_of(Queue, buffers={"pointer": "mean"})
    with refused("buffer-rule-unknown", setting="buffers"):
        run_of(Queue, buffers={"queue": "concatenated"})


def resume_on_a_rank(*, run_dir: str) -> Any:
    return refused_on_a_rank(changes={"run_dir": run_dir}, kind="Queue")


def test_a_checkpoint_knows_which_buffers_need_a_rule(tmp_path: Path, ranks: Ranks) -> None:
    whole = run_of(Queue, run_dir=tmp_path / "whole")
    whole.train()
    parted = run_of(Queue, run_dir=tmp_path / "parted", stop_after="2 steps")
    parted.train()
    saved = read(tmp_path / "parted" / "checkpoints" / "step-00000002").saved
    assert saved.buffers == {
        "once": [],
        "in_order": ["pointer", "queue"],
        "overwritten": [],
    }
    assert saved.identity["behavior"] >= 2
    assert "buffers" not in saved.identity

    ends = ranks(2, resume_on_a_rank, run_dir=str(tmp_path / "parted"))
    assert ends == [["buffer-needs-rule", ["pointer", "queue"]]] * 2

    resumed = run_of(Queue, run_dir=tmp_path / "parted")
    resumed.train()
    assert_same(resumed.state.model.state_dict(), whole.state.model.state_dict())
    file = tmp_path / "parted/checkpoints/step-00000003/state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    assert state["buffers"]["in_order"] == ["pointer", "queue"]


class WritesAlways(Counter):
    in_evaluation = True


def test_evaluations_of_a_run_change_no_buffer() -> None:
    plain = run_of(WritesAlways)
    evaluated = run_of(WritesAlways, splits={"val": sf.Split(data())}, evaluate_every="1 steps")
    plain.train()
    evaluated.train()

    assert_same(buffers(evaluated.state.model), buffers(plain.state.model))


def test_an_evaluation_changes_no_buffer() -> None:
    model = WritesAlways()
    before = buffers(model)

    sf.evaluate(model, sf.Split(data()), loss=loss, device="cpu")

    assert_same(buffers(model), before)


class Centers(nn.Module):
    """A loss with a buffer: the mean feature so far, on which it depends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, model: Any, batch: Any) -> Tensor:
        features = model(batch[0])
        if model.training:
            self.center.mul_(0.5).add_(features.detach().mean(0), alpha=0.5)
            self.passes += 1
        return (features - self.center).square().mean()


def test_buffers_of_a_loss_are_those_of_a_plain_loop_and_restored_by_a_skipped_step(
    tmp_path: Path,
) -> None:
    inputs, labels = data()
    inputs[-1] = torch.nan
    centers = Centers()
    run = run_of(
        lambda: nn.Linear(WIDTH, 3),
        loss=centers,
        train_data=(inputs, labels),
        length="4 steps",
        run_dir=tmp_path / "run",
    )
    run.register_state("centers", centers)
    passes = []
    with run:
        for _ in run:
            passes.append(int(centers.passes))

    assert passes == [6, 12, 18, 18]
    assert torch.isfinite(centers.center).all()


def encode(model: Any, batch: Any) -> Tensor:
    return model.features(batch[0])  # type: ignore[no-any-return]


def spread(model: Any, features: Tensor) -> Tensor:
    return (features @ features.T).logsumexp(1).mean()


class Encoder(nn.Module):
    """Moves its features by the number of passes before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("passes", torch.tensor(0))

    def features(self, inputs: Tensor) -> Tensor:
        moved = self.layer(inputs) + self.passes
        self.passes += 1
        return moved  # type: ignore[no-any-return]


def test_both_passes_of_a_coupled_loss_start_from_the_same_buffers() -> None:
    run = run_of(Encoder, loss=sf.losses.whole_batch(encode, spread), length="1 steps")
    reference: Any = copy_of(run.state.model, Encoder)
    inputs, _ = data()
    features = [reference.features(rows) for rows in inputs[:BATCH].split(2)]
    expected = spread(None, torch.cat(features))

    with run:
        for step in run:
            assert step.loss is not None
            torch.testing.assert_close(step.loss, expected)
    assert int(run.state.model.passes) == 6  # type: ignore[arg-type]
