"""Whether a value out of a JSON file has the shape that a type says: the types of state.json and environment.json. Torch-free."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code that meets a value of another shape than it expects may raise."""


@cache
def hints_of(owner: type) -> dict[str, Any]:
    """The types of the keys of a TypedDict or the fields of a dataclass."""
    return get_type_hints(owner, include_extras=True)


def misshapen(value: Any, hint: Any, where: str) -> str | None:
    """Say which part of a value is not of its type; None if all are. Keys that a TypedDict does not name may stand there.

    In `Annotated` may stand TypedDicts, and functions that raise for what they do not take.

    >>> misshapen({"a": [1, "x"]}, dict[str, list[int]], "counts")
    'counts/a/1 is "x", which does not belong there'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _first(misshapen(value, each, where) for each in (arguments[0], *hint.__metadata__))
    if origin in (Union, UnionType):
        problems = [misshapen(value, each, where) for each in arguments]
        return None if None in problems else problems[0]
    if is_typeddict(hint) and isinstance(value, dict):
        lacks = (f"{where} lacks {name}" for name in hints_of(hint) if name in hint.__required_keys__ - value.keys())
        named = hints_of(hint).items()
        return _first(lacks) or _first(misshapen(value[k], each, f"{where}/{k}") for k, each in named if k in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return _first(misshapen(each, arguments[1], f"{where}/{name}") for name, each in value.items())
    if origin is list and isinstance(value, list):
        return _first(misshapen(each, arguments[0], f"{where}/{index}") for index, each in enumerate(value))
    if hint is Any or (origin is Literal and value in arguments):
        return None
    if hint in (bool, int, str, float, NoneType):
        if isinstance(value, (int, float) if hint is float else hint) and (hint is bool or not isinstance(value, bool)):
            return None
    elif origin is None and not is_typeddict(hint):
        with suppress(*UNREADABLE):
            hint(value)
            return None
    return f"{where} is {json.dumps(value)[:40]}, which does not belong there"


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
