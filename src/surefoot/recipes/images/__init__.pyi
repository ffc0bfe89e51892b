from .config import BEST, PRESETS, Changes, Config, Data
from .networks import Model
from .recipe import build, check, program_files

__all__ = [
    "BEST",
    "PRESETS",
    "Changes",
    "Config",
    "Data",
    "Model",
    "build",
    "check",
    "program_files",
]
