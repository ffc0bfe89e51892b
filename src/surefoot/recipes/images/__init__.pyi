from .config import BEST, PRESETS, Changes, Config, Data
from .recipe import build, check, program_files

__all__ = ["BEST", "PRESETS", "Changes", "Config", "Data", "build", "check", "program_files"]
