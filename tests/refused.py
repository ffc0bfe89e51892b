"""`refused`: the code runs into an error with this code and these fields. `refused_change`: a
resume is refused because of this setting.
"""

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


@contextmanager
def refused_change(setting: str, *values: str) -> Iterator[None]:
    """Expect that a resume is refused because of a setting, which the error names first, with
    these two values if any are given.
    """
    with refused("settings-changed", sf.CheckpointError) as caught:
        yield
    first, *_ = caught.value.fields["changes"]
    assert first.split()[0] == setting
    assert [value for value in values if value not in first] == []
