from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from forked import Forked
from rank_processes import forks
from refused import refused
from small_runs import build
from surefoot.data import workers as reading
from surefoot.data.loader import Feed, in_order
from surefoot.data.order import Order
from surefoot.errors import DataError
from surefoot.seeding import seed_generators
from waiting import HANG_S, wait_until

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="loader workers are forked, which is for Linux"
)


class Augmented(Dataset):
    """Draws from all three generators, and sums over enough numbers that threads would matter."""

    def __len__(self):
        return 20

    def __getitem__(self, sample):
        numbers = torch.randn(70_000)
        return torch.stack(
            [numbers.sum(), (numbers * random.random()).sum(), torch.tensor(np.random.rand())]
        ), sample


class Numbers:
    def __len__(self):
        return 20

    def __getitem__(self, sample):
        return np.full(3, sample, dtype=np.int16)


def mixed(samples):
    return torch.stack([numbers for numbers, _ in samples]) * torch.rand(()) + random.random()


def fed(dataset, first, stop, *, workers, micro_batch_size=4, collate=None):
    plan = Order(3, samples=len(dataset), batch_size=8)
    feed = Feed(
        dataset,
        plan,
        seed=3,
        micro_batch_size=micro_batch_size,
        device=CPU,
        workers=workers,
        collate=collate,
    )
    feed.start(first)
    try:
        return [one for step in range(first, stop) for one in feed.micro_batches(step)]
    finally:
        feed.close()


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.fast("None-2", "mixed-4")
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("collate", [None, mixed])
def test_batches_do_not_depend_on_the_number_of_workers(workers, collate):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # workers have one: a sum in two parts would be rounded otherwise
    try:
        here = fed(Augmented(), 0, 4, workers=0, collate=collate)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    there = fed(Augmented(), 0, 4, workers=workers, collate=collate)
    for one, other in zip(here, there, strict=True):
        assert one.sample_ids.tolist() == other.sample_ids.tolist()
        assert (one.count, one.index) == (other.count, other.index)
        pairs = [(one.batch, other.batch)] if collate else zip(one.batch, other.batch, strict=True)
        assert all(torch.equal(some, others) for some, others in pairs)


def test_workers_started_at_step_k_give_what_those_from_0_give():
    whole = fed(Augmented(), 0, 6, workers=2)
    for one, other in zip(fed(Augmented(), 3, 6, workers=2), whole[6:], strict=True):
        assert torch.equal(one.batch[0], other.batch[0])


def test_what_collate_made_arrives_unchanged():
    found = fed(
        Numbers(),
        0,
        1,
        workers=1,
        collate=lambda samples: {"array": np.stack(samples), "rows": torch.zeros(4)},
    )
    assert isinstance(found[0].batch["array"], np.ndarray)


def test_starting_workers_leaves_the_global_generators_as_they_were():
    seed_generators(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    seed_generators(5)
    fed(Augmented(), 0, 2, workers=2)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("batch_size", [3, 20, 50])
def test_in_order_with_workers_gives_every_sample_once_and_ends(batch_size):
    found = list(in_order(Numbers(), batch_size=batch_size, seed=0, device=CPU, workers=2))
    assert torch.cat([one.batch[:, 0] for one in found]).tolist() == list(range(20))


def test_an_error_in_a_worker_is_the_error_without_workers():
    class Broken(Numbers):
        def __getitem__(self, sample):
            return 1 // (sample - 3)

    messages = []
    for workers in (0, 2):
        with refused("sample-unreadable", DataError, sample=3) as caught:
            fed(Broken(), 0, 4, workers=workers)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "ZeroDivisionError" in caught.value.__notes__[0]


@pytest.mark.parametrize("hides", [True, False])
def test_an_error_of_ours_that_a_worker_sends_says_whether_it_hides_one_of_the_users(hides):
    class Broken(Numbers):
        def __getitem__(self, sample):
            try:
                return {}["x"]
            except KeyError as problem:
                error = DataError("sample-broken", problem="sample is broken")
                raise error from (None if not hides else problem)

    with refused("sample-broken", DataError) as caught:
        fed(Broken(), 0, 1, workers=1)
    assert caught.value.of_user is hides
    assert [("KeyError" in note) for note in getattr(caught.value, "__notes__", [])] == [
        True
    ] * hides


def test_a_worker_that_dies_is_an_error_with_a_cure():
    class Fatal(Numbers):
        def __getitem__(self, sample):
            os._exit(9)

    with refused("loader-worker-died", DataError):
        fed(Fatal(), 0, 1, workers=1)


def test_a_worker_that_dies_while_others_are_started_is_the_same_error_and_ends_them(monkeypatch):
    def signalled():  # torch's handler of SIGCHLD raises wherever the main thread is
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly with exit code 9.")

    monkeypatch.setattr(reading.atexit, "register", lambda close: signalled())
    before = set(multiprocessing.active_children())
    with refused("loader-worker-died", DataError):
        fed(Numbers(), 0, 1, workers=1)
    assert set(multiprocessing.active_children()) == before


def test_workers_live_on_after_ctrl_c_and_sigterm_and_end_with_close():
    feed = Feed(
        Numbers(),
        Order(0, samples=20, batch_size=4),
        seed=0,
        micro_batch_size=4,
        device=CPU,
        workers=2,
    )
    feed.start(0)
    feed.micro_batches(0)
    pids = [process.pid for process in feed.loader_workers.processes]
    assert len(pids) == 2
    for pid in pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    for step in range(1, 30):
        feed.micro_batches(step)
    feed.close()
    assert all(ended(pid) for pid in pids)


PROGRAM = """
import gc, sys, threading, time
import torch
from surefoot.data.loader import Feed
from surefoot.data.order import Order

class Large:
    def __len__(self):
        return 100
    def __getitem__(self, sample):
        return "x" * 300_000  # more than a pipe holds: workers are blocked in the middle of an answer

if __name__ == "__main__":
    FIRST
    plan = Order(0, samples=100, batch_size=4)
    feed = Feed(Large(), plan, seed=0, micro_batch_size=4, device=torch.device("cpu"), workers=2, collate=list, count=len)
    feed.start(0)
    feed.micro_batches(0)
    print(*(process.pid for process in feed.loader_workers.processes), flush=True)
    BODY
"""


def started(tmp_path, body, *, first="pass"):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM).replace("BODY", body).replace("FIRST", first))
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env=environment
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


