"""What kind of module is called what, from how a model prints itself; for records that name modules and parameters only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_LINE = re.compile(r"( *)\((\w+(?:-\w+)?)\): (?:(\d+) x )?(\w+)\(")


def kinds_of_modules(printed: str) -> dict[str, str]:
    """The class of each module by its dotted name, from the `repr` of a model; the model itself is "".

    >>> kinds_of_modules("Net(\\n  (act): ReLU()\\n  (blocks): ModuleList(\\n    (0-1): 2 x Linear(in_features=1)\\n  )\\n)")
    {'': 'Net', 'act': 'ReLU', 'blocks': 'ModuleList', 'blocks.0': 'Linear', 'blocks.1': 'Linear'}
    """
    lines = printed.splitlines()
    opening = re.match(r"(\w+)\(", lines[0]) if lines else None
    found = {"": opening[1]} if opening else {}
    above: list[tuple[int, list[str]]] = []  # indentation, and names: several where a line stands for several modules
    for line in lines[1:]:
        match = _LINE.match(line)
        if match is None:
            continue
        depth = len(match[1])
        while above and above[-1][0] >= depth:
            above.pop()
        parents = above[-1][1] if above else [""]
        names = [f"{parent}.{leaf}" if parent else leaf for parent in parents for leaf in _leaves(match[2])]
        above.append((depth, names))
        found |= dict.fromkeys(names, match[4])
    return found


def kinds_of_models(printed: Mapping[str, str]) -> dict[str, str]:
    """The same of a run's models by name: where there are several, their modules are called MODEL.MODULE, as in its records."""
    found: dict[str, str] = {}
    for model, text in printed.items():
        before = f"{model}." if len(printed) > 1 else ""
        found |= {before + name: kind for name, kind in kinds_of_modules(str(text)).items()}
    return found


def _leaves(written: str) -> Iterator[str]:
    """The names that "3" or "0-3" stands for."""
    first, _, last = written.partition("-")
    if last and first.isdigit() and last.isdigit():
        yield from (str(number) for number in range(int(first), int(last) + 1))
    else:
        yield written
