"""The loops that benchmarks/overhead.py times make one training; 2 seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

STEPS = 20


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """benchmarks/overhead.py, imported as it is when it runs."""
    place = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.append(place)  # last: files of that folder have names that tests have too
    try:
        yield import_module("overhead")
    finally:
        sys.path.remove(place)


def peer(bench: Any, name: str) -> Any:
    return next(peer for peer in bench.PEERS if peer.name == name)


@pytest.mark.parametrize("case", ["mlp/memory", "gpt/loader"])
def test_surefoot_makes_the_training_of_the_plain_loop(bench: Any, case: str) -> None:
    name, data = case.split("/")
    ours = peer(bench, "surefoot")
    found = bench.differs(
        ours, ours.loop(), bench.WORKS[name](), steps=STEPS, loader=data == "loader"
    )
    assert found is None


@pytest.mark.filterwarnings("ignore")  # what peers warn of is theirs
@pytest.mark.slow  # to import them takes longer than to try them
@pytest.mark.parametrize(
    "name", ["Ignite", "Fabric", "Accelerate", "torchtnt", "HF Trainer", "Lightning", "Keras"]
)
def test_a_peer_makes_the_training_of_the_plain_loop(bench: Any, name: str) -> None:
    try:
        loop = peer(bench, name).loop()
    except ModuleNotFoundError as problem:
        pytest.skip(f"{name} is not installed: {problem.name} (pip install 'surefoot[peers]')")
    assert bench.differs(peer(bench, name), loop, bench.mlp(), steps=STEPS, loader=False) is None


def test_a_loop_with_other_losses_is_not_timed(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def unlimited(training: Any) -> Any:
        training.optimizer = lambda model, fused: torch.optim.SGD(model.parameters(), lr=1.0)
        return peer(bench, "plain").loop()(training)

    loops = {peer(bench, "plain"): peer(bench, "plain").loop(), peer(bench, "Ignite"): unlimited}
    assert list(bench.same(loops, "mlp", loader=False, steps=STEPS)) == [peer(bench, "plain")]
    assert "Ignite FAILED and is not timed: losses differ by up to" in capsys.readouterr().out


def test_the_short_form_ends_with_the_ratio(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    short = ["--short", "--only", "surefoot", "--of", "mlp/memory", "--steps", "201"]
    monkeypatch.setattr(sys, "argv", ["overhead.py", *short])
    try:
        bench.main()
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if line.split()[0] == "surefoot")
    assert lines[-1].split()[:2] == ["surefoot/plain", ours.split()[2]]
    assert float(ours.split()[2]) > 0
