"""Grids, names and the plan's file. (1 s)"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refused import refused
from surefoot.config.tree import flatten
from surefoot.recipes.gpt.config import Config
from surefoot.tools.compare import plan as planned
from surefoot.tools.compare.plan import Planned, continue_plan
from surefoot.tools.compare.variants import (
    Variant,
    grid,
    group_labels,
    names,
    refuse_duplicates,
    run_labels,
)

VALUES = st.one_of(
    st.floats(allow_nan=False), st.integers(), st.text(max_size=9), st.booleans(), st.none()
)


@given(
    st.dictionaries(
        st.sampled_from(["a.lr", "b.lr", "name"]),
        st.lists(VALUES, min_size=1, max_size=3),
        min_size=1,
    )
)
def test_a_grid_holds_every_combination_once(vary: dict[str, list[Any]]) -> None:
    """Combination n counts in the settings as digits, the last of them the fastest: each is there,
    and no other twice.
    """
    combinations = grid(vary)
    assert len(combinations) == math.prod(len(values) for values in vary.values())
    for number, combination in enumerate(combinations):
        assert list(combination) == list(vary)
        for setting in reversed(vary):
            number, digit = divmod(number, len(vary[setting]))  # noqa: PLW2901
            assert combination[setting] is vary[setting][digit]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["a.lr", "b.lr", "data.path"]), VALUES),
        min_size=1,
        max_size=6,
    )
)
def test_every_name_is_another_and_fit_for_a_directory(combinations: list[dict[str, Any]]) -> None:
    found = names(combinations)
    assert len(set(found)) == len(combinations)
    assert all(
        name.isascii() and len(name) < 100 and "/" not in name and not name.startswith(".")
        for name in found
    )


def test_twins_are_refused() -> None:
    whole = {"optimizer.name": "adamw", "optimizer.lr": 0.1}
    second = {"optimizer.lr": 1e-1, "optimizer.name": "adamw"}
    with refused("variants-equal", settings=second):
        refuse_duplicates([{"optimizer.lr": 0.1}, second], [whole, whole])


def test_a_label_shows_what_differs_however_long_the_name() -> None:
    shared = {"family": "gpt2", "schedule.name": "constant", "data.path": "x" * 80}
    varied = [{**shared, "optimizer.lr": lr, "schedule.min_lr_ratio": "5%"} for lr in (0.1, 0.2)]
    varied.append({**shared, "optimizer.lr": 0.1, "optimizer.name": "sgd"})
    whole = {
        "optimizer.name": "adamw",
        "schedule.min_lr_ratio": "5%",
    }  # the third has that floor too, by default
    variants = [
        Variant(name, name, one, {**whole, **one})
        for name, one in zip(names(varied), varied, strict=True)
    ]
    assert list(group_labels(variants).values()) == ["lr=0.1", "lr=0.2", "lr=0.1,name=sgd"]


def test_labels_that_would_be_the_same_are_names() -> None:
    twins = [
        Variant(f"lr=1{more}", f"lr=1{more}", {"lr": 1, **held}, {"lr": 1, "a": 2})
        for more, held in TWINS
    ]
    others = [
        Variant("trial-000", "trial-000", {"lr": 1}, {"lr": 1}),
        Variant("runs/a=1", "runs/a=1", {}, {}),
    ]
    assert list(group_labels([*twins, *others]).values()) == [
        "lr=1",
        "lr=1,a=2",
        "trial-000",
        "runs/a=1",
    ]


TWINS: list[tuple[str, dict[str, Any]]] = [("", {}), (",a=2", {"a": 2})]


def test_the_label_of_a_repeat_has_its_seed() -> None:
    runs = [
        Variant(f"{group},seed={seed}", group, {"lr": lr, "x": 0}, {"lr": lr, "x": 0, "seed": seed})
        for group, lr in (("lr=1,x=0", 1), ("lr=2,x=0", 2))
        for seed in (0, 1)
    ]
    assert list(run_labels(runs).values()) == [
        "lr=1,seed=0",
        "lr=1,seed=1",
        "lr=2,seed=0",
        "lr=2,seed=1",
    ]


def plan(**changes: Any) -> Planned:
    settings: dict[str, Any] = {
        "optimizer.name": "adamw",
        "optimizer.betas": (0.9, 0.95),
        "model.tie_embeddings": None,
    }
    variants = [
        Variant("name=adamw", "name=adamw", {"optimizer.name": "adamw"}, settings),
        Variant(
            "name=sgd", "name=sgd", {"optimizer.name": "sgd"}, {**settings, "optimizer.name": "sgd"}
        ),
    ]
    held: dict[str, Any] = {
        "program": {"kind": "recipe", "recipe": "gpt"},
        "base": flatten(Config()),
        "origins": {"seed": "flag"},
        "variants": variants,
        "threads": 2,
        "started_in": "/somewhere",
        "target": 1.9,
    }
    return Planned(**(held | changes))


def again(one: Planned) -> Planned:
    return planned.from_text(planned.to_text(one, Config()), where="compare.toml")


def test_a_plan_is_read_back_as_it_was() -> None:
    before = plan(found={"precision": "fp32"})
    after = again(plan(found={"precision": "fp32"}))
    tuples = {"optimizer.betas": (0.9, 0.95), "fsdp.blocks": ()}
    known = {
        name: value for name, value in before.settings("name=sgd").items() if value is not None
    }
    assert {
        name: value for name, value in after.settings("name=sgd").items() if value is not None
    } | tuples == known
    assert (after.threads, after.target, after.origins["seed"]) == (2, 1.9, "flag")
    assert after.found == before.found
    assert after.names == before.names


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    for content in (b"seed = 0\n", b"seed =", b"\xff"):
        (tmp_path / planned.FILE).write_bytes(content)
        with refused("comparison-plan-damaged", path=str(tmp_path / planned.FILE)):
            planned.read(tmp_path)


@pytest.mark.parametrize("place", ["/proc/self/cwd", ".", "/somewhere/../else"])
def test_a_plan_that_was_started_wherever_one_stands_now_is_refused(place: str) -> None:
    with refused("path-of-code-unresolved", path=Path(place)):
        again(plan(started_in=place))


def test_the_same_plan_goes_on_with_the_threads_it_had() -> None:
    on = continue_plan(again(plan()), plan(threads=8), where=Path("runs/a"), threads_given=False)
    assert on.threads == 2


def test_variants_may_be_added() -> None:
    more = [*plan().variants, Variant("name=lion", "name=lion", {"optimizer.name": "lion"}, {})]
    assert (
        continue_plan(
            again(plan()), plan(variants=more), where=Path("runs/a"), threads_given=False
        ).names[-1]
        == "name=lion"
    )


def test_a_search_is_gone_on_with_by_the_score_it_was_begun_with() -> None:
    search = {"space": {}, "sampler": "tpe", "pruner": "none", "seed": 0, "trials": 2}
    held = plan(search=search, metric="max val/accuracy", variants=[])
    on = continue_plan(
        held,
        plan(search={**search, "trials": 4}, variants=[]),
        where=Path("a"),
        threads_given=False,
    )
    assert on.metric == "max val/accuracy"
    assert on.search is not None
    assert on.search["trials"] == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": flatten(Config(seed=1))}, "was --seed 0, now --seed 1"),
        ({"program": {"kind": "recipe", "recipe": "images"}}, "recipe was gpt, now images"),
        ({"variants": plan().variants[:1]}, "name=sgd is no longer among the variants"),
        ({"threads": 3}, "threads was 2, now 3"),
        ({"search": {"trials": 3}}, "only one of the two comparisons is a search"),
    ],
)
def test_another_comparison_in_the_same_directory_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with refused("comparison-differs", path=Path("runs/a")) as error:
        continue_plan(again(plan()), plan(**changes), where=Path("runs/a"), threads_given=True)
    (difference,) = error.value.fields["differences"]
    assert difference.startswith(said)
