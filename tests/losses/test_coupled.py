"""Losses of the whole batch: the same for any micro-batch size and number of ranks, as autograd has
it without them. (15 s)
"""

from __future__ import annotations

import os
import signal
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
from surefoot.data.loader import MicroBatch
from surefoot.seeding import fold, seed_generators
from surefoot.tracking.jsonl import records
from surefoot.train.loop import Step


def largest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def whole_batch(run: sf.Run) -> Any:
    """The samples of the first step as one batch."""
    return tuple(
        torch.cat(parts)
        for parts in zip(*(each.batch for each in run.parts.pipeline.again(0)), strict=True)
    )


@pytest.mark.parametrize("kind", ["simclr", "ordered", "clip", "parameter"])
def test_accumulation_changes_nothing_in_float64(kind: str) -> None:
    """24 samples in 1, 3 and 8 micro-batches."""
    expected = trained(kind)
    for micro_batch_size in (8, 3):
        found = trained(kind, micro_batch_size=micro_batch_size)
        assert largest(found["weights"], expected["weights"]) < 1e-14
        for own, other in zip(found["steps"], expected["steps"], strict=True):
            assert own == pytest.approx(other, rel=1e-13)


@pytest.mark.parametrize("kind", ["simclr", "ordered", "clip", "parameter"])
def test_loss_and_gradient_are_those_of_a_plain_loop_over_the_whole_batch(kind: str) -> None:
    run = build(kind, micro_batch_size=3)
    loss = run.loss
    assert loss is not None
    model = build(kind).state.model
    plain = loss(model, whole_batch(run))
    mean = plain[0] if isinstance(plain, tuple) else plain
    mean.backward()

    step = Step(0, run.parts.pipeline.again(0), run.parts.task, run.state)
    assert float(sf.forward_backward(step)) == pytest.approx(float(mean.detach()), rel=1e-14)
    gradients = {
        name: each.grad
        for name, each in run.state.model.named_parameters()
        if each.grad is not None
    }
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert largest(gradients, expected) < 1e-14
    if kind in ("clip", "parameter"):
        assert float(gradients["log_scale"].abs()) > 1e-3
        assert float(step._logged["accuracy"].value) == float(plain[1]["accuracy"].value)


