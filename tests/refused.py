"""`refused`: the code runs into an error with this code and these fields."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import surefoot as sf


@contextmanager
def refused(
    code: str, kind: type[sf.SurefootError] = sf.ConfigError, /, **fields: Any
) -> Iterator[pytest.ExceptionInfo[sf.SurefootError]]:
    """Expect an error of a class, with its code and at least these fields."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, str(error)
    assert {name: error.fields[name] for name in fields} == fields
