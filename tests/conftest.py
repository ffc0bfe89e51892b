"""What holds for every test: one thread in each process, where files lie, and how Hypothesis draws
examples.
"""

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import HealthCheck, settings

from rank_processes import SERVER, Ranks, ranks  # noqa: F401  # a fixture: processes that find each other

os.environ["OMP_NUM_THREADS"] = (
    "1"  # also in processes that tests start: two workers share two cores, and barriers would wait
)
os.environ["RES_OPTIONS"] = (
    # torch asks for the names of peers: a name server may not answer for 5 seconds
    "timeout:1 attempts:1"
)

# surefoot's cache is an empty directory, which is removed at the end. torchmetrics imports
# matplotlib where that is installed, which makes its list of fonts once, in seconds.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = _CACHE = mkdtemp(prefix="surefoot-cache-")

# Runs are saved many times, and each save is flushed to the disk: a file system in memory has it
# done at once.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# The same examples every time, and none fails because the machine is busy: neither the test nor the
# drawing has a time limit.
settings.register_profile(
    "surefoot",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("surefoot")
gc.disable()  # until all tests are imported
# what a process inherits it does not collect: a store would wait for its thread, which is not there
os.register_at_fork(after_in_child=gc.freeze)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where a test names its fast cases, all others are slow."""
    named = item.get_closest_marker("fast")
    case = getattr(item, "callspec", None)
    if named is not None and case is not None and case.id not in named.args:
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what all tests have imported out of later collections of garbage; fork ranks from a
    process that has run no test.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(
        20_000, 10, 10
    )  # garbage is looked for a thirtieth as often: a tenth of the suite's time otherwise
    gc.enable()
    # Collection has compiled the package and the tests; a program that a test writes twice in a
    # second must not be compiled once.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if not session.config.option.collectonly and any(
        "ranks" in _fixtures(item) for item in session.items
    ):
        session.config.stash[SERVER] = Ranks().__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what was forked, and remove the cache."""
    shutil.rmtree(_CACHE, ignore_errors=True)
    if SERVER in config.stash:
        config.stash[SERVER].__exit__()


@pytest.fixture(autouse=True)
def _flags_of_the_command_line(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whoever tests a part of the command line, or a recipe, reads messages as these print them:
    with flags.
    """
    if {"cli", "recipes", "compare"}.isdisjoint(request.path.parts):
        yield
        return
    from surefoot.errors import speaking_in_flags

    with speaking_in_flags():
        yield


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """A run of ranks that a test makes in its own process may set float64 for exact comparisons;
    the next test has float32 again.
    """
    yield
    torch.set_default_dtype(torch.float32)


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])
