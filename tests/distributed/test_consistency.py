"""Ranks that were not started alike: what differs is named, and none of them waits for another.
(10 s)
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from identities import world_runs
from rank_processes import Outcome, Ranks


def refusal(outcomes: list[Outcome], kind: type[sf.SurefootError] = sf.ConfigError) -> str:
    """What rank 0 prints of an error that ends both."""
    assert [outcome.status for outcome in outcomes] == [kind.exit_status] * 2
    return outcomes[0].text


def of_other_settings() -> None:
    rank = int(os.environ["RANK"])
    world_runs.built(
        optimizer="sgd" if rank else "adamw", clip="norm 0.5" if rank else "norm 1.0"
    ).train()


def test_ranks_of_other_configurations_are_refused_and_the_fields_named(ranks: Ranks) -> None:
    text = refusal(ranks.outcomes(ranks.start(2, of_other_settings)))
    assert "[ranks-of-different-settings]" in text
    assert "optimizer.name" in text


def of_other_data() -> None:
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    world_runs.built(
        train_data=sf.Split(tuple(torch.randn(24, 6, generator=generator) for _ in range(3))).data
    ).train()


def test_ranks_of_other_data_are_refused_and_the_seed_named(ranks: Ranks) -> None:
    text = refusal(ranks.outcomes(ranks.start(2, of_other_data)), sf.DataError)
    assert "[data-differs-among-ranks]" in text
    assert "torch.manual_seed(0)" in text


def of_another(which: str, values: list[Any], run_dir: str) -> None:
    """Each rank with its own value of one argument, which decides what ranks do together before
    they are compared as runs.
    """
    value = values[int(os.environ["RANK"])]
    if which == "model":
        value = partial(torch.nn.Linear, 6, value)
    if which == "splits":
        value = {
            name: sf.Split((torch.zeros(3, 6), torch.zeros(3), torch.zeros(3))) for name in value
        }
    world_runs.built(run_dir=run_dir, **{which: value})


@pytest.mark.parametrize(
    ("which", "values", "name"),
    [
        ("micro_batch_size", [4, None], "micro_batch_size"),
        ("splits", [["a"], ["a", "b"]], "splits.b.data"),
        ("model", [16, 3], "model.weight"),
    ],
)
def test_other_settings_are_found_before_ranks_wait_for_each_other(
    ranks: Ranks, tmp_path: Path, which: str, values: list[Any], name: str
) -> None:
    place = ranks.start(2, of_another, which=which, values=values, run_dir=str(tmp_path / "run"))
    said = refusal(ranks.outcomes(place))
    assert "[ranks-of-different-settings]" in said
    assert name in said


def failing_alone() -> None:
    world_runs.built(model=partial(torch.nn.Linear, 6, 3 if os.environ["RANK"] == "0" else -1))


def test_a_rank_whose_run_cannot_be_built_is_named_by_the_other_and_the_status_is_7(
    ranks: Ranks,
) -> None:
    first, second = ranks.outcomes(ranks.start(2, failing_alone))
    assert (first.status, second.status) == (7, 1)
    assert "rank 1 (" in first.text
    assert "failed while" in first.text
