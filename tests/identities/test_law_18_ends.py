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
from dataclasses import dataclass
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

BATCH = 8
STEPS = 6


# --- what there is --------------------------------------------------------------------------------


def list_processes(parent: int) -> set[str]:
    """The processes below `parent`, by number and start: those that nobody has awaited count too."""
    below = set[str]()
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, (task / "children").read_text().split()):
                below.add(name_of(child))
                below |= list_processes(child)
    return below


def name_of(process: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        _, _, fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        start = fields.split()[19]
        return f"{process} since {start}"
    return f"{process} is gone"


def living(directory: Path) -> list[int]:
    """The processes that the sources below noted, as far as they still exist, also as orphans."""
    noted = [int(path.name) for path in directory.glob("*")]
    return [process for process in noted if Path(f"/proc/{process}").exists()]


def list_descriptors() -> list[str]:
    """What this process has open. Numbers of pipes and sockets say nothing."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("/proc/"):
                targets.append(re.sub(r":\[\d+\]", "", target))
    return sorted(targets)


def count_threads() -> int:
    """The threads that the system counts, also those that Python did not start."""
    return len(os.listdir("/proc/self/task"))


def count_objects(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


def everything(temporary: Path) -> dict[str, Any]:
    """What a run could leave behind."""
    while gc.collect():  # a finalizer may keep its object for one more collection
        pass
    return {
        "processes": list_processes(os.getpid()),
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": list_descriptors(),
        "files": {path.name for path in temporary.iterdir()},
        "runs": count_objects(sf.Run),
        "models": count_objects(Net),
        "handlers": {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
        },
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
        values = row(number)
        return values["x"], values["y"]


class Noted:
    """Rows of a source that notes its process, and those that it starts, in a directory."""

    def __init__(self, directory: Path, child: str | None, fails_at: int | None) -> None:
        self.directory = directory
        self.child = child
        self.fails_at = fails_at
        self.process_of_run = os.getpid()

    def note(self, process: int) -> None:
        if process != self.process_of_run:
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


def build_data(kind: str, directory: Path, *, fails: bool) -> Any:
    fails_at = 2 * BATCH + 3 if fails else None
    match kind:
        case "tensors":
            return torch.ones(48, FEATURES), torch.zeros(48, dtype=torch.long)
        case "samples" | "workers":
            return Listed(fails_at)
        case "pool" | "fork" | "program":
            return sf.data.Stream(Noted(directory, kind, fails_at))
        case "thread" | "spawn":
            return sf.data.Stream(Noted(directory, None, fails_at), start=kind)
    return sf.data.Stream(Noted(directory, None, fails_at))


WORKERS = {"workers": 2, "stream and workers": 1}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# --- the ends -------------------------------------------------------------------------------------


def finish(run: sf.Run) -> None:
    run.train()


def leave_by_break(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                break


def stop(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                run.stop()


def fail_in_the_body(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                raise ZeroDivisionError


def send_signal(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 2:
                os.kill(os.getpid(), signal.SIGTERM)


def leave_closed(run: sf.Run) -> None:
    """`del run` is its end."""


def iterate_without_with(run: sf.Run) -> None:
    next(iter(run))


@dataclass(frozen=True)
class End:
    """What is done with a run, and with which error it ends, if any."""

    act: Callable[[sf.Run], None]
    error: type[BaseException] | None = None
    data_fails: bool = False
    loss_fails: bool = False
    stops_early: bool = False


ENDS = {
    "finished": End(finish),
    "break": End(leave_by_break),
    "stop": End(stop),
    "early stopping": End(finish, stops_early=True),
    "body": End(fail_in_the_body, ZeroDivisionError),
    "loss": End(finish, ZeroDivisionError, loss_fails=True),
    "data": End(finish, sf.DataError, data_fails=True),
    "SIGTERM": End(send_signal, SystemExit),
    "del": End(leave_closed),
    "no with": End(iterate_without_with, sf.ConfigError),
}


def train_to(end: End, kind: str, run_dir: Path | None, noted: Path) -> None:
    """Build a run, bring it to its end, and forget it."""
    passes = itertools.count()

    def loss_of_run(model: nn.Module, batch: Any) -> Tensor:
        if end.loss_fails and model.training and next(passes) == 4:
            raise ZeroDivisionError
        return loss(model, batch)

    changes: dict[str, Any] = {}
    if end.stops_early:
        changes["splits"] = {"val": sf.Split([Listed()[number] for number in range(8)])}
        changes["evaluate_every"] = "1 steps"
        changes["early_stopping"] = sf.EarlyStopping("max val/loss", patience=1)
    run = sf.Run(
        model=Net,
        loss=loss_of_run,
        train_data=build_data(kind, noted, fails=end.data_fails),
        workers=WORKERS.get(kind, 0),
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
    if end.error is None:
        end.act(run)
    else:
        with pytest.raises(end.error):
            end.act(run)


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
FAST_ENDS: dict[str, list[str]] = {
    "stream": list(ENDS),
    "tensors": ["finished", "body", "SIGTERM", "del"],
    "workers": ["finished", "data", "body"],
    "pool": ["break", "SIGTERM"],
    "fork": ["break", "SIGTERM"],
    "thread": ["break"],
    "program": ["data"],
}


def list_cases() -> Iterator[Any]:
    for kind in [*KINDS, "thread"]:
        for end in ENDS:
            if (kind, end) == ("tensors", "data"):
                continue  # tensors do not fail
            is_fast = end in FAST_ENDS.get(kind, ())
            yield pytest.param(kind, end, marks=[] if is_fast else pytest.mark.slow)
    for end in ("finished", "break", "SIGTERM", "data"):  # each imports torch twice
        yield pytest.param("spawn", end, marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "end"), [*list_cases()])
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

    def train(name: str) -> None:
        run_dir = None if kind == "fork" else tmp_path / name
        train_to(ENDS[end], kind, run_dir, noted)

    train("first")
    before = everything(temporary)
    threads_before = count_threads()
    train("second")

    after = everything(temporary)
    for name, value in before.items():
        assert (name, after[name]) == (name, value)
    # `join` returns a moment before the system has ended the thread
    assert wait_until(lambda: count_threads() <= threads_before, limit_s=60.0)
    assert wait_until(lambda: not living(noted), limit_s=60.0)
