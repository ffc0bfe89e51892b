"""benchmarks/bench.py leaves out what it cannot run and says why; a forged run of benchmarks/costs.py stands where it says. (1 s)"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnose.reading import history_in
from surefoot.report.series import read_reported_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "bench.py"))


def test_every_benchmark_of_the_list_is_there(bench: dict[str, Any]) -> None:
    assert [asked.script for asked in bench["BENCHMARKS"].values() if not (BENCHMARKS / asked.script).is_file()] == []


def test_no_program_hides_a_package_of_the_tests_that_it_imports_from() -> None:
    names = [
        {each.stem for each in place.iterdir()} - {"__pycache__"} for place in (BENCHMARKS, Path(__file__).parents[1])
    ]
    assert names[0] & names[1] == set()


def test_a_benchmark_that_lacks_its_data_is_left_out(bench: dict[str, Any], tmp_path: Path) -> None:
    made, told = bench["Benchmark"], bench["told"]
    assert told(made("bench.py", 1, data="a/b"), None) == (["left out: no a/b in --data, which is absent"], True)
    assert told(made("bench.py", 1, data="a/b"), tmp_path) == ([f"left out: no a/b in {tmp_path}"], True)


def test_the_last_lines_are_told_and_a_benchmark_that_fails_says_so(bench: dict[str, Any], tmp_path: Path) -> None:
    made, told = bench["Benchmark"], bench["told"]
    (tmp_path / "good.py").write_text("import sys; print('a'); print('b\\n\\nc', sys.argv[1:])")
    (tmp_path / "bad.py").write_text("import sys; print('a'); sys.exit('what went wrong')")
    assert told(made(str(tmp_path / "good.py"), 2), None) == (["b", "c ['--short']"], True)
    assert told(made(str(tmp_path / "bad.py"), 2), None) == (["FAILED with 1: what went wrong"], False)


def test_records_in_any_number_are_those_that_a_report_and_findings_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from growing.records import write_records

    write_records(tmp_path / "metrics.jsonl", 2_000, every=50)
    told = read_reported_run(tmp_path).recorded
    assert (told.count, told.last_step) == (2_040, 100_000)
    assert len(history_in(tmp_path).train) == 2_000
    assert {"loss", "grad_norm", "lr"} <= told.train.keys()
    sys.modules.pop("growing.records")
    sys.modules.pop("growing")
