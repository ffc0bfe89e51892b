"""Law 7: a step whose loss or gradient is not finite changes no bit, is counted and shown, and too
many end the run. (2 s)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small_runs
import surefoot as sf
from recorded import training_records
from refused import refused
from stated import lines_naming
from surefoot.checkpoint.store import Store
from surefoot.train.meter import Meter
from surefoot.train.precision import LossScale

SAMPLES, FEATURES, CLASSES = 24, 4, 3
BATCH = 4
STEPS = SAMPLES // BATCH  # one pass
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": sf.optim.adamw(lr=1e-2, weight_decay=0.1),
    "fused SGD with momentum": sf.optim.sgd(lr=1e-2, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, weight_decay=0.1),
}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
        )


class InfiniteGradient(torch.autograd.Function):
    """The identity, with a gradient that is infinite where the value is above 900."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.clamp(max=1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return torch.where(values > 900, math.inf, gradients[0])


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_of_infinite_gradient(model: Any, batch: Any) -> Tensor:
    """The loss is finite throughout; a sample of 1000 makes the gradient infinite."""
    inputs, labels = batch
    is_marked = inputs.amax(dim=1, keepdim=True) > 900
    outputs = model(torch.where(is_marked, 0.0, inputs))
    return F.cross_entropy(InfiniteGradient.apply(outputs + is_marked * 1000), labels)


