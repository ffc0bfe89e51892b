"""Frozen tensors in checkpoints. A tensor with the bits that an older checkpoint has is not written
again.

Bits are compared by fingerprints, which are computed where the tensors are, and kept in memory. A
fingerprint is the list of sums over i of odd[i] * number[i] mod 2^64, over chunks of a tensor's
bytes as 32-bit integers, with fixed random odd factors: multilinear hashing,
https://arxiv.org/abs/1202.4961. Each change of a single number changes the fingerprint. Any other
change is missed with probability 2^-32 at most. Version counters of torch do not suffice:
`parameter.data.mul_(2)` leaves them unchanged. Imported if a run has frozen parameters.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.format import Checkpoint, DamageError
from surefoot.checkpoint.manifest import Base
from surefoot.checkpoint.reader import read_manifest
from surefoot.checkpoint.store import Store
from surefoot.distributed.shards import Rows
from surefoot.distributed.world import World

Frozen = Mapping[
    str, Mapping[str, tuple[Tensor, Rows | None]]
]  # by file and name: the tensor of this rank, and its rows
_Key = tuple[str, str]  # file, name
_CHUNK = {"cuda": 1 << 22}  # numbers; elsewhere 1 << 18, which stay in a core's cache


class FrozenTensors:
    """The frozen tensors that checkpoints in `store` have, by step and fingerprint. Each rank has
    its own rows.
    """

    def __init__(self, store: Store, world: World) -> None:
        self.store, self.world = store, world
        self.stored: dict[_Key, tuple[int, list[Any]]] = {}
        self.pending: dict[
            _Key, tuple[int, list[Any]]
        ] = {}  # written by the last save, which may fail
        self.digests: dict[int, str] = {}  # of manifests that an earlier session has written
        self.chained = set[int]()  # checkpoints that need others than step 0, and so are no bases
        self._factors: dict[torch.device, Tensor] = {}

    def resumed(self, checkpoint: Checkpoint, frozen: Frozen) -> None:
        """Take the tensors of a restored checkpoint as stored: in its bases, or else in the
        checkpoint itself.
        """
        of_bases = {
            (file, name): base.step
            for base in checkpoint.bases
            for file, names in base.tensors.items()
            for name in names
        }
        self.stored = {
            key: (of_bases.get(key, checkpoint.step), fingerprint)
            for key, fingerprint in self._fingerprints(frozen).items()
        }
        self.digests = {base.step: base.sha256 for base in checkpoint.bases}
        self.chained = {checkpoint.step} if any(self.digests) else set()
        if checkpoint.directory is not None:
            self.digests[checkpoint.step] = read_manifest(
                checkpoint.directory, disk=self.store.disk
            ).sha256

    def saved(self, step: int | None) -> None:
        """Take the tensors that the last save has written as stored, if it was the save of `step`;
        None: it failed.
        """
        self.stored |= {key: entry for key, entry in self.pending.items() if entry[0] == step}
        self.pending = {}

    def bases(self, step: int, frozen: Frozen) -> list[Base]:
        """Return the older checkpoints with tensors that a checkpoint of `step` need not have.
        Collective if tensors are sharded.
        """
        digests = {**self.digests, **self.store.digests}
        steps = {each for each, _ in self.stored.values() if each < step}
        if self.world.is_main:
            steps = {each for each in steps if each in digests and self._has(each, digests[each])}
        now = self._fingerprints(frozen)
        same = {
            key
            for key in now
            if key in self.stored
            and self.stored[key][0] in steps
            and self.stored[key][1] == now[key]
        }
        sharded = {
            (file, name)
            for file, named in frozen.items()
            for name, (_, rows) in named.items()
            if rows is not None
        }
        if sharded:
            on_all = set.intersection(
                *(
                    {(file, name) for file, name in each}
                    for each in self.world.gathered(sorted(same & sharded))
                )
            )
            same = (same - sharded) | on_all
        through_others = any(self.stored[key][0] in self.chained for key in same)
        if (
            any(self.world.gathered(through_others)) if sharded else through_others
        ):  # this checkpoint is to need at most step 0
            same = {key for key in same if self.stored[key][0] == 0}
        self.pending = {
            key: (step, fingerprint) for key, fingerprint in now.items() if key not in same
        }
        tensors: dict[int, dict[str, list[str]]] = {}
        for file, name in sorted(same):
            tensors.setdefault(self.stored[file, name][0], {}).setdefault(file, []).append(name)
        self.chained = self.chained - {step} | ({step} if any(tensors) else set())
        return [Base(each, digests.get(each, ""), tensors[each]) for each in sorted(tensors)]

    def _has(self, step: int, digest: str) -> bool:
        with suppress(DamageError):
            return read_manifest(self.store.path(step), disk=self.store.disk).sha256 == digest
        return False

    @torch.no_grad()
    def _fingerprints(self, frozen: Frozen) -> dict[_Key, list[Any]]:
        sums = {
            (file, name): self._sums(each[0])
            for file, named in frozen.items()
            for name, each in named.items()
        }
        by_device: dict[torch.device, list[_Key]] = {}
        for key, each in sums.items():
            by_device.setdefault(each.device, []).append(key)
        fingerprints: dict[_Key, list[Any]] = {}
        for keys in by_device.values():
            numbers = iter(
                torch.cat([sums[key] for key in keys]).tolist()
            )  # the host waits once for each device
            for file, name in keys:
                tensor = frozen[file][name][0]
                head = [str(tensor.dtype), *tensor.shape]
                fingerprints[file, name] = head + [
                    next(numbers) for _ in range(len(sums[file, name]))
                ]
        return fingerprints

    def _sums(self, tensor: Tensor) -> Tensor:
        flat = (
            tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        )
        flat = flat if flat.storage_offset() % 4 == 0 else flat.clone()
        numbers = flat.view(torch.int32) if len(flat) % 4 == 0 else flat
        odd = self._odd_factors(numbers.device)[: len(numbers)]
        products = torch.empty_like(odd)
        chunks = torch.split(numbers, len(odd))
        return torch.stack(
            [torch.mul(each, odd[: len(each)], out=products[: len(each)]).sum() for each in chunks]
        )

    def _odd_factors(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            generator = torch.Generator().manual_seed(0)  # not the run's generator
            count = _CHUNK.get(device.type, 1 << 18)
            factors = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1
            self._factors[device] = factors.to(device)
        return self._factors[device]
