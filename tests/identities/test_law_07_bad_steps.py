"""Law 7: a step whose loss or gradient is not finite changes no bit, is counted and shown, and too
many end the run. (2 s)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small_runs
import surefoot as sf
from refused import refused
from stated import lines_naming
from surefoot.checkpoint.store import Store
from surefoot.tracking.jsonl import records
from surefoot.train.meter import Meter
from surefoot.train.precision import LossScale

SAMPLES, FEATURES, CLASSES, BATCH = 24, 4, 3, 4
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
    marked = batch[0].amax(dim=1, keepdim=True) > 900
    outputs = model(torch.where(marked, 0.0, batch[0]))
    return F.cross_entropy(InfiniteGradient.apply(outputs + marked * 1000), batch[1])


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
    found: list[int] = []
    run = build(data())
    with run:
        for step in run:
            found += [int(sample) for part in step.micro_batches for sample in part.sample_ids]
    return found


def bits(run: sf.Run) -> dict[str, bytes]:
    """Every bit of parameters, buffers, averages and optimizer state."""
    model = run.state.models["model"]
    average = run.state.ema_models["model"].model
    trained = run.state.optimizers["model"]
    named = {f"model/{name}": held for name, held in model.state_dict().items()}
    named |= {f"average/{name}": held for name, held in average.named_parameters()}
    for place, parameter in enumerate(trained.parameters):
        for key, value in trained.optimizer.state[parameter].items():
            named[f"optimizer/{place}/{key}"] = torch.as_tensor(value)
    return {name: held.detach().clone().numpy().tobytes() for name, held in named.items()}


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
    held = [bits(run)]
    skipped = []
    with run:
        for step in run:
            held.append(bits(run))
            assert step.skipped is not None
            assert step.loss is not None
            skipped.append(float(step.skipped))
            assert math.isfinite(float(step.loss)) == (loss_is_finite or step.index != bad_step)

    assert skipped == [float(index == bad_step) for index in range(STEPS)]
    before = held[bad_step]
    after = held[bad_step + 1]
    assert {key: after[key] for key in before} == before
    if (
        bad_step == 0
    ):  # state that was made in the skipped step is what a fresh optimizer starts from
        fresh = {"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "step", "mu_product"}
        assert {key.rpartition("/")[2] for key in after.keys() - before.keys()} <= fresh
    assert all(held[step] != held[step + 1] for step in range(STEPS) if step != bad_step)
    assert all(
        torch.isfinite(weight).all() for weight in run.state.models["model"].state_dict().values()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_a_skipped_step_is_training_without_it(name: str) -> None:
    """The optimizer's own counters did not move on: the same updates from the same state."""
    samples = order_of_samples()
    run = build(data(samples[0]), optimizer=OPTIMIZERS[name], schedule=None, ema=None, clip="off")
    run.train()
    model = build(data(), schedule=None, ema=None).state.models["model"]
    plain: Any = {
        "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "fused SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    }.get(name, OPTIMIZERS[name])
    decayed = [p for p in model.parameters() if p.ndim > 1]
    spared = [p for p in model.parameters() if p.ndim == 1]
    groups: Any = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = plain(groups if "fused" in name else list(model.parameters()))
    inputs, labels = data()
    for step in range(1, STEPS):
        ids = samples[step * BATCH : (step + 1) * BATCH]
        start = [held.clone() for held in model.buffers()]
        for half in (ids[:2], ids[2:]):
            for held, value in zip(model.buffers(), start, strict=True):
                held.copy_(value)
            (loss(model, (inputs[half], labels[half])) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.testing.assert_close(
        dict(run.state.models["model"].named_parameters()),
        dict(model.named_parameters()),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_bad_step_is_counted_and_shown_in_the_record(tmp_path: Path) -> None:
    bad_sample = order_of_samples()[2 * BATCH]
    build(data(bad_sample), run_dir=tmp_path / "run", log_every="3 steps").train()

    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, second = [line for line in lines if line["kind"] == "train"]
    assert (first["skipped"], second["skipped"]) == (1, 0)
    assert first["loss"] is None
    assert first["nonfinite"]["loss"] == "nan"
    assert math.isfinite(first["loss_applied"])
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
    good = None
    with refused("steps-not-finite", sf.DivergedError, step=2) as raised, run:
        for step in run:
            if step.index == 1:
                good = bits(run)

    assert bits(run) == good
    assert order_of_samples()[2 * BATCH] in raised.value.fields["samples"]
    newest = Store(tmp_path / "run/checkpoints").newest_intact()
    assert newest is not None
    assert newest[0].step == 2
    saved = newest[0].files["model"]
    assert all(
        torch.equal(saved[name], held)
        for name, held in run.state.models["model"].state_dict().items()
    )


def test_at_the_limit_a_run_goes_on_and_a_good_step_starts_the_count_again() -> None:
    order = order_of_samples()
    bad = [
        order[0],
        order[BATCH],
        order[3 * BATCH],
        order[4 * BATCH],
    ]  # steps 0 1, 3 4 of each pass
    run = build(
        data(*bad), max_bad_steps=2, length=f"{3 * STEPS} steps", seed=0, log_every="1 steps"
    )
    skipped = []
    with (
        pytest.raises(sf.DivergedError) if most_in_a_row(bad, 3 * STEPS) > 2 else nullcontext(),
        run,
    ):
        for step in run:
            assert step.skipped is not None
            skipped.append(int(step.skipped))
    assert skipped[:STEPS] == [1, 1, 0, 1, 1, 0]


def most_in_a_row(bad: list[int], steps: int) -> int:
    """The longest row of steps with a bad sample, from the data alone."""
    run = build(data(), length=f"{steps} steps")
    longest = row = 0
    with run:
        for step in run:
            row = (
                row + 1
                if any(
                    int(sample) in bad for part in step.micro_batches for sample in part.sample_ids
                )
                else 0
            )
            longest = max(longest, row)
    return longest


def test_the_latch_holds_even_where_later_steps_would_be_good() -> None:
    """The host looks only at the end, after good batches have come: the weights are still those of
    the last good step.
    """
    order = order_of_samples()
    run = build(data(*order[2 * BATCH : 4 * BATCH]), max_bad_steps=1, log_every="1000 steps")
    good = None
    skipped = []
    with refused("steps-not-finite", sf.DivergedError, step=2), run:
        for step in run:
            assert step.skipped is not None
            skipped.append(int(step.skipped))
            if step.index == 1:
                good = bits(run)

    assert skipped == [0, 0, 1, 1, 1, 1]
    assert bits(run) == good


def test_where_another_optimizer_went_on_the_state_is_not_called_that_of_the_first_bad_step(
    tmp_path: Path,
) -> None:
    """The gradient of one of two models is infinite from step 2 on; the other model goes on
    learning.
    """

    def loss_of_two(models: Any, batch: Any) -> Tensor:
        sound = F.cross_entropy(models["sound"](batch[0].clamp(max=1.0)), batch[1])
        return sound + loss_of_infinite_gradient(models["sick"], batch)

    marked = data(*order_of_samples()[2 * BATCH :], value=1000.0)
    run = build(
        marked,
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
    }

    def failing(model: Any, batch: Any) -> Tensor:
        found = loss(model, batch)
        return found * math.nan if model.training and steps_begun[0] >= 2 * 3 else found

    steps_begun = [0]

    def counted(model: Any, batch: Any) -> Tensor:
        value = failing(model, batch)
        steps_begun[0] += torch.is_grad_enabled()  # two micro-batches a step: bad from step 3 on
        return value

    with refused("steps-not-finite", sf.DivergedError, step=3):
        build(data(), loss=counted, run_dir=tmp_path / "run", **settings).train()
    run = build(data(), run_dir=tmp_path / "run", **settings)
    run.train()
    assert run.state.step == 12
    skipped = [
        line["skipped"]
        for line in records(tmp_path / "run/metrics.jsonl")
        if line["kind"] == "train"
    ]
    assert skipped[-1] == 0


def test_a_diverged_run_started_again_says_so_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "max_bad_steps": 1,
        "length": "6 steps",
    }
    for _ in range(2):
        with refused("steps-not-finite", sf.DivergedError, step=2):
            build(every_sample_from(2), **settings).train()
    with pytest.raises(sf.CheckpointError) as caught:  # by another seed
        build(every_sample_from(2), seed=7, **settings).train()
    assert [each.name for each in caught.value.remedies] == ["run_dir"]  # not from its weights
    kept = [
        line["step"] for line in records(tmp_path / "run/metrics.jsonl") if line["kind"] == "train"
    ]
    assert kept == sorted(set(kept))


def test_a_resume_says_that_the_run_diverged_before_it_repeats_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "max_bad_steps": 1,
        "length": "6 steps",
        "check_state": False,  # the loss is at fault
        "console": True,
    }
    passes = [0]

    def failing(model: Any, batch: Any) -> Tensor:
        value = loss(model, batch)
        is_bad = model.training and passes[0] >= 2 * 2  # two micro-batches a step
        passes[0] += torch.is_grad_enabled()
        return value * math.nan if is_bad else value

    def said() -> int:
        out = capsys.readouterr().out
        warnings = lines_naming(out, "WARNING: ", " step 2,")
        for warning in warnings:
            (header,) = re.findall(r"(?m)^plan .*(?:\n .*)*", out)  # where it goes on
            assert out.index(warning) < out.index(header)
        return len(warnings)

    with refused("steps-not-finite", sf.DivergedError, step=2):
        build(data(), loss=failing, **settings).train()
    assert said() == 0
    build(data(), stop_after="4 steps", **settings).train()
    assert said() == 1
    build(data(), **settings).train()  # it is past that step
    assert said() == 0

    settings["run_dir"] = tmp_path / "not mended"
    for count in (0, 1, 1):
        with refused("steps-not-finite", sf.DivergedError, step=2):
            build(every_sample_from(2), **settings).train()
        assert said() == count


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
    assert run.parts.run_state.precision.loss_scale is not None
    return float(run.parts.run_state.precision.loss_scale.scale), int(
        run.parts.run_state.precision.loss_scale.good_steps
    )


