"""What a suite costs: CPU seconds of every process that its tests start, and the files that cost
most.

    python tests/cost.py [--files 10] [--tests 0] ARGUMENTS OF PYTEST...

The sum is what the system has counted for all that ended below this process, orphans included. A
file's share is what its tests and their fixtures took in the worker that ran them and in the
processes below it; a fixture that several tests share is in the first one. pytest loads this file
as a plugin, in each worker; the worker leaves its numbers in a directory.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_DIRECTORY = "SUREFOOT_TEST_COST"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BECOME_SUBREAPER = (
    36  # PR_SET_CHILD_SUBREAPER of Linux: who loses its parent becomes a child of this process
)


def cpu_seconds() -> float:
    """What this process has taken, all that have ended below it, and all that are there below
    it.
    """
    taken = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in taken) + sum(
        map(_taken_below, _children("self"))
    )


def _children(process: int | str) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _taken_below(process: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) * _TICK_S + sum(map(_taken_below, _children(process)))
    return 0.0


class _Costs:
    """What each test took, and what all took before the first one."""

    def __init__(self) -> None:
        self.before: float | None = None
        self.tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begun = cpu_seconds()
        if self.before is None:
            self.before = begun
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = cpu_seconds() - begun

    def pytest_unconfigure(self) -> None:
        if self.before is not None:  # not where workers ran the tests
            file = Path(os.environ[_DIRECTORY], f"{os.getpid()}.json")
            file.write_text(json.dumps({"before": self.before, "tests": self.tests}))


def pytest_configure(config: pytest.Config) -> None:
    if _DIRECTORY in os.environ:
        config.pluginmanager.register(_Costs())


def measured(arguments: list[str], *, files: int = 10, tests: int = 0) -> int:
    """Run pytest, print what it cost, and return its exit status."""
    with suppress(OSError, AttributeError):  # elsewhere than on Linux orphans are not counted
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as directory:
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, _DIRECTORY: directory, "PYTHONPATH": os.pathsep.join(paths)}
        suite = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "cost", *arguments], env=environment
        )
        status: int | None = None
        with suppress(ChildProcessError):
            while True:  # until nobody is left: what nobody waits for is not counted
                process, ended = os.wait()
                if process == suite.pid:
                    status = os.waitstatus_to_exitcode(ended)
        suite.returncode = status
        left = [json.loads(file.read_text()) for file in Path(directory).iterdir()]
    taken = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{taken.ru_utime + taken.ru_stime:8.1f} CPU seconds over all processes")
    print(
        f"{sum(one['before'] for one in left):8.1f} before the first test of {len(left)} processes"
    )
    by_test: Counter[str] = Counter()
    by_file: Counter[str] = Counter()
    for one in left:
        by_test.update(one["tests"])
    for test, seconds in by_test.items():
        by_file[test.partition("::")[0]] += seconds
    for name, seconds in by_file.most_common(files) + by_test.most_common(tests):
        print(f"{seconds:8.1f} {name}")
    return 1 if status is None else status


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--tests", type=int, default=0)
    asked, rest = parser.parse_known_args()
    sys.exit(measured(rest, files=asked.files, tests=asked.tests))
