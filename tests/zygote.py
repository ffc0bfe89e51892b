"""Sessions of `small_runs`, each in processes of its own that are forked from one that has imported
torch.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import small_runs
from rank_processes import Ranks


class Zygote:
    """Runs sessions of `small_runs` on `size` ranks; `run` returns their one exit status, negative
    for a signal.
    """

    def __init__(self, ranks: Ranks, size: int = 1) -> None:
        self.ranks = ranks
        self.size = size

    def run(self, run_dir: Path, **spec: Any) -> int:
        """One session of the run in `out`; keys as in `small_runs.session`, or after_s=... for a
        kill by the clock.
        """
        place = self.ranks.start(
            self.size, small_runs.session, spec={"run_dir": str(run_dir), **spec}
        )
        if "after_s" in spec:
            time.sleep(spec["after_s"])
            if not (place / "status-0").exists():
                os.kill(int((place / "pid-0").read_text()), spec.get("signal", signal.SIGKILL))
        (status,) = {outcome.status for outcome in self.ranks.outcomes(place)}
        return status
