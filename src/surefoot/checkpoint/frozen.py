"""Frozen tensors in checkpoints. A tensor with the bits that an older checkpoint has is not written
again.

Bits are compared by `tensor_fingerprint`, and the fingerprints are kept in memory. Imported if a run has
frozen parameters.
"""

from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from surefoot.checkpoint.fingerprint import read_fingerprints, tensor_fingerprint
from surefoot.checkpoint.format import Checkpoint, DamageError
from surefoot.checkpoint.manifest import Base
from surefoot.checkpoint.reader import read_manifest
from surefoot.checkpoint.store import Store
from surefoot.distributed.shards import Rows
from surefoot.distributed.world import World

# by file and name: the tensor of this rank, and its rows
Frozen = Mapping[str, Mapping[str, tuple[Tensor, Rows | None]]]
_Key = tuple[str, str]  # file, name


class _FrozenTensor(NamedTuple):
    """The step of the checkpoint that has a tensor, and the tensor's fingerprint."""

    step: int
    fingerprint: list[Any]


class FrozenTensors:
    """The frozen tensors that checkpoints in `store` have, by step and fingerprint. Each rank has
    its own rows.
    """

    def __init__(self, store: Store, world: World) -> None:
        self.store = store
        self.world = world
        self.stored: dict[_Key, _FrozenTensor] = {}
        self.pending: dict[_Key, _FrozenTensor] = {}  # written by the last save, which may fail
        self.digests: dict[int, str] = {}  # of manifests that an earlier session has written
        self.chained: set[int] = set()  # checkpoints that need others than step 0, thus no bases

    def resumed(self, checkpoint: Checkpoint, frozen: Frozen) -> None:
        """Take the tensors of a restored checkpoint as stored: in its bases, or else in the
        checkpoint itself.
        """
        steps: dict[_Key, int] = {}
        self.stored = {}
        self.digests = {}
        self.chained = set()
        for base in checkpoint.bases:
            self.digests[base.step] = base.sha256
            if base.step > 0:
                self.chained.add(checkpoint.step)
            for file, names in base.tensors.items():
                for name in names:
                    steps[file, name] = base.step
        for key, fingerprint in self._fingerprints(frozen).items():
            file, _ = key
            if file in checkpoint.files:  # not of an average that begins here
                self.stored[key] = _FrozenTensor(steps.get(key, checkpoint.step), fingerprint)
        if checkpoint.directory is not None:
            manifest = read_manifest(checkpoint.directory, disk=self.store.disk)
            self.digests[checkpoint.step] = manifest.sha256

    def saved(self, step: int | None) -> None:
        """Take the tensors that the last save has written as stored, if it was the save of `step`;
        None: it failed.
        """
        for key, tensor in self.pending.items():
            if tensor.step == step:
                self.stored[key] = tensor
        self.pending = {}

    def bases(self, step: int, frozen: Frozen) -> list[Base]:
        """Return the older checkpoints with tensors that a checkpoint of `step` need not have.
        Collective if tensors are sharded.
        """
        digests = {**self.digests, **self.store.digests}
        older_steps = {tensor.step for tensor in self.stored.values() if tensor.step < step}
        if self.world.is_main:
            older_steps = {older for older in older_steps if self._has(older, digests.get(older))}
        stored = {
            key: tensor.fingerprint
            for key, tensor in self.stored.items()
            if tensor.step in older_steps
        }
        fingerprints = self._fingerprints(frozen)
        unchanged = {key for key in fingerprints if stored.get(key) == fingerprints[key]}
        sharded = _sharded(frozen)
        if sharded:
            unchanged_on_all = unchanged & sharded
            for keys in self.world.gathered(sorted(unchanged & sharded)):
                unchanged_on_all &= {(file, name) for file, name in keys}
            unchanged = (unchanged - sharded) | unchanged_on_all
        needs_chained = any(self.stored[key].step in self.chained for key in unchanged)
        if sharded:
            needs_chained = any(self.world.gathered(needs_chained))
        if needs_chained:  # this checkpoint is to need at most step 0
            unchanged = {key for key in unchanged if self.stored[key].step == 0}
        self.pending = {
            key: _FrozenTensor(step, fingerprint)
            for key, fingerprint in fingerprints.items()
            if key not in unchanged
        }
        bases = self._bases_with(unchanged, digests)
        self.chained.discard(step)
        if any(base.step > 0 for base in bases):
            self.chained.add(step)
        return bases

    def _bases_with(self, keys: Set[_Key], digests: Mapping[int, str]) -> list[Base]:
        names: dict[int, dict[str, list[str]]] = {}
        for file, name in sorted(keys):
            of_base = names.setdefault(self.stored[file, name].step, {})
            of_base.setdefault(file, []).append(name)
        return [Base(step, digests.get(step, ""), names[step]) for step in sorted(names)]

    def _has(self, step: int, digest: str | None) -> bool:
        if digest is None:
            return False
        with suppress(DamageError):
            return read_manifest(self.store.path(step), disk=self.store.disk).sha256 == digest
        return False

    def _fingerprints(self, frozen: Frozen) -> dict[_Key, list[Any]]:
        fingerprints = {}
        for file, tensors in frozen.items():
            for name, (tensor, _) in tensors.items():
                # in one layout, since a later session may have another memory format
                fingerprints[file, name] = tensor_fingerprint(tensor.contiguous())
        sums = read_fingerprints([*fingerprints.values()])
        described: dict[_Key, list[Any]] = {}
        for (key, fingerprint), numbers in zip(fingerprints.items(), sums, strict=True):
            described[key] = [str(fingerprint.dtype), *fingerprint.shape, *numbers]
        return described


def _sharded(frozen: Frozen) -> set[_Key]:
    sharded = set()
    for file, tensors in frozen.items():
        for name, (_, rows) in tensors.items():
            if rows is not None:
                sharded.add((file, name))
    return sharded
