"""A process that has imported torch and forks a fresh training process for each request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self


class Zygote:
    """Runs sittings of `small_runs` in processes of their own; `run` returns the exit status, negative for a signal."""

    def __enter__(self) -> Self:
        program = Path(__file__).with_name("small_runs.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def run(self, out: Path, **spec: Any) -> int:
        """One sitting of the run in `out`; keys as in `small_runs.sitting`, or after_s=... for a kill by the clock."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"out": str(out), **spec}) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self.process.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