def test_one_micro_batch_is_encoded_once_and_gives_the_bits_of_a_plain_loss() -> None:
    calls = []

    def plain(model: Any, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return views_loss(model, coupled_runs.two_views(model, batch))

    def encode(model: Any, batch: Any) -> Any:
        calls.append(len(batch[0]))
        return coupled_runs.two_views(model, batch)

    expected = trained("simclr", loss=plain)
    assert calls == [24] * 3
    found = trained("simclr", loss=sf.losses.whole_batch(encode, views_loss))
    assert calls == [24] * 6
    assert found["steps"] == expected["steps"]
    assert largest(found["weights"], expected["weights"]) == 0.0
    trained(
        "simclr",
        loss=sf.losses.whole_batch(encode, views_loss),
        micro_batch_size=12,
        length="1 steps",
    )
    assert calls == [24] * 6 + [12] * 4


def test_ragged_micro_batches_and_one_without_targets_give_the_same_gradient() -> None:
    def gradients(sizes: list[int], empty: bool = False) -> dict[str, Tensor]:
        run = build("clip")
        (everything,) = run.parts.pipeline.again(0)
        parts = []
        first = 0
        for index, size in enumerate(sizes):
            rows = slice(first, first + size)
            batch = tuple(each[rows] for each in everything.batch)
            ids = everything.sample_ids[rows]
            epochs = everything.epochs[rows]
            parts.append(MicroBatch(batch, size, index, ids, epochs))
            first += size
        if empty:
            parts.insert(
                1, MicroBatch(None, 0, len(parts), everything.sample_ids[:0], everything.epochs[:0])
            )
        step = Step(0, parts, run.parts.task, run.state)
        sf.forward_backward(step)
        assert step._pending is not None
        return {
            name: each.grad
            for name, each in run.state.model.named_parameters()
            if each.grad is not None
        }

    expected = gradients([24])
    assert largest(gradients([5, 7, 12]), expected) < 1e-14
    assert largest(gradients([1, 23], empty=True), expected) < 1e-14


@pytest.mark.parametrize("kind", ["dropout", "norm"])
def test_both_passes_draw_the_same_masks_and_batch_statistics_change_once(kind: str) -> None:
    """The reference keeps the graphs of all micro-batches, and so encodes each once."""
    run = build(kind, micro_batch_size=8)
    reference = build(kind).state.model
    micro_batches = run.parts.pipeline.again(0)
    key = run.parts.task.key
    features = []
    changes = []
    for micro_batch in micro_batches:
        buffers = {name: each.clone() for name, each in reference.named_buffers()}
        changes.append(buffers)
        seed_generators(fold(key, 0, micro_batch.index))
        model = partial(torch.func.functional_call, reference, buffers)
        features.append(coupled_runs.two_views(model, micro_batch.batch))
    first, second = (torch.cat(views) for views in zip(*features, strict=True))
    nt_xent(first, second).backward()

    step = Step(0, micro_batches, run.parts.task, run.state)
    sf.forward_backward(step)
    found = {
        name: each.grad.clone()
        for name, each in run.state.model.named_parameters()
        if each.grad is not None
    }
    expected = {
        name: each.grad for name, each in reference.named_parameters() if each.grad is not None
    }
    assert largest(found, expected) < 1e-14
    sf.update(step)
    for name, each in run.state.model.named_buffers():
        torch.testing.assert_close(
            each, torch.stack([change[name] for change in changes]).double().mean(0).to(each)
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_computes_what_it_computes_without_accumulation(precision: str) -> None:
    """In fp16 the gradients of features would vanish without the scale: they are of the size of
    1e-8.
    """

    def faint(model: Any, features: Any) -> Tensor:
        return 1e-6 * views_loss(model, features)

    def gradients(micro_batch_size: int, loss: Any = None) -> dict[str, Tensor]:
        loss = sf.losses.whole_batch(coupled_runs.two_views, faint) if loss is None else loss
        settings = {"double": False, "precision": precision, "loss": loss}
        run = build("simclr", micro_batch_size=micro_batch_size, **settings)
        step = Step(0, run.parts.pipeline.again(0), run.parts.task, run.state)
        sf.forward_backward(step)
        factor = step._pending[1] if step._pending is not None else 1.0
        scale = run.parts.task.precision.loss_scale
        factor = factor if scale is None else factor / scale.scale
        return {
            name: each.grad * factor
            for name, each in run.state.model.named_parameters()
            if each.grad is not None
        }

    plain = gradients(24, lambda model, batch: faint(model, coupled_runs.two_views(model, batch)))
    size = max(float(each.abs().max()) for each in plain.values())
    assert size > 1e-8
    for micro_batch_size in (24, 8):
        assert largest(gradients(micro_batch_size), plain) < 0.02 * size


def test_a_bad_sample_in_any_micro_batch_skips_the_step() -> None:
    first, second = data()
    first[5] = torch.nan
    run = build(
        "norm", micro_batch_size=8, train_data=(first, second), batch_size=SAMPLES, length="1 steps"
    )
    before = coupled_runs.weights(run)
    with run:
        (skipped,) = (float(step.skipped) for step in run if step.skipped is not None)
    assert skipped == 1.0
    assert largest(coupled_runs.weights(run), before) == 0.0


def test_a_loop_of_ones_own_takes_the_loss_too() -> None:
    run = build("clip", micro_batch_size=8, loss=None)
    with run:
        for step in run.steps():
            mean = sf.forward_backward(
                step, sf.losses.whole_batch(coupled_runs.towers, coupled_runs.clip_loss)
            )
            assert mean is step.loss
            sf.update(step)
    assert largest(coupled_runs.weights(run), trained("clip")["weights"]) < 1e-14


def test_an_optimizer_with_a_closure_encodes_again_with_the_weights_that_it_tries() -> None:
    def trained_weights(micro_batch_size: int) -> dict[str, Tensor]:
        run = build(
            "clip",
            micro_batch_size=micro_batch_size,
            optimizer=lambda groups: torch.optim.LBFGS(groups, lr=0.1, max_iter=3),
        )
        run.train()
        return coupled_runs.weights(run)

    assert largest(trained_weights(8), trained_weights(24)) < 1e-12


CASES: dict[str, dict[str, Any]] = {
    **{
        f"{kind}-{size}": {"kind": kind, "micro_batch_size": size}
        for kind in ("clip", "parameter", "norm")
        for size in (4, 12)
    },
    "ordered-4": {"kind": "ordered", "micro_batch_size": 4},
    "few": {"kind": "clip", "micro_batch_size": 3, "few": True, "length": "8 steps"},
    "unused": {
        "kind": "clip",
        "micro_batch_size": 4,
        "strategy": "ddp",
        "find_unused_parameters": True,
    },
    "sharded-4": {"kind": "clip", "micro_batch_size": 4, "strategy": "fsdp"},
    "sharded-12": {"kind": "clip", "micro_batch_size": 12, "strategy": "fsdp"},
    "dropout": {"kind": "dropout", "micro_batch_size": 4},
    "sharded dropout": {"kind": "dropout", "micro_batch_size": 4, "strategy": "fsdp"},
    "bf16": {"kind": "dropout", "micro_batch_size": 4, "double": False, "precision": "bf16"},
    "sharded bf16": {
        "kind": "dropout",
        "micro_batch_size": 4,
        "double": False,
        "precision": "bf16",
        "strategy": "fsdp",
    },
}


@pytest.fixture(scope="module")
def on_two_ranks(ranks: Ranks) -> dict[str, list[Any]]:
    return dict(
        zip(CASES, ranks.each(2, coupled_runs.trained_with, list(CASES.values())), strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_process_computes(
    name: str, on_two_ranks: dict[str, list[Any]]
) -> None:
    alone = trained_with(
        **{
            key: value
            for key, value in CASES[name].items()
            if key not in ("strategy", "find_unused_parameters")
        }
    )
    limit = 1e-13 if CASES[name].get("double", True) else 1e-6  # of float32's weights
    for together in on_two_ranks[name]:
        assert largest(together["weights"], alone["weights"]) < limit
        for own, other in zip(together["steps"], alone["steps"], strict=True):
            assert own == pytest.approx(other, rel=10 * limit)
        assert together["scores"] == pytest.approx(alone["scores"], rel=10 * limit)


@pytest.mark.parametrize("batch_size", [1, 7, 24, 40])
def test_a_split_s_loss_is_the_mean_over_groups_of_the_batch_size(batch_size: int) -> None:
    views = tuple(each[:40] for each in data())
    run = build(
        "simclr",
        splits={"val": sf.Split(views, metrics=coupled_runs.retrieval, batch_size=batch_size)},
    )
    with torch.no_grad():
        first, second = coupled_runs.two_views(run.state.model.eval(), views)
        groups = [
            float(nt_xent(first[group], second[group])) * count
            for group, count in ((slice(24), 24), (slice(24, 40), 16))
        ]
    scores = run.evaluate()
    assert scores["val/loss"] == pytest.approx(sum(groups) / 40, rel=1e-13)
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
    assert largest(run_in("killed", is_killed=False), whole) == 0.0
    losses = [
        {
            each["step"]: each["loss"]
            for each in records(tmp_path / name / "metrics.jsonl")
            if each["kind"] == "train"
        }
        for name in ("whole", "killed")
    ]
    assert losses[0] == losses[1]
    rebuilt = build("norm", micro_batch_size=8, run_dir=tmp_path / "whole", length="6 steps")
    logged = sf.load(rebuilt).replay(step=3).logged
    assert logged is not None
    assert logged.equal


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_of_such_a_loss_killed_in_a_step_end_with_the_same_bits(
    strategy: str, ranks: Ranks, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"kind": "dropout", "micro_batch_size": 4, "parallel": strategy}
    whole = ranks(
        2, coupled_runs.session, run_dir=str(tmp_path / "whole"), is_killed=False, **settings
    )
    settings["run_dir"] = str(tmp_path / "killed")
    killed = ranks.outcomes(ranks.start(2, coupled_runs.session, is_killed=True, **settings))
    assert {outcome.status for outcome in killed} == {-signal.SIGKILL}
    assert (tmp_path / "killed" / "checkpoints" / "step-00000002").exists()
    for own, other in zip(
        ranks(2, coupled_runs.session, is_killed=False, **settings), whole, strict=True
    ):
        assert largest(own, other) == 0.0


def test_a_resume_with_another_function_in_the_loss_is_refused(tmp_path: Path) -> None:
    def other(model: Any, features: Any) -> Tensor:
        return nt_xent(*features, temperature=0.4)

    build("simclr", run_dir=tmp_path, stop_after="1 steps").train()
    changed = build(
        "simclr", run_dir=tmp_path, loss=sf.losses.whole_batch(coupled_runs.two_views, other)
    )
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
    with refused("coupled-loss-outside-run"):
        sf.evaluate(nn.Identity(), split, loss=build("clip").loss)