@forks
def test_workers_end_when_the_run_is_killed():
    class Large:
        def __len__(self):
            return 100

        def __getitem__(self, sample):
            # more than a pipe holds: workers are blocked in the middle of an answer
            return "x" * 300_000

    def work():
        plan = Order(0, samples=100, batch_size=4)
        feed = Feed(
            Large(),
            plan,
            seed=0,
            micro_batch_size=4,
            device=CPU,
            workers=2,
            collate=list,
            count=len,
        )
        feed.start(0)
        feed.micro_batches(0)
        print(*(process.pid for process in feed.loader_workers.processes), flush=True)
        time.sleep(10_000)

    with Forked(work, stdout=subprocess.PIPE) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    assert wait_until(lambda: all(ended(pid) for pid in pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "pass",
        *(
            pytest.param(body, marks=pytest.mark.slow)
            for body in ("sys.exit(3)", "raise ValueError(3)")
        ),
    ],
)
def test_a_program_that_forgets_to_close_its_feed_still_ends(tmp_path, body):
    process, pids = started(tmp_path, body)
    with process:
        process.wait(timeout=HANG_S)
    assert all(ended(pid) for pid in pids)


LEFT = """
    class Collects(Large):
        def __getitem__(self, sample):
            for _ in range(8):  # they would be given the places of threads that are not here
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            gc.collect()
            return gc.isenabled()
    Large = Collects
    gc.set_threshold(1_000_000)  # the parent shall not collect it
    left = [torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    left.append(left)
    del left
"""


@pytest.mark.slow
def test_what_a_worker_inherits_is_not_its_to_end(tmp_path):
    process, pids = started(
        tmp_path, "print(feed.micro_batches(1)[0].batch, gc.isenabled())", first=LEFT.strip()
    )
    with process:
        assert len(pids) == 2, "a store that the worker inherited waited for its thread"
        assert process.stdout.read() == f"{[True] * 4} True\n"


def test_a_path_that_is_too_long_for_a_workers_socket_is_refused_where_workers_are_needed(
    monkeypatch,
):
    short = Path(tempfile.mkdtemp(dir="/tmp"))

    def below(length):
        place = short / ("d" * (length - len(str(short)) - 1))
        (place / "pymp-12345678").mkdir(parents=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{place}/pymp-12345678/listener-12345678")

    def train(**changes):
        changes = {"splits": {}, "early_stopping": None, "length": "1 steps"} | changes
        build(None, **changes).train()

    below(75)
    train(workers=1)
    with pytest.raises(OSError, match="too long"):
        below(76)
    with refused("temporary-path-too-long", length=76):
        train(workers=1)
    train()
    tensors = torch.rand(8, 8), torch.zeros(8, dtype=torch.long)
    train(workers=1, train_data=tensors)  # which no worker reads
    shutil.rmtree(short)
