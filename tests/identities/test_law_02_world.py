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

from identities import strategy_runs, world_runs
from identities.world_runs import largest_difference, values_of_steps
from rank_processes import Ranks

SPLITS = [
    pytest.param(4, 4, marks=pytest.mark.slow),
    (2, 4),
    (2, 8),
]  # ranks, and the micro-batch size of 16 samples: accumulation 2, 1 and 1
SPLIT_SIZES = (1, 3, 24, 37)  # samples of an evaluated split
CORNERS = (
    "channels last",
    "two models",
    "two passes",
    "no targets on a rank",
    "seldom used",
    "whole batch",
    "integers",
)
SHARDED_CORNERS = CORNERS[1:6]
ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"order": "sequential", "batch_size": 24},
    "lanes": {"order": "lanes", "batch_size": 24},  # the fifth step has 5 samples, for rank 0
    "weighted": {
        "order": [0.1 + sample % 5 for sample in range(world_runs.SAMPLES)],
        "batch_size": 24,
    },
    "listed": {"listed": True},
}

# Runs by name: a function of world_runs, and its arguments.
CASES: dict[str, dict[str, Any]] = {
    "muon": {"function": "trained", "optimizer": "muon", "steps": 4, "double": False},
    "bf16": {"function": "trained", "precision": "bf16", "steps": 4, "double": False},
    "thirds": {
        "function": "trained",
        "batch_size": 24,
        "micro_batch_size": 2,
        "steps": 4,
        "double": False,
    },
    "word_lm": {"function": "of_word_lm"},
    "bad": {"function": "trained", "bad": 97, "steps": 4},  # a sample of rank 1
    "gradients": {"function": "first_gradients"},
    "few targets": {"function": "with_few_targets", "counts_itself": False},
    "few targets, counted": {"function": "with_few_targets", "counts_itself": True},
    "tokens": {"function": "by_tokens"},
    "logged": {"function": "logged"},
    "gpt": {"function": "of_recipe", "recipe": "gpt"},
    "translation": {"function": "of_recipe", "recipe": "translation"},
    "images": {"function": "of_recipe", "recipe": "images"},
    "sam": {"function": "of_example", "name": "sam"},
    "gan": {"function": "of_example", "name": "gan"},
    "sometimes": {
        "function": "of_two_models_with",
        "sometimes": True,
        "strategy": {"find_unused_parameters": True},
    },
    "every": {"function": "of_two_models_with", "sometimes": False, "strategy": {"sync": "every"}},
}
for optimizer in ("adamw", "sgd"):
    for micro_batch_size in (4, 8):
        CASES[f"{optimizer}-{micro_batch_size}"] = {
            "function": "trained",
            "optimizer": optimizer,
            "micro_batch_size": micro_batch_size,
            "steps": 8,
            "evaluate_every": "4 steps",
            "double": False,
        }
for order, settings in ORDERS.items():
    CASES[f"order {order}"] = {
        "function": "trained",
        "steps": 6,
        "ema": None,
        "micro_batch_size": 6,
        **settings,
    }
for corner in CORNERS:
    CASES[corner] = {"function": "of_corner", "name": corner}
for corner in SHARDED_CORNERS:
    CASES[f"sharded {corner}"] = {"function": "of_corner", "name": corner, "sharded": True}
for sample_count in SPLIT_SIZES:
    CASES[f"scored-{sample_count}"] = {"function": "scored", "samples": sample_count}

