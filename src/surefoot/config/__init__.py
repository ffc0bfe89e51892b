"""Configuration: dataclasses to TOML and back, and what every run has; nothing here imports torch."""

from surefoot.config.files import origins, program, to_toml, values, with_choices
from surefoot.config.strategy import Sharding, Strategy
from surefoot.config.train_settings import TrainSettings, clipping, default, ordered, setting
from surefoot.config.tree import LEADS, STAYS, flatten, layered, nearest, unflatten

__all__ = [
    "LEADS",
    "STAYS",
    "Sharding",
    "Strategy",
    "TrainSettings",
    "clipping",
    "default",
    "flatten",
    "layered",
    "nearest",
    "ordered",
    "origins",
    "program",
    "setting",
    "to_toml",
    "unflatten",
    "values",
    "with_choices",
]
