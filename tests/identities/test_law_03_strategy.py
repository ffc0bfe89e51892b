"""Law 3: one process = DDP = FSDP2, whatever the optimizer, the limit of gradients, and how the
model is spread. (90 s)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from identities import strategy_runs, world_runs
from rank_processes import Ranks

STEPS = 4


def largest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between any two numbers."""
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def of_steps(found: dict[str, Any], name: str) -> list[Any]:
    return [step[name] for step in found["steps"]]


def assert_same(together: dict[str, Any], alone: dict[str, Any]) -> None:
    for name in ("samples", "mask", "skipped"):
        assert of_steps(together, name) == of_steps(alone, name)
    for name in ("loss", "grad_norm"):
        assert of_steps(together, name) == pytest.approx(
            of_steps(alone, name), abs=1e-9, nan_ok=True
        )
    assert largest(together["weights"], alone["weights"]) < 1e-9
    assert together["scores"] == pytest.approx(alone["scores"], abs=1e-6)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, Any]:
    (found,) = ranks(1, strategy_runs.trained, steps=STEPS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_in_float64_twenty_sharded_steps_are_those_of_one_process(ranks: Ranks, size: int) -> None:
    (alone,) = ranks(1, strategy_runs.trained)
    for together in ranks(size, strategy_runs.trained, sharding={}):
        assert_same(together, alone)


OF_TWO: list[dict[str, Any]] = [
    {"sharding": {}},
    {"sharding": {"reshard_after_forward": False, "sync": "last", "cpu_offload": True}},
]
OTHERS_OF_TWO: list[dict[str, Any]] = [
    {"sharding": {"replicas": 2}},
    {"sharding": {"blocks": ["blocks", "kernel"], "find_unused_parameters": True}},
    {"parallel": "ddp"},
]


@pytest.mark.fast("two")
@pytest.mark.parametrize(
    ("size", "ways"),
    [
        (1, [{"sharding": {}}]),
        (2, OF_TWO),
        (2, OTHERS_OF_TWO),
        (4, [{"sharding": {"replicas": 2, "sync": "last"}}]),
    ],
    ids=["one", "two", "two-others", "four"],
)
def test_however_a_model_is_spread_it_makes_the_same_run(
    ranks: Ranks, alone: dict[str, Any], size: int, ways: list[dict[str, Any]]
) -> None:
    for way, found in zip(
        ways, ranks.each(size, strategy_runs.trained, ways, steps=STEPS), strict=True
    ):
        print(way)  # shown where it is not
        for together in found:
            assert_same(together, alone)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", pytest.param("selective", marks=pytest.mark.slow)])
def test_sharded_blocks_that_are_computed_again_make_the_same_run(
    ranks: Ranks, alone: dict[str, Any], how: str
) -> None:
    for together in ranks(
        2, strategy_runs.trained, sharding={}, steps=STEPS, activation_checkpointing=how
    ):
        assert_same(together, alone)


@pytest.mark.slow
def test_compiled_it_is_the_same_run_under_every_strategy_and_draws_the_same_masks(
    ranks: Ranks, alone: dict[str, Any]
) -> None:
    for size, parallel in ((1, "none"), (2, "ddp"), (2, "fsdp")):
        for together in ranks(
            size, strategy_runs.trained, parallel=parallel, steps=STEPS, compile=True
        ):
            assert_same(together, alone)


@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_ranks_compile_where_the_main_one_chose_to_and_make_the_same_run(
    ranks: Ranks, alone: dict[str, Any], really: bool
) -> None:
    for parallel, chosen in (("ddp", True), ("fsdp", False))[: 1 + really]:
        for together in ranks(
            2, strategy_runs.trained_as_chosen, really=really, parallel=parallel, steps=STEPS
        ):
            assert together.pop("compiled") is chosen
            assert (together.pop("called") >= STEPS) is not really
            assert_same(together, alone)


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
        for name, found in together.items():
            assert 0 < sum(of_steps(found, "skipped")) < 3, name
            assert_same(found, alone[name])


LIMITS = ["norm 0.5", "value 0.01", "adaptive 0.05", "auto 0.5", "off"]


@pytest.mark.fast("2")
@pytest.mark.parametrize(
    ("size", "limits"),
    [(2, LIMITS[:3:2]), (2, LIMITS[1::2] + LIMITS[4:]), (4, LIMITS)],
    ids=["2", "2-others", "4"],
)
def test_every_limit_of_gradients_limits_the_same_and_tells_the_same_fraction(
    ranks: Ranks, size: int, limits: list[str]
) -> None:
    (alone,) = ranks(1, strategy_runs.of_each_limit, limits=limits)
    for together in ranks(size, strategy_runs.of_each_limit, limits=limits, sharding={}):
        for clip, found in together.items():
            assert found["clip_fraction"] == pytest.approx(
                alone[clip]["clip_fraction"], abs=1e-6
            ), clip
            assert largest(found["weights"], alone[clip]["weights"]) < 1e-9, clip


@pytest.mark.slow
def test_ranks_may_use_whole_weights_as_often_as_each_likes_between_steps(
    ranks: Ranks, tmp_path: Path
) -> None:
    (alone,) = ranks(1, strategy_runs.sampled, run_dir=str(tmp_path / "alone"))
    together = ranks(2, strategy_runs.sampled, sharding={}, run_dir=str(tmp_path / "together"))
    assert together[0]["sampled"] > together[1]["sampled"]
    for found in together:
        assert [*found["scores"]] == [pytest.approx(scores, abs=1e-6) for scores in alone["scores"]]
        assert float(found["said"]) == pytest.approx(float(alone["said"]), abs=1e-9)
        assert found["panels"][0] == alone["panels"][0]  # on every rank
    assert together[0]["panels"][1] == together[0]["panels"][0]  # and rank 0 has written them
    for found in together:
        assert largest(found["weights"], alone["weights"]) < 1e-9


@pytest.mark.fast("last")
@pytest.mark.parametrize("when", ["last", "every"])
def test_what_no_rank_uses_in_a_step_does_not_move_in_it(ranks: Ranks, when: str) -> None:
    (alone,) = ranks(1, strategy_runs.with_unused)
    for together in ranks(
        2, strategy_runs.with_unused, sharding={"find_unused_parameters": True, "sync": when}
    ):
        assert largest(together, alone) < 1e-9


def test_a_router_that_leaves_out_experts_is_the_same_under_every_strategy(ranks: Ranks) -> None:
    """Under DDP to the bit of one process, and under FSDP to the bit of one rank."""
    unused = {"find_unused_parameters": True}
    (alone,) = ranks(1, strategy_runs.routed)
    (sharded,) = ranks(1, strategy_runs.routed, sharding=unused)
    by_way = ranks.each(2, strategy_runs.routed, [{"replicated": unused}, {"sharding": unused}])
    for found, reference in zip(by_way, (alone, sharded), strict=True):
        for together in found:
            assert largest(together, reference) == 0
            assert largest(together, alone) < 1e-9


@pytest.mark.slow
def test_generate_of_transformers_makes_the_same_samples_and_scores(ranks: Ranks) -> None:
    """On rank 0 alone, and as often as each rank likes."""
    pytest.importorskip("transformers")
    (alone,) = ranks(1, strategy_runs.generated)
    ways = [{"parallel": "ddp"}, {"parallel": "fsdp"}]
    for way, found in zip(ways, ranks.each(2, strategy_runs.generated, ways), strict=True):
        print(way)  # shown where it is not
        assert [of_rank["sampled"] for of_rank in found] == [alone["sampled"], []]
        for together in found:
            assert together["scores"] == pytest.approx(alone["scores"], abs=1e-9)
            assert largest(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.slow
def test_weights_gathered_in_bfloat16_are_kept_in_float32_and_move_about_the_same(
    ranks: Ranks,
) -> None:
    for found in ranks(2, strategy_runs.of_gathered_halves):
        assert found["halved"]["model out.weight"].dtype is found["plain"]["model out.weight"].dtype
        assert 0 < largest(found["halved"], found["plain"]) < 0.2


@pytest.mark.slow
def test_in_float32_losses_are_equal_to_1e_4_and_weights_under_sgd_to_1e_5(ranks: Ranks) -> None:
    settings = {"optimizer": "sgd", "double": False, "ema": None, "steps": 10}
    (alone,) = ranks(1, strategy_runs.trained, **settings)
    for together in ranks(2, strategy_runs.trained, sharding={}, **settings):
        assert of_steps(together, "loss") == pytest.approx(of_steps(alone, "loss"), abs=1e-4)
        assert largest(together["weights"], alone["weights"]) < 1e-5


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
    saved = settings | {"run_dir": str(tmp_path / "run")}
    ranks(4, strategy_runs.trained, sharding={}, stop_after="3 steps", **saved)
    ranks(2, strategy_runs.trained, parallel="ddp", stop_after="6 steps", **saved)
    for together in ranks(4, strategy_runs.trained, sharding={"replicas": 2}, **saved):
        assert of_steps(together, "samples") == of_steps(alone, "samples")[6:]
        assert largest(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.slow
def test_a_sharded_run_stopped_and_gone_on_with_on_as_many_ranks_is_bit_equal(
    ranks: Ranks, tmp_path: Path
) -> None:
    settings = {"optimizer": "muon", "steps": 8, "double": False, "sharding": {}}
    whole = ranks(2, strategy_runs.trained, **settings, run_dir=str(tmp_path / "whole"))
    ranks(2, strategy_runs.trained, **settings, run_dir=str(tmp_path / "cut"), stop_after="4 steps")
    for rank, resumed in enumerate(
        ranks(2, strategy_runs.trained, **settings, run_dir=str(tmp_path / "cut"))
    ):
        assert largest(resumed["weights"], whole[rank]["weights"]) == 0
        assert resumed["steps"] == whole[rank]["steps"][4:]


@pytest.mark.slow
def test_loops_of_ones_own_are_the_same_under_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    """With a directory: then the state is checked, by passes of the first steps' losses."""
    names = [{"name": name, "run_dir": str(tmp_path / name)} for name in ("sam", "gan")]
    alone = ranks.each(1, world_runs.of_example, [{"name": "sam"}, {"name": "gan"}])
    together = ranks.each(2, world_runs.of_example, names, parallel="fsdp")
    for found, (by_itself,) in zip(together, alone, strict=True):
        assert max(largest(each, by_itself) for each in found) < 1e-9


BESIDE: list[dict[str, Any]] = [
    {"parallel": "ddp"},
    {"sharding": {}},
    {"sharding": {"reshard_after_forward": False}},
    {"sharding": {"replicas": 2}},
    {"sharding": {"sync": "last", "cpu_offload": True}},
]


@pytest.mark.fast("two")
@pytest.mark.parametrize("ways", [BESIDE[:2], BESIDE[2:]], ids=["two", "others"])
def test_models_called_without_a_backward_pass_are_those_of_the_newest_weights(
    ranks: Ranks, tmp_path: Path, ways: list[dict[str, Any]]
) -> None:
    (alone,) = ranks(1, strategy_runs.with_calls_beside, run_dir=str(tmp_path / "alone"))
    cases = [{**way, "run_dir": str(tmp_path / str(number))} for number, way in enumerate(ways)]
    for way, found in zip(ways, ranks.each(2, strategy_runs.with_calls_beside, cases), strict=True):
        print(way)  # shown if it is another run
        for together in found:
            assert together["logged"] == pytest.approx(alone["logged"], abs=1e-12)
            assert together["scores"] == pytest.approx(alone["scores"], abs=1e-12)
            assert largest(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.fast("muon-adaptive 0.05")
@pytest.mark.parametrize(
    ("optimizer", "clip"), [("adamw", "value 0.01"), ("muon", "adaptive 0.05")]
)
def test_sharded_steps_read_nothing_on_the_host(ranks: Ranks, optimizer: str, clip: str) -> None:
    assert ranks(
        2, strategy_runs.read_on_the_host, optimizer=optimizer, clip=clip, sharding={}
    ) == [3, 3]


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name(ranks: Ranks) -> None:
    names = ("adafactor", "adamw8bit", "Muon", "Mine")
    for name, (said,) in zip(
        names,
        ranks.each(1, strategy_runs.refused, [{"optimizer": name} for name in names]),
        strict=True,
    ):
        assert said == f"optimizer-of-whole-parameters {name}"
