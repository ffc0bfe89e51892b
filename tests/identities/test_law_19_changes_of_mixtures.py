"""Law 19: the weights of a mixture change while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import surefoot as sf
from identities import changed_runs
from identities.changed_runs import (
    assert_same_end,
    data,
    given_the_journal_of,
    same,
    samples_read,
    weights,
)
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.config.mixture_weights import quotas
from surefoot.config.setting_change import SettingChange
from surefoot.data.mixture import MixtureOrder
from surefoot.run.run import Run
from surefoot.tracking.change_journal import append_changes, read_changes

SIZES = [300, 150]
END = 45
AT = 13  # of steps with 100 samples: in the midst of a block
NEW = {"train_data.weights.web": 0.2, "train_data.weights.old books": 0.8}


def mixture(web: float | str = 0.7, books: float | str = 0.3) -> sf.data.Mixture:
    return sf.data.Mixture(
        {"web": (data(300, seed=0), web), "old books": (data(150, seed=1), books)}
    )


def run_in(run_dir: Path, **settings: Any) -> Run:
    of_mixture = {"train_data": mixture(), "batch_size": 100, "length": f"{END} steps"}
    return changed_runs.run_in(run_dir, **(of_mixture | settings))


def changed_run(run_dir: Path, **settings: Any) -> Run:
    run_in(run_dir, stop_after=f"{AT} steps").train()
    sf.load(run_dir).change("a test", **settings)
    return run_in(run_dir)


def given_run(changed: Path, run_dir: Path, **settings: Any) -> Run:
    """Return a run that is given the journal of another from the start."""
    return run_in(given_the_journal_of(changed, run_dir), **settings)


def test_a_run_given_its_journal_from_the_start_ends_with_the_same_bits(tmp_path: Path) -> None:
    run = changed_run(tmp_path / "changed", **NEW)
    run.train()
    given = given_run(tmp_path / "changed", tmp_path / "given")
    given.train()
    unchanged = run_in(tmp_path / "unchanged")
    unchanged.train()

    assert same(weights(given), weights(run))
    assert not same(weights(unchanged), weights(run))
    assert sf.load(run_in(tmp_path / "changed")).verify(steps="all").problems == []


@pytest.mark.parametrize("stopped_at", [14, 19, 20, 21, 33])
def test_a_changed_run_resumes_to_the_same_bits(stopped_at: int, tmp_path: Path) -> None:
    whole = changed_run(tmp_path / "whole", **NEW)
    whole.train()
    changed_run(tmp_path / "stopped", **NEW)
    run_in(tmp_path / "stopped", stop_after=f"{stopped_at} steps").train()
    resumed = run_in(tmp_path / "stopped")
    resumed.train()
    assert same(weights(resumed), weights(whole))


@forks
def test_two_ranks_that_are_given_the_journal_train_as_those_that_were_changed(
    tmp_path: Path,
) -> None:
    changed = tmp_path / "changed"
    train_on_two_ranks(changed, stop_after=f"{AT} steps", micro_batch_size=50)
    sf.load(changed).change(**NEW)
    train_on_two_ranks(changed, micro_batch_size=50)
    given = given_the_journal_of(changed, tmp_path / "given")
    train_on_two_ranks(given, micro_batch_size=50)
    assert_same_end(given, changed, step=END)


def train_on_two_ranks(run_dir: Path, **settings: Any) -> None:
    statuses = on_ranks(2, lambda _: run_in(run_dir, **settings).train())
    assert statuses == [0, 0]


def test_the_new_quotas_hold_from_the_next_block_on(tmp_path: Path) -> None:
    run = changed_run(tmp_path, **NEW)
    after = run.parts.pipeline.plan
    before = run_in(tmp_path / "before").parts.pipeline.plan

    samples = samples_read(after, range(45))
    assert samples[:2000] == samples_read(before, range(20))
    for begin, share in [(0, 0.7), (1000, 0.7), (2000, 0.2), (3000, 0.2)]:
        of_web = [sample for _, sample in samples[begin : begin + 1000] if sample < 300]
        assert len(of_web) == 1000 * share
    assert_whole_passes(samples[:4000], SIZES)


def assert_whole_passes(samples: list[tuple[int, int]], sizes: list[int]) -> None:
    """Assert that every pass over each source has each of its samples once; the last passes may be
    cut off. The samples are those of whole blocks.
    """
    first = 0
    for size in sizes:
        of_source = [(epoch, id_) for epoch, id_ in samples if first <= id_ < first + size]
        assert len(set(of_source)) == len(of_source)
        passes = [epoch for epoch, _ in of_source]
        for epoch in range(max(passes)):
            assert passes.count(epoch) == size
        first += size


changes_of_weights = st.lists(
    st.tuples(st.integers(0, 9000), st.lists(st.integers(1, 9), min_size=3, max_size=3)),
    max_size=4,
)


@given(changes=changes_of_weights, batch_size=st.sampled_from([7, 250, 1000, 3000]))
@settings(max_examples=40)
def test_no_sample_is_skipped_or_repeated_in_a_pass_whatever_changes_when(
    changes: list[tuple[int, list[int]]], batch_size: int
) -> None:
    sizes = [700, 40, 400]
    weights_from: list[tuple[int, list[int]]] = [(0, [5, 1, 4]), *sorted(changes)]
    plan = MixtureOrder(
        3,
        sizes=sizes,
        weights=weights_from[-1][1],
        batch_size=batch_size,
        weights_from=weights_from,
    )
    samples: list[tuple[int, int]] = []
    for step in range(-(-10_000 // batch_size)):
        ids, epochs = plan.ids(step)
        samples += zip(epochs.tolist(), ids.tolist(), strict=True)

    ends = np.cumsum(sizes)
    for block in range(10):
        expected = [shares for begin, shares in weights_from if begin <= 1000 * block][-1]
        ids_of_block = [sample for _, sample in samples[1000 * block : 1000 * (block + 1)]]
        counts = np.bincount(np.searchsorted(ends, ids_of_block, side="right"), minlength=3)
        assert counts.tolist() == quotas(expected)
    assert_whole_passes(samples[:10_000], sizes)


def test_another_batch_size_too_goes_on_where_the_last_batch_ended(tmp_path: Path) -> None:
    run = changed_run(tmp_path, **NEW, batch_size=120)
    plan = run.parts.pipeline.plan
    whole = MixtureOrder(
        0,
        sizes=SIZES,
        weights=[0.2, 0.8],
        batch_size=100,
        weights_from=[(0, [0.7, 0.3]), (AT * 100, [0.2, 0.8])],
    )
    expected: list[int] = []
    for step in range(45):
        expected += whole.ids(step)[0].tolist()
    changed = [sample for _, sample in samples_read(plan, range(AT, 35))]
    assert changed == expected[AT * 100 : AT * 100 + 22 * 120]


def test_a_body_changes_the_weights(tmp_path: Path) -> None:
    changed = changed_run(tmp_path / "changed", **NEW)
    changed.train()
    run = run_in(tmp_path / "run")
    with run:
        for step in run:
            if step.index + 1 >= AT:
                run.change("train_data.weights", {"web": 0.2, "old books": 0.8})
    assert len(read_changes(tmp_path / "run")) == 1
    assert same(weights(run), weights(changed))


def test_the_journal_has_all_weights_by_name(tmp_path: Path) -> None:
    changed_run(tmp_path, **{"train_data.weights.web": 0.2})
    (change,) = read_changes(tmp_path)
    assert change.setting == "train_data.weights"
    assert change.was == {"web": 0.7, "old books": 0.3}
    assert change.now == {"web": 0.2, "old books": 0.3}
    assert sf.load(tmp_path).settings_at(AT)["train_data.weights"] == change.now
    sf.load(tmp_path).change(**{"train_data.weights": {"old books": 0.3}})
    assert len(read_changes(tmp_path)) == 1


@pytest.mark.parametrize("of_program", [(0.7, 0.3), (0.2, 0.8)])
def test_a_program_may_have_the_weights_of_the_beginning_or_of_now(
    of_program: tuple[float, float], tmp_path: Path
) -> None:
    changed_run(tmp_path, **NEW)
    run = run_in(tmp_path, train_data=mixture(*of_program))
    assert run.parts.plan.identity["data"]["plan"]["weights"] == [0.2, 0.8]
    run.train()
    assert run.state.step == 45


def test_other_weights_in_the_program_name_the_line_to_type(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    with pytest.raises(sf.CheckpointError) as refusal:
        run_in(tmp_path, train_data=mixture(0.5, 0.5)).train()
    assert refusal.value.code == "settings-changed"
    assert "surefoot change" in str(refusal.value)
    assert "train_data.weights" in str(refusal.value)

    sf.load(tmp_path).change(**NEW)
    with refused("changed-setting-differs", at_beginning={"web": 0.7, "old books": 0.3}):
        run_in(tmp_path, train_data=mixture(0.5, 0.5))


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        ({"train_data.weights.web": 0}, "mixture-weights-invalid"),
        ({"train_data.weights.web": 1e-9}, "mixture-weights-invalid"),
        ({"train_data.weights.web": "much"}, "setting-out-of-range"),
        ({"train_data.weights.books": 0.5}, "weights-of-other-data-sets"),
        ({"train_data.weights": [0.5, 0.5]}, "weights-of-other-data-sets"),
        ({"train_data.sizes": 3}, "setting-cannot-change"),
    ],
)
def test_weights_that_cannot_be_are_refused_and_nothing_written(
    weights: dict[str, Any], code: str, tmp_path: Path
) -> None:
    run_in(tmp_path, stop_after="1 steps").train()
    with refused(code):
        sf.load(tmp_path).change(**weights)
    assert read_changes(tmp_path) == ()


def test_data_of_one_kind_have_no_weights(tmp_path: Path) -> None:
    run_in(tmp_path, train_data=data(300, seed=0), stop_after="1 steps").train()
    with refused("setting-cannot-change"):
        sf.load(tmp_path).change(**NEW)


def test_a_mixture_in_a_data_loader_changes_too(tmp_path: Path) -> None:
    loader: Any = DataLoader(mixture(), batch_size=100, shuffle=True)
    run_in(
        tmp_path / "loader", train_data=loader, batch_size=None, stop_after=f"{AT} steps"
    ).train()
    sf.load(tmp_path / "loader").change(**NEW)
    run = run_in(tmp_path / "loader", train_data=loader, batch_size=None)
    run.train()
    direct = changed_run(tmp_path / "direct", **NEW)
    direct.train()
    assert samples_read(run.parts.pipeline.plan, range(45)) == samples_read(
        direct.parts.pipeline.plan, range(45)
    )


def test_a_run_whose_sessions_know_no_weights_changes_them(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    file = tmp_path / "environment.json"
    text = file.read_text()
    assert '"train_data.weights"' in text
    file.write_text(text.replace('"train_data.weights"', '"some_setting"'))
    sf.load(tmp_path).change(**NEW)
    run = run_in(tmp_path)
    run.train()
    assert run.parts.plan.identity["data"]["plan"]["weights"] == [0.2, 0.8]


def test_weights_that_were_set_before_the_first_step_are_those_of_the_run(tmp_path: Path) -> None:
    tmp_path.joinpath("changed").mkdir()
    line = {"web": 0.7, "old books": 0.3}, {"web": 0.2, "old books": 0.8}
    append_changes(tmp_path / "changed", [SettingChange(0, 0, "train_data.weights", *line)])
    changed = run_in(tmp_path / "changed").parts.pipeline.plan
    new = run_in(tmp_path / "new", train_data=mixture(0.2, 0.8)).parts.pipeline.plan
    assert samples_read(changed, range(45)) == samples_read(new, range(45))