SLOW = {"adamw-8", "sgd-4", "sgd-8", "translation", "images"}
ResultsOf = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def results_of(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> ResultsOf:
    """The results of all ranks of a case; fast cases of one number of ranks share processes."""
    texts = str(tmp_path_factory.mktemp("texts"))
    fast_names = [name for name in CASES if name not in SLOW]

    def run_cases(size: int, names: list[str]) -> dict[str, list[Any]]:
        cases = []
        for name in names:
            case = CASES[name]
            if case["function"] == "of_recipe":
                case = {**case, "texts": texts}
            cases.append(case)
        results = ranks.each(size, world_runs.called, cases)
        return dict(zip(names, results, strict=True))

    @cache
    def run_fast_cases(size: int) -> dict[str, list[Any]]:
        return run_cases(size, fast_names)

    def run_case(size: int, name: str) -> list[Any]:
        if name in fast_names and size <= 2:
            return run_fast_cases(size)[name]
        return run_cases(size, [name])[name]

    return run_case


def assert_same_run(together: dict[str, Any], alone: dict[str, Any]) -> None:
    """Samples, masks, losses and weights, to the bit."""
    for name in ("samples", "mask", "loss", "grad_norm", "skipped", "scores"):
        # as text, in which NaN is equal to NaN
        assert str(values_of_steps(together, name)) == str(values_of_steps(alone, name))
    assert largest_difference(together["weights"], alone["weights"]) == 0
    assert together["scores"] == alone["scores"]


@pytest.mark.fast("adamw-2-4")
@pytest.mark.parametrize(("size", "micro_batch_size"), SPLITS)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_run_has_the_same_bits_on_any_number_of_ranks(
    results_of: ResultsOf, size: int, micro_batch_size: int, optimizer: str
) -> None:
    """With dropout, augmentation, batch statistics, clipping, an average of weights, and scores."""
    name = f"{optimizer}-{micro_batch_size}"
    (alone,) = results_of(1, name)
    for together in results_of(size, name):
        assert_same_run(together, alone)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("muon", 2),
        ("bf16", 2),
        ("thirds", 2),
        pytest.param("thirds", 3, marks=pytest.mark.slow),
        pytest.param("thirds", 8, marks=pytest.mark.slow),
        pytest.param("adamw-4", 3, marks=pytest.mark.slow),
    ],
)
def test_bits_are_the_same_with_other_optimizers_precisions_and_numbers_of_micro_batches(
    results_of: ResultsOf, name: str, size: int
) -> None:
    """12 micro-batches on 3 ranks: no rank's share is one subtree. On 8 ranks, and 4 micro-batches
    on 3, shares are unequal.
    """
    (alone,) = results_of(1, name)
    for together in results_of(size, name):
        assert_same_run(together, alone)


@pytest.mark.parametrize("name", [*CORNERS, *(f"sharded {corner}" for corner in SHARDED_CORNERS)])
def test_bits_are_the_same_whatever_the_layout_of_gradients_and_the_passes_that_have_them(
    results_of: ResultsOf, name: str
) -> None:
    (alone,) = results_of(1, name)
    for together in results_of(2, name):
        assert largest_difference(together, alone) == 0


@pytest.mark.parametrize("corner", SHARDED_CORNERS)
def test_a_sharded_run_is_the_plain_run_up_to_rounding(results_of: ResultsOf, corner: str) -> None:
    (plain,) = results_of(1, corner)
    (sharded,) = results_of(1, f"sharded {corner}")
    assert largest_difference(sharded, plain) < 1e-5


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
    return {name: results[0] for name, results in run_sharded_cases(ranks, 1).items()}


def run_sharded_cases(ranks: Ranks, size: int, **sharding: Any) -> dict[str, list[Any]]:
    """The results of all ranks in each case of `SHARDED`."""
    cases = []
    for case in SHARDED.values():
        case_sharding = case.get("sharding", {})
        cases.append({**case, "sharding": {**case_sharding, **sharding}})
    results = ranks.each(size, strategy_runs.trained, cases, steps=4, double=False)
    return dict(zip(SHARDED, results, strict=True))


