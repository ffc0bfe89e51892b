"""Several ranks on gloo, each a process of its own that finds the others.

All are forked from a process that has imported torch, because importing it costs seconds. There are
two ways. `ranks(2, function, ...)`: a server forked before the first test forks them, and holds the
store at which they meet, as torchrun's agent does. A function is named by its file and its name,
its arguments are JSON, and what it returns comes back through `torch.save`. `on_ranks(2, work)`:
the process of the test forks them, so that `work` may be any closure; they meet at rank 0.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import inspect
import json
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TextIO

import pytest

from waiting import HANG_S, HangLimit

forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
SERVER = pytest.StashKey["Ranks"]()


@dataclass
class Outcome:
    """How one rank ended: its exit status (negative for a signal), what its function returned, and
    what it printed.
    """

    status: int
    result: Any
    text: str


class Ranks:
    """`ranks(2, function, argument=...)` returns what each of two ranks came to, by rank."""

    def __init__(self, scratch: Path | None = None) -> None:
        self.scratch = scratch
        self.calls = 0

    def __enter__(self) -> Self:
        questions = os.pipe()
        answers = os.pipe()
        sys.stdout.flush()
        with warnings.catch_warnings(action="ignore"):
            self.server = os.fork()
        if self.server == 0:
            status = 1
            try:
                os.close(questions[1])
                os.close(answers[0])
                _serve(os.fdopen(questions[0]), os.fdopen(answers[1], "w"))
                status = 0
            finally:
                os._exit(status)
        os.close(questions[0])
        os.close(answers[1])
        self.questions = os.fdopen(questions[1], "w")
        self.answers = os.fdopen(answers[0])
        return self

    def __exit__(self, *_: object) -> None:
        # an end of the file would not do: the reader of a stream may hold the pipe, too
        with suppress(BrokenPipeError):
            self.questions.write("\n")
            self.questions.close()
        self.answers.close()
        os.waitpid(self.server, 0)

    def start(
        self, size: int, function: Callable[..., Any], *, environment: Any = None, **arguments: Any
    ) -> Path:
        """Begin; returns the directory in which `outcomes` finds how it ended, and `pid-RANK` from
        the start.
        """
        assert self.scratch is not None
        self.calls += 1
        place = self.scratch / f"call-{self.calls}"
        place.mkdir()
        request = {
            "size": size,
            "file": inspect.getfile(function),
            "function": function.__name__,
            "arguments": arguments,
            "environment": environment or {},
            "place": str(place),
        }
        self.questions.write(json.dumps(request) + "\n")
        self.questions.flush()
        pids = json.loads(self.answers.readline())
        for rank, pid in enumerate(pids):
            (place / f"pid-{rank}").write_text(str(pid))
        return place

    def each(
        self,
        size: int,
        function: Callable[..., Any],
        cases: Sequence[Mapping[str, Any]],
        **common: Any,
    ) -> list[list[Any]]:
        """Call the function for one case of its arguments after the other in the same processes;
        results by case, then by rank.
        """
        by_rank = self(size, function, cases=[{**common, **case} for case in cases])
        return [list(results) for results in zip(*by_rank, strict=True)]

    def outcomes(self, place: Path) -> list[Outcome]:
        """Wait for all ranks; those that hang are killed."""
        import torch

        size = len([*place.glob("pid-*")])
        statuses = [place / f"status-{rank}" for rank in range(size)]
        limit = HangLimit()
        while not all(status.exists() for status in statuses):
            if limit.is_over:
                for rank, status in enumerate(statuses):
                    if not status.exists():
                        with suppress(ProcessLookupError):
                            os.kill(int((place / f"pid-{rank}").read_text()), signal.SIGKILL)
            time.sleep(0.01)
        outcomes = []
        for rank, status in enumerate(statuses):
            outcome = Outcome(int(status.read_text()), result=None, text="")
            result = place / f"result-{rank}.pt"
            if result.exists():
                outcome.result = torch.load(result, weights_only=True)
            text = place / f"text-{rank}"
            if text.exists():  # one that was killed may not have made it
                outcome.text = text.read_text()
            outcomes.append(outcome)
        return outcomes

    def __call__(
        self,
        size: int,
        function: Callable[..., Any],
        *,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """What the function returned on each rank; an `AssertionError` where one of them failed."""
        place = self.start(size, function, environment=environment, **arguments)
        outcomes = self.outcomes(place)
        for rank, outcome in enumerate(outcomes):
            assert outcome.status == 0, f"rank {rank} ended with {outcome.status}\n{outcome.text}"
        return [outcome.result for outcome in outcomes]


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    server = request.config.stash[SERVER]  # forked when the tests had been collected
    server.scratch = tmp_path_factory.mktemp("ranks")
    return server


def on_ranks(
    count: int,
    work: Callable[[int], object],
    *,
    environment: Callable[[int], Mapping[str, str]] | None = None,
    patience_s: float = HANG_S,
) -> list[int]:
    """Do `work(rank)` on so many ranks, each a process with the environment of a launcher, or
    another; their exit statuses.

    A status is that of `SystemExit`, 1 for any other exception (its traceback goes to standard
    error), or minus a signal. Ranks that stand still are killed after `patience_s`; shortly before,
    each writes to standard error where its threads are.
    """
    _import_for_all()
    if environment is None:
        port = _free_port()

        def environment(rank: int) -> Mapping[str, str]:
            return _of_launcher(rank, count, port)

    sys.stdout.flush()
    processes: list[int] = []
    for rank in range(count):
        process = os.fork()
        if process == 0:
            faulthandler.dump_traceback_later(0.9 * patience_s, file=2)
            _be(environment(rank), lambda rank=rank: work(rank))  # type: ignore[misc]
        processes.append(process)
    statuses: dict[int, int] = {}
    limit = HangLimit(patience_s)
    while len(statuses) < count:
        for rank, process in enumerate(processes):
            if rank not in statuses:
                pid, status = os.waitpid(process, os.WNOHANG)
                if pid:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        if limit.is_over:
            for rank, process in enumerate(processes):
                if rank not in statuses:
                    os.kill(process, signal.SIGKILL)
            limit = HangLimit(float("inf"))
        time.sleep(0.01)
    return [statuses[rank] for rank in range(count)]


def _import_for_all() -> None:
    """Import what FSDP imports in its first step and every run when it begins: here it is once for
    all.
    """

    import torch._dynamo
    import torch.utils.tensorboard  # noqa: F401

    import surefoot.distributed.fsdp
    import surefoot.run.run
    import surefoot.train.parallel_check
    import surefoot.train.state_check  # noqa: F401
    from surefoot.optim.kinds.kind import all_kinds

    all_kinds()


def _of_launcher(rank: int, count: int, port: int) -> dict[str, str]:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if count > 1:
        environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return environment


def _serve(questions: IO[str], answers: IO[str]) -> None:
    """One JSON object a line: what to call on how many ranks; answered with their process ids."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks says when it is over
    warn_as_python_does()
    children: dict[int, Path] = {}
    stores: list[Any] = []

    def note_ends() -> None:
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                place = children.pop(pid)
                beside = place.with_name(f".{place.name}")
                beside.write_text(str(os.waitstatus_to_exitcode(status)))
                beside.replace(place)

    while True:
        ready, _, _ = select.select([questions], [], [], 0.01 if children else None)
        note_ends()
        if not ready:
            continue
        line = questions.readline()
        if not line.strip():
            break
        request = json.loads(line)
        size = request["size"]
        _import_for_all()
        from torch._C._distributed_c10d import TCPStore

        gc.freeze()  # or each process would copy what a collection touches
        # its thread could hold a lock while a rank is forked, which would wait for it for ever
        stores.clear()
        port_read, port_write = os.pipe()
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                questions.close()
                answers.close()
                _be_requested(rank, request, port=int(os.read(port_read, 8)))
            pids.append(pid)
            children[pid] = Path(request["place"]) / f"status-{rank}"
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        stores.append(store)
        for _ in range(size):
            os.write(port_write, b"%8d" % store.port)
        os.close(port_read)
        os.close(port_write)
        answers.write(json.dumps(pids) + "\n")
        answers.flush()
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def warn_as_python_does() -> None:
    """Undo what pytest makes of warnings: errors here, and a list of them."""
    warnings.resetwarnings()
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        print(text, end="", file=file or sys.stderr)

    warnings.showwarning = show


