from .average import average_weights, last_steps
from .filesystem import Disk
from .format import Checkpoint, Damage, DamageError, write
from .gpt2 import load_gpt2, save_gpt2
from .manifest import Manifest
from .reader import opened, read, read_manifest, verify
from .store import Store
from .writer import Writer

__all__ = [
    "Checkpoint",
    "Damage",
    "DamageError",
    "Disk",
    "Manifest",
    "Store",
    "Writer",
    "average_weights",
    "last_steps",
    "load_gpt2",
    "opened",
    "read",
    "read_manifest",
    "save_gpt2",
    "verify",
    "write",
]
