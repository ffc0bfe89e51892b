"""benchmarks/bench.py leaves out what it cannot run and says why; a forged run of
benchmarks/costs.py stands where it says. (1 s)
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.tools.diagnose.reading import history_in
from surefoot.tools.report.series import read_reported_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(BENCHMARKS))
    yield runpy.run_path(str(BENCHMARKS / "bench.py"))
    sys.path.remove(str(BENCHMARKS))
    for name in [name for name in sys.modules if name.split(".")[0] == "loops"]:
        del sys.modules[name]


def test_every_benchmark_of_the_list_is_there(bench: dict[str, Any]) -> None:
    assert [
        asked.script
        for asked in bench["BENCHMARKS"].values()
        if not (BENCHMARKS / asked.script).is_file()
    ] == []


def test_no_program_hides_a_package_of_the_tests_that_it_imports_from() -> None:
    names = [
        {each.stem for each in place.iterdir()} - {"__pycache__"}
        for place in (BENCHMARKS, Path(__file__).parents[1])
    ]
    assert names[0] & names[1] == set()


def test_a_benchmark_that_lacks_its_data_is_left_out(bench: dict[str, Any], tmp_path: Path) -> None:
    made = bench["Benchmark"]
    told = bench["told"]
    assert told(made("bench.py", 1, data="a/b"), None) == (
        ["left out: no a/b in --data, which is absent"],
        True,
    )
    assert told(made("bench.py", 1, data="a/b"), tmp_path) == (
        [f"left out: no a/b in {tmp_path}"],
        True,
    )


def test_the_last_lines_are_told_and_a_benchmark_that_fails_says_so(
    bench: dict[str, Any], tmp_path: Path
) -> None:
    made = bench["Benchmark"]
    told = bench["told"]
    (tmp_path / "good.py").write_text("import sys; print('a'); print('b\\n\\nc', sys.argv[1:])")
    (tmp_path / "bad.py").write_text("import sys; print('a'); sys.exit('what went wrong')")
    assert told(made(str(tmp_path / "good.py"), 2), None) == (["b", "c ['--short']"], True)
    assert told(made(str(tmp_path / "bad.py"), 2), None) == (
        ["FAILED with 1: what went wrong"],
        False,
    )


def test_records_in_any_number_are_those_that_a_report_and_findings_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from growing.records import write_records

    write_records(tmp_path / "metrics.jsonl", 2_000, every=50)
    told = read_reported_run(tmp_path)
    assert (told.records.count, told.records.last_step) == (2_040, 100_000)
    assert history_in(tmp_path).records.train.count == 2_000
    assert {"loss", "grad_norm", "lr"} <= told.train.keys()
    sys.modules.pop("growing.records")
    sys.modules.pop("growing")


@pytest.mark.parametrize(
    ("other", "asked", "figure"), [(0.3, [], True), (0.31, [], False), (0.31, ["--busy"], True)]
)
def test_a_figure_that_other_programs_disturbed_is_not_printed(
    bench: dict[str, Any],
    other: float,
    asked: list[str],
    figure: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conditions = sys.modules["loops.conditions"]
    busy_s = iter([100.0, 100.0 + 10 * other])
    monkeypatch.setattr(conditions, "_busy_s", lambda: next(busy_s))
    monkeypatch.setattr(
        conditions, "os", SimpleNamespace(times=lambda: os.times_result((0.0,) * 5))
    )
    monkeypatch.setattr(conditions, "perf_counter", count(0.0, 10.0).__next__)
    monkeypatch.setitem(bench["main"].__globals__, "told", lambda *_: (["ratio 1.25"], True))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "tape", *asked])
    bench["main"]()
    printed = capsys.readouterr().out
    assert ("ratio 1.25" in printed) is figure
    assert f"other programs: {other:.2f} cores" in printed
    assert ("no figures, since other programs ran: tape" in printed) is not figure


def test_time_withheld_from_the_machine_counts_as_use_and_time_of_guests_does_not_count_twice(
    bench: dict[str, Any],  # imports it
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conditions: Any = sys.modules["loops.conditions"]
    (tmp_path / "stat").write_text("cpu  100 20 30 5000 400 6 7 8 90 10\ncpu0 1 2 3\n")
    monkeypatch.setattr(conditions, "_CPU_TIMES", tmp_path / "stat")
    assert conditions._busy_s() == (100 + 20 + 30 + 6 + 7 + 8) / os.sysconf("SC_CLK_TCK")
