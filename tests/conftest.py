"""What holds for every test: one thread in each process, where data sets lie, and how Hypothesis draws examples."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = (
    "1"  # also in processes that tests start: two workers share two cores, and barriers would wait
)
os.environ["RES_OPTIONS"] = (
    "timeout:1 attempts:1"  # torch asks for the names of peers: a name server may not answer for 5 seconds
)

import pytest
import torch  # reads the variable when it is imported
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# The same examples every time, and none fails because the machine is busy: neither the test nor the drawing has a time limit.
settings.register_profile(
    "surefoot", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("surefoot")
gc.disable()  # until all tests are imported
# what a process inherits it does not collect: a store would wait for its thread, which is not there
os.register_at_fork(after_in_child=gc.freeze)

from rank_processes import SERVER, Ranks, ranks  # noqa: E402, F401  # a fixture: processes that find each other


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where a test names its fast cases, all others are slow."""
    named = item.get_closest_marker("fast")
    case = getattr(item, "callspec", None)
    if named is not None and case is not None and case.id not in named.args:
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what all tests have imported out of every later collection; fork ranks from a process that has run no test."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly and any("ranks" in _fixtures(item) for item in session.items):
        session.config.stash[SERVER] = Ranks().__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what was forked."""
    if SERVER in config.stash:
        config.stash[SERVER].__exit__()


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])
