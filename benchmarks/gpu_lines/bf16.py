"""bf16 trains: the loss of a GPT falls."""

from __future__ import annotations

from gpu_lines.runs import gpt_run, losses_of


def check(device: str) -> str:
    """Train in bf16 and in fp32."""
    return falling_loss(device, "bf16")


def falling_loss(device: str, precision: str) -> str:
    """Check that the loss halves, and that it ends about where fp32 ends."""
    losses, expected = (
        losses_of(gpt_run(device, precision=name, length="60 steps"))
        for name in (precision, "fp32")
    )
    first = losses[0]
    last = sum(losses[-5:]) / 5
    reference = sum(expected[-5:]) / 5
    assert last < 0.5 * first, f"the loss went from {first:.3f} to {last:.3f}"
    assert abs(last - reference) < 0.25, f"the loss ended at {last:.3f}, in fp32 at {reference:.3f}"
    return f"loss {first:.3f} to {last:.3f} in {len(losses)} steps (fp32: {reference:.3f})"
