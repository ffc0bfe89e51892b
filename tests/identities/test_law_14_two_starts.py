"""Law 14: the same command on machines with the same facts makes the same choices, whatever else
they do. 4 s.
"""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from rank_processes import forks, on_ranks

SOURCE = Path(sf.__file__).parent
CLOCKS = ("perf_counter", "process_time", "monotonic", "thread_time", "time")
STARTS = 4


class Net(nn.Sequential):
    """Large enough to be worth a choice, with a convolution, so that its layout is one too."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 128, 1),
            nn.ReLU(),
            nn.Conv2d(128, 800, 1),
            nn.Flatten(),
            nn.Linear(800 * 4, 4),
        )


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def choices(**changes: Any) -> dict[str, Any]:
    """What a start of one run comes to, before its first step."""
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(16, 3, 2, 2, generator=generator),
        torch.randint(4, (16,), generator=generator),
    )
    arguments: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data,
        "batch_size": 8,
        "length": "5000 steps",
        "optimizer": sf.optim.adamw(lr=1e-3),
        "precision": "auto",
        "channels_last": "auto",
        "compile": "auto",
        "device": "cpu",
        "report": False,
        "console": False,
    }
    run = sf.Run(**(arguments | changes))
    with run:
        return {
            name: run.parts.plan.identity.get(name)
            for name in ("precision", "channels_last", "compile")
        }


def gain_by_table(
    gains: dict[str, float], *, set_to: Callable[[Any, str, Any], None], instructions: str = "fast"
) -> None:
    """Make this processor one with these instructions, and the table one of such gains for networks
    of images on "fast" ones.
    """
    from surefoot.config import speed_table
    from surefoot.run import facts

    version = ".".join(torch.__version__.split(".")[:2])
    every = (1, 1 << 30)
    rows = [speed_table.Row("convolution", every, every, every, gains)]
    set_to(speed_table, "TABLE", {("fast", version): ("2026-11-22", rows)})
    set_to(facts, "instruction_set", lambda: instructions)


@contextmanager
def load() -> Iterator[None]:
    """Threads that take the processor away while this block runs."""
    stopped = threading.Event()
    matrix = torch.ones(200, 200)

    def burn() -> None:
        while not stopped.is_set():
            torch.mm(matrix, matrix)

    burners = [threading.Thread(target=burn) for _ in range(4)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        stopped.set()
        for burner in burners:
            burner.join()


def lying(start: int) -> Callable[[], float]:
    """A clock that jumps: by its own reading every second stretch is a thousand times as long, in
    every second start the others.
    """
    calls = iter(range(1 << 40))
    read = [0.0]

    def clock() -> float:
        read[0] += 1.0 if (next(calls) // 2 + start) % 2 else 0.001
        return read[0]

    return clock


def patched(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """Have everything of surefoot read lying clocks, however it imported them."""
    clocks = {name: (getattr(time, name), lying(start)) for name in CLOCKS}
    for module in [held for name, held in sys.modules.items() if name.startswith("surefoot")]:
        for name, (real, lie) in clocks.items():
            if vars(module).get(name) is real:
                monkeypatch.setattr(module, name, lie)


@pytest.mark.parametrize(
    "gains", [None, {"bf16": 2.0, "channels last": 1.0, "bf16, channels last": 3.0}]
)
def test_starts_under_load_and_by_clocks_that_jump_choose_alike(
    gains: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the table has for this machine, and where it has a gain."""
    if gains is not None:
        gain_by_table(gains, set_to=monkeypatch.setattr)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        quiet = choices()
        found = []
        for start in range(STARTS):
            with monkeypatch.context() as lies, load():
                patched(lies, start)
                found.append(choices())
    finally:
        torch.set_num_threads(threads)
    assert found == [quiet] * STARTS
    assert gains is None or quiet == {"precision": "bf16", "channels_last": True, "compile": False}


def test_the_loss_is_not_called_before_the_first_step() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return loss(model, batch)

    choices(loss=counted)
    assert calls == []


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports when it runs, inside of functions too; not those for
    types alone.
    """

    def below(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                yield child
                yield from below(child)

    for node in below(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reachable(first: str) -> dict[str, list[str]]:
    """By module of surefoot's what it imports, of all that a module can reach; the package itself
    loads nothing.
    """
    found: dict[str, list[str]] = {}
    waiting = [first]
    while waiting:
        name = waiting.pop()
        place = SOURCE.parent.joinpath(*name.split("."))
        path = next(
            (held for held in (place.with_suffix(".py"), place / "__init__.py") if held.is_file()),
            None,
        )
        if name not in found and name != "surefoot" and path is not None:
            found[name] = list(imported(path))
            waiting += [each for each in found[name] if each.startswith("surefoot.")]
    return found


@pytest.mark.parametrize("first", ["surefoot.train.plan", "surefoot.config.speed_table"])
def test_nothing_that_a_choice_can_reach_imports_a_clock(first: str) -> None:
    modules = reachable(first)
    clocks = {"time", "timeit", "datetime", "surefoot.train.timer", "torch.utils.benchmark"}
    told = {
        name: sorted(clocks & {*names, *(each.split(".")[0] for each in names)})
        for name, names in modules.items()
    }
    assert {name: found for name, found in told.items() if found} == {}
    assert "surefoot.config.speed_table" in modules


def test_the_table_is_read_without_torch() -> None:
    names = {each.split(".")[0] for each in imported(SOURCE / "config" / "speed_table.py")}
    assert names <= {"__future__", "collections", "dataclasses", "typing"}


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rank_0_decides_for_all(parallel: str, tmp_path: Path) -> None:
    def start(rank: int) -> None:
        gains = {"bf16": 2.0, "channels last": 1.0, "bf16, channels last": 3.0}
        gain_by_table(gains, set_to=setattr, instructions="slow" if rank else "fast")
        (tmp_path / str(rank)).write_text(repr(choices(micro_batch_size=4, parallel=parallel)))

    assert on_ranks(2, start) == [0, 0]
    bf16 = repr({"precision": "bf16", "channels_last": True, "compile": False})
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [bf16, bf16]
