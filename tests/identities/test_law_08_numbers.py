"""Law 8: the numbers that are logged are true. (3 s)

Every one is worked out a second time from what a step shows to the body of the loop. Time is a
clock that is told, or slept.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from ragged import CLASSES, FEATURES, IGNORED, Batch, counted_targets, plain_mean, tokens
from recorded import training_records
from refused import refused
from surefoot.tools.diagnose.reading import history_in
from surefoot.tools.report.series import read_reported_run
from surefoot.tracking.jsonl import line
from surefoot.tracking.record import PHASES
from surefoot.train.loop import Step, steps
from surefoot.train.timer import Clock, RemainingTime
from waiting import LogicalClock

SAMPLES = 40
TOKENS = tokens(SAMPLES, seed=5)


def with_accuracy(model: Any, batch: Batch) -> Any:
    inputs, targets = batch
    logits = model(inputs)
    is_counted = targets != IGNORED
    is_right = (logits.argmax(2) == targets) & is_counted
    accuracy = sf.Mean(is_right.sum(), is_counted.sum())
    return sf.losses.cross_entropy(logits, targets), {"accuracy": accuracy}


def build(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(FEATURES, CLASSES),
        "loss": plain_mean,
        "count_fn": counted_targets,
        "train_data": tokens(SAMPLES, seed=5),
        "batch_size": 8,
        "micro_batch_size": 2,
        "length": "12 steps",
        "optimizer": sf.optim.sgd(lr=0.5),
        "schedule": sf.schedules.cosine(warmup="3 steps"),
        "clip": "norm 0.1",
        "log_every": "5 steps",
        "precision": "fp32",
        "device": "cpu",
        "run_dir": run_dir,
        "console": False,
        "check_state": False,  # losses that move a clock
    }
    return sf.Run(**(settings | changes))


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What one step contributes to a record."""

    samples: int
    targets: int
    loss_sum: float
    right: int
    grad_norm: float


def numbers_of(step: Step, weights: dict[str, Tensor]) -> StepNumbers:
    """The step's own forward pass once more, in float64, with the weights it started from."""
    inputs = torch.cat([micro_batch.batch[0] for micro_batch in step.micro_batches]).double()
    targets = torch.cat([micro_batch.batch[1] for micro_batch in step.micro_batches])
    is_counted = targets != IGNORED
    target_count = int(is_counted.sum())

    logits = (inputs @ weights["weight"].T + weights["bias"]).requires_grad_()
    loss_sum = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    is_right = (logits.argmax(2) == targets) & is_counted
    (slope,) = torch.autograd.grad(loss_sum / target_count, logits)
    weight_grad = torch.einsum("btc,btf->cf", slope, inputs)
    bias_grad = slope.sum((0, 1))
    grad_norm = torch.cat([weight_grad.flatten(), bias_grad]).norm()
    return StepNumbers(
        samples=len(ids_of(step)),
        targets=target_count,
        loss_sum=float(loss_sum.detach()),
        right=int(is_right.sum()),
        grad_norm=float(grad_norm),
    )


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.double().clone() for name, tensor in model.state_dict().items()}


def ids_of(step: Step) -> list[int]:
    sample_ids: list[int] = []
    for micro_batch in step.micro_batches:
        sample_ids += micro_batch.sample_ids.tolist()
    return sample_ids


@pytest.mark.parametrize(
    ("loss", "count"),
    [(plain_mean, counted_targets), (with_accuracy, counted_targets), (with_accuracy, None)],
)
def test_the_logged_loss_is_that_of_all_global_batches_since_the_last_log(
    loss: Any, count: Any, tmp_path: Path
) -> None:
    """A loss that returns a `Mean` counts by itself, without `count=`."""
    run = build(tmp_path / "run", loss=loss, count_fn=count)
    model = run.state.models["model"]
    numbers = []
    with run:
        weights_at_start = weights_of(model)
        for step in run:
            numbers.append(numbers_of(step, weights_at_start))
            weights_at_start = weights_of(model)

    written = training_records(tmp_path / "run")
    assert [record["step"] for record in written] == [5, 10, 12]
    for record, window in zip(written, (numbers[:5], numbers[5:10], numbers[10:]), strict=True):
        targets = sum(step.targets for step in window)
        loss_sum = sum(step.loss_sum for step in window)
        grad_norms = [step.grad_norm for step in window]
        assert record["targets"] == targets
        assert record["samples"] == sum(step.samples for step in window)
        assert record["loss"] == pytest.approx(loss_sum / targets, rel=1e-6)
        assert record["grad_norm"] == pytest.approx(sum(grad_norms) / len(window), rel=1e-5)
        assert record["grad_norm_max"] == pytest.approx(max(grad_norms), rel=1e-5)
        assert record["skipped"] == 0
        if loss is with_accuracy:
            assert record["accuracy"] == sum(step.right for step in window) / targets


