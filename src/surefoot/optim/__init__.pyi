from .lr_multipliers import LRMultipliers, frozen, layer_decay, width_scaling
from .optimizers import adafactor, adam, adamw, adamw8bit, lion, muon, nadam, radam, schedule_free, sgd

__all__ = [
    "LRMultipliers",
    "adafactor",
    "adam",
    "adamw",
    "adamw8bit",
    "frozen",
    "layer_decay",
    "lion",
    "muon",
    "nadam",
    "radam",
    "schedule_free",
    "sgd",
    "width_scaling",
]
