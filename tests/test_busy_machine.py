"""No test fails because the machine is busy: what would make one fail is looked for in the source
of all tests. (1 s)
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waiting import HANG_S

TESTS = Path(__file__).parent
# a file without one of these words is not parsed
WORDS = re.compile(r"from time|time\.|deadline|suppress_health_check|timeout=|\.(wait|join)\(\d")
WALL_CLOCKS = {
    "time",
    "monotonic",
    "perf_counter",
    "time_ns",
    "monotonic_ns",
    "perf_counter_ns",
}


def called_name(function: ast.expr) -> str:
    """The name that a call has: `time.monotonic`, or what stands last of it, as `.wait`."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    if isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return f".{function.attr}"


def is_timing(node: ast.AST) -> bool:
    """Whether a function carries the mark `timing`."""
    if not isinstance(node, ast.FunctionDef):
        return False
    return "pytest.mark.timing" in map(ast.unparse, node.decorator_list)


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    """All calls outside functions that are marked `timing`."""
    for node in ast.iter_child_nodes(tree):
        if not is_timing(node):
            if isinstance(node, ast.Call):
                yield node
            yield from calls_in(node)


def clocks_read(tree: ast.Module) -> Iterator[int]:
    """Lines that read a wall clock."""
    names = {f"time.{name}" for name in WALL_CLOCKS}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            for alias in node.names:
                if alias.name in WALL_CLOCKS:
                    names.add(alias.asname or alias.name)
    for call in calls_in(tree):
        if called_name(call.func) in names:
            yield call.lineno


def deadlines_set(tree: ast.Module) -> Iterator[int]:
    """Lines that give Hypothesis a deadline, or health checks of their own in place of the
    profile's.
    """
    for call in calls_in(tree):
        if called_name(call.func).rpartition(".")[2] == "settings":
            keywords = {keyword.arg for keyword in call.keywords}
            if keywords & {"deadline", "suppress_health_check"}:
                yield call.lineno


def short_waits(tree: ast.Module) -> Iterator[int]:
    """Lines that end a wait sooner than a hang is ended."""
    for call in calls_in(tree):
        limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        if called_name(call.func).endswith((".wait", ".join")):
            limits += call.args
        if any(is_short(limit) for limit in limits):
            yield call.lineno


def is_short(limit: ast.expr) -> bool:
    """Whether a limit is a number of seconds below that of a hang."""
    if not isinstance(limit, ast.Constant):
        return False
    return isinstance(limit.value, int | float) and limit.value < HANG_S


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The tests' files that may have something to do with time, by their paths."""
    trees = {}
    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        if path.name != "waiting.py" and WORDS.search(text):
            trees[str(path.relative_to(TESTS))] = ast.parse(text)
    return trees


@pytest.mark.parametrize("find_offences", [clocks_read, deadlines_set, short_waits])
def test_no_test_depends_on_how_fast_the_machine_is(
    find_offences: Callable[[ast.Module], Iterator[int]], trees: dict[str, ast.Module]
) -> None:
    offences = []
    for path, tree in trees.items():
        offences += [f"{path}:{line}" for line in find_offences(tree)]
    assert offences == [], (
        "tests/waiting.py says how a test waits; one that measures time is marked `timing`"
    )


PLANTED = """
    import time
    from time import perf_counter as now

    def test_a():
        begun = time.monotonic()
        assert now() - begun < 1

    @pytest.mark.timing
    def test_b():
        assert time.perf_counter() < 1
        process.wait(timeout=5)

    @settings(max_examples=5, deadline=None)
    def test_c():
        process.communicate(timeout=60)
        over.wait(0.5)
        over.wait(HANG_S)
        ",".join("ab")

    @hypothesis.settings(suppress_health_check=[])
    def test_d():
        assert time.process_time() < 1
"""


def test_what_is_looked_for_is_seen() -> None:
    tree = ast.parse(textwrap.dedent(PLANTED))

    assert list(clocks_read(tree)) == [6, 7]
    assert list(deadlines_set(tree)) == [14, 21]
    assert list(short_waits(tree)) == [16, 17]


def test_properties_are_checked_without_a_deadline() -> None:
    profile = settings()
    assert profile.deadline is None
    assert HealthCheck.too_slow in profile.suppress_health_check


def draw_examples() -> list[int]:
    """The integers that Hypothesis draws for a property."""
    numbers: list[int] = []

    @settings(max_examples=20)
    @given(st.integers())
    def note(number: int) -> None:
        numbers.append(number)

    note()
    return numbers


def test_every_property_is_checked_with_the_same_examples() -> None:
    first = draw_examples()
    second = draw_examples()

    assert second == first
    assert len(first) == 20
    assert settings().derandomize
    assert settings().print_blob


# --- what is slow ---------------------------------------------------------------------------------


def fast_cases(decorator: ast.expr) -> str | None:
    """What the page on tests says of a test with this mark: the cases that stay fast, "none" if it
    is slow; None for other marks.
    """
    if ast.unparse(decorator) == "pytest.mark.slow":
        return "none"
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fast":
        cases = [str(ast.literal_eval(argument)) for argument in decorator.args]
        return "; ".join(f"`{case[:60]}`" for case in cases)
    return None


def find_slow_tests() -> Iterator[tuple[str, str]]:
    """Each test with a mark of its own that makes it or some of its cases slow: its name, and what
    the page on tests says of it.
    """
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text()
        if "pytest.mark.slow" not in text and "pytest.mark.fast" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    cases = fast_cases(decorator)
                    if cases is not None:
                        yield node.name, cases


def test_the_page_on_tests_lists_what_only_the_slow_suite_shows() -> None:
    page = (TESTS.parent / "docs" / "testing.md").read_text()
    listed = set()
    for claim, cases in re.findall(r"(?m)^\| (.+) \| (.+) \|$", page):
        if not claim.startswith(("`", "C")):  # a row of another table, or the head of this one
            listed.add((f"test_{claim.replace(' ', '_')}", cases))
    marked = set(find_slow_tests())
    with_fast_cases = {(name, cases) for name, cases in marked if cases != "none"}

    assert len(listed) > 10
    assert sorted(listed - marked) == []
    assert sorted(with_fast_cases - listed) == []
