from .lr_schedule import (
    constant,
    exponential,
    inverse_sqrt,
    join,
    linear,
    one_cycle,
    polynomial,
    step_decay,
    warm_restarts,
    warmup_cosine,
    warmup_stable_decay,
)

__all__ = [
    "constant",
    "exponential",
    "inverse_sqrt",
    "join",
    "linear",
    "one_cycle",
    "polynomial",
    "step_decay",
    "warm_restarts",
    "warmup_cosine",
    "warmup_stable_decay",
]
