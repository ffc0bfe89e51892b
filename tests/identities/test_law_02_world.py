"""Law 2: the same samples, masks and bits on any number of ranks, at one micro-batch size.
(50 s)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from identities import strategy_runs, world_runs
from rank_processes import Ranks

SPLITS = [
    pytest.param(4, 4, marks=pytest.mark.slow),
    (2, 4),
    (2, 8),
]  # ranks, and the micro-batch size of 16 samples: accumulation 2, 1 and 1


def largest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between any two numbers."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def of_steps(found: dict[str, Any], name: str) -> list[Any]:
    return [step[name] for step in found["steps"]]


CORNERS = (
    "channels last",
    "two models",
    "two passes",
    "no targets on a rank",
    "seldom used",
    "whole batch",
    "integers",
)
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{optimizer}-{micro_batch_size}": {
            "function": "trained",
            "optimizer": optimizer,
            "micro_batch_size": micro_batch_size,
            "steps": 8,
            "evaluate_every": "4 steps",
            "double": False,
        }
        for optimizer in ("adamw", "sgd")
        for micro_batch_size in (4, 8)
    },
    "muon": {"function": "trained", "optimizer": "muon", "steps": 4, "double": False},
    "bf16": {"function": "trained", "precision": "bf16", "steps": 4, "double": False},
    "thirds": {
        "function": "trained",
        "batch_size": 24,
        "micro_batch_size": 2,
        "steps": 4,
        "double": False,
    },
    **{
        f"order {name}": {
            "function": "trained",
            "steps": 6,
            "ema": None,
            "micro_batch_size": 6,
            **changes,
        }
        for name, changes in {
            "sequential": {"order": "sequential", "batch_size": 24},
            "lanes": {
                "order": "lanes",
                "batch_size": 24,
            },  # the fifth step has five samples, for rank 0
            "weighted": {
                "order": [0.1 + sample % 5 for sample in range(world_runs.SAMPLES)],
                "batch_size": 24,
            },
            "listed": {"listed": True},
        }.items()
    },
    "word_lm": {"function": "of_word_lm"},
    "bad": {"function": "trained", "bad": 97, "steps": 4},  # a sample of rank 1
    **{name: {"function": "of_corner", "name": name} for name in CORNERS},
    **{
        f"sharded {name}": {"function": "of_corner", "name": name, "sharded": True}
        for name in CORNERS[1:6]
    },
    "gradients": {"function": "first_gradients"},
    "few targets": {"function": "with_few_targets", "counts_itself": False},
    "few targets, counted": {"function": "with_few_targets", "counts_itself": True},
    "tokens": {"function": "by_tokens"},
    "logged": {"function": "logged"},
    "gpt": {"function": "of_recipe", "recipe": "gpt"},
    "translation": {"function": "of_recipe", "recipe": "translation"},
    "images": {"function": "of_recipe", "recipe": "images"},
    **{
        f"scored-{samples}": {"function": "scored", "samples": samples}
        for samples in (1, 3, 24, 37)
    },
    "sam": {"function": "of_example", "name": "sam"},
    "gan": {"function": "of_example", "name": "gan"},
    "sometimes": {
        "function": "of_two_models_with",
        "sometimes": True,
        "strategy": {"find_unused_parameters": True},
    },
    "every": {"function": "of_two_models_with", "sometimes": False, "strategy": {"sync": "every"}},
}
SLOW = {"adamw-8", "sgd-4", "sgd-8", "translation", "images"}
CameTo = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def came_to(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> CameTo:
    """What each of so many ranks comes to in a case; the fast ones follow each other in the same
    one or two processes.
    """
    texts = {"texts": str(tmp_path_factory.mktemp("texts"))}
    cases = {
        name: case | (texts if case["function"] == "of_recipe" else {})
        for name, case in CASES.items()
    }
    fast = [name for name in cases if name not in SLOW]

    @cache
    def of_all(size: int) -> dict[str, list[Any]]:
        return of_these(size, fast)

    def of_these(size: int, names: list[str]) -> dict[str, list[Any]]:
        found = ranks.each(size, world_runs.called, [cases[name] for name in names])
        return dict(zip(names, found, strict=True))

    def of(size: int, name: str) -> list[Any]:
        return (of_all(size) if name in fast and size < 3 else of_these(size, [name]))[name]

    return of


@pytest.mark.fast("adamw-2-4")
@pytest.mark.parametrize(("size", "micro_batch_size"), SPLITS)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_run_has_the_same_bits_on_any_number_of_ranks(
    came_to: CameTo, size: int, micro_batch_size: int, optimizer: str
) -> None:
    """With dropout, augmentation, batch statistics, clipping, an average of weights, and scores."""
    assert_same_bits(came_to, f"{optimizer}-{micro_batch_size}", size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("muon", 2),
        ("bf16", 2),
        ("thirds", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("thirds", 3), ("thirds", 8), ("adamw-4", 3))
        ),
    ],
)
def test_bits_are_the_same_with_other_optimizers_precisions_and_numbers_of_micro_batches(
    came_to: CameTo, name: str, size: int
) -> None:
    """12 micro-batches on 3 ranks: no rank's share is one subtree. On 8 ranks, and 4 micro-batches
    on 3, shares are unequal.
    """
    assert_same_bits(came_to, name, size)


@pytest.mark.parametrize("name", [*CORNERS, *(f"sharded {name}" for name in CORNERS[1:6])])
def test_bits_are_the_same_whatever_the_layout_of_gradients_and_the_passes_that_have_them(
    came_to: CameTo, name: str
) -> None:
    (alone,) = came_to(1, name)
    for together in came_to(2, name):
        assert largest(together, alone) == 0
    if name.startswith("sharded"):
        (unsharded,) = came_to(1, name.removeprefix("sharded "))
        assert largest(alone, unsharded) < 1e-5


SHARDED: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd, 8 micro-batches": {"optimizer": "sgd", "micro_batch_size": 2},
    "muon, blocks": {
        "optimizer": "muon",
        "sharding": {"blocks": ["blocks", "kernel"], "find_unused_parameters": True},
        "rounds": 2,  # torch reduces the gradients of a block twice in a pass
    },
    "schedule-free, bf16": {"optimizer": "schedule_free", "precision": "bf16"},
    "lanes": {
        "order": "lanes",
        "batch_size": 24,
        "micro_batch_size": 6,
        "steps": 6,
    },  # with empty micro-batches
    "a bad sample": {"bad": 97, "sharding": {"cpu_offload": True, "reshard_after_forward": False}},
}


@pytest.fixture(scope="module")
def sharded_alone(ranks: Ranks) -> dict[str, Any]:
    return of_sharded(ranks, 1)[0]


def of_sharded(ranks: Ranks, size: int, **sharding: Any) -> list[dict[str, Any]]:
    """What each rank comes to in each case of `SHARDED`."""
    cases = [{**case, "sharding": case.get("sharding", {}) | sharding} for case in SHARDED.values()]
    found = ranks.each(size, strategy_runs.trained, cases, steps=4, double=False)
    return [dict(zip(SHARDED, each, strict=True)) for each in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("size", "replicas"),
    [
        (2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 2), (3, 1), (3, 3), (4, 1), (4, 2))
        ),
    ],
)
def test_sharded_bits_are_the_same_on_any_number_of_ranks(
    ranks: Ranks, sharded_alone: dict[str, Any], size: int, replicas: int
) -> None:
    """Also if the ranks do not divide the micro-batches, or are divided into replicas."""
    for found in of_sharded(ranks, size, **({"replicas": replicas} if replicas > 1 else {})):
        for name, together in found.items():
            print(name)  # shown if bits differ
            assert_equal_bits(together, sharded_alone[name])


ON_GPU: dict[str, Any] = {"device": "cuda", "deterministic": True, "steps": 4, "double": False}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_size": 2, "precision": "bf16"},
        {"sharding": {}},
        {"sharding": {"replicas": 2}},
    ],
)
def test_a_run_has_the_same_bits_on_one_and_two_gpus(ranks: Ranks, changes: dict[str, Any]) -> None:
    alone = changes | ({"sharding": {}} if "sharding" in changes else {})
    (one,) = ranks(1, strategy_runs.trained, **ON_GPU, **alone)
    for together in ranks(2, strategy_runs.trained, **ON_GPU, **changes):
        assert_equal_bits(together, one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sharded_run_on_one_gpu_has_the_same_bits_twice_and_those_of_a_plain_run_up_to_rounding(
    ranks: Ranks,
) -> None:
    """A read of a sum in the wrong stream would show."""
    (plain,) = ranks(1, strategy_runs.trained, **ON_GPU)
    first, again = (ranks(1, strategy_runs.trained, **ON_GPU, sharding={})[0] for _ in range(2))
    assert_equal_bits(first, again)
    assert largest(first["weights"], plain["weights"]) < 1e-4


def assert_same_bits(came_to: CameTo, name: str, size: int) -> None:
    (alone,) = came_to(1, name)
    for together in came_to(size, name):
        assert_equal_bits(together, alone)


def assert_equal_bits(together: dict[str, Any], alone: dict[str, Any]) -> None:
    for number in ("samples", "mask", "loss", "grad_norm", "skipped", "scores"):
        assert str(of_steps(together, number)) == str(
            of_steps(alone, number)
        )  # NaN is equal to NaN
    assert largest(together["weights"], alone["weights"]) == 0
    assert together["scores"] == alone["scores"]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_gradients_have_the_same_bits(came_to: CameTo, size: int) -> None:
    (alone,) = came_to(1, "gradients")
    for together in came_to(size, "gradients"):
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.slow
def test_without_exact_sums_losses_are_equal_to_1e_4_and_weights_under_sgd_to_1e_5(
    ranks: Ranks,
) -> None:
    settings = {"optimizer": "sgd", "double": False, "ema": None, "exact_sums": False}
    (alone,) = ranks(1, world_runs.trained, **settings)
    for together in ranks(2, world_runs.trained, **settings):
        assert of_steps(together, "samples") == of_steps(alone, "samples")
        assert of_steps(together, "loss") == pytest.approx(of_steps(alone, "loss"), abs=1e-4)
        assert 0 < largest(together["weights"], alone["weights"]) < 1e-5


@pytest.mark.slow
def test_workers_and_when_gradients_are_added_up_change_nothing(ranks: Ranks) -> None:
    (alone,) = ranks(1, world_runs.trained)
    workers, every = ranks.each(2, world_runs.trained_with, [{"workers": 2}, {"strategy": "every"}])
    for found, bound in (
        (workers, 0),
        (every, 1e-9),
    ):  # gradients added after each micro-batch are added in another order
        for together in found:
            assert of_steps(together, "samples") == of_steps(alone, "samples")
            assert largest(together["weights"], alone["weights"]) <= bound


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_by_none(came_to: CameTo) -> None:
    (alone,) = came_to(1, "bad")
    skipped = of_steps(alone, "skipped")
    assert 0 < sum(skipped) < len(skipped)
    for together in came_to(2, "bad"):
        assert of_steps(together, "skipped") == skipped
        assert largest(together["weights"], alone["weights"]) == 0
        assert all(torch.isfinite(held).all() for held in together["weights"].values())


@pytest.mark.parametrize("counts_itself", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_with_nothing_to_count_changes_nothing(
    came_to: CameTo, size: int, counts_itself: bool
) -> None:
    """Whether `count=` tells the targets, or the loss returns a `Mean` over them."""
    name = "few targets, counted" if counts_itself else "few targets"
    (alone,) = came_to(1, name)
    for together in came_to(size, name):
        assert together["counts"] == alone["counts"]
        assert together["losses"] == alone["losses"]
        assert largest(together["weights"], alone["weights"]) == 0


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_by_tokens_are_the_same_though_some_micro_batches_are_empty(
    came_to: CameTo, size: int
) -> None:
    (alone,) = came_to(1, "tokens")
    assert 0 in alone["rows"]
    for together in came_to(size, "tokens"):
        assert together["losses"] == alone["losses"]
        assert largest(together["weights"], alone["weights"]) == 0


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scores_are_those_of_one_process_for_any_number_of_samples(
    came_to: CameTo, size: int
) -> None:
    for samples in (1, 3, 24, 37):
        (alone,) = came_to(1, f"scored-{samples}")
        assert came_to(size, f"scored-{samples}") == [pytest.approx(alone, abs=1e-6)] * size


def test_what_the_user_logs_is_averaged_over_all_ranks(came_to: CameTo) -> None:
    assert came_to(2, "logged")[0] == pytest.approx([0.5 + step for step in range(4)])


@pytest.mark.parametrize(
    "recipe",
    ["gpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("translation", "images"))],
)
def test_a_recipe_is_the_same_run_on_two_ranks(came_to: CameTo, recipe: str) -> None:
    (alone,) = came_to(1, recipe)
    for together in came_to(2, recipe):
        assert together["samples"] == alone["samples"]
        assert together["losses"] == alone["losses"]
        assert together["scores"] == alone["scores"]


def test_loops_of_ones_own_are_the_same_on_two_ranks(came_to: CameTo) -> None:
    for name in ("sam", "gan"):
        (alone,) = came_to(1, name)
        assert max(largest(together, alone) for together in came_to(2, name)) == 0


@pytest.mark.parametrize("order", ["sequential", "lanes", "weighted", "listed"])
def test_every_order_is_the_same_on_two_ranks(came_to: CameTo, order: str) -> None:
    (alone,) = came_to(1, f"order {order}")
    for together in came_to(2, f"order {order}"):
        assert [[ids for _, ids in step if ids] for step in of_steps(together, "samples")] == [
            [ids for _, ids in step if ids] for step in of_steps(alone, "samples")
        ]
        assert of_steps(together, "mask") == of_steps(alone, "mask")
        assert of_steps(together, "loss") == of_steps(alone, "loss")
        assert largest(together["weights"], alone["weights"]) == 0


def test_a_state_carried_in_lanes_is_the_same_on_two_ranks(came_to: CameTo) -> None:
    (alone,) = came_to(1, "word_lm")
    for together in came_to(2, "word_lm"):
        assert largest(together, alone) == 0


def test_of_several_models_one_may_be_used_on_some_ranks_only_where_that_is_allowed(
    came_to: CameTo,
) -> None:
    (alone,) = came_to(1, "sometimes")
    for together in came_to(2, "sometimes"):
        assert largest(together, alone) == 0


def test_gradients_of_several_models_are_added_up_once_a_step(came_to: CameTo) -> None:
    for said in came_to(2, "every"):
        assert said.endswith("[sync-every-with-several-models]")


@pytest.mark.slow
def test_a_run_saved_on_two_ranks_goes_on_with_four_and_with_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    (alone,) = ranks(1, world_runs.trained)
    run_dir = str(tmp_path / "run")
    ranks(2, world_runs.trained, run_dir=run_dir, stop_after="6 steps")
    ranks(4, world_runs.trained, run_dir=run_dir, stop_after="13 steps")
    (last,) = ranks(1, world_runs.trained, run_dir=run_dir)
    assert of_steps(last, "samples") == of_steps(alone, "samples")[13:]
    assert largest(last["weights"], alone["weights"]) == 0


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_stopped_and_gone_on_with_is_bit_equal_on_as_many_ranks(
    ranks: Ranks, tmp_path: Path, size: int
) -> None:
    settings: dict[str, Any] = {"double": False, "steps": 6}
    cases = [
        {"run_dir": str(tmp_path / "whole")},
        {"run_dir": str(tmp_path / "cut"), "stop_after": "4 steps"},
    ]
    whole, _ = ranks.each(size, world_runs.trained, cases, **settings)
    for rank, resumed in enumerate(
        ranks(size, world_runs.trained, **settings, run_dir=str(tmp_path / "cut"))
    ):
        assert largest(resumed["weights"], whole[rank]["weights"]) == 0
        assert resumed["steps"] == whole[rank]["steps"][4:]
