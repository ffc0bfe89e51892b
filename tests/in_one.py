"""One test in the place of many that are small: each costs more to collect and to report than to
run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import Any

import pytest


def in_one(function: Callable[..., None]) -> Callable[..., None]:
    """Make all cases of a parametrised test one test, which goes through them all and names each
    that fails.

    It stands above the marks. Each case has a `tmp_path` of its own, and nothing in `capsys`; other
    fixtures are shared.
    """
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    assert marks, f"{function.__name__} has no cases"
    choices = [list(_choices(*mark.args)) for mark in marks]
    taken = {name for choice in choices for name in choice[0]}

    @wraps(function)
    def all_cases(**fixtures: Any) -> None:
        failed = []
        skipped = []
        for number, parts in enumerate(product(*choices)):
            own = dict(fixtures)
            if "tmp_path" in own:
                own["tmp_path"] /= str(number)
                own["tmp_path"].mkdir()
            if "capsys" in own:
                own["capsys"].readouterr()
            case = {name: value for part in parts for name, value in part.items()}
            try:
                function(**case, **own)
            except pytest.skip.Exception:
                skipped.append(case)
            except (Exception, pytest.fail.Exception) as problem:  # told of all together
                failed.append(f"{case}: {type(problem).__name__}: {problem}")
        if skipped and not failed:
            pytest.skip(
                f"{len(skipped)} of {len(list(product(*choices)))} cases, such as {skipped[0]}; all others passed"
            )
        assert not failed, f"{len(failed)} of {len(list(product(*choices)))} cases:\n" + "\n".join(
            failed
        )

    signature = inspect.signature(function)
    left = [each for name, each in signature.parameters.items() if name not in taken]
    setattr(all_cases, "__signature__", signature.replace(parameters=left))  # noqa: B010  # pytest reads it
    setattr(all_cases, "pytestmark", [mark for mark in function.pytestmark if mark not in marks])  # type: ignore[attr-defined]  # noqa: B010
    return all_cases


def _choices(names: str | tuple[str, ...] | list[str], values: Any) -> list[dict[str, Any]]:
    several = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    found = []
    for value in values:
        if hasattr(value, "marks"):  # pytest.param
            assert not value.marks, f"a case has a mark of its own: {value}"
            found.append(dict(zip(several, value.values, strict=True)))
        else:
            found.append(dict(zip(several, value if len(several) > 1 else [value], strict=True)))
    return found
