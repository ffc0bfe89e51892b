from .build import build, check, judged, network_shape, outline
from .config import BEST, PRESETS, Config, Data, Model

__all__ = ["BEST", "PRESETS", "Config", "Data", "Model", "build", "check", "judged", "network_shape", "outline"]