@pytest.mark.parametrize(("loss", "count"), [(plain_mean, counted_targets), (with_accuracy, None)])
def test_steps_that_count_nothing_weigh_nothing_in_the_logged_loss(
    loss: Any, count: Any, tmp_path: Path
) -> None:
    inputs, targets = tokens(SAMPLES, seed=5)
    targets[torch.arange(SAMPLES) % 5 > 0] = IGNORED  # a step of two samples often has none
    run = build(
        tmp_path / "run",
        loss=loss,
        count_fn=count,
        train_data=(inputs, targets),
        batch_size=2,
        micro_batch_size=1,
        length="20 steps",
        log_every="20 steps",
    )
    counts = []
    loss_sum = 0.0
    with run:
        for step in run:
            assert step.loss is not None
            step_count = int((targets[ids_of(step)] != IGNORED).sum())
            counts.append(step_count)
            loss_sum += float(step.loss) * step_count

    assert 0 < counts.count(0) < 20
    (record,) = training_records(tmp_path / "run")
    assert record["targets"] == sum(counts)
    assert record["loss"] == pytest.approx(loss_sum / sum(counts), rel=1e-6)


def test_the_logged_rate_is_that_of_the_last_step(tmp_path: Path) -> None:
    run = build(tmp_path / "run", log_every="1 steps")
    run.train()

    rates = [record["lr"] for record in training_records(tmp_path / "run")]
    assert rates == [0.5 * run.parts.task.factors(step) for step in range(12)]


def test_targets_a_second_times_seconds_are_targets(tmp_path: Path) -> None:
    """Those of the first step, whose time is that of the start, count in neither."""
    build(tmp_path / "run").train()

    for record in training_records(tmp_path / "run"):
        seconds = record["training_s"] + record["data_wait_s"]
        timed_targets = record["targets"] - record.get("starting_targets", 0)
        timed_samples = record["samples"]
        if record["step"] == 5:
            timed_samples -= 8
        assert record["targets_per_s"] * seconds == pytest.approx(timed_targets, rel=1e-12)
        assert record["samples_per_s"] * seconds == pytest.approx(timed_samples, rel=1e-12)


def test_records_of_lanes_count_the_samples_of_each_step(tmp_path: Path) -> None:
    """40 samples in 9 lanes: an epoch is four steps of nine samples and one of four."""
    with build(tmp_path / "run", order="lanes", batch_size=9, micro_batch_size=3) as run:
        sizes = [len(ids_of(step)) for step in run]

    assert sizes == [9, 9, 9, 9, 4, 9, 9, 9, 9, 4, 9, 9]
    written = training_records(tmp_path / "run")
    assert [record["samples"] for record in written] == [
        sum(sizes[:5]),
        sum(sizes[5:10]),
        sum(sizes[10:]),
    ]
    # the first step is in no speed
    timed = (sum(sizes[1:5]), sum(sizes[5:10]), sum(sizes[10:]))
    for record, samples in zip(written, timed, strict=True):
        seconds = record["training_s"] + record["data_wait_s"]
        assert record["samples_per_s"] * seconds == pytest.approx(samples, rel=1e-12)


def test_values_of_the_users_own_are_averaged_over_the_interval(tmp_path: Path) -> None:
    run = build(tmp_path / "run")
    with run:
        for step in run:
            step.log(
                index=step.index,
                squared=torch.tensor(float(step.index**2)),
                counted=sf.Mean(step.index, 3),
            )

    first, second, last = training_records(tmp_path / "run")
    assert (first["index"], second["index"], last["index"]) == (2.0, 7.0, 10.5)
    assert first["squared"] == (0 + 1 + 4 + 9 + 16) / 5
    assert first["counted"] == (0 + 1 + 2 + 3 + 4) / 15


