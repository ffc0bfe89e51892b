"""A parameter that only some passes, steps or ranks use: refused by name and before any update, or
the same run as in one process. (25 s)
"""

from __future__ import annotations

from typing import Any

import pytest

import surefoot as sf
from distributed import use_runs
from identities.test_law_03_strategy import largest
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


def each(ways: list[dict[str, Any]], *cases: dict[str, Any]) -> list[dict[str, Any]]:
    return [way | case for way in ways for case in cases]


def assert_refused(found: dict[str, Any], *, step: int, names: list[str]) -> None:
    assert found["code"] == "unused-parameters"
    assert found["step"] == found["steps"] == step
    assert sorted(found["names"]) == sorted(names)


def test_ddp_names_what_the_last_pass_of_a_later_step_does_not_use(ranks: Ranks) -> None:
    """Also if earlier micro-batches of the step do use it, and only if all of them have to."""
    cases = each(DDP, {"use": "early"}, {"use": "in the first passes"})
    for case, found in zip(cases, ranks.each(2, use_runs.of_one_model, cases), strict=True):
        print(case)  # shown if another run fails
        for of_rank in found:
            assert_refused(of_rank, step=2, names=SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("way", DDP)
@pytest.mark.parametrize(
    ("use", "step"), [("early on rank 1", 2), ("not in the last pass of rank 1", 0)]
)
def test_a_rank_that_does_not_use_it_says_so_and_the_others_end_because_of_it(
    ranks: Ranks, way: dict[str, Any], use: str, step: int
) -> None:
    """The others wait in the sum of its gradients."""
    waiting, unlike = ranks.outcomes(ranks.start(2, use_runs.of_one_model, use=use, **way))
    assert unlike.result is None or unlike.status == 0
    assert waiting.status == RankLostError.exit_status
    assert f"in step {step}, 2 parameters get no gradient" in waiting.text


@pytest.mark.fast("two")
@pytest.mark.parametrize("ways", [FSDP[:2], FSDP[2:]], ids=["two", "others"])
def test_fsdp_takes_what_all_ranks_use_alike_as_one_process_does(
    ranks: Ranks, ways: list[dict[str, Any]]
) -> None:
    cases = each(ways, {"use": "early"}, {"use": "early", "of": "block"})
    for way in ways:  # with exact sums, the ranks that share a copy take turns
        takes_turns = way == FSDP[0]
        cases.append(way | {"use": "in the first pass" if takes_turns else "in the first passes"})
    for case, found in zip(cases, ranks.each(2, use_runs.of_one_model, cases), strict=True):
        print(case)
        alone = use_runs.of_one_model(use=case["use"], of=case.get("of", "second"))
        for together in found:
            assert largest(together["weights"], alone["weights"]) < 1e-9


@pytest.mark.fast("two")
@pytest.mark.parametrize("ways", [FSDP[:2], FSDP[2:]], ids=["two", "others"])
def test_fsdp_names_what_some_ranks_do_not_use_before_the_update(
    ranks: Ranks, ways: list[dict[str, Any]]
) -> None:
    cases = each(ways, {"use": "early on rank 1"}, {"use": "early", "of": "part"})
    for case, found in zip(cases, ranks.each(2, use_runs.of_one_model, cases), strict=True):
        print(case)
        both = [*SECOND, "third.weight", "third.bias"]
        for of_rank in found:
            assert_refused(of_rank, step=2, names=both if "of" in case else SECOND)


def test_fsdp_names_the_blocks_that_ranks_call_in_another_order(ranks: Ranks) -> None:
    arguments: dict[str, Any] = {"blocks": ["blocks"], "find_unused_parameters": True}
    for found in ranks(
        2, use_runs.of_one_model, use="early", of="one of two", strategy=("fsdp", arguments)
    ):
        assert (found["code"], found["step"], found["steps"]) == ("unlike-blocks", 2, 2)
        assert found["calls"] == ["model.blocks.1", "model.blocks.0"]


def test_of_several_models_all_ranks_use_the_same_parameters_in_a_step(ranks: Ranks) -> None:
    """In every step, others are allowed."""
    alone = use_runs.of_two_models(use="in every other step")
    ways = [*DDP[:2], *FSDP[:2]]
    for way, found in zip(
        ways,
        ranks.each(2, use_runs.of_two_models, ways, use="in every other step"),
        strict=True,
    ):
        print(way)
        for together in found:
            assert largest(together["weights"], alone["weights"]) < 1e-9
    for found in ranks.each(2, use_runs.of_two_models, DDP[:2], use="early on rank 1"):
        for of_rank in found:
            second = [f"second.{part}.{name}" for part in (0, 2) for name in ("weight", "bias")]
            assert_refused(of_rank, step=2, names=second)


def test_steps_of_several_losses_are_refused_under_ddp_in_the_first_and_equal_under_fsdp(
    ranks: Ranks,
) -> None:
    alone = use_runs.of_two_losses()
    ddp, inexact, *sharded = ranks.each(2, use_runs.of_two_losses, [*DDP[:2], *FSDP[:2]])
    for of_rank in [*ddp, *inexact]:
        assert_refused(of_rank, step=0, names=["third.weight", "third.bias"])
    for found in sharded:
        for together in found:
            assert largest(together["weights"], alone["weights"]) < 1e-9


def test_what_the_body_unfreezes_and_no_pass_uses_is_named_in_the_next_step(ranks: Ranks) -> None:
    for of_rank in ranks(2, use_runs.of_two_losses, unfreezes=True):
        assert_refused(of_rank, step=2, names=["third.weight", "third.bias"])


def test_where_it_is_allowed_no_rank_has_to_use_it(ranks: Ranks) -> None:
    allowed = {"find_unused_parameters": True}
    cases = each(
        [{"strategy": ("ddp", allowed)}, {"strategy": ("fsdp", allowed)}],
        {"use": "early"},
        {"use": "not in the last pass of rank 1"},
    )
    alone = {use: use_runs.of_one_model(use=use) for use in {case["use"] for case in cases}}
    for case, found in zip(cases, ranks.each(2, use_runs.of_one_model, cases), strict=True):
        print(case)
        for together in found:
            assert largest(together["weights"], alone[case["use"]]["weights"]) < 1e-9


def test_ranks_agree_on_equal_numbers_alone(ranks: Ranks) -> None:
    assert ranks(2, use_runs.agreed) == [[True, False, True, False]] * 2


def test_orders_of_calls_are_compared_to_their_ends() -> None:
    refuse_unlike_calls([["a", "b"], None, ["a", "b"]])
    refuse_unlike_calls([None, None])
    with pytest.raises(sf.ConfigError) as refused:
        refuse_unlike_calls([None, ["a"], ["a", "b"]], step=3)
    assert refused.value.fields == {"step": 3, "rank": 2, "calls": ["nothing more", "b"]}
