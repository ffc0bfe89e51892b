"""Data sets of others, of which some tests read a part. They lie where the variable DATA says:
`make test DATA=DIRECTORY` sets it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("DATA") or Path(__file__).parents[1] / "data").resolve()


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test if one of these files or directories of DATA is absent, and name it."""
    absent = [name for name in names if not (DATA / name).exists()]
    return pytest.mark.skipif(
        bool(absent), reason=f"{DATA} holds no {' and no '.join(absent)}: make test DATA=DIRECTORY"
    )
