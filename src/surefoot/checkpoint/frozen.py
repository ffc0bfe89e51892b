"""Frozen tensors in checkpoints. A tensor with the bits that an older checkpoint has is not written
again.

Bits are compared by `tensor_fingerprint`, and the fingerprints are kept in memory. Imported if a run has
frozen parameters.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from surefoot.checkpoint.fingerprint import read_fingerprints, tensor_fingerprint
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

    def _fingerprints(self, frozen: Frozen) -> dict[_Key, list[Any]]:
        keys = [(file, name) for file, named in frozen.items() for name in named]
        # in one layout, since a later session may have another memory format
        fingerprints = [
            tensor_fingerprint(frozen[file][name][0].contiguous()) for file, name in keys
        ]
        described: dict[_Key, list[Any]] = {}
        for key, each, sums in zip(
            keys, fingerprints, read_fingerprints(fingerprints), strict=True
        ):
            described[key] = [str(each.dtype), *each.shape, *sums]
        return described
