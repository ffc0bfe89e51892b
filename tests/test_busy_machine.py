"""No test fails because the machine is busy: what would make one fail is looked for in the source
of all tests. (1 s)
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from waiting import HANG_S

TESTS = Path(__file__).parent
WORDS = re.compile(
    r"from time|time\.|deadline|suppress_health_check|timeout=|\.(wait|join)\(\d"
)  # without one, nothing to parse
WALL_CLOCKS = {"time", "monotonic", "perf_counter"} | {"time_ns", "monotonic_ns", "perf_counter_ns"}


def dotted(node: ast.expr) -> str:
    """The name that a call has: `time.monotonic`, or what stands last of it, as `.wait`."""
    if isinstance(node, ast.Attribute):
        return f"{node.value.id if isinstance(node.value, ast.Name) else ''}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_timing(node: ast.AST) -> bool:
    """Whether a function carries the mark `timing`."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator) == "pytest.mark.timing" for decorator in decorators)


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    """All calls outside functions that are marked `timing`."""
    for node in ast.iter_child_nodes(tree):
        if not is_timing(node):
            if isinstance(node, ast.Call):
                yield node
            yield from calls_in(node)


def clocks_read(tree: ast.Module) -> Iterator[int]:
    """Lines that read a wall clock."""
    imports = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "time"
    ]
    aliases = [alias for node in imports for alias in node.names if alias.name in WALL_CLOCKS]
    names = {f"time.{name}" for name in WALL_CLOCKS} | {
        alias.asname or alias.name for alias in aliases
    }
    return (call.lineno for call in calls_in(tree) if dotted(call.func) in names)


def deadlines_set(tree: ast.Module) -> Iterator[int]:
    """Lines that give Hypothesis a deadline, or health checks of their own in place of the
    profile's.
    """
    own = {"deadline", "suppress_health_check"}
    for call in calls_in(tree):
        if dotted(call.func).split(".")[-1] == "settings" and own & {
            keyword.arg for keyword in call.keywords
        }:
            yield call.lineno


def short_waits(tree: ast.Module) -> Iterator[int]:
    """Lines that end a wait sooner than a hang is ended."""
    for call in calls_in(tree):
        name = dotted(call.func)
        limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        limits += call.args if name.endswith((".wait", ".join")) else []
        numbers = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
        if any(isinstance(number, int | float) and number < HANG_S for number in numbers):
            yield call.lineno


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    texts = {
        str(path.relative_to(TESTS)): path.read_text()
        for path in TESTS.rglob("*.py")
        if path.name != "waiting.py"
    }
    return {name: ast.parse(text) for name, text in texts.items() if WORDS.search(text)}


@pytest.mark.parametrize("offences", [clocks_read, deadlines_set, short_waits])
def test_no_test_depends_on_how_fast_the_machine_is(offences, trees: dict[str, ast.Module]) -> None:
    found = [f"{path}:{line}" for path, tree in trees.items() for line in offences(tree)]
    assert found == [], (
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
    assert [list(clocks_read(tree)), list(deadlines_set(tree)), list(short_waits(tree))] == [
        [6, 7],
        [14, 21],
        [16, 17],
    ]


def test_every_property_is_checked_with_the_same_examples_and_without_a_deadline() -> None:
    drawn: list[list[int]] = []

    for _ in range(2):
        drawn.append([])

        @settings(max_examples=20)
        @given(st.integers())
        def draw(number: int) -> None:
            drawn[-1].append(number)

        draw()
    profile = settings()
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 20
    assert (profile.deadline, profile.derandomize, profile.print_blob) == (None, True, True)
    assert HealthCheck.too_slow in profile.suppress_health_check


# --- what is slow ---------------------------------------------------------------------------------


def marked() -> Iterator[tuple[str, str, tuple[object, ...]]]:
    """Each test function with a mark of its own that makes it or some of its cases slow: its name,
    the mark, its arguments.
    """
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text()
        is_marked = "pytest.mark.slow" in text or "pytest.mark.fast" in text
        for node in ast.parse(text).body if is_marked else []:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                call = decorator if isinstance(decorator, ast.Call) else None
                mark = ast.unparse(decorator if call is None else call.func)
                if mark in ("pytest.mark.slow", "pytest.mark.fast"):
                    assert isinstance(node, ast.FunctionDef)
                    yield node.name, mark, tuple(map(ast.literal_eval, call.args if call else ()))


def test_the_page_on_tests_lists_what_only_the_slow_suite_shows() -> None:
    rows = re.findall(
        r"^\| (.+) \| (.+) \|$",
        (TESTS.parent / "docs" / "testing.md").read_text(),
        flags=re.MULTILINE,
    )
    listed = [
        (f"test_{claim.replace(' ', '_')}", kept)
        for claim, kept in rows
        if not claim.startswith(("`", "C"))
    ]
    there = [
        (
            name,
            "; ".join(f"`{str(case)[:60]}`" for case in cases) if mark.endswith("fast") else "none",
        )
        for name, mark, cases in marked()
    ]
    assert len(listed) > 10
    assert sorted(set(listed) - set(there)) == []
    assert sorted({each for each in there if each[1] != "none"} - set(listed)) == []
