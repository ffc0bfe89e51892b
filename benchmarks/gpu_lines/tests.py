"""The tests that are marked gpu, if pytest is installed. Without it the other lines check the same
claims.
"""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path

from gpu_lines.machine import Skip

ROOT = Path(__file__).parents[2]


def check(device: str) -> str:
    """Run them; on a CPU each skips itself."""
    if absent := [name for name in ("pytest", "hypothesis") if find_spec(name) is None]:
        raise Skip(f"not installed: {', '.join(absent)}; the other lines check the same claims")
    import pytest

    files = sorted(
        str(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    )
    options = [
        "-m",
        "gpu",
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
        "-rfE",
    ]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        status = pytest.main([*options, *files])
    print(shown.getvalue())
    rows = [row for row in shown.getvalue().splitlines() if row.strip()]
    assert status == 0, f"pytest ended with {status}"
    assert device == "cpu" or "passed" in rows[-1], "no test was run"
    return f"{rows[-1].strip('= ')}, of {len(files)} files"