def test_the_loss_scale_goes_as_torchs_grad_scaler_does() -> None:
    run = fp16(loss=steep_loss, optimizer=sf.optim.sgd(lr=1e-3, momentum=0.9))
    scales = []
    batches = []
    model = fp16(loss=steep_loss).state.models["model"]
    with run:
        for step in run:
            scales.append(scale_of(run))
            batches.append([part.batch for part in step.micro_batches])

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=4)
    expected = []
    for parts in batches:
        start = [held.clone() for held in model.buffers()]
        for part in parts:
            for held, value in zip(model.buffers(), start, strict=True):
                held.copy_(value)
            with torch.autocast("cpu", dtype=torch.float16):
                value = steep_loss(model, part) / len(parts)
            scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.append((scaler.get_scale(), scaler._get_growth_tracker()))

    assert scales == expected
    assert len({scale for scale, _ in scales}) > 2
    assert any(later > now for (now, _), (later, _) in pairwise(scales))
    torch.testing.assert_close(
        dict(run.state.models["model"].named_parameters()),
        dict(model.named_parameters()),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("found", ["0" * 40, "1" * 40, "0001" * 10, "00000001" * 5])
@pytest.mark.parametrize("start", [65536.0, 2.0**-140, 2.0**126])
def test_any_sequence_of_overflows_gives_the_scales_of_torch(start: float, found: str) -> None:
    """At the ends of float32's range too: the scale of a loss that is 0 for long must not become
    infinite.
    """
    ours = LossScale(torch.tensor(start), torch.tensor(0), interval=3)
    theirs, tracker = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    for flag in found:
        ours.update(torch.tensor(flag == "1"))
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(flag)), 2.0, 0.5, 3)
        assert (float(ours.scale), int(ours.good_steps)) == (float(theirs), int(tracker))


