"""The data that the ranks were started with are the same data: a run gives each rank its share, so
data that the script has already split would be split again.
"""

from collections.abc import Mapping
from typing import Any

import torch

from surefoot.data.batch_lists import BatchLists
from surefoot.data.dataset_checks import digest_of_samples
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DataError

UNSPLIT = "give every rank the whole data, without split_dataset_by_node, rank or world_size"


def refuse_other_samples(world: World, datasets: Mapping[str, Any], *, seed: int) -> None:
    """Raise `DataError` if a rank has other samples than rank 0, by the first, middle and last
    sample of each data set. Collective.

    Ranks whose processors have other instructions are not compared, because they may decode a
    sample to other bits.
    """
    digests = {name: digest_of_samples(data, seed=seed) for name, data in datasets.items()}
    processor = torch.backends.cpu.get_cpu_capability()
    by_rank = world.gathered({"processor": processor, "digests": digests})
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if other["processor"] != first["processor"]:
            continue
        for name, digest in first["digests"].items():
            if other["digests"][name] != digest:
                raise DataError(
                    "data-differs-among-ranks",
                    problem=f"{name}: rank {rank} has other samples than rank 0",
                    reason="the run itself gives each rank its share, so split data are split again",
                    remedy=[
                        UNSPLIT,
                        "if the data are random numbers, seed them: torch.manual_seed(0)",
                    ],
                    data=name,
                    rank=rank,
                )


def refuse_other_lists(world: World, order: Any) -> None:
    """Raise `ConfigError` if a sampler lists other batches on a rank than on rank 0. Collective."""
    is_listed = isinstance(order, BatchLists)
    fingerprints = world.gathered(order.fingerprint if is_listed else None)
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            name = order.name if is_listed else "the sampler of train_data"
            raise ConfigError(
                "sampler-split-by-rank",
                problem=f"{name} lists other batches on rank {rank} than on rank 0",
                reason="the run itself gives each rank its part of one list, so the share of a rank"
                " is split again",
                remedy=[
                    "let it list the batches of all ranks, as rank 0 of 1: rank=0, num_replicas=1",
                    "or give the data set: train_data=loader.dataset, batch_size=...",
                ],
                sampler=name,
                rank=rank,
            )
