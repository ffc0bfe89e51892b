"""Names in the code that reads samples. An attribute that this code does not name cannot change a
sample.
"""

from collections.abc import Iterable
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# the methods with which samples are read, transformed and collated
_ENTRY_POINTS = frozenset(
    {"__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward", "gather"}
)
_OF_MODULES = frozenset({"_modules", "_buffers"})  # hold what the code of a module names


def read_names(kind: type, called: Iterable[str]) -> frozenset[str]:
    """Return the names in the code that reads an object of this class: in its methods above, in
    those that its owner names (`called`), and in the methods that these name.
    """
    names: set[str] = set()
    new = {*_ENTRY_POINTS, *called}
    while new:
        names |= new
        in_methods: set[str] = set()
        for owner in kind.__mro__:
            if owner in (object, nn.Module):
                continue
            for name in new & vars(owner).keys():
                in_methods |= names_in(_function_of(vars(owner)[name]))
        new = in_methods - names
    if issubclass(kind, nn.Module):
        names |= _OF_MODULES
    return frozenset(names)


def names_in(function: FunctionType | None) -> set[str]:
    """Return the names in the code of a function, and of functions of the same file that it
    names.
    """
    names: set[str] = set()
    functions = [] if function is None else [function]
    seen = set(functions)
    while functions:
        function = functions.pop()
        in_function = _names_in_code(function.__code__)
        names |= in_function
        for name in in_function:
            other = function.__globals__.get(name)
            if not isinstance(other, FunctionType) or other in seen:
                continue
            if other.__module__ == function.__module__:
                seen.add(other)
                functions.append(other)
    return names


@cache
def _names_in_code(code: CodeType) -> frozenset[str]:
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function or comprehension within
            names |= _names_in_code(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(self, "rate")
            names.add(constant)
    return frozenset(names)


def _function_of(member: Any) -> FunctionType | None:
    """Return the function of a method, a property or a decorated method."""
    for attribute in ("fget", "func", "__func__", "__wrapped__"):
        member = getattr(member, attribute, None) or member
    return member if isinstance(member, FunctionType) else None
