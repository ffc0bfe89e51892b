"""A compiled run makes the losses of a plain one, and compiles nothing after its first steps."""

from __future__ import annotations

import shutil

from torch._dynamo.utils import counters

from gpu_lines.machine import Skip
from gpu_lines.runs import assert_close, gpt_run, is_tiny, losses_of


def check(device: str) -> str:
    """Train both ways."""
    if (
        shutil.which("gcc") is None
        and shutil.which("g++") is None
        and shutil.which("clang") is None
    ):
        raise Skip("torch.compile needs a C compiler, and none is installed")
    precision = "fp32" if is_tiny(device) else "bf16"
    plain = losses_of(gpt_run(device, precision=precision))
    run = gpt_run(device, precision=precision, compile=True)
    losses = []
    graphs = []
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(step.loss.detach().clone())
            graphs.append(counters["stats"]["unique_graphs"])
    difference = assert_close(
        [float(loss) for loss in losses], plain, relative=1e-3 if is_tiny(device) else 5e-2
    )
    assert 0 < graphs[1] == graphs[-1], f"graphs after each step: {graphs}"
    return f"{graphs[-1]} graphs, {precision} losses of {len(losses)} steps differ by at most {difference:.1e} of themselves"
