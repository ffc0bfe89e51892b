"""Batch normalisation over all processes changes nothing in one process; on a CPU it is refused by
name.
"""

from __future__ import annotations

import surefoot as sf
from gpu_lines.runs import assert_close, breaking_data, breaking_run, is_tiny, losses_of


def check(device: str) -> str:
    """Train with and without."""
    inputs, labels = breaking_data()
    data = inputs.nan_to_num(), labels
    if is_tiny(device):
        try:
            breaking_run(device, train_data=data, sync_batch_norm=True)
        except sf.ConfigError as refusal:
            return f"refused on a CPU, as it should be: {str(refusal).splitlines()[0]}"
        raise AssertionError("sync_batch_norm was not refused on a CPU")
    losses = losses_of(breaking_run(device, train_data=data, sync_batch_norm=True))
    difference = assert_close(
        losses, losses_of(breaking_run(device, train_data=data)), relative=1e-3
    )
    return f"losses of {len(losses)} steps differ by at most {difference:.1e} of themselves"
