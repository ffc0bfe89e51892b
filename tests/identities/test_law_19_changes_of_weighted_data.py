"""Law 19: a run whose samples are drawn by weights goes on with more data, or with other weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import surefoot as sf
from identities.changed_runs import given_the_journal_of, same, samples_read, weights
from identities.test_law_19_changes_of_data import (
    AT,
    BEGINS,
    FEW,
    MANY,
    data,
    run_in,
)
from refused import refused
from surefoot.run.run import Run
from surefoot.tracking.change_journal import read_changes

KINDS = {"with replacement": True, "without replacement": False}


def weighted(run_dir: Path, samples: int, kind: str, *, scale: float = 1.0, **settings: Any) -> Run:
    of_samples = [1.0 + scale * (sample % 3) for sample in range(samples)]
    order = sf.data.Weighted(of_samples, replacement=KINDS[kind])
    return run_in(run_dir, samples, order=order, **settings)


def changed_run(run_dir: Path, kind: str, when: str) -> Run:
    """Return a run whose data have changed, and that stands where the new ones begin."""
    weighted(run_dir, FEW, kind, stop_after=f"{AT} steps").train()
    sf.load(run_dir).change("a test", data=when)
    stop_at_new_data(run_dir, kind, when)
    return weighted(run_dir, MANY, kind)


def stop_at_new_data(run_dir: Path, kind: str, when: str) -> None:
    with refused("data-of-earlier-steps", sf.CheckpointError):
        weighted(run_dir, FEW, kind).train()
    assert sf.load(run_dir).step == BEGINS[when]


@pytest.mark.parametrize("when", BEGINS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_given_its_journal_from_the_start_ends_with_the_same_bits(
    kind: str, when: str, tmp_path: Path
) -> None:
    changed = changed_run(tmp_path / "changed", kind, when)
    changed.train()
    given = given_the_journal_of(tmp_path / "changed", tmp_path / "given")
    stop_at_new_data(given, kind, when)
    for step in range(BEGINS[when] + 1, changed.state.step):  # a resume after every step
        if step % 5 == 0 or step < BEGINS[when] + 3:
            weighted(given, MANY, kind, stop_after=f"{step} steps").train()
    run = weighted(given, MANY, kind)
    run.train()

    assert run.state.step == changed.state.step == BEGINS[when] + -(-3 * MANY // 8)
    assert same(weights(run), weights(changed))
    assert sf.load(weighted(given, MANY, kind)).verify(steps="all").problems == []


@pytest.mark.parametrize("when", BEGINS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_draws_are_those_of_a_run_that_always_had_the_new_data(
    kind: str, when: str, tmp_path: Path
) -> None:
    run = changed_run(tmp_path / "run", kind, when)
    seen = samples_read(run.parts.pipeline.plan, range(BEGINS[when], run.parts.length.steps))
    always = weighted(tmp_path / "always", MANY, kind).parts.pipeline.plan
    assert seen[: 3 * MANY] == samples_read(always, range(60))[2 * MANY : 5 * MANY]
    if kind == "without replacement":
        expected = [(epoch, id_) for epoch in (2, 3, 4) for id_ in range(MANY)]
        assert sorted(seen[: 3 * MANY]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_other_weights_of_the_same_samples_are_other_data(kind: str, tmp_path: Path) -> None:
    weighted(tmp_path, FEW, kind, stop_after=f"{AT} steps").train()
    with pytest.raises(sf.CheckpointError) as refusal:
        weighted(tmp_path, FEW, kind, scale=5.0).train()
    assert "data='at once'" in str(refusal.value)
    sf.load(tmp_path).change("a test", data="at once")
    with refused("data-of-earlier-steps", sf.CheckpointError):
        weighted(tmp_path, FEW, kind).train()
    run = weighted(tmp_path, FEW, kind, scale=5.0)
    run.train()
    assert run.state.step == AT + -(-3 * FEW // 8)


def test_steps_before_the_change_need_the_weights_that_they_had(tmp_path: Path) -> None:
    kind = "with replacement"
    weighted(tmp_path / "run", FEW, kind, stop_after=f"{AT} steps").train()
    sf.load(tmp_path / "run").change("a test", data="next epoch")
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(tmp_path / "run" / "changes.jsonl", given)
    with refused("data-of-later-steps", sf.CheckpointError):
        weighted(given, FEW, kind, scale=5.0)
    assert len(list(given.iterdir())) == 1
    assert len(read_changes(given)) == 1


def test_a_sampler_of_torch_gives_the_weights_too(tmp_path: Path) -> None:
    def trained(samples: int, **settings: Any) -> Run:
        of_samples = [1.0 + sample % 3 for sample in range(samples)]
        sampler = WeightedRandomSampler(of_samples, samples)
        dataset = TensorDataset(*data(samples))
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        chosen = {"train_data": loader, "batch_size": None, **settings}
        run = run_in(tmp_path / "loader", samples, **chosen)
        run.train()
        return run

    trained(FEW, stop_after=f"{AT} steps")
    sf.load(tmp_path / "loader").change("a test", data="at once")
    run = trained(MANY)
    direct = changed_run(tmp_path / "direct", "with replacement", "at once")
    direct.train()
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(weights(run), weights(direct), strict=True)
    )
