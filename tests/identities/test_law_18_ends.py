"""Law 18: what a run starts ends with it. (20 s; the fast cases 6 s)

After every kind of run at every kind of end, processes, threads, descriptors, temporary files and
live `Run` objects are those of before. The first run of a process opens what stays open, such as
caches of torch. So one run of the same kind ends before the measurement.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from stream_runs import FEATURES, Net, row
from waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BATCH, STEPS = 8, 6


# --- what there is --------------------------------------------------------------------------------


def processes(parent: int) -> set[str]:
    """The processes below `parent`, by number and start: those that nobody has awaited count too."""
    below = set[str]()
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, (task / "children").read_text().split()):
                below |= {name_of(child)} | processes(child)
    return below


def name_of(process: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return f"{process} since {fields[19]}"
    return f"{process} is gone"


def group_members(directory: Path) -> list[int]:
    """The processes that the sources below noted, as far as they still exist, also as orphans."""
    noted = [int(path.name) for path in directory.glob("*")]
    return [process for process in noted if Path(f"/proc/{process}").exists()]


def descriptors() -> list[str]:
    """What this process has open. Numbers of pipes and sockets say nothing."""
    links = list[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(re.sub(r":\[\d+\]", "", os.readlink(f"/proc/self/fd/{name}")))
    return sorted(link for link in links if not link.startswith("/proc/"))


def task_count() -> int:
    """The threads that the system counts, also those that Python did not start."""
    return len(os.listdir("/proc/self/task"))


def everything(temporary: Path) -> dict[str, Any]:
    """What a run could leave behind."""
    while gc.collect():  # a finalizer may keep its object for one more collection
        pass
    objects = gc.get_objects()
    return {
        "processes": processes(os.getpid()),
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": descriptors(),
        "files": {path.name for path in temporary.iterdir()},
        "runs": sum(type(each) is sf.Run for each in objects),
        "models": sum(type(each) is Net for each in objects),
        "handlers": {number: signal.getsignal(number) for number in (2, 10, 15)},
    }


# --- the data -------------------------------------------------------------------------------------


class Listed:
    """Rows with numbers, of which one may raise."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number == self.fails_at:
            raise ValueError("broken")
        each = row(number)
        return each["x"], each["y"]


class Noted:
    """Rows of a source that notes its process, and those that it starts, in a directory."""

    def __init__(self, directory: Path, child: str | None, fails_at: int | None) -> None:
        self.directory = directory
        self.child = child
        self.fails_at = fails_at
        self.trains = os.getpid()

    def note(self, process: int) -> None:
        if process != self.trains:
            (self.directory / str(process)).touch()

    def __call__(self) -> Iterator[tuple[Tensor, int]]:
        self.note(os.getpid())
        if self.child == "fork":
            child = os.fork()
            if child == 0:
                threading.Event().wait()
            self.note(child)
        if self.child == "program":
            self.note(subprocess.Popen(["sleep", "600"]).pid)
        if self.child == "pool":
            pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
            pool.submit(int).result()
            for process in pool._processes:
                self.note(process)
        for number in itertools.count():
            if number == self.fails_at:
                raise ValueError("broken")
            yield Listed()[number % 40]


def data_of(kind: str, directory: Path, *, fails: bool) -> tuple[Any, dict[str, Any]]:
    fails_at = 2 * BATCH + 3 if fails else None
    if kind == "tensors":
        return (torch.ones(48, FEATURES), torch.zeros(48, dtype=torch.long)), {}
    if kind == "samples":
        return Listed(fails_at), {}
    if kind == "workers":
        return Listed(fails_at), {"workers": 2}
    child = {"pool": "pool", "fork": "fork", "program": "program"}.get(kind)
    start = kind if kind in ("thread", "spawn") else "auto"
    source = sf.data.Stream(
        Noted(directory, child, fails_at), **({} if start == "auto" else {"start": start})
    )
    return source, {"workers": 1 if kind == "stream and workers" else 0}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# --- the ends -------------------------------------------------------------------------------------


def finished(run: sf.Run) -> None:
    run.train()


