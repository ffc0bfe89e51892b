"""Numbers of NumPy as plain numbers, so that every setting takes them. Imports neither NumPy nor
torch.
"""

import sys
from typing import Any


def plain_number(value: Any) -> Any:
    """Return a number of NumPy, also an array without dimensions, as a number of Python; return
    any other value as it is.

    >>> import numpy
    >>> plain_number(numpy.float32(0.5)), plain_number(numpy.array(3)), plain_number("5%")
    (0.5, 3, '5%')
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray) or value.ndim:
        return value
    return value.item()


def plain_numbers(value: Any) -> Any:
    """Return settings with plain numbers, also those in tuples, lists, dictionaries and arrays.

    >>> import numpy
    >>> plain_numbers((numpy.float64(0.9), 0.999)), plain_numbers(numpy.array([2, 4]))
    ((0.9, 0.999), [2, 4])
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return value
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if type(value) in (tuple, list):
        return type(value)(map(plain_numbers, value))
    if type(value) is dict:
        return {key: plain_numbers(entry) for key, entry in value.items()}
    return plain_number(value)
