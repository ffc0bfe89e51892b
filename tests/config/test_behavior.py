"""A run keeps the number of its behavior for its whole life; a number that this version lacks is
refused by name. (2 s)
"""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from surefoot.checkpoint import Store
from surefoot.checkpoint.manifest import from_bytes, to_bytes
from surefoot.config import behavior
from surefoot.config.behavior import BehaviorChange, note_of_older
from surefoot.program import read_program
from surefoot.tracking.run_reader import behavior_in

ROOT = Path(__file__).parents[2]


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One behavior more than there is."""
    number = behavior.newest_behavior() + 1
    change = BehaviorChange(number, since="9.9.9", what="pictures are turned")
    monkeypatch.setattr(behavior, "BEHAVIORS", [*behavior.BEHAVIORS, change])


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    x = torch.arange(8.0)[:, None]
    settings: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(1, 1),
        "loss": small_loss,
        "train_data": (x, 2 * x),
        "splits": {"val": sf.Split((x, 2 * x))},
        "batch_size": 4,
        "length": "4 steps",
        "optimizer": sf.optim.sgd(lr=2**-6),
        "device": "cpu",
        "console": False,
        "report": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def small_loss(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def saved_identity(run_dir: Path) -> dict[str, Any]:
    newest = Store(run_dir / "checkpoints").newest_intact()
    assert newest is not None
    return newest[0].saved.identity


def test_the_numbers_follow_each_other_from_1() -> None:
    numbers = [change.number for change in behavior.BEHAVIORS]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(change.since and change.what for change in behavior.BEHAVIORS)


def test_the_page_lists_every_change() -> None:
    page = (ROOT / "docs" / "explained" / "resume.md").read_text(encoding="utf-8")
    for change in behavior.BEHAVIORS:
        assert f"| {change.number} | {change.since} | {change.what} |" in page


def test_a_run_of_the_first_behavior_does_not_name_it(tmp_path: Path) -> None:
    if behavior.newest_behavior() > 1:
        pytest.skip("a new run has a later behavior")
    build(tmp_path / "run").train()
    assert "behavior" not in saved_identity(tmp_path / "run")


@pytest.mark.usefixtures("newer")
def test_a_new_run_begins_with_the_newest_behavior_and_keeps_it(tmp_path: Path) -> None:
    newest = behavior.newest_behavior()
    build(tmp_path / "run", stop_after="2 steps").train()
    assert saved_identity(tmp_path / "run")["behavior"] == newest
    run = build(tmp_path / "run")
    run.train()
    assert run.parts.plan.identity["behavior"] == newest
    assert saved_identity(tmp_path / "run")["behavior"] == newest
    assert sf.load(run).verify(say=None).exit_status == 0


def test_an_older_run_keeps_its_behavior_in_every_verb(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    before = behavior.newest_behavior()
    build(tmp_path / "run", stop_after="2 steps").train()
    as_it_began = saved_identity(tmp_path / "run")
    request.getfixturevalue("newer")
    resumed = build(tmp_path / "run", console=True)
    resumed.train()
    assert saved_identity(tmp_path / "run") == as_it_began
    assert behavior.behavior_of(resumed.parts.plan.identity) == before
    assert "without: pictures are turned (since 9.9.9)" in " ".join(capsys.readouterr().out.split())
    saved = sf.load(build(tmp_path / "run"))
    assert saved.verify(say=None).exit_status == 0
    rebuilt = saved.rebuild(one_process=True)
    assert behavior.behavior_of(rebuilt.parts.plan.identity) == before
    assert behavior_in(tmp_path / "run") == before


def test_what_reads_data_before_the_run_asks_its_directory(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = behavior.newest_behavior()
    build(tmp_path / "run", stop_after="2 steps").train()
    request.getfixturevalue("newer")
    assert behavior_in(tmp_path / "run") == before
    assert behavior_in(tmp_path / "new") == before + 1


@pytest.mark.usefixtures("newer")
def test_a_run_without_a_directory_has_the_newest_behavior() -> None:
    assert build(None).parts.plan.identity["behavior"] == behavior.newest_behavior()


@pytest.mark.parametrize("number", [0, 99, "2", True, 1.5, None])
def test_a_behavior_that_this_version_lacks_is_refused_by_name(number: Any, tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after="2 steps").train()
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        write_behavior(checkpoint, number)
    lacks = {"setting": "behavior", "value": number, "newest": behavior.newest_behavior()}
    with refused("behavior-unknown", sf.CheckpointError, **lacks):
        build(tmp_path / "run")
    with refused("behavior-unknown", sf.CheckpointError, **lacks):
        read_program(tmp_path / "run")


def write_behavior(checkpoint: Path, number: Any) -> None:
    """Write another behavior into a checkpoint, and the hash of its new state.json."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    state["identity"]["behavior"] = number
    content = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(content)
    manifest = from_bytes((checkpoint / "manifest.json").read_bytes())
    files = {**manifest.files, "state.json": (len(content), sha256(content).hexdigest())}
    (checkpoint / "manifest.json").write_bytes(to_bytes(replace(manifest, files=files)))


def test_a_damaged_state_does_not_say_how_a_run_began(tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after="2 steps", save_every="1 step").train()
    newest = tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json"
    state = json.loads(newest.read_text(encoding="utf-8"))
    state["identity"]["behavior"] = 99
    newest.write_text(json.dumps(state), encoding="utf-8")
    run = build(tmp_path / "run")
    run.train()
    assert run.state.step == 4


def test_what_an_older_run_does_without_is_said_with_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = [
        BehaviorChange(1, "0.1.0", "the first"),
        BehaviorChange(2, "0.2.0", "a ramp"),
        BehaviorChange(3, "0.3.0", "an order"),
    ]
    monkeypatch.setattr(behavior, "BEHAVIORS", changes)
    assert note_of_older(3) is None
    assert note_of_older(2) is not None
    assert str(note_of_older(2)).endswith("without: an order (since 0.3.0)")
    assert str(note_of_older(1)).endswith("without: a ramp (since 0.2.0); an order (since 0.3.0)")


def behavior_on_this_rank(run_dir: str) -> int:
    """Rank 1 is on another machine, where the run's directory does not exist."""
    import os

    here = Path(run_dir).parent
    if os.environ["RANK"] == "1":
        here = here / "another machine"
        here.mkdir()
    os.chdir(here)
    newest = behavior.newest_behavior()
    behavior.BEHAVIORS.append(BehaviorChange(newest + 1, since="9.9.9", what="pictures are turned"))
    run = build(Path(Path(run_dir).name), micro_batch_size=2)
    return int(behavior.behavior_of(run.parts.plan.identity)) - newest


def test_all_ranks_have_the_behavior_that_rank_0_reads(ranks: Ranks, tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after="2 steps", micro_batch_size=2).train()
    assert ranks(2, behavior_on_this_rank, run_dir=str(tmp_path / "run")) == [0, 0]