def test_an_overflow_is_skipped_and_shown_but_is_no_sign_of_divergence() -> None:
    run = fp16(loss=steep_loss, max_bad_steps=0, log_every="1 steps")
    before = bits_of_model(run)
    skipped = 0
    with run:
        for step in run:
            assert step.skipped is not None
            if float(step.skipped):
                skipped += 1
                assert bits_of_model(run) == before
            before = bits_of_model(run)

    assert skipped > 1
    assert float(run.state.optimizers["model"].bad_in_a_row) == 0


def bits_of_model(run: sf.Run) -> dict[str, bytes]:
    return {
        name: held.clone().numpy().tobytes()
        for name, held in run.state.models["model"].state_dict().items()
    }


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
    assert bits_of_model(resumed) == bits_of_model(whole)


def test_skipped_steps_are_in_a_row_until_one_is_made() -> None:
    bad = Meter()
    rows = []
    for skipped, done in (([3], 4), ([4, 5], 6), ([], 8), ([9], 10), ([10, 12], 13), ([14], 16)):
        bad.note_skipped(skipped, done=done)
        rows.append(bad.skipped_in_a_row)
    assert rows == [[3], [3, 4, 5], [], [9], [12], []]


def test_two_optimizers_of_one_backward_are_unscaled_by_the_same_scale() -> None:
    """The first one's overflow halves the scale; the second one's gradient was made under the old
    scale all the same.
    """

    def two(precision: str) -> tuple[sf.Run, Tensor]:
        def both(models: Any, batch: Any) -> Tensor:
            outer = models["first"](batch[0]).float().square().mean() * (
                1e30 if precision == "fp16" else 0.0
            )
            return outer * 0.0 + torch.as_tensor(models["second"](batch[0])).float().mean()

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
        if run.parts.run_state.precision.loss_scale is not None:
            run.parts.run_state.precision.loss_scale.interval = 1  # grows in every good step
        before = torch.as_tensor(run.state.models["second"].weight).detach().clone()
        run.train()
        return run, before - torch.as_tensor(run.state.models["second"].weight).detach()

    _, expected = two("fp32")
    run, found = two("fp16")

    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)  # fp16 holds eleven bits
    assert scale_of(run)[0] == 131072.0  # one step, one decision


def test_a_run_that_was_never_finite_is_not_told_to_lower_its_rate(tmp_path: Path) -> None:
    """Nothing has been updated yet: no rate and no warm-up made that loss."""

    def loss(model: Any, batch: Any) -> Any:
        return model(batch[0]).mean() * torch.tensor(float("nan"))

    with pytest.raises(sf.DivergedError) as ended:
        small_runs.build(
            tmp_path / "run", loss=loss, length="20 steps", splits={}, early_stopping=None
        ).train()
    assert ended.value.step == 0
    assert not any(isinstance(remedy, tuple) for remedy in ended.value.remedies)  # no setting
