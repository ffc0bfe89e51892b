from .config import BEST, PRESETS, Config, Data, Model
from .recipe import build, check, evaluate_questions, network_shape, outline

__all__ = [
    "BEST",
    "PRESETS",
    "Config",
    "Data",
    "Model",
    "build",
    "check",
    "evaluate_questions",
    "network_shape",
    "outline",
]
