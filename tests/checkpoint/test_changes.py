"""On which machine what is compared, and what a change is called. Programs that changed:
tests/run/test_changed_programs.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from in_one import in_one
from refused import refused
from surefoot.checkpoint.changes import find_changes, refuse_changes
from surefoot.config.accepted_changes import change_names
from surefoot.errors import CheckpointError, Setting

MACHINE = {
    "torch": "2",
    "surefoot": "1",
    "device": "cpu",
    "hardware": "x",
    "cpu": "y",
    "deterministic": False,
    "threads": 1,
    "ranks": 1,
}
SOURCES = {
    "loss": {"loss()": "a"},
    "model": {"model()": "a"},
    "collate": {"collate()": "a"},
    "data": {"data()": "a"},
    "optimizer": {"optimizer()": "a"},
}


def facts(**changes: Any) -> dict[str, Any]:
    """What a checkpoint has noted of a program, with these changes."""
    noted: dict[str, Any] = {
        "machine": MACHINE,
        "format": "fp32",
        "samples": {"sample 0": "a"},
        "splits": {},
        "micro_batch": {"sha256": "a", "count": 2, "samples": 2},
        "loss": "1.0",
        "draws": False,
        "failed": False,
        "sources": SOURCES,
        "accepted": [],
    }
    return noted | changes


def changed_sources(*names: str) -> dict[str, Any]:
    """The sources with others for these names."""
    return SOURCES | {name: {} for name in names}


def changed_names(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, ...]]:
    changes, _ = find_changes(before, now)
    return [change.names for change in changes]


THREADS = MACHINE | {"threads": 4}
RANKS = MACHINE | {"ranks": 2}
ELSEWHERE = MACHINE | {"hardware": "z"}
GPU = MACHINE | {"device": "cuda"}
SAMPLE = {"sample 0": "b"}
SAMPLES = {"sample 0": "b", "sample 1": "b"}
BATCH = {"sha256": "b", "count": 2, "samples": 2}
HALF = {"sha256": "b", "count": 1, "samples": 1}  # the first of several ranks
LOSS = changed_sources("loss")


@in_one
@pytest.mark.parametrize(
    ("now", "names"),
    [
        # on the same machine bits are compared
        ({}, []),
        ({"loss": "1.0000001"}, [("loss",)]),
        ({"loss": "nan"}, [("loss",)]),
        ({"samples": SAMPLE}, [("data",)]),
        ({"samples": SAMPLES, "micro_batch": BATCH, "loss": "7"}, [("data",)]),
        ({"micro_batch": BATCH}, [("collate",)]),
        ({"micro_batch": BATCH, "sources": changed_sources("collate")}, [("collate",)]),
        ({"sources": changed_sources("optimizer")}, [("optimizer",)]),
        ({"loss": "2.0", "sources": changed_sources("loss", "model")}, [("loss", "model")]),
        ({"loss": None, "sources": LOSS}, [("loss",)]),
        # the step says why it fails
        ({"loss": None, "failed": True, "sources": LOSS}, []),
        # on another one losses are compared to rounding
        ({"loss": "1.00001", "machine": ELSEWHERE}, []),
        ({"loss": "1.001", "machine": ELSEWHERE}, [("loss",)]),
        ({"loss": "1.001", "machine": ELSEWHERE, "format": "bf16"}, []),
        ({"loss": "1.1", "machine": ELSEWHERE, "format": "bf16"}, [("loss",)]),
        ({"samples": SAMPLE, "micro_batch": BATCH, "machine": ELSEWHERE}, []),
        ({"samples": SAMPLE, "micro_batch": BATCH, "machine": THREADS}, [("data",)]),
        ({"loss": "1.00001", "machine": THREADS}, []),
        ({"loss": "7", "micro_batch": HALF, "machine": RANKS}, []),
        ({"loss": "2.0", "machine": GPU, "draws": True}, []),
        ({"loss": "2.0", "machine": GPU}, [("loss",)]),
    ],
)
def test_bits_are_compared_on_the_same_machine_and_losses_to_rounding_on_another(
    now: dict[str, Any], names: list[tuple[str, ...]]
) -> None:
    assert changed_names(facts(), facts(**now)) == names


def test_a_loss_that_the_weights_of_step_0_make_equal_is_told_by_other_outputs() -> None:
    without = facts()  # of a version that did not note it
    before = facts(noisy_loss="2.0")
    now = facts(noisy_loss="2.5")

    assert changed_names(before, now) == [("loss",)]
    assert changed_names(before, before) == []
    assert changed_names(without, now) == []
    assert changed_names(before, facts(noisy_loss=None)) == []


def test_a_file_that_was_renamed_changes_nothing_by_itself() -> None:
    def sources_in(file: str, text: str) -> dict[str, Any]:
        return SOURCES | {"loss": {f"loss() in {file}": text, f"used() in {file}": "same"}}

    before = facts(sources=sources_in("a.py", "1"))
    renamed = facts(sources=sources_in("b.py", "1"))
    renamed_and_changed = facts(loss="2.0", sources=sources_in("b.py", "2"))

    assert find_changes(before, renamed) == ([], [])
    (change,), _ = find_changes(before, renamed_and_changed)
    assert change.names == ("loss",)
    assert change.cause == "changed: loss() in b.py"


def test_a_change_of_two_names_is_accepted_by_both_of_them() -> None:
    now = facts(loss="2.0", sources=changed_sources("loss", "model"))
    changes, _ = find_changes(facts(), now)

    with refused("program-changed", CheckpointError, changed=["loss", "model"]) as caught:
        refuse_changes(changes, accepted=("loss",), where="step-00000004")
    *_, (_, accept) = caught.value.remedies
    assert accept == Setting("accept_change", "loss,model")

    refuse_changes(changes, accepted=("loss", "model"), where="step-00000004")


def test_on_a_gpu_without_deterministic_kernels_a_loss_is_compared_to_rounding() -> None:
    before = facts(machine=GPU)

    assert changed_names(before, facts(machine=GPU, loss="1.00001")) == []
    assert changed_names(before, facts(machine=GPU, loss="1.001")) == [("loss",)]


def test_a_loss_that_was_not_finite_and_still_is_not_is_the_same() -> None:
    assert find_changes(facts(loss="nan"), facts(loss="nan")) == ([], [])


def test_names_of_changes_are_text_or_a_list() -> None:
    assert change_names("loss,data") == change_names(["loss", "data"]) == ("loss", "data")
