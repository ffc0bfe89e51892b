"""Checkpoints: what one is on disk, which exist, and how a run becomes one and comes back from it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.checkpoint.average import averaged, last_steps
    from surefoot.checkpoint.disk import Disk, Files
    from surefoot.checkpoint.format import Contents, Damage, DamageError, write
    from surefoot.checkpoint.manifest import Manifest
    from surefoot.checkpoint.reading import opened, read, read_manifest, verify
    from surefoot.checkpoint.store import Store
    from surefoot.checkpoint.writer import Writer

_HOMES = {
    "average": ("averaged", "last_steps"),
    "disk": ("Disk", "Files"),
    "format": ("Contents", "Damage", "DamageError", "write"),
    "manifest": ("Manifest",),
    "reading": ("opened", "read", "read_manifest", "verify"),
    "store": ("Store",),
    "writer": ("Writer",),
}

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


def __getattr__(name: str) -> Any:
    """Import a public name where it is used: the schema of state.json is read without torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"surefoot.checkpoint.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
