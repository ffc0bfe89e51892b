"""Law 3: one process = DDP = FSDP2, whatever the optimizer, the limit of gradients, and how the
model is spread. (90 s)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities import strategy_runs, world_runs
from identities.world_runs import largest_difference, values_of_steps
from rank_processes import Ranks

STEPS = 4


def assert_same_run(together: dict[str, Any], alone: dict[str, Any]) -> None:
    for name in ("samples", "mask", "skipped"):
        assert values_of_steps(together, name) == values_of_steps(alone, name)
    for name in ("loss", "grad_norm"):
        assert values_of_steps(together, name) == pytest.approx(
            values_of_steps(alone, name), abs=1e-9, nan_ok=True
        )
    assert largest_difference(together["weights"], alone["weights"]) < 1e-9
    assert together["scores"] == pytest.approx(alone["scores"], abs=1e-6)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Any]:
    (result,) = ranks(1, strategy_runs.trained, steps=STEPS)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_in_float64_twenty_sharded_steps_are_those_of_one_process(ranks: Ranks, size: int) -> None:
    (alone,) = ranks(1, strategy_runs.trained)
    for together in ranks(size, strategy_runs.trained, sharding={}):
        assert_same_run(together, alone)


ON_TWO: list[dict[str, Any]] = [
    {"sharding": {}},
    {"sharding": {"reshard_after_forward": False, "sync": "last", "cpu_offload": True}},
]
OTHERS_ON_TWO: list[dict[str, Any]] = [
    {"sharding": {"replicas": 2}},
    {"sharding": {"blocks": ["blocks", "kernel"], "find_unused_parameters": True}},
    {"parallel": "ddp"},
]


@pytest.mark.fast("two")
@pytest.mark.parametrize(
    ("size", "strategies"),
    [
        pytest.param(1, [{"sharding": {}}], id="one"),
        pytest.param(2, ON_TWO, id="two"),
        pytest.param(2, OTHERS_ON_TWO, id="two-others"),
        pytest.param(4, [{"sharding": {"replicas": 2, "sync": "last"}}], id="four"),
    ],
)
def test_however_a_model_is_spread_it_makes_the_same_run(
    ranks: Ranks, alone: dict[str, Any], size: int, strategies: list[dict[str, Any]]
) -> None:
    results = ranks.each(size, strategy_runs.trained, strategies, steps=STEPS)
    for strategy, of_ranks in zip(strategies, results, strict=True):
        print(strategy)  # shown if the run is another one
        for together in of_ranks:
            assert_same_run(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", pytest.param("selective", marks=pytest.mark.slow)])
def test_sharded_blocks_that_are_computed_again_make_the_same_run(
    ranks: Ranks, alone: dict[str, Any], how: str
) -> None:
    for together in ranks(
        2, strategy_runs.trained, sharding={}, steps=STEPS, activation_checkpointing=how
    ):
        assert_same_run(together, alone)


@pytest.mark.slow
def test_compiled_it_is_the_same_run_under_every_strategy_and_draws_the_same_masks(
    ranks: Ranks, alone: dict[str, Any]
) -> None:
    for size, parallel in ((1, "none"), (2, "ddp"), (2, "fsdp")):
        for together in ranks(
            size, strategy_runs.trained, parallel=parallel, steps=STEPS, compile=True
        ):
            assert_same_run(together, alone)


@pytest.mark.parametrize(
    ("parallel", "really", "is_compiled"),
    [
        ("ddp", False, True),
        pytest.param("ddp", True, True, marks=pytest.mark.slow),
        pytest.param("fsdp", True, False, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_compile_where_the_main_one_chose_to_and_make_the_same_run(
    ranks: Ranks, alone: dict[str, Any], parallel: str, really: bool, is_compiled: bool
) -> None:
    """Where it is not `really` compiled, another module is called in the model's place."""
    for together in ranks(
        2, strategy_runs.trained_as_chosen, really=really, parallel=parallel, steps=STEPS
    ):
        assert together["compiled"] is is_compiled
        assert (together["called"] >= STEPS) is not really
        assert_same_run(together, alone)