def test_a_value_is_logged_as_it_is_when_it_is_logged(tmp_path: Path) -> None:
    """A live tensor (a temperature that is trained, say) moves on; and nobody may hold the graph
    until the log.
    """
    values: list[float] = []
    with build(tmp_path / "run", log_every="4 steps", length="4 steps") as run:
        parameter = run.state.parameters[0]
        for step in run:
            moving = parameter.sum()
            step.log(moving=moving, one=parameter.reshape(-1)[:1], pair=sf.Mean(moving, 1))
            _, logged = run.parts.run_state.meter.logged[-1]
            assert logged.keys() == {"moving", "one", "pair"}
            for value in logged.values():
                assert not getattr(value, "requires_grad", False)
            values.append(float(moving.detach()))
            with torch.no_grad():
                parameter.add_(1.0)

    (record,) = training_records(tmp_path / "run")
    assert record["moving"] == record["pair"] == pytest.approx(sum(values) / 4)


@pytest.mark.parametrize("value", [torch.ones(2), "text", "1.5", None, [1.0]])
def test_what_is_no_number_is_refused_where_it_is_logged(value: Any) -> None:
    with refused("logged-not-a-number", name="mine"), build() as run:
        next(iter(run)).log(mine=value)


def test_norm_and_clipping_are_those_of_all_optimizers_together(tmp_path: Path) -> None:
    def both(models: Any, batch: Any) -> Tensor:
        return 4 * models["a"](batch[0]).mean() + 20 * models["b"](batch[0]).mean()

    run = sf.Run(
        model={"a": lambda: nn.Linear(3, 1), "b": lambda: nn.Linear(3, 1)},
        loss=both,
        train_data=(torch.ones(4, 3), torch.ones(4)),
        batch_size=4,
        length="1 steps",
        optimizer=sf.optim.sgd(0.1),
        clip="norm 20",  # of the first optimizer's gradient 8, of the second's 40
        run_dir=tmp_path / "run",
        console=False,
    )
    with run:
        (step,) = run

    # the gradient of each of three weights and of the bias is 4, or 20
    norm_of_a = 4 * math.sqrt(3 + 1)
    norm_of_b = 20 * math.sqrt(3 + 1)
    assert step.grad_norm is not None
    assert float(step.grad_norm) == pytest.approx(math.hypot(norm_of_a, norm_of_b))
    (record,) = training_records(tmp_path / "run")
    assert record["clip_fraction"] == 0.5


def test_time_is_shown_where_it_went_and_never_twice(tmp_path: Path) -> None:
    clock = LogicalClock()

    class SlowData:
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, sample: int) -> Batch:
            clock.advance(1.0)
            inputs, targets = TOKENS
            return inputs[sample], targets[sample]

    passes = 0
    passes_by_step = [0]  # a micro-batch without targets is not passed through

    def slow_loss(model: Any, batch: Batch) -> Tensor:
        nonlocal passes
        if torch.is_grad_enabled():
            passes += 1
            clock.advance(100.0)
        return plain_mean(model, batch)

    def slow_score(outputs: Any, targets: Any) -> sf.Mean:
        clock.advance(10_000.0)
        return sf.Mean(1.0, 1)

    run = build(
        tmp_path / "run",
        length="10 steps",
        loss=slow_loss,
        train_data=SlowData(),
        splits={"s": sf.Split(TOKENS, metrics=slow_score, batch_size=SAMPLES)},
        evaluate_every="1 steps",
    )
    run.parts.run_state.clock.now = clock
    with run:
        for _ in run:
            passes_by_step.append(passes)
            clock.advance(1e6)

    _, second = training_records(tmp_path / "run")  # steps 5 to 9, of 8 samples each
    passes_of_second = passes_by_step[10] - passes_by_step[5]
    assert second["data_wait_s"] == 5 * 8 * 1.0
    assert second["training_s"] == passes_of_second * 100.0
    assert second["evaluating_s"] == 5 * 10_000.0
    assert second["user_s"] == 5 * 1e6
    assert second["saving_s"] == 0