@pytest.mark.parametrize(
    ("size", "sharding"),
    [
        (2, {}),
        pytest.param(2, {"replicas": 2}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(3, {"replicas": 3}, marks=pytest.mark.slow),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(4, {"replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_sharded_bits_are_the_same_on_any_number_of_ranks(
    ranks: Ranks, sharded_alone: dict[str, Any], size: int, sharding: dict[str, int]
) -> None:
    """Also if the ranks do not divide the micro-batches, or are divided into replicas."""
    for name, results in run_sharded_cases(ranks, size, **sharding).items():
        print(name)  # shown if bits differ
        for together in results:
            assert_same_run(together, sharded_alone[name])


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
    changes_alone = changes
    if "sharding" in changes:
        changes_alone = {"sharding": {}}  # one GPU has no replicas

    (alone,) = ranks(1, strategy_runs.trained, **ON_GPU, **changes_alone)
    for together in ranks(2, strategy_runs.trained, **ON_GPU, **changes):
        assert_same_run(together, alone)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_sharded_run_on_one_gpu_has_the_same_bits_twice_and_those_of_a_plain_run_up_to_rounding(
    ranks: Ranks,
) -> None:
    """A read of a sum in the wrong stream would show."""
    (plain,) = ranks(1, strategy_runs.trained, **ON_GPU)
    (first,) = ranks(1, strategy_runs.trained, **ON_GPU, sharding={})
    (again,) = ranks(1, strategy_runs.trained, **ON_GPU, sharding={})

    assert_same_run(first, again)
    assert largest_difference(first["weights"], plain["weights"]) < 1e-4


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_gradients_have_the_same_bits(results_of: ResultsOf, size: int) -> None:
    (alone,) = results_of(1, "gradients")
    for together in results_of(size, "gradients"):
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.slow
def test_without_exact_sums_losses_are_equal_to_1e_4_and_weights_under_sgd_to_1e_5(
    ranks: Ranks,
) -> None:
    settings = {"optimizer": "sgd", "double": False, "ema": None, "exact_sums": False}

    (alone,) = ranks(1, world_runs.trained, **settings)
    for together in ranks(2, world_runs.trained, **settings):
        assert values_of_steps(together, "samples") == values_of_steps(alone, "samples")
        assert values_of_steps(together, "loss") == pytest.approx(
            values_of_steps(alone, "loss"), abs=1e-4
        )
        assert 0 < largest_difference(together["weights"], alone["weights"]) < 1e-5


@pytest.mark.slow
def test_workers_and_when_gradients_are_added_up_change_nothing(ranks: Ranks) -> None:
    (alone,) = ranks(1, world_runs.trained)
    with_workers, sync_every = ranks.each(
        2, world_runs.trained_with, [{"workers": 2}, {"strategy": "every"}]
    )

    for together in with_workers:
        assert values_of_steps(together, "samples") == values_of_steps(alone, "samples")
        assert largest_difference(together["weights"], alone["weights"]) == 0
    for together in sync_every:
        assert values_of_steps(together, "samples") == values_of_steps(alone, "samples")
        # gradients added after each micro-batch are added in another order
        assert largest_difference(together["weights"], alone["weights"]) <= 1e-9


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_by_none(
    results_of: ResultsOf,
) -> None:
    (alone,) = results_of(1, "bad")
    skipped = values_of_steps(alone, "skipped")
    assert 0 < sum(skipped) < len(skipped)

    for together in results_of(2, "bad"):
        assert values_of_steps(together, "skipped") == skipped
        assert largest_difference(together["weights"], alone["weights"]) == 0
        for weight in together["weights"].values():
            assert torch.isfinite(weight).all()


@pytest.mark.parametrize("counts_itself", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_with_nothing_to_count_changes_nothing(
    results_of: ResultsOf, size: int, counts_itself: bool
) -> None:
    """Whether `count=` tells the targets, or the loss returns a `Mean` over them."""
    name = "few targets, counted" if counts_itself else "few targets"
    (alone,) = results_of(1, name)
    for together in results_of(size, name):
        assert together["counts"] == alone["counts"]
        assert together["losses"] == alone["losses"]
        assert largest_difference(together["weights"], alone["weights"]) == 0


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_by_tokens_are_the_same_though_some_micro_batches_are_empty(
    results_of: ResultsOf, size: int
) -> None:
    (alone,) = results_of(1, "tokens")
    assert 0 in alone["rows"]
    for together in results_of(size, "tokens"):
        assert together["losses"] == alone["losses"]
        assert largest_difference(together["weights"], alone["weights"]) == 0


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_scores_are_those_of_one_process_for_any_number_of_samples(
    results_of: ResultsOf, size: int
) -> None:
    for sample_count in SPLIT_SIZES:
        name = f"scored-{sample_count}"
        (alone,) = results_of(1, name)
        for together in results_of(size, name):
            assert together == pytest.approx(alone, abs=1e-6)


def test_what_the_user_logs_is_averaged_over_all_ranks(results_of: ResultsOf) -> None:
    """Rank 0 logs the step, rank 1 the step plus one."""
    on_rank_0, _ = results_of(2, "logged")
    assert on_rank_0 == pytest.approx([0.5, 1.5, 2.5, 3.5])


@pytest.mark.parametrize(
    "recipe",
    [
        "gpt",
        pytest.param("translation", marks=pytest.mark.slow),
        pytest.param("images", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_is_the_same_run_on_two_ranks(results_of: ResultsOf, recipe: str) -> None:
    (alone,) = results_of(1, recipe)
    for together in results_of(2, recipe):
        assert together["samples"] == alone["samples"]
        assert together["losses"] == alone["losses"]
        assert together["scores"] == alone["scores"]


@pytest.mark.parametrize("name", ["sam", "gan"])
def test_a_loop_of_ones_own_is_the_same_on_two_ranks(results_of: ResultsOf, name: str) -> None:
    (alone,) = results_of(1, name)
    for together in results_of(2, name):
        assert largest_difference(together, alone) == 0


def samples_of_steps(result: dict[str, Any]) -> list[list[list[int]]]:
    """The samples of each micro-batch that has any."""
    return [
        [sample_ids for _, sample_ids in step if sample_ids]
        for step in values_of_steps(result, "samples")
    ]


@pytest.mark.parametrize("order", list(ORDERS))
def test_every_order_is_the_same_on_two_ranks(results_of: ResultsOf, order: str) -> None:
    (alone,) = results_of(1, f"order {order}")
    for together in results_of(2, f"order {order}"):
        assert samples_of_steps(together) == samples_of_steps(alone)
        assert values_of_steps(together, "mask") == values_of_steps(alone, "mask")
        assert values_of_steps(together, "loss") == values_of_steps(alone, "loss")
        assert largest_difference(together["weights"], alone["weights"]) == 0


def test_a_state_carried_in_lanes_is_the_same_on_two_ranks(results_of: ResultsOf) -> None:
    (alone,) = results_of(1, "word_lm")
    for together in results_of(2, "word_lm"):
        assert largest_difference(together, alone) == 0


def test_of_several_models_one_may_be_used_on_some_ranks_only_where_that_is_allowed(
    results_of: ResultsOf,
) -> None:
    (alone,) = results_of(1, "sometimes")
    for together in results_of(2, "sometimes"):
        assert largest_difference(together, alone) == 0


def test_gradients_of_several_models_are_added_up_once_a_step(results_of: ResultsOf) -> None:
    assert results_of(2, "every") == ["sync-every-with-several-models"] * 2


@pytest.mark.slow
def test_a_run_saved_on_two_ranks_goes_on_with_four_and_with_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    (alone,) = ranks(1, world_runs.trained)

    run_dir = str(tmp_path / "run")
    ranks(2, world_runs.trained, run_dir=run_dir, stop_after="6 steps")
    ranks(4, world_runs.trained, run_dir=run_dir, stop_after="13 steps")
    (last,) = ranks(1, world_runs.trained, run_dir=run_dir)

    assert values_of_steps(last, "samples") == values_of_steps(alone, "samples")[13:]
    assert largest_difference(last["weights"], alone["weights"]) == 0


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_stopped_and_gone_on_with_is_bit_equal_on_as_many_ranks(
    ranks: Ranks, tmp_path: Path, size: int
) -> None:
    settings: dict[str, Any] = {"double": False, "steps": 6}
    whole_dir = str(tmp_path / "whole")
    stopped_dir = str(tmp_path / "stopped")
    cases = [{"run_dir": whole_dir}, {"run_dir": stopped_dir, "stop_after": "4 steps"}]

    whole_results, _ = ranks.each(size, world_runs.trained, cases, **settings)
    resumed_results = ranks(size, world_runs.trained, **settings, run_dir=stopped_dir)

    for whole, resumed in zip(whole_results, resumed_results, strict=True):
        assert resumed["steps"] == whole["steps"][4:]
        assert largest_difference(resumed["weights"], whole["weights"]) == 0
