"""Processes that tests fork from their own."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from rank_processes import forks, on_ranks

pytestmark = forks


@pytest.fixture
def left_store() -> Any:
    """A store that the next collection of garbage would end, and wait for its thread."""
    gc.disable()
    cycle: list[Any] = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    cycle.append(cycle)
    del cycle
    yield
    gc.enable()
    gc.collect()


def test_a_rank_ends_no_thread_that_only_its_parent_has(left_store: None) -> None:
    def collect(rank: int) -> None:
        for _ in range(8):  # they would be given the places of the threads that are not there
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        gc.collect()

    assert on_ranks(1, collect) == [0]
