from .config import PRESETS, Config, Data, Model
from .recipe import build, check, network_shape, outline

__all__ = ["PRESETS", "Config", "Data", "Model", "build", "check", "network_shape", "outline"]