def _be_requested(rank: int, request: dict[str, Any], *, port: int) -> NoReturn:
    """Be a rank that the server forks: what it prints, and what its function returns, lie beside
    its exit status.
    """
    place = Path(request["place"])
    file = Path(request["file"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    text = os.open(place / f"text-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(text, 1)
    os.dup2(text, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}

    def call() -> None:
        import torch

        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        function = getattr(module, request["function"])
        arguments = request["arguments"]
        result: Any
        if "cases" in arguments:
            result = [function(**case) for case in arguments["cases"]]
        else:
            result = function(**arguments)
        torch.save(result, place / f"result-{rank}.pt")

    environment = _of_launcher(rank, request["size"], port) | agent | request["environment"]
    _be(environment, call, at_exit=True)


def _be(
    environment: Mapping[str, str], call: Callable[[], object], *, at_exit: bool = False
) -> NoReturn:
    """Be a process that does this, and end as Python would, without what this process has
    inherited.
    """
    status = 1
    try:
        if at_exit:
            _forget_exits()
        os.environ.update(environment)
        call()
        status = 0
    except SystemExit as end:
        status = _status(end)
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            status = _status(end)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if at_exit:
            atexit._run_exitfuncs()
        os._exit(status)


def _forget_exits() -> None:
    """Leave what this process has inherited undone at its end: that of torch goes through all that
    is imported, and copies it.
    """
    atexit._clear()
    setattr(weakref.finalize, "_registry", {})  # noqa: B010
    setattr(weakref.finalize, "_registered_with_atexit", False)  # noqa: B010
    atexit.register(getattr(multiprocessing.util, "_exit_function"))  # noqa: B009


def _status(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _host, port = free.getsockname()
        return int(port)
