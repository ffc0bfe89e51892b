"""Stored mutants: each fits the source as it is, its test exists, and the campaign tells the dead
from the living. (3 s)
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
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
        lines = zip(definition.lines, text.splitlines(), strict=True)
        changed = [before.strip() for before, after in lines if before != after]
        assert changed == [mutant.old]


@pytest.fixture(scope="module")
def mutants(tool: Any) -> Any:
    return tool.stored.load(tool.campaign.STORED)


def test_there_are_twenty_different_mutants_in_each_area_and_some_of_each_kind(
    tool: Any, mutants: Any
) -> None:
    changes = {(mutant.function, mutant.old, mutant.number, mutant.new) for mutant in mutants}
    kinds = {*tool.drawing.KINDS, *tool.stored.WRITTEN_KINDS}

    assert Counter(mutant.area for mutant in mutants) == dict.fromkeys(tool.stored.AREAS, 20)
    assert {mutant.kind for mutant in mutants} == kinds
    assert len(changes) == len(mutants)


def test_each_mutant_has_a_test_that_exists_or_a_sentence(mutants: Any) -> None:
    for mutant in mutants:
        assert bool(mutant.killed_by) != bool(mutant.equivalent), mutant.words
        if mutant.killed_by:
            file, _, name = mutant.killed_by.partition("::")
            assert name.partition("[")[0] in names_of_tests(ROOT / file), mutant.killed_by
        else:
            assert len(mutant.equivalent.split()) > 5, mutant.words


@cache
def names_of_tests(file: Path) -> set[str]:
    """The names of the tests in a file; none where there is no such file."""
    if not file.exists():
        return set()
    body = ast.parse(file.read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return {name for name in functions if name.startswith("test_")}


@pytest.fixture(scope="module")
def drawn_mutants(tool: Any, functions: Any) -> Any:
    return tool.drawing.draw(functions, PACKAGE, "loop", seed=6, count=12)


def test_a_seed_draws_the_same_mutants_and_another_seed_draws_others(
    tool: Any, functions: Any, drawn_mutants: Any
) -> None:
    same_seed = tool.drawing.draw(functions, PACKAGE, "loop", seed=6, count=12)
    other_seed = tool.drawing.draw(functions, PACKAGE, "loop", seed=7, count=12)
    assert drawn_mutants == same_seed
    assert drawn_mutants != other_seed


def test_mutants_of_all_kinds_are_drawn_each_in_another_function(
    tool: Any, drawn_mutants: Any
) -> None:
    assert Counter(mutant.kind for mutant in drawn_mutants) == dict.fromkeys(tool.drawing.KINDS, 2)
    assert len({mutant.function for mutant in drawn_mutants}) == 12


def test_a_drawn_mutant_changes_one_line(tool: Any, functions: Any, drawn_mutants: Any) -> None:
    for mutant in drawn_mutants:
        definition, index = tool.stored.locate(mutant, functions)
        ast.parse(tool.stored.mutated(mutant, definition, index))
        assert mutant.old == definition.lines[index].strip()
        assert mutant.new != mutant.old


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
    package = tmp_path / "src" / "small"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "counting.py").write_text(SMALL)
    (tmp_path / "test_small.py").write_text(TESTS)
    return tmp_path


def test_a_campaign_tells_what_was_killed_what_survived_and_what_is_stale(
    tool: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = (project / "src/small/counting.py").rename(project / "src/small/moved.py")
    (project / "test_small.py").write_text(TESTS.replace("counting", "moved"))
    mutant = tool.stored.Mutant(
        "loop",
        "comparison",
        "Counter.count",
        "if number > 3:",
        "if number >= 3:",
        killed_by="test_small.py::test_what_is_above_three_is_counted",
    )
    survivor = replace(mutant, killed_by="test_small.py::test_nothing_is_counted_in_nothing")
    stale = replace(mutant, old="if number > 4:", new="pass")
    equivalent = replace(
        mutant,
        new="if 3 < number:",
        killed_by="",
        equivalent="it is the same comparison, turned around",
    )
    mutants = [mutant, survivor, stale, equivalent]
    before = moved.read_text()

    outcomes = tool.campaign.campaign(mutants, root=project, source=project / "src")

    assert outcomes == ["killed", "survived", "stale", "equivalent"]
    assert moved.read_text() == before
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
    file = project / "mutants.toml"

    file.write_text("\n\n".join(map(tool.campaign.as_toml, drawn)))

    assert tool.stored.load(file) == drawn


def test_a_function_has_sites_of_each_kind_that_its_code_allows(tool: Any, project: Path) -> None:
    (function,) = tool.stored.definitions(project / "src")
    kinds = {site.kind for site in tool.drawing.sites(function)}
    assert kinds == {"comparison", "off by one", "constant", "min or max", "sign"}
