from .build import build, check, program_files
from .config import BEST, PRESETS, Changes, Config, Data

__all__ = ["BEST", "PRESETS", "Changes", "Config", "Data", "build", "check", "program_files"]
