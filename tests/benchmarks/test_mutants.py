"""Stored mutants: each fits the source as it is, its test exists, and the campaign tells the dead
from the living. (3 s)
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "surefoot"


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """benchmarks/mutants.py and its parts, imported as they are when it runs."""
    folder = str(ROOT / "benchmarks")
    sys.path.append(folder)  # last: files of that folder have names that tests have too
    try:
        names = ("mutants", "mutating.stored", "mutating.drawing")
        campaign, stored, drawing = (import_module(name) for name in names)
        yield SimpleNamespace(campaign=campaign, stored=stored, drawing=drawing)
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def functions(tool: Any) -> Any:
    return tool.stored.definitions(PACKAGE)


def test_every_stored_mutant_still_fits_the_source(tool: Any, functions: Any) -> None:
    for mutant in tool.stored.load(tool.campaign.STORED):
        definition, index = tool.stored.locate(mutant, functions)
        text = tool.stored.mutated(mutant, definition, index)
        ast.parse(text)
        different = [
            one
            for one, other in zip(definition.lines, text.splitlines(), strict=True)
            if one != other
        ]
        assert [line.strip() for line in different] == [mutant.old]


def test_there_are_twenty_in_each_area_and_each_has_a_test_that_exists_or_a_sentence(
    tool: Any,
) -> None:
    mutants = tool.stored.load(tool.campaign.STORED)
    assert Counter(mutant.area for mutant in mutants) == dict.fromkeys(tool.stored.AREAS, 20)
    kinds = {*tool.drawing.KINDS, *tool.stored.WRITTEN_KINDS}
    assert {mutant.kind for mutant in mutants} == kinds
    assert len(
        {(mutant.function, mutant.old, mutant.number, mutant.new) for mutant in mutants}
    ) == len(mutants)
    for mutant in mutants:
        assert bool(mutant.killed_by) != bool(mutant.equivalent), mutant.words
        if mutant.killed_by:
            file, _, name = mutant.killed_by.partition("::")
            assert name.partition("[")[0] in names_in(ROOT / file), mutant.killed_by
        else:
            assert len(mutant.equivalent.split()) > 5, mutant.words


@cache
def names_in(file: Path) -> set[str]:
    """The names of the tests in a file; none where there is no such file."""
    tree = ast.parse(file.read_text() if file.exists() else "")
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_a_seed_draws_the_same_mutants_of_all_kinds_and_each_changes_one_line(
    tool: Any, functions: Any
) -> None:
    drawn = tool.drawing.draw(functions, PACKAGE, "loop", seed=6, count=12)
    assert drawn == tool.drawing.draw(functions, PACKAGE, "loop", seed=6, count=12)
    assert drawn != tool.drawing.draw(functions, PACKAGE, "loop", seed=7, count=12)
    assert Counter(mutant.kind for mutant in drawn) == dict.fromkeys(tool.drawing.KINDS, 2)
    assert len({mutant.function for mutant in drawn}) == 12
    for mutant in drawn:
        definition, index = tool.stored.locate(mutant, functions)
        ast.parse(tool.stored.mutated(mutant, definition, index))
        assert mutant.new != mutant.old == definition.lines[index].strip()


SMALL = '''
class Counter:
    def count(self, numbers):
        """At most ten."""
        found = 0
        for number in numbers:
            if number > 3:
                found = found + 1
        return min(found, 10)
'''
TESTS = """
from small.counting import Counter
def test_what_is_above_three_is_counted(): assert Counter().count([3, 4, 5]) == 2
def test_nothing_is_counted_in_nothing(): assert Counter().count([]) == 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {
        "src/small/__init__.py": "",
        "src/small/counting.py": SMALL,
        "test_small.py": TESTS,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_campaign_tells_what_was_killed_what_survived_and_what_is_stale(
    tool: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "src/small/counting.py").rename(project / "src/small/moved.py")
    (project / "test_small.py").write_text(
        TESTS.replace("counting", "moved")
    )  # mutants survive a move
    changes = {
        "area": "loop",
        "kind": "comparison",
        "function": "Counter.count",
        "old": "if number > 3:",
    }
    killed = tool.stored.Mutant(
        **changes,
        new="if number >= 3:",
        killed_by="test_small.py::test_what_is_above_three_is_counted",
    )
    survivor = tool.stored.Mutant(
        **changes,
        new="if number >= 3:",
        killed_by="test_small.py::test_nothing_is_counted_in_nothing",
    )
    stale = tool.stored.Mutant(
        **(changes | {"old": "if number > 4:"}), new="pass", killed_by=killed.killed_by
    )
    excused = tool.stored.Mutant(
        **changes, new="if 3 < number:", equivalent="it is the same comparison, turned around"
    )
    mutants = [killed, survivor, stale, excused]
    before = (project / "src/small/moved.py").read_text()

    outcomes = tool.campaign.campaign(mutants, root=project, source=project / "src")

    assert outcomes == ["killed", "survived", "stale", "equivalent"]
    assert (project / "src/small/moved.py").read_text() == before
    table = tool.campaign.summary(mutants, outcomes).splitlines()
    assert table[1].split() == ["loop", "1", "1", "1", "1"]
    assert [line.split()[0].rstrip(":") for line in table[2:]] == ["all", "survived", "stale"]


def test_a_campaign_whose_tests_fail_without_any_mutant_says_so(tool: Any, project: Path) -> None:
    (project / "test_small.py").write_text(TESTS.replace("== 2", "== 9"))
    mutant = tool.stored.Mutant(
        "loop",
        "comparison",
        "Counter.count",
        "if number > 3:",
        "if number >= 3:",
        killed_by="test_small.py::test_what_is_above_three_is_counted",
    )
    with pytest.raises(SystemExit, match="fails without any"):
        tool.campaign.campaign([mutant], root=project, source=project / "src")


def test_what_is_drawn_is_found_again_in_its_own_toml(tool: Any, project: Path) -> None:
    (project / "src/small/counting.py").rename(project / "src/small/mean.py")
    functions = tool.stored.definitions(project / "src")
    drawn = tool.drawing.draw(functions, project / "src/small", "loop", seed=0, count=1)
    (project / "mutants.toml").write_text(
        "\n\n".join(tool.campaign.as_toml(mutant) for mutant in drawn)
    )
    assert tool.stored.load(project / "mutants.toml") == drawn
    everything = {site.kind for site in tool.drawing.sites(functions[0])}
    assert everything == {"comparison", "off by one", "constant", "min or max", "sign"}
