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
    every_name = names(combinations)
    assert len(set(every_name)) == len(combinations)
    for name in every_name:
        assert name.isascii()
        assert len(name) < 100
        assert "/" not in name
        assert not name.startswith(".")


def test_twins_are_refused() -> None:
    whole = {"optimizer.name": "adamw", "optimizer.lr": 0.1}
    second = {"optimizer.lr": 1e-1, "optimizer.name": "adamw"}
    with refused("variants-equal", settings=second):
        refuse_duplicates([{"optimizer.lr": 0.1}, second], [whole, whole])


def variant(name: str, varied: dict[str, Any], settings: dict[str, Any]) -> Variant:
    """A variant of one run."""
    return Variant(name, name, varied, settings)


def test_a_label_shows_what_differs_however_long_the_name() -> None:
    shared = {"family": "gpt2", "schedule.name": "constant", "data.path": "x" * 80}
    # the third has that floor too, by default
    defaults = {"optimizer.name": "adamw", "schedule.min_lr_ratio": "5%"}
    all_varied = [
        {**shared, "optimizer.lr": 0.1, "schedule.min_lr_ratio": "5%"},
        {**shared, "optimizer.lr": 0.2, "schedule.min_lr_ratio": "5%"},
        {**shared, "optimizer.lr": 0.1, "optimizer.name": "sgd"},
    ]
    variants = []
    for name, varied in zip(names(all_varied), all_varied, strict=True):
        variants.append(variant(name, varied, {**defaults, **varied}))

    labels = list(group_labels(variants).values())

    assert labels == ["lr=0.1", "lr=0.2", "lr=0.1,name=sgd"]


def test_labels_that_would_be_the_same_are_names() -> None:
    variants = [
        variant("lr=1", {"lr": 1}, {"lr": 1, "a": 2}),
        variant("lr=1,a=2", {"lr": 1, "a": 2}, {"lr": 1, "a": 2}),
        variant("trial-000", {"lr": 1}, {"lr": 1}),
        variant("runs/a=1", {}, {}),
    ]

    labels = list(group_labels(variants).values())

    assert labels == ["lr=1", "lr=1,a=2", "trial-000", "runs/a=1"]


def test_the_label_of_a_repeat_has_its_seed() -> None:
    runs = []
    for lr in (1, 2):
        group = f"lr={lr},x=0"
        varied = {"lr": lr, "x": 0}
        for seed in (0, 1):
            runs.append(Variant(f"{group},seed={seed}", group, varied, {**varied, "seed": seed}))

    labels = list(run_labels(runs).values())

    assert labels == [
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
    sgd = {"optimizer.name": "sgd"}
    variants = [
        variant("name=adamw", {"optimizer.name": "adamw"}, settings),
        variant("name=sgd", sgd, {**settings, **sgd}),
    ]
    fields: dict[str, Any] = {
        "program": {"kind": "recipe", "recipe": "gpt"},
        "base": flatten(Config()),
        "origins": {"seed": "flag"},
        "variants": variants,
        "threads": 2,
        "started_in": "/somewhere",
        "target": 1.9,
    }
    return Planned(**(fields | changes))


def written_and_read(one: Planned) -> Planned:
    return planned.from_text(planned.to_text(one, Config()), where="compare.toml")


def present_settings(one: Planned, name: str) -> dict[str, Any]:
    """The settings of a variant that have a value: TOML has no null."""
    return {name: value for name, value in one.settings(name).items() if value is not None}


def test_a_plan_is_read_back_as_it_was() -> None:
    before = plan(found={"precision": "fp32"})

    after = written_and_read(before)

    tuples = {"optimizer.betas": (0.9, 0.95), "fsdp.blocks": ()}  # arrays in TOML
    assert present_settings(after, "name=sgd") | tuples == present_settings(before, "name=sgd")
    assert (after.threads, after.target, after.origins["seed"]) == (2, 1.9, "flag")
    assert after.found == before.found
    assert after.names == before.names


@pytest.mark.parametrize("content", [b"seed = 0\n", b"seed =", b"\xff"])
def test_a_file_that_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / planned.FILE
    file.write_bytes(content)
    with refused("comparison-plan-damaged", path=str(file)):
        planned.read(tmp_path)


@pytest.mark.parametrize("place", ["/proc/self/cwd", ".", "/somewhere/../else"])
def test_a_plan_that_was_started_wherever_one_stands_now_is_refused(place: str) -> None:
    with refused("path-of-code-unresolved", path=Path(place)):
        written_and_read(plan(started_in=place))


def go_on(*, from_plan: Planned, with_plan: Planned, threads_given: bool = False) -> Planned:
    return continue_plan(from_plan, with_plan, where=Path("runs/a"), threads_given=threads_given)


def test_the_same_plan_goes_on_with_the_threads_it_had() -> None:
    continued = go_on(from_plan=written_and_read(plan()), with_plan=plan(threads=8))
    assert continued.threads == 2


def test_variants_may_be_added() -> None:
    lion = variant("name=lion", {"optimizer.name": "lion"}, {})
    with_lion = plan(variants=[*plan().variants, lion])

    continued = go_on(from_plan=written_and_read(plan()), with_plan=with_lion)

    assert continued.names[-1] == "name=lion"


def test_a_search_is_gone_on_with_by_the_score_it_was_begun_with() -> None:
    search = {"space": {}, "sampler": "tpe", "pruner": "none", "seed": 0, "trials": 2}
    begun = plan(search=search, metric="max val/accuracy", variants=[])
    longer = plan(search={**search, "trials": 4}, variants=[])

    continued = go_on(from_plan=begun, with_plan=longer)

    assert continued.metric == "max val/accuracy"
    assert continued.search is not None
    assert continued.search["trials"] == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": flatten(Config(seed=1))}, "was --seed 0, now --seed 1"),
        ({"program": {"kind": "recipe", "recipe": "images"}}, "recipe was gpt, now images"),
        ({"variants": plan().variants[:1]}, "name=sgd is no longer among the variants"),
        ({"threads": 3}, "threads was 2, now 3"),
        ({"search": {"trials": 3}}, "only one of the two comparisons is a search"),
    ],
)
def test_another_comparison_in_the_same_directory_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    before = written_and_read(plan())
    with refused("comparison-differs", path=Path("runs/a")) as error:
        go_on(from_plan=before, with_plan=plan(**changes), threads_given=True)
    (difference,) = error.value.fields["differences"]
    assert difference.startswith(words)
