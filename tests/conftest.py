"""One thread in every test and every process that a test starts: two workers share two cores, and barriers would wait for both."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RES_OPTIONS"] = (
    "timeout:1 attempts:1"  # torch asks for the names of peers: a name server may not answer for 5 seconds
)

import torch  # reads the variable when it is imported

torch.set_num_threads(1)
gc.disable()  # until all tests are imported
# what a process inherits it does not collect: a store would wait for its thread, which is not there
os.register_at_fork(after_in_child=gc.freeze)

from ranks import ranks  # noqa: E402, F401  # a fixture: processes that find each other


def pytest_collection_finish() -> None:
    """Leave what all tests have imported out of every later collection."""
    gc.collect()
    gc.freeze()
    gc.enable()
