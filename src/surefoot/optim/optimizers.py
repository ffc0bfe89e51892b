"""Specifications of optimizers, without importing torch; the guide to optimizers helps to choose
one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surefoot.errors import together
from surefoot.optim import validation
from surefoot.optim.lr_multipliers import LRMultipliers, misfits
from surefoot.optim.validation import (
    DECLARED,
    Declaration,
    Value,
    at_least,
    declaration,
    declared,
    problems,
)

Betas = tuple[float, float]
Decay = Literal["matrices", "all"]
Multipliers = LRMultipliers | Sequence[LRMultipliers]

AVERAGING = ("schedule_free",)  # they average the weights for evaluation


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer's name and settings, returned by functions such as `adamw` or, from
    configuration, by `named`.
    """

    name: str
    lr: float
    weight_decay: float
    settings: Mapping[str, Value] = field(default_factory=dict)
    decay: Decay = "matrices"  # which parameters decay
    lr_multipliers: tuple[LRMultipliers, ...] = ()  # for parts of the model
    # what a decay spares is a group of its own without one too, as it was before a change
    has_decayed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return all settings that must be equal for an exact resume, as JSON values.

        >>> sgd(0.1, momentum=0.9).to_dict()
        {'name': 'sgd', 'lr': 0.1, 'weight_decay': 0.0, 'decay': 'matrices', 'momentum': 0.9, 'nesterov': False}
        """
        values: dict[str, Any] = {
            "name": self.name,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "decay": self.decay,
        }
        for key, value in self.settings.items():
            values[key] = list(value) if isinstance(value, tuple) else value
        if self.lr_multipliers:
            values["lr_multipliers"] = [dict(rate.identity) for rate in self.lr_multipliers]
        return values


@declared(".torch_optimizers", first_run=(3e-3, 0.1))
def adamw(
    lr: float,
    *,
    weight_decay: float = 0.01,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2:
    https://arxiv.org/abs/1711.05101).

    Each step subtracts lr * weight_decay * weight, so the decay follows the schedule. With
    `decay="matrices"`, biases and norms do not decay, as in transformers and timm; embeddings do
    not decay either. `decay="all"` decays every parameter, as
    `torch.optim.AdamW(model.parameters())` does. `lr_multipliers` are factors for parts of the
    model, such as `layer_decay(0.75)`.

    >>> adamw(3e-4, betas=(0.9, 0.95)).to_dict()
    {'name': 'adamw', 'lr': 0.0003, 'weight_decay': 0.01, 'decay': 'matrices', 'betas': [0.9, 0.95], 'eps': 1e-08}
    """
    return _specified("adamw", **locals())


