"""What holds for every test: one thread in each process, where data sets lie, and how Hypothesis draws examples."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = (
    "1"  # also in processes that tests start: two workers share two cores, and barriers would wait
)
os.environ["RES_OPTIONS"] = (
    "timeout:1 attempts:1"  # torch asks for the names of peers: a name server may not answer for 5 seconds
)

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

from ranks import ranks  # noqa: E402, F401  # a fixture: processes that find each other


def pytest_collection_finish() -> None:
    """Leave what all tests have imported out of every later collection."""
    gc.collect()
    gc.freeze()
    gc.enable()
