"""A parameter that only some passes, steps or ranks use: refused by name and before any update, or
the same run as in one process. (25 s)
"""

from __future__ import annotations

from typing import Any

import pytest

import surefoot as sf
from distributed import use_runs
from identities.world_runs import largest_difference
from rank_processes import Ranks
from surefoot.distributed.used_parameters import refuse_unlike_calls
from surefoot.errors import RankLostError

DDP: list[dict[str, Any]] = [
    {},
    {"exact_sums": False},
    {"exact_sums": False, "strategy": ("ddp", {"sync": "every"})},
]
FSDP: list[dict[str, Any]] = [
    {"strategy": ("fsdp", {})},
    {"strategy": ("fsdp", {"sync": "last"}), "exact_sums": False},
    {"strategy": ("fsdp", {"replicas": 2})},
    {"strategy": ("fsdp", {"blocks": ["blocks"]}), "exact_sums": False},
]
SECOND = ["second.weight", "second.bias"]


THIRD = ["third.weight", "third.bias"]


def combine(strategies: list[dict[str, Any]], *uses: dict[str, Any]) -> list[dict[str, Any]]:
    cases = []
    for strategy in strategies:
        cases += [strategy | use for use in uses]
    return cases


def assert_refused(result: dict[str, Any], *, step: int, names: list[str]) -> None:
    """Before the update of this step."""
    assert result["code"] == "unused-parameters"
    assert result["step"] == step
    assert result["steps"] == step
    assert sorted(result["names"]) == sorted(names)