def left_by_break(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                break


def stopped(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                run.stop()


def failed_in_the_body(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                raise ZeroDivisionError


def signalled(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                os.kill(os.getpid(), signal.SIGTERM)


def never_opened(run: sf.Run) -> None:
    """`del run` is its end."""


def without_with(run: sf.Run) -> None:
    next(iter(run))


ENDS: dict[str, tuple[Callable[[sf.Run], None], dict[str, Any], type[BaseException] | None]] = {
    "finished": (finished, {}, None),
    "break": (left_by_break, {}, None),
    "stop": (stopped, {}, None),
    "early stopping": (finished, {"early": True}, None),
    "body": (failed_in_the_body, {}, ZeroDivisionError),
    "loss": (finished, {"loss_fails": True}, ZeroDivisionError),
    "data": (finished, {"fails": True}, sf.DataError),
    "SIGTERM": (signalled, {}, SystemExit),
    "del": (never_opened, {}, None),
    "no with": (without_with, {}, sf.ConfigError),
}


def ended(kind: str, end: str, run_dir: Path | None, noted: Path) -> None:
    """Build a run, bring it to its end, and forget it."""
    act, how, expected = ENDS[end]
    data, changes = data_of(kind, noted, fails=how.get("fails", False))
    passes = itertools.count()

    def failing(model: nn.Module, batch: Any) -> Tensor:
        if model.training and next(passes) == 4:
            raise ZeroDivisionError
        return loss(model, batch)

    if how.get("early"):
        changes["splits"] = {"val": sf.Split([Listed()[number] for number in range(8)])}
        changes["evaluate_every"] = "1 steps"
        changes["early_stopping"] = sf.EarlyStopping("max val/loss", patience=1)
    run = sf.Run(
        model=Net,
        loss=failing if how.get("loss_fails") else loss,
        train_data=data,
        batch_size=BATCH,
        length=f"{STEPS} steps",
        optimizer=sf.optim.sgd(lr=0.1),
        run_dir=run_dir,
        check_state=False,
        console=False,
        report=False,
        tensorboard=False,
        device="cpu",
        **changes,
    )
    try:
        act(run)
    except BaseException as problem:
        if expected is None or not isinstance(problem, expected):
            raise
    else:
        assert expected is None


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Computing on several threads would start and end those of OpenMP, which outlive a run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path, below which workers have sockets."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


KINDS = ["tensors", "samples", "workers", "stream", "stream and workers", "pool", "fork", "program"]
FAST = {
    *itertools.product(["stream"], ENDS),
    *itertools.product(["tensors"], ["finished", "body", "SIGTERM", "del"]),
    *itertools.product(["workers"], ["finished", "data", "body"]),
    *itertools.product(["pool", "fork"], ["break", "SIGTERM"]),
    ("thread", "break"),
    ("program", "data"),
}
CASES = [
    pytest.param(kind, end, marks=[] if (kind, end) in FAST else pytest.mark.slow)
    for kind in [*KINDS, "thread"]
    for end in ENDS
    if (kind, end) != ("tensors", "data")
]
CASES += [  # each imports torch twice
    pytest.param("spawn", end, marks=pytest.mark.slow)
    for end in ("finished", "break", "SIGTERM", "data")
]


@pytest.mark.parametrize(("kind", "end"), CASES)
def test_what_a_run_starts_ends_with_it(
    kind: str, end: str, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = short / "temporary"
    noted = tmp_path / "noted"
    temporary.mkdir()
    noted.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    # a busy machine may take long to import torch, and a warning fails a test
    monkeypatch.setattr("surefoot.data.streams.tape._START_S", 600.0)
    with_directory = kind != "fork"
    ended(kind, end, tmp_path / "first" if with_directory else None, noted)
    before = everything(temporary)
    tasks_before = task_count()
    ended(kind, end, tmp_path / "second" if with_directory else None, noted)
    after = everything(temporary)
    for what, there in before.items():
        assert (what, after[what]) == (what, there)
    # `join` returns a moment before the system has ended the thread
    assert wait_until(lambda: task_count() <= tasks_before, limit_s=60.0)
    assert wait_until(lambda: not group_members(noted), limit_s=60.0)