def data(*bad: int, value: float = math.nan) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    inputs[list(bad), 1] = value
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def build(train: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": train,
        "batch_size": BATCH,
        "micro_batch_size": 2,
        "length": f"{STEPS} steps",
        "optimizer": OPTIMIZERS["fused AdamW"],
        "schedule": sf.schedules.cosine(warmup="2 steps"),
        "ema": 0.9,
        "precision": "fp32",
        "device": "cpu",
        "log_every": "1 steps",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def order_of_samples() -> list[int]:
    """Which samples each step of a run sees; the same in every run here."""
    sample_ids: list[int] = []
    with build(data()) as run:
        for step in run:
            for micro_batch in step.micro_batches:
                sample_ids += micro_batch.sample_ids.tolist()
    return sample_ids


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().clone().numpy().tobytes()


def model_bits(run: sf.Run) -> dict[str, bytes]:
    state = run.state.models["model"].state_dict()
    return {name: bytes_of(tensor) for name, tensor in state.items()}


def bits(run: sf.Run) -> dict[str, bytes]:
    """Every bit of parameters, buffers, averages and optimizer state."""
    bits = {f"model/{name}": value for name, value in model_bits(run).items()}
    for name, tensor in run.state.ema_models["model"].model.named_parameters():
        bits[f"average/{name}"] = bytes_of(tensor)
    trained = run.state.optimizers["model"]
    for place, parameter in enumerate(trained.parameters):
        for name, value in trained.optimizer.state[parameter].items():
            bits[f"optimizer/{place}/{name}"] = bytes_of(torch.as_tensor(value))
    return bits


# state that an optimizer makes in its first step
FRESH_STATE = {"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "step", "mu_product"}


@pytest.mark.parametrize(
    ("value", "used", "loss_is_finite"),
    [(math.nan, loss, False), (math.inf, loss, False), (1000.0, loss_of_infinite_gradient, True)],
    ids=["NaN in the data", "infinity in the data", "infinite gradient only"],
)
@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_changes_no_bit_and_the_next_one_is_made(
    name: str, bad_step: int, value: float, used: Callable[..., Tensor], loss_is_finite: bool
) -> None:
    bad_sample = order_of_samples()[bad_step * BATCH + 3]  # in the step's second micro-batch
    run = build(data(bad_sample, value=value), optimizer=OPTIMIZERS[name], loss=used)
    bits_after = {-1: bits(run)}
    skipped_steps = []
    with run:
        for step in run:
            bits_after[step.index] = bits(run)
            assert step.skipped is not None
            assert step.loss is not None
            if float(step.skipped):
                skipped_steps.append(step.index)
            is_finite = loss_is_finite or step.index != bad_step
            assert math.isfinite(float(step.loss)) == is_finite

    assert skipped_steps == [bad_step]
    for step in range(STEPS):
        before = bits_after[step - 1]
        after = bits_after[step]
        if step == bad_step:
            assert {name: after[name] for name in before} == before
            new = {name.rpartition("/")[2] for name in after.keys() - before.keys()}
            assert new <= (FRESH_STATE if step == 0 else set())
        else:
            assert after != before
    for tensor in run.state.models["model"].state_dict().values():
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_a_skipped_step_is_training_without_it(name: str) -> None:
    """The optimizer's own counters did not move on: the same updates from the same state."""
    samples = order_of_samples()
    run = build(data(samples[0]), optimizer=OPTIMIZERS[name], schedule=None, ema=None, clip="off")
    run.train()

    model = build(data(), schedule=None, ema=None).state.models["model"]
    optimizer = optimizer_of_torch(name, model)
    inputs, labels = data()
    for step in range(1, STEPS):
        ids = samples[step * BATCH : (step + 1) * BATCH]
        buffers_at_start = copies(model.buffers())
        for half in (ids[:2], ids[2:]):
            restore(model.buffers(), buffers_at_start)
            (loss(model, (inputs[half], labels[half])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(
        dict(run.state.models["model"].named_parameters()),
        dict(model.named_parameters()),
        rtol=1e-5,
        atol=1e-6,
    )


def optimizer_of_torch(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Without our own code: ours decays matrices alone."""
    match name:
        case "fused AdamW":
            return torch.optim.AdamW(decay_groups(model), lr=1e-2, fused=True)
        case "fused SGD with momentum":
            return torch.optim.SGD(decay_groups(model), lr=1e-2, momentum=0.9, fused=True)
    build_optimizer: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS[name]
    return build_optimizer(list(model.parameters()))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def restore(tensors: Iterable[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def test_a_bad_step_is_counted_and_shown_in_the_record(tmp_path: Path) -> None:
    bad_sample = order_of_samples()[2 * BATCH]
    build(data(bad_sample), run_dir=tmp_path / "run", log_every="3 steps").train()

    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, second = [line for line in lines if line["kind"] == "train"]
    assert first["skipped"] == 1
    assert first["loss"] is None
    assert first["nonfinite"]["loss"] == "nan"
    assert math.isfinite(first["loss_applied"])
    assert second["skipped"] == 0
    assert math.isfinite(second["loss"])
    assert "loss_applied" not in second


def every_sample_from(step: int) -> tuple[Tensor, Tensor]:
    return data(*order_of_samples()[step * BATCH :])


@pytest.mark.fast("0-2 steps", "1-1 steps", "1-1000 steps", "3-2 steps")
@pytest.mark.parametrize("log_every", ["1 steps", "2 steps", "1000 steps"])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_too_many_in_a_row_end_the_run_with_the_weights_of_the_last_good_step(
    most: int, log_every: str, tmp_path: Path
) -> None:
    run = build(
        every_sample_from(2),
        run_dir=tmp_path / "run",
        max_bad_steps=most,
        log_every=log_every,
        length="12 steps",
    )
    last_good_bits = None
    with refused("steps-not-finite", sf.DivergedError, step=2) as raised, run:
        for step in run:
            if step.index == 1:
                last_good_bits = bits(run)

    assert bits(run) == last_good_bits
    assert order_of_samples()[2 * BATCH] in raised.value.fields["samples"]
    newest = Store(tmp_path / "run/checkpoints").newest_intact()
    assert newest is not None
    checkpoint, _ = newest
    assert checkpoint.step == 2
    saved_model = {name: bytes_of(saved) for name, saved in checkpoint.files["model"].items()}
    assert saved_model == model_bits(run)


def test_at_the_limit_a_run_goes_on_and_a_good_step_starts_the_count_again() -> None:
    order = order_of_samples()
    bad_samples = [order[step * BATCH] for step in (0, 1, 3, 4)]
    three_passes = f"{3 * STEPS} steps"
    end: AbstractContextManager[Any] = nullcontext()
    if most_bad_in_a_row(bad_samples, length=three_passes) > 2:  # the later passes are shuffled
        end = pytest.raises(sf.DivergedError)
    run = build(data(*bad_samples), max_bad_steps=2, length=three_passes, log_every="1 steps")
    skipped = []
    with end, run:
        for step in run:
            assert step.skipped is not None
            skipped.append(int(step.skipped))

    assert skipped[:STEPS] == [1, 1, 0, 1, 1, 0]


def most_bad_in_a_row(bad_samples: list[int], *, length: str) -> int:
    """How many steps in a row have a bad sample, at most; from the data alone."""
    most = 0
    in_a_row = 0
    with build(data(), length=length) as run:
        for step in run:
            sample_ids: set[int] = set()
            for micro_batch in step.micro_batches:
                sample_ids.update(micro_batch.sample_ids.tolist())
            if not sample_ids.isdisjoint(bad_samples):
                in_a_row += 1
            else:
                in_a_row = 0
            most = max(most, in_a_row)
    return most


def test_the_latch_holds_even_where_later_steps_would_be_good() -> None:
    """The host looks only at the end, after good batches have come: the weights are still those of
    the last good step.
    """
    bad_samples = order_of_samples()[2 * BATCH : 4 * BATCH]
    run = build(data(*bad_samples), max_bad_steps=1, log_every="1000 steps")
    last_good_bits = None
    skipped = []
    with refused("steps-not-finite", sf.DivergedError, step=2), run:
        for step in run:
            assert step.skipped is not None
            skipped.append(int(step.skipped))
            if step.index == 1:
                last_good_bits = bits(run)

    assert skipped == [0, 0, 1, 1, 1, 1]
    assert bits(run) == last_good_bits


def test_where_another_optimizer_went_on_the_state_is_not_called_that_of_the_first_bad_step(
    tmp_path: Path,
) -> None:
    """The gradient of one of two models is infinite from step 2 on; the other model goes on
    learning.
    """

    def loss_of_two(models: Any, batch: Any) -> Tensor:
        sound = F.cross_entropy(models["sound"](batch[0].clamp(max=1.0)), batch[1])
        return sound + loss_of_infinite_gradient(models["sick"], batch)

    run = build(
        data(*order_of_samples()[2 * BATCH :], value=1000.0),
        model={"sound": Net, "sick": Net},
        loss=loss_of_two,
        ema=None,
        max_bad_steps=1,
        run_dir=tmp_path / "run",
    )

    with refused("steps-not-finite", sf.DivergedError, saved_step=0):
        run.train()

    assert run.state.step == 4
    assert Store(tmp_path / "run" / "checkpoints").steps() == [0]


class LossNotFiniteFrom:
    """A loss that is NaN from this step on, of two micro-batches a step."""

    def __init__(self, step: int) -> None:
        self.first_bad_pass = 2 * step
        self.passes = 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        value = loss(model, batch)
        if model.training and self.passes >= self.first_bad_pass:
            value = value * math.nan
        if torch.is_grad_enabled():
            self.passes += 1
        return value


@pytest.mark.parametrize("save_every", ["1 steps", "2 steps", "1000 steps"])
def test_after_divergence_a_mended_run_goes_on_whatever_was_saved_while_it_was_latched(
    save_every: str, tmp_path: Path
) -> None:
    """The loss is at fault and not the data, so that the run stays the same run when it is
    mended.
    """
    settings: dict[str, Any] = {
        "max_bad_steps": 1,
        "length": "12 steps",
        "save_every": save_every,
        "log_every": "10 steps",
        "check_state": False,  # the loss counts
        "run_dir": tmp_path / "run",
    }
    with refused("steps-not-finite", sf.DivergedError, step=3):
        build(data(), loss=LossNotFiniteFrom(step=3), **settings).train()

    run = build(data(), **settings)
    run.train()

    assert run.state.step == 12
    *_, last = training_records(tmp_path / "run")
    assert last["skipped"] == 0


def test_a_diverged_run_started_again_says_so_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for _ in range(2):
        with refused("steps-not-finite", sf.DivergedError, step=2):
            build(every_sample_from(2), run_dir=run_dir, max_bad_steps=1).train()

    steps = [record["step"] for record in training_records(run_dir)]
    assert steps == sorted(set(steps))


def test_a_diverged_run_is_not_offered_as_a_start_for_another_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "max_bad_steps": 1}
    with refused("steps-not-finite", sf.DivergedError):
        build(every_sample_from(2), **settings).train()

    with pytest.raises(sf.CheckpointError) as caught:
        build(every_sample_from(2), seed=7, **settings).train()

    # not init_from, which would take its weights
    assert [remedy.name for remedy in caught.value.remedies] == ["run_dir"]


def count_warnings_of_step_2(out: str) -> int:
    """Each stands above the plan of the session, which says where it goes on."""
    warnings = lines_naming(out, "WARNING: ", " step 2,")
    for warning in warnings:
        (plan,) = re.findall(r"(?m)^plan .*(?:\n .*)*", out)
        assert out.index(warning) < out.index(plan)
    return len(warnings)


def test_a_mended_run_says_that_it_diverged_until_it_is_past_that_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "max_bad_steps": 1,
        "check_state": False,  # the loss is at fault
        "console": True,
    }
    with refused("steps-not-finite", sf.DivergedError, step=2):
        build(data(), loss=LossNotFiniteFrom(step=2), **settings).train()
    assert count_warnings_of_step_2(capsys.readouterr().out) == 0

    build(data(), stop_after="4 steps", **settings).train()
    assert count_warnings_of_step_2(capsys.readouterr().out) == 1

    build(data(), **settings).train()
    assert count_warnings_of_step_2(capsys.readouterr().out) == 0


def test_a_resume_says_that_the_run_diverged_before_it_repeats_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "max_bad_steps": 1, "console": True}
    for expected_warnings in (0, 1, 1):
        with refused("steps-not-finite", sf.DivergedError, step=2):
            build(every_sample_from(2), **settings).train()
        assert count_warnings_of_step_2(capsys.readouterr().out) == expected_warnings


# --- the loss scale of fp16 -----------------------------------------------------------------------


def fp16(*, interval: int = 4, **changes: Any) -> sf.Run:
    run = build(
        data(), precision="fp16", ema=None, schedule=None, clip="off", length="24 steps", **changes
    )
    assert run.parts.run_state.precision.loss_scale is not None
    run.parts.run_state.precision.loss_scale.interval = interval
    return run


def steep_loss(model: Any, batch: Any) -> Tensor:
    """Large enough for its scaled gradient to overflow in fp16 at first, and again whenever the
    scale has grown.
    """
    return loss(model, batch) * 20


def scale_of(run: sf.Run) -> tuple[float, int]:
    """The scale, and the good steps since it last changed."""
    loss_scale = run.parts.run_state.precision.loss_scale
    assert loss_scale is not None
    return float(loss_scale.scale), int(loss_scale.good_steps)


def test_the_loss_scale_goes_as_torchs_grad_scaler_does() -> None:
    run = fp16(loss=steep_loss, optimizer=sf.optim.sgd(lr=1e-3, momentum=0.9))
    scales = []
    batches_by_step = []
    with run:
        for step in run:
            scales.append(scale_of(run))
            batches_by_step.append([micro_batch.batch for micro_batch in step.micro_batches])

    model = fp16(loss=steep_loss).state.models["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=4)
    expected = []
    for batches in batches_by_step:
        buffers_at_start = copies(model.buffers())
        for batch in batches:
            restore(model.buffers(), buffers_at_start)
            with torch.autocast("cpu", dtype=torch.float16):
                value = steep_loss(model, batch) / len(batches)
            scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append((scaler.get_scale(), scaler._get_growth_tracker()))

    assert scales == expected
    values = [scale for scale, _ in scales]
    assert len(set(values)) > 2
    assert any(later > earlier for earlier, later in pairwise(values))
    torch.testing.assert_close(
        dict(run.state.models["model"].named_parameters()),
        dict(model.named_parameters()),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("overflows", ["0" * 40, "1" * 40, "0001" * 10, "00000001" * 5])
@pytest.mark.parametrize("start", [65536.0, 2.0**-140, 2.0**126])
def test_any_sequence_of_overflows_gives_the_scales_of_torch(start: float, overflows: str) -> None:
    """At the ends of float32's range too: the scale of a loss that is 0 for long must not become
    infinite.
    """
    loss_scale = LossScale(torch.tensor(start), torch.tensor(0), interval=3)
    torchs_scale = torch.tensor(start)
    torchs_good_steps = torch.tensor(0, dtype=torch.int32)
    for overflow in map(int, overflows):
        loss_scale.update(torch.tensor(bool(overflow)))
        torch._amp_update_scale_(
            torchs_scale, torchs_good_steps, torch.tensor(float(overflow)), 2.0, 0.5, 3
        )
        assert float(loss_scale.scale) == float(torchs_scale)
        assert int(loss_scale.good_steps) == int(torchs_good_steps)


def test_an_overflow_is_skipped_and_shown_but_is_no_sign_of_divergence() -> None:
    run = fp16(loss=steep_loss, max_bad_steps=0, log_every="1 steps")
    bits_before = model_bits(run)
    skipped_count = 0
    with run:
        for step in run:
            assert step.skipped is not None
            if float(step.skipped):
                skipped_count += 1
                assert model_bits(run) == bits_before
            bits_before = model_bits(run)

    assert skipped_count > 1
    assert float(run.state.optimizers["model"].bad_in_a_row) == 0


def test_a_loss_that_is_not_finite_is_a_sign_of_divergence_under_a_loss_scale_too() -> None:
    run = build(
        every_sample_from(2), precision="fp16", ema=None, max_bad_steps=2, length="12 steps"
    )
    with refused("steps-not-finite", sf.DivergedError, step=2):
        run.train()


@pytest.mark.parametrize("stop", [2, 5, 9])
def test_the_loss_scale_survives_a_resume(stop: int, tmp_path: Path) -> None:
    whole = fp16(loss=steep_loss)
    whole.train()
    settings: dict[str, Any] = {"loss": steep_loss, "run_dir": tmp_path / "run"}
    fp16(stop_after=f"{stop} steps", **settings).train()
    resumed = fp16(**settings)
    resumed.train()

    assert scale_of(resumed) == scale_of(whole)
    assert model_bits(resumed) == model_bits(whole)


def test_skipped_steps_are_in_a_row_until_one_is_made() -> None:
    meter = Meter()

    def row_after(done: int, skipped: list[int]) -> list[int]:
        meter.note_skipped(skipped, done=done)
        return meter.skipped_in_a_row

    assert row_after(4, skipped=[3]) == [3]
    assert row_after(6, skipped=[4, 5]) == [3, 4, 5]
    assert row_after(8, skipped=[]) == []
    assert row_after(10, skipped=[9]) == [9]
    assert row_after(13, skipped=[10, 12]) == [12]
    assert row_after(16, skipped=[14]) == []


def test_two_optimizers_of_one_backward_are_unscaled_by_the_same_scale() -> None:
    """The first one's overflow halves the scale; the second one's gradient was made under the old
    scale all the same.
    """

    def train_two(precision: str) -> tuple[sf.Run, Tensor]:
        """The run, and what its step subtracts from the second model's weight."""
        factor = 1e30 if precision == "fp16" else 0.0

        def both(models: Any, batch: Any) -> Tensor:
            overflowing = models["first"](batch[0]).float().square().mean() * factor
            mean_output: Tensor = models["second"](batch[0]).float().mean()
            return overflowing * 0.0 + mean_output

        run = build(
            data(),
            model={
                "first": lambda: nn.Linear(FEATURES, 1),
                "second": lambda: nn.Linear(FEATURES, 1),
            },
            optimizer={"first": sf.optim.sgd(lr=1.0), "second": sf.optim.sgd(lr=1.0)},
            loss=both,
            precision=precision,
            ema=None,
            schedule=None,
            clip="off",
            length="1 steps",
        )
        loss_scale = run.parts.run_state.precision.loss_scale
        if loss_scale is not None:
            loss_scale.interval = 1  # grows in every good step
        second: Any = run.state.models["second"]
        before = second.weight.detach().clone()
        run.train()
        return run, before - second.weight.detach()

    _, expected = train_two("fp32")
    run, update = train_two("fp16")

    torch.testing.assert_close(update, expected, rtol=2e-3, atol=1e-4)  # fp16 has eleven bits
    scale, _ = scale_of(run)
    assert scale == 2 * 65536.0  # one step, one decision


def test_a_run_that_was_never_finite_is_not_told_to_lower_its_rate(tmp_path: Path) -> None:
    """Nothing has been updated yet: no rate and no warm-up made that loss."""

    def loss(model: Any, batch: Any) -> Any:
        return model(batch[0]).mean() * torch.tensor(float("nan"))

    run = small_runs.build(
        tmp_path / "run", loss=loss, length="20 steps", splits={}, early_stopping=None
    )
    with pytest.raises(sf.DivergedError) as caught:
        run.train()

    assert caught.value.step == 0
    assert not any(isinstance(remedy, tuple) for remedy in caught.value.remedies)  # no setting