def assert_same_weights(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """On each rank those of one process, up to rounding."""
    for together in results:
        assert largest_difference(together["weights"], alone["weights"]) < 1e-9


def test_ddp_names_what_the_last_pass_of_a_later_step_does_not_use(ranks: Ranks) -> None:
    """Also if earlier micro-batches of the step do use it, and only if all of them have to."""
    cases = combine(DDP, {"use": "early"}, {"use": "in the first passes"})
    results = ranks.each(2, use_runs.of_one_model, cases)
    for case, on_ranks in zip(cases, results, strict=True):
        print(case)  # shown if another run fails
        for result in on_ranks:
            assert_refused(result, step=2, names=SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", DDP)
@pytest.mark.parametrize(
    ("use", "step"), [("early on rank 1", 2), ("not in the last pass of rank 1", 0)]
)
def test_a_rank_that_does_not_use_it_says_so_and_the_others_end_because_of_it(
    ranks: Ranks, strategy: dict[str, Any], use: str, step: int
) -> None:
    """The others wait in the sum of its gradients."""
    start = ranks.start(2, use_runs.of_one_model, use=use, **strategy)
    waiting, unlike = ranks.outcomes(start)
    assert unlike.result is None or unlike.status == 0
    assert waiting.status == RankLostError.exit_status
    assert f"in step {step}, 2 parameters get no gradient" in waiting.text


@pytest.mark.fast("two")
@pytest.mark.parametrize("strategies", [FSDP[:2], FSDP[2:]], ids=["two", "others"])
def test_fsdp_takes_what_all_ranks_use_alike_as_one_process_does(
    ranks: Ranks, strategies: list[dict[str, Any]]
) -> None:
    cases = combine(strategies, {"use": "early"}, {"use": "early", "of": "block"})
    for strategy in strategies:  # with exact sums, the ranks that share a copy take turns
        takes_turns = strategy == FSDP[0]
        use = "in the first pass" if takes_turns else "in the first passes"
        cases.append(strategy | {"use": use})

    results = ranks.each(2, use_runs.of_one_model, cases)

    for case, on_ranks in zip(cases, results, strict=True):
        print(case)
        alone = use_runs.of_one_model(use=case["use"], of=case.get("of", "second"))
        assert_same_weights(on_ranks, alone)


@pytest.mark.fast("two")
@pytest.mark.parametrize("strategies", [FSDP[:2], FSDP[2:]], ids=["two", "others"])
def test_fsdp_names_what_some_ranks_do_not_use_before_the_update(
    ranks: Ranks, strategies: list[dict[str, Any]]
) -> None:
    cases = combine(strategies, {"use": "early on rank 1"}, {"use": "early", "of": "part"})
    results = ranks.each(2, use_runs.of_one_model, cases)
    for case, on_ranks in zip(cases, results, strict=True):
        print(case)
        names = SECOND + THIRD if "of" in case else SECOND
        for result in on_ranks:
            assert_refused(result, step=2, names=names)


def test_fsdp_names_the_blocks_that_ranks_call_in_another_order(ranks: Ranks) -> None:
    arguments: dict[str, Any] = {"blocks": ["blocks"], "find_unused_parameters": True}
    for result in ranks(
        2, use_runs.of_one_model, use="early", of="one of two", strategy=("fsdp", arguments)
    ):
        assert result["code"] == "unlike-blocks"
        assert result["step"] == 2
        assert result["steps"] == 2
        assert result["calls"] == ["model.blocks.1", "model.blocks.0"]


def test_of_several_models_each_step_may_use_others_if_all_ranks_do(ranks: Ranks) -> None:
    strategies = [*DDP[:2], *FSDP[:2]]
    alone = use_runs.of_two_models(use="in every other step")
    results = ranks.each(2, use_runs.of_two_models, strategies, use="in every other step")
    for strategy, on_ranks in zip(strategies, results, strict=True):
        print(strategy)
        assert_same_weights(on_ranks, alone)


def test_of_several_models_ddp_names_what_one_rank_does_not_use_in_a_step(ranks: Ranks) -> None:
    second = ["second.0.weight", "second.0.bias", "second.2.weight", "second.2.bias"]
    for on_ranks in ranks.each(2, use_runs.of_two_models, DDP[:2], use="early on rank 1"):
        for result in on_ranks:
            assert_refused(result, step=2, names=second)


def test_steps_of_several_losses_are_refused_under_ddp_in_the_first_step(ranks: Ranks) -> None:
    for on_ranks in ranks.each(2, use_runs.of_two_losses, DDP[:2]):
        for result in on_ranks:
            assert_refused(result, step=0, names=THIRD)


def test_steps_of_several_losses_are_the_same_under_fsdp(ranks: Ranks) -> None:
    alone = use_runs.of_two_losses()
    for on_ranks in ranks.each(2, use_runs.of_two_losses, FSDP[:2]):
        assert_same_weights(on_ranks, alone)


def test_what_the_body_unfreezes_and_no_pass_uses_is_named_in_the_next_step(ranks: Ranks) -> None:
    for result in ranks(2, use_runs.of_two_losses, unfreezes=True):
        assert_refused(result, step=2, names=THIRD)


@pytest.mark.parametrize("use", ["early", "not in the last pass of rank 1"])
def test_where_it_is_allowed_no_rank_has_to_use_it(ranks: Ranks, use: str) -> None:
    allowed = {"find_unused_parameters": True}
    strategies = [{"strategy": ("ddp", allowed)}, {"strategy": ("fsdp", allowed)}]
    alone = use_runs.of_one_model(use=use)
    results = ranks.each(2, use_runs.of_one_model, strategies, use=use)
    for strategy, on_ranks in zip(strategies, results, strict=True):
        print(strategy)
        assert_same_weights(on_ranks, alone)


def test_ranks_agree_on_equal_numbers_alone(ranks: Ranks) -> None:
    assert ranks(2, use_runs.agreed) == [[True, False, True, False]] * 2


def test_orders_of_calls_are_compared_to_their_ends() -> None:
    refuse_unlike_calls([["a", "b"], None, ["a", "b"]])
    refuse_unlike_calls([None, None])
    with pytest.raises(sf.ConfigError) as refused:
        refuse_unlike_calls([None, ["a"], ["a", "b"]], step=3)
    assert refused.value.fields == {"step": 3, "rank": 2, "calls": ["nothing more", "b"]}
