from .build import build, check, network_shape, outline
from .config import PRESETS, Config, Data, Model

__all__ = ["PRESETS", "Config", "Data", "Model", "build", "check", "network_shape", "outline"]
