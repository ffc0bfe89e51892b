"""Losses of the images recipe's `tiny` preset over its first steps, on scikit-learn's digits; 5
seconds.

They pin everything at once: images, what is held out, order, augmentation, initialisation, network,
loss, clipping, optimizer, schedule. A change that is meant changes them with a line in
CHANGELOG.md; one that is not meant is found here. Rounding differs between builds of torch and
kinds of CPU, so they agree to 2e-3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from run_files import records_of
from surefoot.config.tree import layered
from surefoot.recipes import images

GOLDEN = {
    "as it is": [2.298106, 2.228213, 2.188019],
    "with everything": [2.304089, 2.298087, 2.296576],
}
CHANGES: dict[str, dict[str, object]] = {
    "as it is": {},
    "with everything": {
        "augmentation.flip": True,
        "augmentation.cutout": 2,
        "augmentation.mixup": 0.4,
        "augmentation.cutmix": 0.4,
        "model.dropout": 0.1,
        "micro_batch_size": 16,
    },
}


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_first_losses_are_what_they_were(kind: str, tmp_path: Path) -> None:
    changes = {
        "run_dir": str(tmp_path / "run"),
        "length": "12 steps",
        "log_every": "4 steps",
        "evaluate_every": "100 steps",
        "precision": "fp32",
        **CHANGES[kind],
    }
    config, _ = layered(images.Config, [("preset", images.PRESETS["tiny"]), ("test", changes)])

    images.build(config).train()

    losses = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    assert losses == pytest.approx(GOLDEN[kind], abs=2e-3)