@pytest.mark.fast("2-two")
@pytest.mark.parametrize(
    "names", [["schedule_free", "muon"], [*strategy_runs.OPTIMIZERS]], ids=["two", "all"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_every_optimizer_makes_the_same_steps_on_shards_and_none_where_one_rank_is_bad(
    ranks: Ranks, size: int, names: list[str]
) -> None:
    (alone,) = ranks(1, strategy_runs.of_each_optimizer, names=names)
    for together in ranks(size, strategy_runs.of_each_optimizer, names=names, sharding={}):
        assert together.keys() == {*names}
        for name, result in together.items():
            assert 0 < sum(values_of_steps(result, "skipped")) < 3, name
            assert_same_run(result, alone[name])


LIMITS = ["norm 0.5", "adaptive 0.05"]
OTHER_LIMITS = ["value 0.01", "auto 0.5", "off"]


@pytest.mark.fast("2")
@pytest.mark.parametrize(
    ("size", "limits"),
    [
        pytest.param(2, LIMITS, id="2"),
        pytest.param(2, OTHER_LIMITS, id="2-others"),
        pytest.param(4, LIMITS + OTHER_LIMITS, id="4"),
    ],
)
def test_every_limit_of_gradients_limits_the_same_and_tells_the_same_fraction(
    ranks: Ranks, size: int, limits: list[str]
) -> None:
    (alone,) = ranks(1, strategy_runs.of_each_limit, limits=limits)
    for together in ranks(size, strategy_runs.of_each_limit, limits=limits, sharding={}):
        assert together.keys() == {*limits}
        for clip, result in together.items():
            expected = alone[clip]
            assert result["clip_fraction"] == pytest.approx(expected["clip_fraction"], abs=1e-6), (
                clip
            )
            assert largest_difference(result["weights"], expected["weights"]) < 1e-9, clip


@pytest.mark.slow
def test_ranks_may_use_whole_weights_as_often_as_each_likes_between_steps(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "together")
    (alone,) = ranks(1, strategy_runs.sampled, run_dir=str(tmp_path / "alone"))
    results = ranks(2, strategy_runs.sampled, sharding={}, run_dir=run_dir)

    on_rank_0, on_rank_1 = results
    assert on_rank_0["sample_calls"] > on_rank_1["sample_calls"]
    expected_scores = [pytest.approx(scores, abs=1e-6) for scores in alone["scores"]]
    expected_sample = pytest.approx(float(alone["last_sample"]), abs=1e-9)
    for together in results:
        assert together["scores"] == expected_scores
        assert float(together["last_sample"]) == expected_sample
        assert together["last_panels"] == alone["last_panels"]
        assert largest_difference(together["weights"], alone["weights"]) < 1e-9
    written_panels = sf.load(run_dir).panels()
    assert written_panels is not None
    assert written_panels.to_json() == alone["last_panels"]


@pytest.mark.fast("last")
@pytest.mark.parametrize("sync", ["last", "every"])
def test_what_no_rank_uses_in_a_step_does_not_move_in_it(ranks: Ranks, sync: str) -> None:
    sharding = {"find_unused_parameters": True, "sync": sync}
    (alone,) = ranks(1, strategy_runs.with_unused)
    for together in ranks(2, strategy_runs.with_unused, sharding=sharding):
        assert largest_difference(together, alone) < 1e-9


def test_a_router_that_leaves_out_experts_is_the_same_under_every_strategy(ranks: Ranks) -> None:
    """Under DDP to the bit of one process, and under FSDP to the bit of one rank."""
    unused = {"find_unused_parameters": True}
    (alone,) = ranks(1, strategy_runs.routed)
    (sharded_alone,) = ranks(1, strategy_runs.routed, sharding=unused)

    replicated, sharded = ranks.each(
        2, strategy_runs.routed, [{"replicated": unused}, {"sharding": unused}]
    )

    for together in replicated:
        assert largest_difference(together, alone) == 0
    for together in sharded:
        assert largest_difference(together, sharded_alone) == 0
        assert largest_difference(together, alone) < 1e-9


@pytest.mark.slow
def test_generate_of_transformers_makes_the_same_samples_and_scores(ranks: Ranks) -> None:
    """On rank 0 alone, and as often as each rank likes."""
    pytest.importorskip("transformers")
    (alone,) = ranks(1, strategy_runs.generated)
    strategies = [{"parallel": "ddp"}, {"parallel": "fsdp"}]
    results = ranks.each(2, strategy_runs.generated, strategies)
    for strategy, of_ranks in zip(strategies, results, strict=True):
        print(strategy)  # shown if the run is another one
        on_rank_0, on_rank_1 = of_ranks
        assert on_rank_0["sampled"] == alone["sampled"]
        assert on_rank_1["sampled"] == []
        for together in of_ranks:
            assert together["scores"] == pytest.approx(alone["scores"], abs=1e-9)
            assert largest_difference(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.slow
def test_weights_gathered_in_bfloat16_are_kept_in_float32_and_move_about_the_same(
    ranks: Ranks,
) -> None:
    for together in ranks(2, strategy_runs.of_gathered_halves):
        plain = together["plain"]
        halved = together["halved"]
        assert halved["model out.weight"].dtype is plain["model out.weight"].dtype
        assert 0 < largest_difference(halved, plain) < 0.2


@pytest.mark.slow
def test_in_float32_losses_are_equal_to_1e_4_and_weights_under_sgd_to_1e_5(ranks: Ranks) -> None:
    settings = {"optimizer": "sgd", "double": False, "ema": None, "steps": 10}
    (alone,) = ranks(1, strategy_runs.trained, **settings)
    for together in ranks(2, strategy_runs.trained, sharding={}, **settings):
        assert values_of_steps(together, "loss") == pytest.approx(
            values_of_steps(alone, "loss"), abs=1e-4
        )
        assert largest_difference(together["weights"], alone["weights"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [
        ("gpt", "muon"),
        pytest.param("gpt", "adamw", marks=pytest.mark.slow),
        pytest.param("translation", "adamw", marks=pytest.mark.slow),
        pytest.param("translation", "muon", marks=pytest.mark.slow),
        pytest.param("images", "adamw", marks=pytest.mark.slow),
        pytest.param("images", "muon", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_is_the_same_run_under_fsdp(
    ranks: Ranks, recipe: str, optimizer: str, tmp_path: Path
) -> None:
    settings = {
        "recipe": recipe,
        "texts": str(tmp_path),
        "optimizer.name": optimizer,
        "ema": 0.9,
        "optimizer.lr": 1e-3,
    }
    (alone,) = ranks(1, world_runs.of_recipe, **settings)
    for together in ranks(2, world_runs.of_recipe, **settings, parallel="fsdp"):
        assert together["samples"] == alone["samples"]
        assert together["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert together["scores"] == pytest.approx(alone["scores"], abs=1e-3, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["muon", pytest.param("schedule_free", marks=pytest.mark.slow)]
)
def test_a_sharded_run_goes_on_under_ddp_and_sharded_again(
    ranks: Ranks, optimizer: str, tmp_path: Path
) -> None:
    settings = {"optimizer": optimizer, "steps": 9, "clip": "auto 0.5"}
    (alone,) = ranks(1, strategy_runs.trained, **settings)

    settings["run_dir"] = str(tmp_path / "run")
    ranks(4, strategy_runs.trained, sharding={}, stop_after="3 steps", **settings)
    ranks(2, strategy_runs.trained, parallel="ddp", stop_after="6 steps", **settings)
    for together in ranks(4, strategy_runs.trained, sharding={"replicas": 2}, **settings):
        assert values_of_steps(together, "samples") == values_of_steps(alone, "samples")[6:]
        assert largest_difference(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.slow
def test_a_sharded_run_stopped_and_gone_on_with_on_as_many_ranks_is_bit_equal(
    ranks: Ranks, tmp_path: Path
) -> None:
    settings = {"optimizer": "muon", "steps": 8, "double": False, "sharding": {}}
    stopped_dir = str(tmp_path / "stopped")

    whole_results = ranks(2, strategy_runs.trained, **settings, run_dir=str(tmp_path / "whole"))
    ranks(2, strategy_runs.trained, **settings, run_dir=stopped_dir, stop_after="4 steps")
    resumed_results = ranks(2, strategy_runs.trained, **settings, run_dir=stopped_dir)

    for whole, resumed in zip(whole_results, resumed_results, strict=True):
        assert resumed["steps"] == whole["steps"][4:]
        assert largest_difference(resumed["weights"], whole["weights"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sam", "gan"])
def test_a_loop_of_ones_own_is_the_same_under_fsdp(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """With a directory: then the state is checked, by passes of the first steps' losses."""
    run_dir = str(tmp_path / name)
    (alone,) = ranks(1, world_runs.of_example, name=name)
    for together in ranks(2, world_runs.of_example, name=name, run_dir=run_dir, parallel="fsdp"):
        assert largest_difference(together, alone) < 1e-9


@pytest.mark.fast("two")
@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param([{"parallel": "ddp"}, {"sharding": {}}], id="two"),
        pytest.param(
            [
                {"sharding": {"reshard_after_forward": False}},
                {"sharding": {"replicas": 2}},
                {"sharding": {"sync": "last", "cpu_offload": True}},
            ],
            id="others",
        ),
    ],
)
def test_models_called_without_a_backward_pass_are_those_of_the_newest_weights(
    ranks: Ranks, tmp_path: Path, strategies: list[dict[str, Any]]
) -> None:
    (alone,) = ranks(1, strategy_runs.with_calls_beside, run_dir=str(tmp_path / "alone"))
    cases = [
        {**strategy, "run_dir": str(tmp_path / f"strategy-{number}")}
        for number, strategy in enumerate(strategies)
    ]
    results = ranks.each(2, strategy_runs.with_calls_beside, cases)
    for strategy, of_ranks in zip(strategies, results, strict=True):
        print(strategy)  # shown if the run is another one
        for together in of_ranks:
            assert together["logged"] == pytest.approx(alone["logged"], abs=1e-12)
            assert together["scores"] == pytest.approx(alone["scores"], abs=1e-12)
            assert largest_difference(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.fast("muon-adaptive 0.05")
@pytest.mark.parametrize(
    ("optimizer", "clip"), [("adamw", "value 0.01"), ("muon", "adaptive 0.05")]
)
def test_sharded_steps_read_nothing_on_the_host(ranks: Ranks, optimizer: str, clip: str) -> None:
    ended_counts = ranks(
        2, strategy_runs.read_on_the_host, optimizer=optimizer, clip=clip, sharding={}
    )
    assert ended_counts == [3, 3]


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name(ranks: Ranks) -> None:
    names = list(strategy_runs.OF_WHOLE_PARAMETERS)
    cases = [{"optimizer": name} for name in names]
    results = ranks.each(1, strategy_runs.refusal_of, cases)
    for name, (refusal,) in zip(names, results, strict=True):
        assert refusal == ("optimizer-of-whole-parameters", name)
