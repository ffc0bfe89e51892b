"""fp16 trains: the loss of a GPT falls, a step that overflows is skipped, and the scale of the loss
halves.
"""

from __future__ import annotations

import surefoot as sf
from gpu_lines.bf16 import falling_loss
from gpu_lines.runs import breaking_run
from gpu_lines.skipping import assert_same_bits, state_of


def check(device: str) -> str:
    """Train until the loss has fallen; then with a sample that overflows."""
    falling = falling_loss(device, "fp16")
    run = breaking_run(device, precision="fp16", ema=0.9)
    scale = scale_of(run)
    before = state_of(run)
    skipped = 0
    with run:
        for step in run:
            now = scale_of(run)
            after = state_of(run)
            if step.skipped is not None and bool(step.skipped):
                skipped += 1
                assert now == scale / 2, (
                    f"the scale went from {scale} to {now} at step {step.index}, which overflowed"
                )
                if step.index:  # the optimizer has no state before the first
                    assert_same_bits(
                        after, before, f"step {step.index}, which overflowed, changed bits"
                    )
            else:
                assert now == scale, (
                    f"the scale went from {scale} to {now} at step {step.index}, which was applied"
                )
            scale = now
            before = after
    assert skipped >= 2, "no step overflowed"
    return f"{falling}; {skipped} overflows were skipped, the scale is {scale:g}"


def scale_of(run: sf.Run) -> float:
    """The factor on the loss."""
    loss_scale = run.parts.run_state.precision.loss_scale
    assert loss_scale is not None, "fp16 without a scale of the loss"
    return float(loss_scale.scale)
