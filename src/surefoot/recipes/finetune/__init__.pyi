from .config import BEST, PRESETS, Config, Data, Lora
from .recipe import build, check, outline

__all__ = [
    "BEST",
    "PRESETS",
    "Config",
    "Data",
    "Lora",
    "build",
    "check",
    "outline",
]
