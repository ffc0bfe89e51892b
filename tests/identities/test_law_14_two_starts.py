"""Law 14: the same command on machines with the same facts makes the same choices, whatever else
they do. 4 s.
"""

from __future__ import annotations

import ast
import json
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
    settings: dict[str, Any] = {
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
    with sf.Run(**(settings | changes)) as run:
        identity = run.parts.plan.identity
        return {name: identity.get(name) for name in ("precision", "channels_last", "compile")}


# what the table of a test says, and what a start chooses by it
GAINS = {"bf16": 2.0, "channels last": 1.0, "bf16, channels last": 3.0}
CHOICE_BY_GAINS = {"precision": "bf16", "channels_last": True, "compile": False}


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


class JumpingClock:
    """By its own reading every second stretch is a thousand times as long, in every second start
    the others.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.calls = 0
        self.now_s = 0.0

    def __call__(self) -> float:
        is_long = (self.calls // 2 + self.start) % 2 == 1
        self.now_s += 1.0 if is_long else 0.001
        self.calls += 1
        return self.now_s


def let_clocks_jump(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """Have everything of surefoot read jumping clocks, however it imported them."""
    modules = [module for name, module in sys.modules.items() if name.startswith("surefoot")]
    for name in CLOCKS:
        clock = JumpingClock(start)
        for module in modules:
            if vars(module).get(name) is getattr(time, name):
                monkeypatch.setattr(module, name, clock)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def choices_of_busy_starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Under load, and by clocks that jump."""
    choices_by_start = []
    for start in range(STARTS):
        with monkeypatch.context() as patches, load():
            let_clocks_jump(patches, start)
            choices_by_start.append(choices())
    return choices_by_start


@pytest.mark.usefixtures("_one_thread")
def test_starts_under_load_and_by_clocks_that_jump_choose_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what the table has for this machine."""
    assert choices_of_busy_starts(monkeypatch) == [choices()] * STARTS


@pytest.mark.usefixtures("_one_thread")
def test_starts_under_load_choose_by_the_gains_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gain_by_table(GAINS, set_to=monkeypatch.setattr)
    assert choices() == CHOICE_BY_GAINS
    assert choices_of_busy_starts(monkeypatch) == [CHOICE_BY_GAINS] * STARTS


def test_the_loss_is_not_called_before_the_first_step() -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return loss(model, batch)

    choices(loss=counted)
    assert calls == []


def imported_modules(path: Path) -> Iterator[str]:
    """What a file imports when it runs, inside of functions too; not what is for types alone."""
    for node in nodes_that_run(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not is_for_types:
            yield child
            yield from nodes_that_run(child)


def file_of(module: str) -> Path | None:
    """None for a name within a module."""
    place = SOURCE.parent.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path
    return None


def imports_of_reachable(first: str) -> dict[str, list[str]]:
    """What each module imports, of all modules of surefoot that `first` can reach; the package
    itself loads nothing.
    """
    imports: dict[str, list[str]] = {}
    waiting = [first]
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if module not in imports and module != "surefoot" and path is not None:
            imports[module] = list(imported_modules(path))
            waiting += [name for name in imports[module] if name.startswith("surefoot.")]
    return imports


@pytest.mark.parametrize("first", ["surefoot.train.plan", "surefoot.config.speed_table"])
def test_nothing_that_a_choice_can_reach_imports_a_clock(first: str) -> None:
    clocks = {"time", "timeit", "datetime", "surefoot.train.timer", "torch.utils.benchmark"}
    imports = imports_of_reachable(first)

    assert "surefoot.config.speed_table" in imports
    for module, names in imports.items():
        packages = {name.split(".")[0] for name in names}
        assert clocks.isdisjoint({*names, *packages}), module


def test_the_table_is_read_without_torch() -> None:
    names = imported_modules(SOURCE / "config" / "speed_table.py")
    packages = {name.split(".")[0] for name in names}
    assert packages <= {"__future__", "collections", "dataclasses", "typing"}


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rank_0_decides_for_all(parallel: str, tmp_path: Path) -> None:
    def start(rank: int) -> None:
        gain_by_table(GAINS, set_to=setattr, instructions="slow" if rank else "fast")
        chosen = choices(micro_batch_size=4, parallel=parallel)
        (tmp_path / f"{rank}.json").write_text(json.dumps(chosen))

    assert on_ranks(2, start) == [0, 0]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == CHOICE_BY_GAINS
