"""Functions called by several ranks, each a process of its own that finds the others over gloo.

A process that has imported torch forks them, because importing it costs seconds; it holds the store at which ranks meet, as
torchrun's agent does. A function is named by its file and its name, its arguments are JSON, and what it returns comes back
through `torch.save`.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from waiting import HangLimit


@dataclass
class Outcome:
    """How one rank ended: its exit status (negative for a signal), what its function returned, and what it printed."""

    status: int
    result: Any
    text: str


class Ranks:
    """`ranks(2, function, argument=...)` returns what each of two ranks came to, by rank."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.calls = scratch, 0

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def start(self, size: int, function: Callable[..., Any], *, environment: Any = None, **arguments: Any) -> Path:
        """Begin; returns the directory in which `outcomes` finds how it ended, and `pid-RANK` from the start."""
        self.calls += 1
        place = self.scratch / f"call-{self.calls}"
        place.mkdir()
        asked = {
            "size": size,
            "file": inspect.getfile(function),
            "function": function.__name__,
            "arguments": arguments,
            "environment": environment or {},
            "place": str(place),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        pids = json.loads(self.process.stdout.readline())
        for rank, pid in enumerate(pids):
            (place / f"pid-{rank}").write_text(str(pid))
        return place

    def each(
        self, size: int, function: Callable[..., Any], cases: Sequence[Mapping[str, Any]], **common: Any
    ) -> list[list[Any]]:
        """Call the function for one case of its arguments after the other in the same processes; results by case, then by rank."""
        every = [{**common, **case} for case in cases]
        return [list(found) for found in zip(*self(size, function, cases=every), strict=True)]

    def outcomes(self, place: Path) -> list[Outcome]:
        """Wait for all ranks; those that hang are killed."""
        import torch

        pids = [int((place / f"pid-{rank}").read_text()) for rank in range(len(list(place.glob("pid-*"))))]
        limit = HangLimit()
        while any(not (place / f"status-{rank}").exists() for rank in range(len(pids))):
            if limit.is_over:
                for rank, pid in enumerate(pids):
                    if not (place / f"status-{rank}").exists():
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        found = []
        for rank in range(len(pids)):
            kept = place / f"result-{rank}.pt"
            result = torch.load(kept, weights_only=True) if kept.exists() else None
            text = (place / f"text-{rank}").read_text()
            found.append(Outcome(int((place / f"status-{rank}").read_text()), result, text))
        return found

    def __call__(
        self, size: int, function: Callable[..., Any], *, environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> list[Any]:
        """What the function returned on each rank; an `AssertionError` where one of them failed."""
        found = self.outcomes(self.start(size, function, environment=environment, **arguments))
        for rank, outcome in enumerate(found):
            assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.text}"
        return [outcome.result for outcome in found]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as made:
        yield made


def _serve() -> None:
    """One JSON object a line: what to call on how many ranks; answered with their process ids."""
    import torch._dynamo  # what FSDP imports in its first step and every run when it begins: here it is once for all
    import torch.utils.tensorboard
    from torch.distributed import TCPStore

    import surefoot.fully_sharded
    import surefoot.run

    del torch, surefoot
    gc.freeze()  # or each process would copy what a collection touches
    children: dict[int, Path] = {}
    stores: list[Any] = []

    def note_ends(*_: object) -> None:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                place = children.pop(pid)
                beside = place.with_name(f".{place.name}")
                beside.write_text(str(os.waitstatus_to_exitcode(status)))
                beside.replace(place)

    import select

    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.01)
        note_ends()
        if not ready:
            continue
        line = sys.stdin.readline()
        if not line:
            break
        asked = json.loads(line)
        stores.clear()  # its thread could hold a lock while a rank is forked, which would wait for it for ever
        ports, told = os.pipe()
        pids = []
        for rank in range(asked["size"]):
            pid = os.fork()
            if pid == 0:
                _be(rank, asked, port=int(os.read(ports, 8)))
            pids.append(pid)
            children[pid] = Path(asked["place"]) / f"status-{rank}"
        stores.append(TCPStore("127.0.0.1", 0, asked["size"], is_master=True, wait_for_workers=False))
        os.write(told, b"%8d" % stores[0].port * asked["size"])
        os.close(ports)
        os.close(told)
        print(json.dumps(pids), flush=True)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _be(rank: int, asked: dict[str, Any], *, port: int) -> None:
    place, status = Path(asked["place"]), 1
    text = os.open(place / f"text-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(text, 1)
    os.dup2(text, 2)
    size = str(asked["size"])
    if asked["size"] > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0", **asked["environment"]}
    try:
        import torch

        sys.path.insert(0, str(Path(asked["file"]).parent))
        spec = importlib.util.spec_from_file_location(Path(asked["file"]).stem, asked["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        call, given = getattr(module, asked["function"]), asked["arguments"]
        result = [call(**case) for case in given["cases"]] if "cases" in given else call(**given)
        torch.save(result, place / f"result-{rank}.pt")
        status = 0
    except SystemExit as problem:
        status = int(problem.code or 0)
    except BaseException:
        status = _uncaught()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        import atexit

        atexit._run_exitfuncs()
        os._exit(status)


def _uncaught() -> int:
    """What Python does with an exception that a script does not catch; the exit status."""
    try:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is one
    except SystemExit as problem:
        return int(problem.code or 0)
    return 1


if __name__ == "__main__":
    _serve()
