"""Losses of the whole batch: the same for any micro-batch size and number of ranks, as autograd has
it without them. (15 s)
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from forked import Forked
from losses import coupled_runs
from losses.coupled_runs import SAMPLES, build, data, nt_xent, trained, trained_with, views_loss
from rank_processes import Ranks
from refused import refused
from same_bits import assert_same_bits
from surefoot.data.loader import MicroBatch
from surefoot.seeding import fold, seed_generators
from surefoot.tracking.jsonl import records
from surefoot.train.loop import Step


def largest_difference(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert tensors.keys() == expected.keys()
    differences = []
    for name, tensor in tensors.items():
        differences.append(float((tensor.double() - expected[name].double()).abs().max()))
    return max(differences)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients


def first_step(run: sf.Run, micro_batches: list[MicroBatch] | None = None) -> Step:
    """The first step of a run, or one with these micro-batches."""
    if micro_batches is None:
        micro_batches = run.parts.pipeline.again(0)
    return Step(0, micro_batches, run.parts.task, run.state)


def whole_batch(run: sf.Run) -> Any:
    """The samples of the first step as one batch."""
    batches = [micro_batch.batch for micro_batch in run.parts.pipeline.again(0)]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


@pytest.mark.parametrize("kind", ["simclr", "ordered", "clip", "parameter"])
def test_accumulation_changes_nothing_in_float64(kind: str) -> None:
    """24 samples in 1, 3 and 8 micro-batches."""
    expected = trained(kind)

    for micro_batch_size in (8, 3):
        accumulated = trained(kind, micro_batch_size=micro_batch_size)
        assert largest_difference(accumulated["weights"], expected["weights"]) < 1e-14
        assert_steps_close(accumulated["steps"], expected["steps"], rel=1e-13)


def assert_steps_close(steps: list[Any], expected: list[Any], *, rel: float) -> None:
    for numbers, expected_numbers in zip(steps, expected, strict=True):
        assert numbers == pytest.approx(expected_numbers, rel=rel)


@pytest.mark.parametrize("kind", ["simclr", "ordered", "clip", "parameter"])
def test_loss_and_gradient_are_those_of_a_plain_loop_over_the_whole_batch(kind: str) -> None:
    run = build(kind, micro_batch_size=3)
    assert run.loss is not None
    model = build(kind).state.model
    plain = run.loss(model, whole_batch(run))
    metrics = {}
    if isinstance(plain, tuple):
        plain, metrics = plain
    plain.backward()

    step = first_step(run)
    mean = sf.forward_backward(step)

    gradients = gradients_of(run.state.model)
    assert float(mean) == pytest.approx(float(plain.detach()), rel=1e-14)
    assert largest_difference(gradients, gradients_of(model)) < 1e-14
    if kind in ("clip", "parameter"):
        assert float(gradients["log_scale"].abs()) > 1e-3
        assert float(step._logged["accuracy"].value) == float(metrics["accuracy"].value)


def test_one_micro_batch_is_encoded_once_and_gives_the_bits_of_a_plain_loss() -> None:
    sizes = []

    def encode(model: Any, batch: Any) -> Any:
        sizes.append(len(batch[0]))
        return coupled_runs.two_views(model, batch)

    def plain_loss(model: Any, batch: Any) -> Tensor:
        return views_loss(model, encode(model, batch))

    expected = trained("simclr", loss=plain_loss)
    assert sizes == [24] * 3

    sizes.clear()
    encoded_once = trained("simclr", loss=sf.losses.whole_batch(encode, views_loss))
    assert sizes == [24] * 3
    assert encoded_once["steps"] == expected["steps"]
    assert_same_bits(encoded_once["weights"], expected["weights"])


def test_two_micro_batches_are_encoded_twice() -> None:
    sizes = []

    def encode(model: Any, batch: Any) -> Any:
        sizes.append(len(batch[0]))
        return coupled_runs.two_views(model, batch)

    loss = sf.losses.whole_batch(encode, views_loss)
    trained("simclr", loss=loss, micro_batch_size=12, length="1 steps")

    assert sizes == [12] * 4


def test_ragged_micro_batches_and_one_without_targets_give_the_same_gradient() -> None:
    def gradients(*sizes: int) -> dict[str, Tensor]:
        """Of the samples of a step in micro-batches of these sizes; 0 is one without targets."""
        run = build("clip")
        (everything,) = run.parts.pipeline.again(0)
        micro_batches = []
        first = 0
        for index, size in enumerate(sizes):
            rows = slice(first, first + size)
            batch = tuple(part[rows] for part in everything.batch) if size else None
            ids = everything.sample_ids[rows]
            epochs = everything.epochs[rows]
            micro_batches.append(MicroBatch(batch, size, index, ids, epochs))
            first += size
        sf.forward_backward(first_step(run, micro_batches))
        return gradients_of(run.state.model)

    expected = gradients(24)

    assert largest_difference(gradients(5, 7, 12), expected) < 1e-14
    assert largest_difference(gradients(1, 0, 23), expected) < 1e-14


@pytest.mark.parametrize("kind", ["dropout", "norm"])
def test_both_passes_draw_the_same_masks_and_batch_statistics_change_once(kind: str) -> None:
    """The reference keeps the graphs of all micro-batches, and so encodes each once."""
    run = build(kind, micro_batch_size=8)
    reference = build(kind).state.model
    micro_batches = run.parts.pipeline.again(0)
    key = run.parts.task.key
    features = []
    buffers_of_batches = []
    for micro_batch in micro_batches:
        buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
        buffers_of_batches.append(buffers)
        seed_generators(fold(key, 0, micro_batch.index))
        model = partial(torch.func.functional_call, reference, buffers)
        features.append(coupled_runs.two_views(model, micro_batch.batch))
    first_views, second_views = zip(*features, strict=True)
    nt_xent(torch.cat(first_views), torch.cat(second_views)).backward()

    step = first_step(run, micro_batches)
    sf.forward_backward(step)
    gradients = gradients_of(run.state.model)
    sf.update(step)

    assert largest_difference(gradients, gradients_of(reference)) < 1e-14
    for name, buffer in run.state.model.named_buffers():
        of_batches = torch.stack([buffers[name] for buffers in buffers_of_batches])
        torch.testing.assert_close(buffer, of_batches.double().mean(0).to(buffer))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_computes_what_it_computes_without_accumulation(precision: str) -> None:
    """In fp16 the gradients of features would vanish without the scale: they are of the size of
    1e-8.
    """

    def faint(model: Any, features: Any) -> Tensor:
        return 1e-6 * views_loss(model, features)

    def faint_plain(model: Any, batch: Any) -> Tensor:
        return faint(model, coupled_runs.two_views(model, batch))

    def gradients(micro_batch_size: int, loss: Any) -> dict[str, Tensor]:
        run = build(
            "simclr",
            micro_batch_size=micro_batch_size,
            double=False,
            precision=precision,
            loss=loss,
        )
        step = first_step(run)
        sf.forward_backward(step)
        assert step._pending is not None
        _, factor, *_ = step._pending
        loss_scale = run.parts.task.precision.loss_scale
        if loss_scale is not None:
            factor = factor / loss_scale.scale
        scaled = gradients_of(run.state.model)
        return {name: gradient * factor for name, gradient in scaled.items()}

    coupled = sf.losses.whole_batch(coupled_runs.two_views, faint)
    plain = gradients(24, faint_plain)
    size = max(float(gradient.abs().max()) for gradient in plain.values())

    assert size > 1e-8
    assert largest_difference(gradients(24, coupled), plain) < 0.02 * size
    assert largest_difference(gradients(8, coupled), plain) < 0.02 * size


def test_a_bad_sample_in_any_micro_batch_skips_the_step() -> None:
    first, second = data()
    first[5] = torch.nan
    run = build(
        "norm", micro_batch_size=8, train_data=(first, second), batch_size=SAMPLES, length="1 steps"
    )
    before = coupled_runs.weights(run)

    with run:
        for step in run:
            assert step.skipped is not None
            assert float(step.skipped) == 1.0

    assert run.state.step == 1
    assert_same_bits(coupled_runs.weights(run), before)


def test_a_loop_of_ones_own_takes_the_loss_too() -> None:
    run = build("clip", micro_batch_size=8, loss=None)
    loss = sf.losses.whole_batch(coupled_runs.towers, coupled_runs.clip_loss)

    with run:
        for step in run.steps():
            mean = sf.forward_backward(step, loss)
            assert mean is step.loss
            sf.update(step)

    assert largest_difference(coupled_runs.weights(run), trained("clip")["weights"]) < 1e-14


def test_an_optimizer_with_a_closure_encodes_again_with_the_weights_that_it_tries() -> None:
    def trained_weights(micro_batch_size: int) -> dict[str, Tensor]:
        run = build(
            "clip",
            micro_batch_size=micro_batch_size,
            optimizer=lambda groups: torch.optim.LBFGS(groups, lr=0.1, max_iter=3),
        )
        run.train()
        return coupled_runs.weights(run)

    assert largest_difference(trained_weights(8), trained_weights(24)) < 1e-12


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of a run, and those beside them that only ranks have."""

    kind: str
    micro_batch_size: int
    changes: dict[str, Any] = field(default_factory=dict)
    of_ranks: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "micro_batch_size": self.micro_batch_size, **self.changes}


