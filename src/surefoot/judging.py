"""The scores of any model over a split, without a run around it."""

from __future__ import annotations

from torch import nn

from surefoot.data.feed import in_order
from surefoot.data.samples import check_split
from surefoot.errors import ConfigError
from surefoot.evaluate import Split, scored
from surefoot.evaluate import numbers as of_numbers
from surefoot.precision import precision as chosen_precision
from surefoot.world import device_called

_BATCH_SIZE = 16  # where the split names none; changes no score


def split_scores(
    model: nn.Module, split: Split, *, device: str = "auto", precision: str = "fp32", seed: int = 0
) -> dict[str, float]:
    """Every score of a split by name, of a model that is moved to the device and otherwise left as it was.

    `precision` is that of the passes, as in `Run`. A split that scores the run's loss has none here: `Split(..., loss=False)`.

    >>> import torch
    >>> from surefoot.evaluate import accuracy
    >>> data = torch.eye(3), torch.tensor([0, 1, 0])
    >>> split_scores(nn.Identity(), Split(data, scores=accuracy, loss=False), device="cpu")
    {'accuracy': 0.6666666666666666}
    """
    if split.loss:
        raise ConfigError("split_scores: outside a run there is no loss to score: write Split(..., loss=False)")
    check_split("split", split.dataset, seed=seed)
    place = device_called(device)
    numbers = chosen_precision(precision, place)
    batches = in_order(split.dataset, batch_size=split.batch_size or _BATCH_SIZE, seed=seed, device=place)
    with numbers.numerics():
        found = scored(
            model.to(place),
            batches,
            loss=None,
            scores=split.score_functions,
            outputs=split.outputs,
            judge=split.judge,
            precision=numbers,
            seed=seed,
        )
    scores = of_numbers(found)
    return scores | {name: function(scores) for name, function in split.derived.items()}
