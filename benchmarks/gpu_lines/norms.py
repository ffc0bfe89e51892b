"""Batch normalization over all processes changes nothing in one process."""

from __future__ import annotations

from gpu_lines.runs import assert_close, breaking_data, breaking_run, losses_of


def check(device: str) -> str:
    """Train with and without."""
    inputs, labels = breaking_data()
    data = inputs.nan_to_num(), labels
    losses = losses_of(breaking_run(device, train_data=data, sync_batch_norm=True))
    difference = assert_close(
        losses, losses_of(breaking_run(device, train_data=data)), relative=1e-3
    )
    return f"losses of {len(losses)} steps differ by at most {difference:.1e} of themselves"
