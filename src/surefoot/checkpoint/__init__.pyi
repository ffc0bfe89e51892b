from .average import averaged, last_steps
from .filesystem import Disk
from .format import Contents, Damage, DamageError, write
from .manifest import Manifest
from .reader import opened, read, read_manifest, verify
from .store import Store
from .writer import Writer

__all__ = [
    "Contents",
    "Damage",
    "DamageError",
    "Disk",
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