BF16 = {"double": False, "precision": "bf16"}
DDP_UNUSED = {"strategy": "ddp", "find_unused_parameters": True}
FSDP = {"strategy": "fsdp"}
FEW = {"few": True, "length": "8 steps"}
CASES = {
    "clip-4": Case(kind="clip", micro_batch_size=4),
    "clip-12": Case(kind="clip", micro_batch_size=12),
    "parameter-4": Case(kind="parameter", micro_batch_size=4),
    "parameter-12": Case(kind="parameter", micro_batch_size=12),
    "norm-4": Case(kind="norm", micro_batch_size=4),
    "norm-12": Case(kind="norm", micro_batch_size=12),
    "ordered-4": Case(kind="ordered", micro_batch_size=4),
    "few": Case(kind="clip", micro_batch_size=3, changes=FEW),
    "unused": Case(kind="clip", micro_batch_size=4, of_ranks=DDP_UNUSED),
    "sharded-4": Case(kind="clip", micro_batch_size=4, of_ranks=FSDP),
    "sharded-12": Case(kind="clip", micro_batch_size=12, of_ranks=FSDP),
    "dropout": Case(kind="dropout", micro_batch_size=4),
    "sharded dropout": Case(kind="dropout", micro_batch_size=4, of_ranks=FSDP),
    "bf16": Case(kind="dropout", micro_batch_size=4, changes=BF16),
    "sharded bf16": Case(kind="dropout", micro_batch_size=4, changes=BF16, of_ranks=FSDP),
}


