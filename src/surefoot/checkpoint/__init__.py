"""Checkpoints: what one is on disk, which exist, and how a run becomes one and comes back from it."""

from surefoot.checkpoint.average import averaged, last_steps
from surefoot.checkpoint.disk import Disk, Files
from surefoot.checkpoint.format import Contents, Damage, DamageError, write
from surefoot.checkpoint.manifest import Manifest
from surefoot.checkpoint.reading import opened, read, read_manifest, verify
from surefoot.checkpoint.store import Store
from surefoot.checkpoint.writer import Writer

__all__ = [
    "Contents",
    "Damage",
    "DamageError",
    "Disk",
    "Files",
    "Manifest",
    "Store",
    "Writer",
    "averaged",
    "last_steps",
    "opened",
    "read",
    "read_manifest",
    "verify",
    "write",
]