@declared(".torch_optimizers", first_run=(3e-3, 0.0))
def adam(
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify Adam with weight decay in the gradient (Kingma and Ba 2015, algorithm 1:
    https://arxiv.org/abs/1412.6980).

    The decay passes through the moments, so weights with large gradients hardly decay; use `adamw`
    except for comparison.

    >>> adam(3e-4).to_dict()
    {'name': 'adam', 'lr': 0.0003, 'weight_decay': 0.0, 'decay': 'matrices', 'betas': [0.9, 0.999], 'eps': 1e-08}
    """
    return _specified("adam", **locals())


@declared(".torch_optimizers", first_run=(0.1, 0.0), like_adam=False)
def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify stochastic gradient descent, with torch's momentum: buffer = momentum * buffer +
    gradient.

    The learning rate multiplies the buffer. In Sutskever et al., 2013, equations 1 and 2, the
    learning rate multiplies the gradient inside the buffer:
    https://proceedings.mlr.press/v28/sutskever13.html

    >>> dict(sgd(0.1, momentum=0.9).settings)
    {'momentum': 0.9, 'nesterov': False}
    """
    return _specified("sgd", **locals())


@declared(".lion", first_run=(1e-3, 0.3))
def lion(
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: Betas = (0.9, 0.99),
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify Lion, which steps by the sign of a momentum (Chen et al., 2023, algorithm 2:
    https://arxiv.org/abs/2302.06675).

    The state takes half the bytes of AdamW's state. Every element moves by lr. Use an lr 3 to 10
    times smaller than AdamW's, and a weight_decay 3 to 10 times larger (section 5).

    >>> lion(3e-4, weight_decay=1.0).to_dict()
    {'name': 'lion', 'lr': 0.0003, 'weight_decay': 1.0, 'decay': 'matrices', 'betas': [0.9, 0.99]}
    """
    return _specified("lion", **locals())


@declared(
    ".adafactor",
    first_run=(0.1, 0.0),
    like_adam=False,
    checks={
        "beta2_decay": at_least(-1, below=0),
        "clip_threshold": at_least(1),
        "min_scale": validation.POSITIVE,
    },
)
def adafactor(
    lr: float = 0.01,
    *,
    weight_decay: float = 0.0,
    beta2_decay: float = -0.8,
    clip_threshold: float = 1.0,
    min_scale: float = 1e-3,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify Adafactor, with a mean square per row and column (Shazeer and Stern 2018:
    https://arxiv.org/abs/1804.04235).

    The arithmetic is torch's version of algorithm 4. A step is at most min(lr, 1 / sqrt(step))
    times the parameter's root mean square, or times `min_scale` if `min_scale` is larger. Updates
    are scaled down to a root mean square of `clip_threshold`. A schedule has an effect only while
    its lr is below 1 / sqrt(step).

    >>> adafactor(clip_threshold=2.0).settings
    {'beta2_decay': -0.8, 'clip_threshold': 2.0, 'min_scale': 0.001}
    """
    return _specified("adafactor", **locals())


@declared(
    ".muon",
    first_run=(1e-2, 0.1),
    like_adam=False,
    checks={
        "ns_steps": validation.FEW,
        "adamw_lr": validation.POSITIVE,
        "adamw_modules": validation.NAMES,
    },
)
def muon(
    lr: float,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    betas: Betas = (0.9, 0.95),
    eps: float = 1e-8,
    adamw_lr: float | None = None,
    adamw_modules: tuple[str, ...] | None = None,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify Muon for hidden matrices and kernels, and AdamW (`betas`, `eps`) for all other
    parameters.

    AdamW trains embeddings, head, norms and biases. Matrix updates are orthogonalized by `ns_steps`
    Newton-Schulz iterations (Jordan et al., 2024: https://kellerjordan.github.io/posts/muon/).
    These updates have the scale of AdamW's updates (Liu et al., 2025, section 2.2, equation 4:
    https://arxiv.org/abs/2502.16982), so that AdamW's learning rate and decay fit both optimizers.
    `adamw_lr` sets another learning rate for AdamW. `adamw_modules` names the modules or parameters
    that AdamW trains instead of the head. `surefoot plan` prints which optimizer trains each
    parameter.

    >>> dict(muon(3e-3, adamw_lr=1e-3).settings)
    {'momentum': 0.95, 'nesterov': True, 'ns_steps': 5, 'betas': (0.9, 0.95), 'eps': 1e-08, 'adamw_lr': 0.001, 'adamw_modules': None}
    """
    return _specified("muon", **locals())


@declared(".torch_optimizers", first_run=(3e-3, 0.1), checks={"momentum_decay": at_least(0)})
def nadam(
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    momentum_decay: float = 4e-3,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify torch's NAdam, with decoupled weight decay (Dozat 2016:
    https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ).

    >>> nadam(1e-3).to_dict()
    {'name': 'nadam', 'lr': 0.001, 'weight_decay': 0.0, 'decay': 'matrices', 'betas': [0.9, 0.999], 'eps': 1e-08, 'momentum_decay': 0.004}
    """
    return _specified("nadam", **locals())


@declared(".torch_optimizers", first_run=(3e-3, 0.1))
def radam(
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify torch's RAdam, with decoupled weight decay (Liu et al., 2020, algorithm 2:
    https://arxiv.org/abs/1908.03265).

    >>> radam(1e-3).to_dict()
    {'name': 'radam', 'lr': 0.001, 'weight_decay': 0.0, 'decay': 'matrices', 'betas': [0.9, 0.999], 'eps': 1e-08}
    """
    return _specified("radam", **locals())


@declared(".adamw8bit", first_run=(3e-3, 0.1))
def adamw8bit(
    lr: float,
    *,
    weight_decay: float = 0.01,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify AdamW with 8-bit moments in blocks of 256 (Dettmers et al., 2022:
    https://arxiv.org/abs/2110.02861).

    The state takes 25% of the bytes of AdamW's state. Parameters of fewer than 4096 elements have
    32-bit moments. The optimizer needs bitsandbytes.

    >>> adamw8bit(3e-4).to_dict()
    {'name': 'adamw8bit', 'lr': 0.0003, 'weight_decay': 0.01, 'decay': 'matrices', 'betas': [0.9, 0.999], 'eps': 1e-08}
    """
    return _specified("adamw8bit", **locals())


@declared(".schedule_free", first_run=(1e-2, 0.1), checks={"betas": validation.FIRST_ABOVE_0})
def schedule_free(
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Specify AdamW without a schedule (Defazio et al., 2024, algorithm 1:
    https://arxiv.org/abs/2405.15682).

    Evaluation, samples and predictions use an average of all weights so far, weighted by the
    squared learning rates. Use a constant schedule with a warm-up, and no `ema`. Good learning
    rates are 1 to 10 times AdamW's.

    >>> schedule_free(3e-3).to_dict()
    {'name': 'schedule_free', 'lr': 0.003, 'weight_decay': 0.0, 'decay': 'matrices', 'betas': [0.9, 0.999], 'eps': 1e-08}
    """
    return _specified("schedule_free", **locals())


def _specified(
    name: str,
    *,
    lr: float,
    weight_decay: float,
    decay: Decay,
    lr_multipliers: Multipliers,
    **settings: Value,
) -> OptimizerSpec:
    return named(
        name,
        lr=lr,
        weight_decay=weight_decay,
        settings=settings,
        decay=decay,
        lr_multipliers=lr_multipliers,
    )


def named(
    name: str,
    *,
    lr: float,
    weight_decay: float | None = None,
    settings: Mapping[str, Value] | None = None,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """Return the specification of the optimizer `name`; a setting of None selects the optimizer's
    default.

    Raises one `ConfigError` that lists all problems, including settings of other optimizers.

    >>> named("sgd", lr=0.1, settings={"momentum": 0.9, "betas": None}).to_dict()["momentum"]
    0.9
    """
    declared_optimizer = declaration(name)
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    if weight_decay is None:
        weight_decay = declared_optimizer.weight_decay
    if isinstance(lr_multipliers, Sequence):
        multipliers = tuple(lr_multipliers)
    else:
        multipliers = (lr_multipliers,)
    errors = problems(
        declared_optimizer, lr=lr, weight_decay=weight_decay, decay=decay, settings=given
    )
    errors += misfits(multipliers, declared_optimizer)
    if errors:
        raise together(errors)
    all_settings: dict[str, Value] = {}
    for key, value in {**declared_optimizer.settings, **given}.items():
        # TOML and JSON have lists
        all_settings[key] = tuple(value) if isinstance(value, list) else value
    return OptimizerSpec(
        name,
        lr=lr,
        weight_decay=weight_decay,
        settings=all_settings,
        decay=decay,
        lr_multipliers=multipliers,
    )


OPTIMIZERS: Mapping[str, Declaration] = DECLARED  # all optimizers above, by name
