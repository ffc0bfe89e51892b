"""GPT-2 124M beside a plain script: the last rows of benchmarks/gpt2_mfu.py."""

from __future__ import annotations

import contextlib
import io
import re
import sys

from gpu_lines.machine import limit_s

SLOWEST = 0.9  # of plain: below that something waits
SLACK_S = 30.0  # between the end of the last round and the limit


def check(device: str) -> str:
    """Measure in turns, a minute for each way, or as long as the limit permits."""
    import gpt2_mfu

    options = ["--tiny", "--rounds", "2", "--steps", "1", "--peak", "1e12"]
    if device == "cuda":
        options = ["--rounds", "100000", "--seconds", "60", "--limit-s", str(limit_s() - SLACK_S)]
    sys.argv = ["gpt2_mfu.py", *options]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        gpt2_mfu.main()
    print(printed.getvalue())
    rows = [row for row in printed.getvalue().splitlines() if "tokens/s" in row]
    assert len(rows) == 3, rows
    shares = {row[:22].strip(): float(re.findall(r"([\d.]+) of plain", row)[0]) for row in rows}
    assert device == "cpu" or shares["surefoot, all logits"] >= SLOWEST, (
        f"slower than {SLOWEST} of plain: {shares}"
    )
    return "; ".join(re.sub(r"\s+", " ", row) for row in rows)
