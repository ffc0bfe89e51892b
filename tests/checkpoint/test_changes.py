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


def taken(**changes: Any) -> dict[str, Any]:
    machine = {"torch": "2", "surefoot": "1", "device": "cpu", "hardware": "x", "cpu": "y"}
    machine |= {"deterministic": False, "threads": 1, "ranks": 1}
    sources = {
        name: {f"{name}()": "a"} for name in ("loss", "model", "collate", "data", "optimizer")
    }
    plain: dict[str, Any] = {
        "machine": machine,
        "format": "fp32",
        "samples": {"sample 0": "a"},
        "splits": {},
    }
    plain |= {
        "micro_batch": {"sha256": "a", "count": 2, "samples": 2},
        "loss": "1.0",
        "draws": False,
        "failed": False,
        "sources": sources,
        "accepted": [],
    }
    return plain | changes


THREADS = taken()["machine"] | {"threads": 4}
ELSEWHERE = taken()["machine"] | {"hardware": "z"}
GPU = taken()["machine"] | {"device": "cuda"}
ANOTHER = {"sha256": "b", "count": 2, "samples": 2}
HALF = {"sha256": "b", "count": 1, "samples": 1}  # the first of several ranks


@in_one
@pytest.mark.parametrize(
    ("now", "refused"),
    [
        ({}, []),
        ({"loss": "1.0000001"}, [("loss",)]),
        ({"loss": "nan"}, [("loss",)]),
        ({"loss": "1.00001", "machine": ELSEWHERE}, []),
        ({"loss": "1.001", "machine": ELSEWHERE}, [("loss",)]),
        ({"loss": "1.001", "machine": ELSEWHERE, "format": "bf16"}, []),
        ({"loss": "1.1", "machine": ELSEWHERE, "format": "bf16"}, [("loss",)]),
        ({"samples": {"sample 0": "b"}, "micro_batch": ANOTHER, "machine": ELSEWHERE}, []),
        ({"samples": {"sample 0": "b"}, "micro_batch": ANOTHER, "machine": THREADS}, [("data",)]),
        ({"loss": "1.00001", "machine": THREADS}, []),
        ({"loss": "7", "micro_batch": HALF, "machine": taken()["machine"] | {"ranks": 2}}, []),
        ({"loss": "2.0", "machine": GPU, "draws": True}, []),
        ({"loss": "2.0", "machine": GPU}, [("loss",)]),
        ({"samples": {"sample 0": "b"}}, [("data",)]),
        (
            {"samples": {"sample 0": "b", "sample 1": "b"}, "micro_batch": ANOTHER, "loss": "7"},
            [("data",)],
        ),
        ({"micro_batch": ANOTHER}, [("collate",)]),
        ({"micro_batch": ANOTHER, "sources": taken()["sources"] | {"collate": {}}}, [("collate",)]),
        ({"sources": taken()["sources"] | {"optimizer": {}}}, [("optimizer",)]),
        (
            {"loss": "2.0", "sources": taken()["sources"] | {"loss": {}, "model": {}}},
            [("loss", "model")],
        ),
        ({"loss": None, "sources": taken()["sources"] | {"loss": {}}}, [("loss",)]),
        (
            {"loss": None, "failed": True, "sources": taken()["sources"] | {"loss": {}}},
            [],
        ),  # the step says why it fails
    ],
)
def test_bits_are_compared_on_the_same_machine_and_losses_to_rounding_on_another(
    now: dict[str, Any], refused: list[tuple[str, ...]]
) -> None:
    assert [change.names for change in find_changes(taken(), taken(**now))[0]] == refused


def test_a_loss_that_the_weights_of_step_0_make_equal_is_told_by_other_outputs() -> None:
    older, before, now = taken(), taken(noisy_loss="2.0"), taken(noisy_loss="2.5")
    assert [change.names for change in find_changes(before, now)[0]] == [("loss",)]
    assert find_changes(before, before)[0] == []
    assert find_changes(older, now)[0] == []  # a run of a version without it
    assert find_changes(before, taken(noisy_loss=None))[0] == []


def test_a_file_that_was_renamed_changes_nothing_by_itself() -> None:
    def of_file(file: str, text: str) -> dict[str, Any]:
        return taken()["sources"] | {
            "loss": {f"loss() in {file}": text, f"used() in {file}": "same"}
        }

    before = taken(sources=of_file("a.py", "1"))
    assert find_changes(before, taken(sources=of_file("b.py", "1"))) == ([], [])
    (change,), _ = find_changes(before, taken(loss="2.0", sources=of_file("b.py", "2")))
    assert (change.names, change.cause) == (("loss",), "changed: loss() in b.py")


def test_a_change_of_two_names_is_accepted_by_both_of_them() -> None:
    changes, _ = find_changes(
        taken(), taken(loss="2.0", sources=taken()["sources"] | {"loss": {}, "model": {}})
    )
    with refused("program-changed", CheckpointError, changed=["loss", "model"]) as caught:
        refuse_changes(changes, accepted=("loss",), where="step-00000004")
    *_, (_, accept) = caught.value.remedies
    assert accept == Setting("accept_change", "loss,model")
    refuse_changes(changes, accepted=("loss", "model"), where="step-00000004")


def test_on_a_gpu_without_deterministic_kernels_a_loss_is_compared_to_rounding() -> None:
    found = [
        find_changes(taken(machine=GPU), taken(machine=GPU, loss=loss))[0]
        for loss in ("1.00001", "1.001")
    ]
    assert [len(changes) for changes in found] == [0, 1]


def test_a_loss_that_was_not_finite_and_still_is_not_is_the_same() -> None:
    assert find_changes(taken(loss="nan"), taken(loss="nan")) == ([], [])


def test_names_of_changes_are_text_or_a_list() -> None:
    assert change_names("loss,data") == change_names(["loss", "data"]) == ("loss", "data")
