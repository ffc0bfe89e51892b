"""Activations that are computed again give the same losses, with dropout inside attention and
autocast to bf16.
"""

from __future__ import annotations

from gpu_lines.runs import assert_close, gpt_run, losses_of


def check(device: str) -> str:
    """Train with and without."""
    plain = losses_of(gpt_run(device, precision="bf16", dropout=0.1))
    differences = [
        assert_close(
            losses_of(gpt_run(device, precision="bf16", dropout=0.1, activation_checkpointing=how)),
            plain,
            relative=2e-2,
        )
        for how in ("blocks", "selective")
    ]
    return f"losses of {len(plain)} steps differ by at most {max(differences):.1e} of themselves"