def test_a_clock_that_goes_on_from_a_checkpoint_counts_every_second_once() -> None:
    """Also those since the last record, which stand in the total and in the window."""
    now = LogicalClock()
    clock = Clock(now=now)
    clock.enter("training")
    now.advance(5.0)
    clock.window()  # a record
    clock.enter("data_wait")
    now.advance(2.0)
    clock.enter("user")
    now.advance(1.0)
    saved = clock.state()

    resumed = Clock(now=now)
    resumed.start()
    resumed.load_state(saved)
    assert resumed.state() == saved
    resumed.enter("training")
    now.advance(4.0)

    window = resumed.window()
    assert window["training_s"] == 4.0
    assert window["data_wait_s"] == 2.0
    assert window["user_s"] == 1.0
    total_s = {phase: float(seconds) for phase, seconds in resumed.state()["total_s"].items()}
    assert total_s["training"] == 5.0 + 4.0
    assert total_s["data_wait"] == 2.0
    assert total_s["user"] == 1.0


class SlowSaving:
    """Duties of which each tells the clock how long it takes."""

    stopping = False

    def __init__(self) -> None:
        self.now = 0.0
        self.windows: list[dict[str, float]] = []
        self.clock = Clock(now=lambda: self.now)

    def metrics_after(self, done: int) -> dict[str, float]:
        return {}

    def evaluate_due(self, done: int) -> bool:
        return done % 2 == 0

    def log_due(self, done: int) -> bool:
        return done % 3 == 0

    def save_due(self, done: int) -> bool:
        return done % 2 == 1

    def evaluate(self, step: Step) -> None:
        self.now += 100

    def log(self) -> None:
        self.now += 10_000
        self.windows.append(self.clock.window())

    def save(self) -> None:
        self.now += 1_000_000


@pytest.mark.parametrize("opened", [False, True])
def test_every_moment_counts_for_exactly_one_phase(opened: bool) -> None:
    periodic = SlowSaving()

    def loss(model: Any, batch: Batch) -> Tensor:
        periodic.now += 0.25
        return plain_mean(model, batch)

    run = build(loss=loss)
    supply = run.parts.pipeline.feed(workers=0)
    supply.start(0)

    def feed(step: int) -> Any:
        periodic.now += 10
        return supply.micro_batches(step)

    arguments: dict[str, Any] = {
        "feed": feed,
        "record": run.parts.run_state.meter.add,
        "clock": periodic.clock.enter,
        "periodic": periodic,
    }
    for step in steps(run.parts.task, run.state, length=6, opened=opened, **arguments):
        if opened:
            sf.forward_backward(step)
            sf.update(step)
        else:
            periodic.now += 7

    # a window of three steps: four passes, a read of data, and 7 s in the body of each
    first = {
        "starting_s": 0.0,
        "training_s": 10_000 + 3 * 4 * 0.25,  # and the log
        "data_wait_s": 3 * 10,
        "evaluating_s": 100,
        "saving_s": 1_000_000,
        "user_s": 0 if opened else 3 * 7,
    }
    second = first | {"evaluating_s": 2 * 100, "saving_s": 2 * 1_000_000}
    assert periodic.windows == [first, second]


def test_what_comes_before_the_first_step_is_not_waiting_for_data(tmp_path: Path) -> None:
    clock = LogicalClock()

    def slow_loss(model: Any, batch: Batch) -> Tensor:
        if torch.is_grad_enabled():
            clock.advance(1.0)
        return plain_mean(model, batch)

    run = build(tmp_path / "run", log_every="1 steps", loss=slow_loss)
    run.parts.run_state.clock.now = clock
    clock.advance(1000.0)
    with run:
        clock.advance(1000.0)
        run.train()

    first, *_ = training_records(tmp_path / "run")
    assert first["starting_s"] == 4 * 1.0  # the passes of the first step
    assert first["data_wait_s"] == 0.0
    assert first["training_s"] == 0.0