@pytest.fixture(scope="module")
def on_two_ranks(ranks: Ranks) -> dict[str, list[Any]]:
    settings = [case.settings | case.of_ranks for case in CASES.values()]
    results = ranks.each(2, coupled_runs.trained_with, settings)
    return dict(zip(CASES, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_computes(
    name: str, on_two_ranks: dict[str, list[Any]]
) -> None:
    alone = trained_with(**CASES[name].settings)

    limit = 1e-13
    if CASES[name].changes is BF16:
        limit = 1e-6  # of float32's weights
    for together in on_two_ranks[name]:
        assert largest_difference(together["weights"], alone["weights"]) < limit
        assert_steps_close(together["steps"], alone["steps"], rel=10 * limit)
        assert together["scores"] == pytest.approx(alone["scores"], rel=10 * limit)


@pytest.mark.parametrize("batch_size", [1, 7, 24, 40])
def test_a_split_s_loss_is_the_mean_over_groups_of_the_batch_size(batch_size: int) -> None:
    views = tuple(view[:40] for view in data())
    split = sf.Split(views, metrics=coupled_runs.retrieval, batch_size=batch_size)
    run = build("simclr", splits={"val": split})
    with torch.no_grad():
        first, second = coupled_runs.two_views(run.state.model.eval(), views)
        of_24 = float(nt_xent(first[:24], second[:24]))
        of_16 = float(nt_xent(first[24:], second[24:]))

    scores = run.evaluate()

    assert scores["val/loss"] == pytest.approx((24 * of_24 + 16 * of_16) / 40, rel=1e-13)
    assert scores["val/top_1"] == coupled_runs.retrieval.whole(first, second)["top_1"]


def test_a_killed_run_ends_with_the_same_bits_and_replays_as_recorded(tmp_path: Path) -> None:
    def run_in(name: str, **changes: Any) -> dict[str, Tensor]:
        settings = {"kind": "norm", "micro_batch_size": 8, "layer_stats_every": "2 steps"}
        return coupled_runs.session(str(tmp_path / name), **(settings | changes))

    whole = run_in("whole", is_killed=False)
    with open(os.devnull, "w") as nowhere:
        process = Forked(lambda: run_in("killed", is_killed=True), stdout=nowhere)
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL

    resumed = run_in("killed", is_killed=False)

    assert_same_bits(resumed, whole)
    assert logged_losses(tmp_path / "killed") == logged_losses(tmp_path / "whole")
    rebuilt = build("norm", micro_batch_size=8, run_dir=tmp_path / "whole", length="6 steps")
    logged = sf.load(rebuilt).replay(step=3).logged
    assert logged is not None
    assert logged.equal


def logged_losses(run_dir: Path) -> dict[int, float]:
    """By step; a step that was logged twice has the later one."""
    losses = {}
    for record in records(run_dir / "metrics.jsonl"):
        if record["kind"] == "train":
            losses[record["step"]] = record["loss"]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_of_such_a_loss_killed_in_a_step_end_with_the_same_bits(
    strategy: str, ranks: Ranks, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"kind": "dropout", "micro_batch_size": 4, "parallel": strategy}
    whole_dir = str(tmp_path / "whole")
    killed_dir = str(tmp_path / "killed")
    session = coupled_runs.session
    whole = ranks(2, session, run_dir=whole_dir, is_killed=False, **settings)

    killed = ranks.outcomes(ranks.start(2, session, run_dir=killed_dir, is_killed=True, **settings))
    assert {outcome.status for outcome in killed} == {-signal.SIGKILL}
    assert (tmp_path / "killed" / "checkpoints" / "step-00000002").exists()
    resumed = ranks(2, session, run_dir=killed_dir, is_killed=False, **settings)

    for rank in (0, 1):
        assert_same_bits(resumed[rank], whole[rank])


def test_a_resume_with_another_function_in_the_loss_is_refused(tmp_path: Path) -> None:
    def other(model: Any, features: Any) -> Tensor:
        return nt_xent(*features, temperature=0.4)

    build("simclr", run_dir=tmp_path, stop_after="1 steps").train()
    other_loss = sf.losses.whole_batch(coupled_runs.two_views, other)
    changed = build("simclr", run_dir=tmp_path, loss=other_loss)

    with refused("program-changed", sf.CheckpointError, changed=["loss"]) as caught:
        changed.train()

    assert "other() in test_coupled" in (caught.value.reason or "")


def rows(model: Any, batch: Any) -> Any:
    return model(torch.cat(batch))


def as_list(model: Any, batch: Any) -> Any:
    return coupled_runs.two_views(model, batch)[0].tolist()


def wide(model: Any, batch: Any) -> Any:
    first, _ = coupled_runs.two_views(model, batch)
    return first[:, : 2 + int(batch[0].sum() > 0)]


def detached(model: Any, features: Any) -> Tensor:
    return views_loss(model, features).detach()


def by_sample(model: Any, features: Any) -> Tensor:
    return (features[0] - features[1]).square().mean(1)


@pytest.mark.parametrize(
    ("encode_fn", "loss_fn", "code", "fields"),
    [
        (rows, views_loss, "features-not-by-sample", {"shape": (16, 5), "samples": 8}),
        (as_list, views_loss, "features-not-by-sample", {"returned": "float"}),
        (wide, views_loss, "features-differ", {"among": "micro-batches"}),
        (coupled_runs.two_views, detached, "loss-without-gradient", {}),
        (coupled_runs.two_views, by_sample, "loss-not-a-scalar", {"shape": (24,)}),
    ],
)
def test_wrong_features_and_losses_are_refused(
    encode_fn: Any, loss_fn: Any, code: str, fields: dict[str, Any]
) -> None:
    run = build("simclr", micro_batch_size=8, loss=sf.losses.whole_batch(encode_fn, loss_fn))

    with refused(code, **fields):
        run.train()


def test_functions_of_other_arguments_are_refused_when_they_are_handed_over() -> None:
    with refused("whole-batch-function", setting="loss_fn"):
        sf.losses.whole_batch(coupled_runs.two_views, nn.functional.relu_)
    with refused("whole-batch-function", setting="encode_fn"):
        sf.losses.whole_batch(3, views_loss)  # type: ignore[arg-type]


def test_outside_a_run_the_loss_of_a_split_is_refused() -> None:
    split = sf.Split(data())
    loss = build("clip").loss

    with refused("coupled-loss-outside-run"):
        sf.evaluate(nn.Identity(), split, loss=loss)