def test_floats_are_written_whole(tmp_path: Path) -> None:
    numbers = [0.1 + 0.2, 1 / 3, 1e-300, 5e-324, 123456789.123456789, 2.0**-149]
    values = {f"value{place}": number for place, number in enumerate(numbers)}
    run = build(tmp_path / "run")
    with run:
        for step in run:
            if step.index == 0:
                step.log(**{name: sf.Mean(value, 1) for name, value in values.items()})

    text = (tmp_path / "run/metrics.jsonl").read_text()
    first, *_ = [json.loads(row) for row in text.splitlines() if '"train"' in row]
    for name, value in values.items():
        assert repr(first[name]) == repr(value)
    for record in training_records(tmp_path / "run"):
        assert f'"loss": {record["loss"]!r}' in text


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_what_is_not_finite_is_null_beside_a_field_that_says_what(
    value: float, word: str, tmp_path: Path
) -> None:
    run = build(tmp_path / "run")
    with run:
        for step in run:
            step.log(own=value)

    for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        record = json.loads(row, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        if record["kind"] == "train":
            assert record["own"] is None
            assert record["nonfinite"] == {"own": word}
    values_read = [record["own"] for record in training_records(tmp_path / "run")]
    assert [repr(value_read) for value_read in values_read] == [word] * 3
    assert json.loads(line({"own": value}))["own"] is None


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_resumed_run_writes_the_same_numbers(stop: int, tmp_path: Path) -> None:
    timeless = (
        "step",
        "loss",
        "grad_norm",
        "grad_norm_max",
        "clip_fraction",
        "targets",
        "skipped",
        "lr",
        "accuracy",
    )
    build(tmp_path / "whole", loss=with_accuracy).train()
    build(tmp_path / "resumed", loss=with_accuracy, stop_after=f"{stop} steps").train()
    build(tmp_path / "resumed", loss=with_accuracy).train()

    whole = training_records(tmp_path / "whole")
    resumed = training_records(tmp_path / "resumed")
    assert len(resumed) == len(whole)
    for record, expected in zip(resumed, whole, strict=True):
        for name in timeless:
            assert record[name] == expected[name], name


def test_a_record_that_spans_two_sessions_has_the_time_of_both(tmp_path: Path) -> None:
    clock = LogicalClock()
    data = (torch.randn(64, 8), torch.randint(3, (64,)))

    def slow_loss(model: Any, batch: Any) -> Tensor:
        clock.advance(1.0)
        return F.cross_entropy(model(batch[0]), batch[1])

    def train(stop_after: str) -> None:
        run = build(
            tmp_path / "run",
            model=lambda: nn.Linear(8, 3),
            loss=slow_loss,
            count_fn=None,
            train_data=data,
            micro_batch_size=None,
            length="10 steps",
            log_every="10 steps",
            stop_after=stop_after,
        )
        run.parts.run_state.clock.now = clock
        run.train()

    train(stop_after="5 steps")
    train(stop_after="10 steps")

    (record,) = training_records(tmp_path / "run")
    assert record["targets"] == 10 * 8
    assert record["starting_targets"] == 2 * 8  # the first step of each session
    assert record["starting_s"] == 2 * 1.0
    assert record["training_s"] == 8 * 1.0
    assert record["data_wait_s"] == 0.0
    assert record["targets_per_s"] == 8.0


def timed(run_dir: Path, **changes: Any) -> sf.Run:
    """A run on such a clock: the first pass of a process takes 90 s, later steps 0.5 s each, an
    evaluation 4 s.
    """
    clock = LogicalClock()
    passes = 0

    def loss(model: Any, batch: Batch) -> Tensor:
        nonlocal passes
        if torch.is_grad_enabled():
            clock.advance(0.125 if passes else 90.0)  # four micro-batches a step
            passes += 1
        return plain_mean(model, batch)

    def score(outputs: Any, targets: Any) -> sf.Mean:
        clock.advance(4.0)
        return sf.Mean(outputs.mean(), 1)

    settings: dict[str, Any] = {
        "loss": loss,
        "splits": {"s": sf.Split(TOKENS, metrics=score, batch_size=1000)},
        "length": "9 steps",
        "log_every": "4 steps",
        "evaluate_every": "3 steps",
    }
    run = build(run_dir, **(settings | changes))
    run.parts.run_state.clock.now = clock
    return run


def printed_s(printed: str) -> float:
    """The seconds that the console's last words tell, of all phases together."""
    minutes, seconds = re.findall(r"took (?:(\d+)m)?(\d+)s: ", printed)[-1]
    return 60 * int(minutes or 0) + int(seconds)


def test_console_page_and_diagnosis_tell_the_same_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came after the last record is among it, and is not counted again where the run goes
    on.
    """
    seconds: list[float] = []
    for stop_after in ("5 steps", "9 steps"):
        run = timed(tmp_path / "run", console=True, stop_after=stop_after)
        run.train()
        page = read_reported_run(tmp_path / "run").records.spent_s
        history = history_in(tmp_path / "run")
        seconds.append(sum(page.values()))
        assert printed_s(capsys.readouterr().out) == round(seconds[-1])
        for phase in PHASES:
            assert history.total(f"{phase}_s") == pytest.approx(page[phase])
    # each session: 90.375 s for its first step; 0.5 s for every other (one micro-batch has nothing
    # to count and is left out); 4 s for an evaluation after 3, 6 and 9 steps
    assert seconds == pytest.approx([90.375 + 4 * 0.5 + 4, 2 * 90.375 + 7 * 0.5 - 0.125 + 12])


def test_what_comes_once_is_in_neither_speed_nor_the_time_that_is_left(tmp_path: Path) -> None:
    run = timed(tmp_path / "run", splits=None, length="12 steps")
    run.train()
    first, *others = training_records(tmp_path / "run")
    timed_targets = first["targets"] - first["starting_targets"]
    assert first["starting_s"] == pytest.approx(90.375)
    assert first["eta_s"] == pytest.approx(8 * 0.5)
    assert first["targets_per_s"] == pytest.approx(timed_targets / (3 * 0.5), rel=1e-9)
    for record in others:
        assert "starting_targets" not in record
        assert record["starting_s"] == 0


def test_a_record_of_a_first_step_alone_tells_neither(tmp_path: Path) -> None:
    run = timed(tmp_path / "run", splits=None, log_every="1 steps")
    run.train()
    first, second, *_ = training_records(tmp_path / "run")
    assert first.keys().isdisjoint({"targets_per_s", "eta_s"})
    assert second["eta_s"] == pytest.approx(7 * 0.5)


def test_the_time_that_is_left_counts_evaluations_before_the_first_one(tmp_path: Path) -> None:
    """A forward pass is a third of the 0.5 s of a step of 8 samples, and an evaluation passes 40,
    until one has taken 4 s.
    """
    run = timed(tmp_path / "run", length="12 steps", evaluate_every="6 steps")
    run.train()
    left = [record["eta_s"] for record in training_records(tmp_path / "run")]
    estimated_evaluation_s = SAMPLES / 8 * 0.5 / 3
    # one micro-batch of the steps 5 to 8 has nothing to count, and is left out
    assert left == pytest.approx([8 * 0.5 + 2 * estimated_evaluation_s, 4 * 0.5 - 0.125 + 4.0, 4.0])


def test_neither_a_slow_start_nor_a_busy_spell_is_trusted_for_long() -> None:
    remaining = RemainingTime()
    left: list[float | None] = []
    for step_s in (9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 1.0, 1.0):
        remaining.add_steps(10, training_s=10 * step_s)
        left.append(remaining.seconds(steps=100, evaluations=0.0))
    assert left[1] == 900.0
    assert left[3:] == [100.0] * 7
    for _ in range(5):  # a machine that is slower for good is believed
        remaining.add_steps(10, training_s=30.0)
    assert remaining.seconds(steps=100, evaluations=0.0) == 300.0


def test_samples_saves_and_code_of_the_users_count_in_the_time_that_is_left() -> None:
    remaining = RemainingTime()
    assert remaining.seconds(steps=100, evaluations=2.0) is None
    remaining.add_steps(10, training_s=10.0, user_s=5.0)
    remaining.add_steps(10, training_s=10.0)  # what it does in some steps only counts as a mean
    remaining.add_event("sample", 7.0)
    remaining.add_event("save", 3.0)
    with_each = remaining.seconds(steps=100, evaluations=2.0, samples=2, saves=1)
    with_saves_by_time = remaining.seconds(steps=100, evaluations=0.0, save_every_s=50.0)
    assert with_each == 100 * 1.25 + 2 * 1.0 + 2 * 7.0 + 3.0
    assert with_saves_by_time == 100 * 1.25 + 2 * 3.0


def test_no_step_that_is_checked_has_a_speed(tmp_path: Path) -> None:
    """Time and targets of one step are in the same phase, also if each step has its own record, and
    after a resume.
    """
    settings: dict[str, Any] = {"length": "5 steps", "log_every": "1 steps", "check_state": True}
    build(tmp_path / "resumed", **settings, stop_after="1 steps").train()
    build(tmp_path / "resumed", **settings).train()
    build(tmp_path / "new", **settings).train()
    for name in ("resumed", "new"):
        written = training_records(tmp_path / name)
        assert [record["step"] for record in written if record.get("starting_targets")] == [1, 2]
        assert [record["step"] for record in written if "targets_per_s" in record] == [3, 4, 5]
