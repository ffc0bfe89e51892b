"""Specifications of optimizers, before a model exists: a name and numbers to print, save and compare.

Importing this file does not import torch; `build.build_optimizer` does. docs/guides/optimizers.md helps to choose one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surefoot.errors import ConfigError
from surefoot.optim import validation
from surefoot.optim.lr_multipliers import LRMultipliers, misfits
from surefoot.optim.validation import DECLARED, Declaration, Setting, at_least, declaration, declared, problems

Betas = tuple[float, float]
Decay = Literal["matrices", "all"]
Multipliers = LRMultipliers | Sequence[LRMultipliers]


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer with its numbers; made by `adamw` and the others or, from configuration, `named`."""

    name: str
    lr: float
    weight_decay: float
    settings: Mapping[str, Setting] = field(default_factory=dict)
    decay: Decay = "matrices"  # which parameters decay
    lr_multipliers: tuple[LRMultipliers, ...] = ()  # of parts of the model

    def to_dict(self) -> dict[str, Any]:
        """Everything that must agree for an exact resume, as JSON values.

        >>> sgd(0.1, momentum=0.9).to_dict()
        {'name': 'sgd', 'lr': 0.1, 'weight_decay': 0.0, 'decay': 'matrices', 'momentum': 0.9, 'nesterov': False}
        """
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in self.settings.items()}
        lr_multipliers = (
            {"lr_multipliers": [dict(rate.identity) for rate in self.lr_multipliers]} if self.lr_multipliers else {}
        )
        numbers = {"lr": self.lr, "weight_decay": self.weight_decay, "decay": self.decay}
        return {"name": self.name, **numbers, **plain, **lr_multipliers}


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
    """Adam with decoupled weight decay: Loshchilov and Hutter 2019, algorithm 2 (https://arxiv.org/abs/1711.05101).

    The decay of a step is lr * weight_decay, so it follows the schedule. It applies to "matrices", as transformers and timm do, and
    not to embeddings either; `decay="all"` applies it to every parameter, as `torch.optim.AdamW(model.parameters())` does. `lr_multipliers`
    are those of parts of the model, such as `layer_decay(0.75)`.

    >>> adamw(3e-4).weight_decay
    0.01
    """
    return named(
        "adamw",
        lr=lr,
        weight_decay=weight_decay,
        settings={"betas": betas, "eps": eps},
        decay=decay,
        lr_multipliers=lr_multipliers,
    )


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
    """Adam, whose weight decay is a part of the gradient: Kingma and Ba 2015, algorithm 1 (https://arxiv.org/abs/1412.6980).

    For comparison: the decay goes through the moments, so weights with large gradients hardly decay; `adamw` has it apart.

    >>> adam(3e-4).to_dict()["betas"]
    [0.9, 0.999]
    """
    return named(
        "adam",
        lr=lr,
        weight_decay=weight_decay,
        settings={"betas": betas, "eps": eps},
        decay=decay,
        lr_multipliers=lr_multipliers,
    )


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
    """Stochastic gradient descent, with momentum as torch has it: buffer = momentum * buffer + gradient.

    The rate multiplies the buffer; Sutskever et al. 2013, equations 1 and 2, have it inside instead:
    https://proceedings.mlr.press/v28/sutskever13.html

    >>> dict(sgd(0.1, momentum=0.9).settings)
    {'momentum': 0.9, 'nesterov': False}
    """
    own = {"momentum": momentum, "nesterov": nesterov}
    return named("sgd", lr=lr, weight_decay=weight_decay, settings=own, decay=decay, lr_multipliers=lr_multipliers)


@declared(".lion", first_run=(1e-3, 0.3))
def lion(
    lr: float,
    *,
    weight_decay: float = 0.0,
    betas: Betas = (0.9, 0.99),
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """The sign of a momentum, half of AdamW's state: Chen et al. 2023, algorithm 2 (https://arxiv.org/abs/2302.06675).

    Every number moves by lr, so lr is 3 to 10 times smaller than AdamW's, and weight_decay as many times larger (section 5).

    >>> lion(3e-4, weight_decay=1.0).to_dict()
    {'name': 'lion', 'lr': 0.0003, 'weight_decay': 1.0, 'decay': 'matrices', 'betas': [0.9, 0.99]}
    """
    return named(
        "lion", lr=lr, weight_decay=weight_decay, settings={"betas": betas}, decay=decay, lr_multipliers=lr_multipliers
    )


@declared(
    ".adafactor",
    first_run=(0.1, 0.0),
    like_adam=False,
    checks={"beta2_decay": at_least(-1, below=0), "clip_threshold": at_least(1), "min_scale": validation.POSITIVE},
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
    """A mean square for each row and column: Shazeer and Stern 2018, algorithm 4 (https://arxiv.org/abs/1804.04235).

    As torch's Adafactor: a step is at most min(lr, 1 / sqrt(step)) of a parameter's root mean square, or of `min_scale` if that is
    larger. An update whose root mean square is above `clip_threshold` is scaled to it. Once 1 / sqrt(step) is below lr, a
    schedule's lower lr is felt only below that.

    >>> adafactor().lr
    0.01
    """
    settings = {"beta2_decay": beta2_decay, "clip_threshold": clip_threshold, "min_scale": min_scale}
    return named(
        "adafactor", lr=lr, weight_decay=weight_decay, settings=settings, decay=decay, lr_multipliers=lr_multipliers
    )


@declared(
    ".muon",
    first_run=(1e-2, 0.1),
    like_adam=False,
    checks={"ns_steps": validation.FEW, "adamw_lr": validation.POSITIVE, "adamw_modules": validation.NAMES},
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
    """Muon for hidden matrices and kernels, AdamW (`betas`, `eps`) for embeddings, head, norms and biases.

    Updates of matrices are orthogonalised by `ns_steps` of Newton and Schulz's iteration (Jordan et al. 2024:
    https://kellerjordan.github.io/posts/muon/) and are then as large as AdamW's (Liu et al. 2025, section 2.2, equation 4:
    https://arxiv.org/abs/2502.16982), so that AdamW's rate and decay serve both; `adamw_lr` gives its part another rate.
    `adamw_modules` names the modules or parameters that AdamW trains instead of the head. `surefoot plan` prints which part trains
    which parameters.

    >>> muon(3e-3).to_dict()["ns_steps"]
    5
    """
    settings: dict[str, Setting] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "betas": betas,
        "eps": eps,
        "adamw_lr": adamw_lr,
        "adamw_modules": adamw_modules,
    }
    return named(
        "muon", lr=lr, weight_decay=weight_decay, settings=settings, decay=decay, lr_multipliers=lr_multipliers
    )


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
    """torch's NAdam, Adam with Nesterov's momentum (Dozat 2016: https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ).

    Its weight decay is decoupled, as AdamW's.

    >>> nadam(1e-3).to_dict()["momentum_decay"]
    0.004
    """
    settings: dict[str, Setting] = {"betas": betas, "eps": eps, "momentum_decay": momentum_decay}
    return named(
        "nadam", lr=lr, weight_decay=weight_decay, settings=settings, decay=decay, lr_multipliers=lr_multipliers
    )


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
    """torch's RAdam, whose first steps are rectified: Liu et al. 2020, algorithm 2 (https://arxiv.org/abs/1908.03265).

    Its weight decay is decoupled, as AdamW's.

    >>> radam(1e-3).name
    'radam'
    """
    return named(
        "radam",
        lr=lr,
        weight_decay=weight_decay,
        settings={"betas": betas, "eps": eps},
        decay=decay,
        lr_multipliers=lr_multipliers,
    )


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
    """AdamW that keeps its moments in 8 bits, by blocks of 256: Dettmers et al. 2022 (https://arxiv.org/abs/2110.02861).

    A quarter of AdamW's state. Parameters of fewer than 4096 numbers keep theirs in 32 bits. Needs bitsandbytes.

    >>> adamw8bit(3e-4).to_dict()["eps"]
    1e-08
    """
    return named(
        "adamw8bit",
        lr=lr,
        weight_decay=weight_decay,
        settings={"betas": betas, "eps": eps},
        decay=decay,
        lr_multipliers=lr_multipliers,
    )


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
    """AdamW without a schedule: Defazio et al. 2024, algorithm 1 (https://arxiv.org/abs/2405.15682).

    Evaluation, samples and predictions use a mean of all weights so far, each with the square of its rate as its weight. Give it a
    constant schedule with a warm-up, and no `ema`. It takes larger rates than AdamW, 1 to 10 times.

    >>> schedule_free(3e-3).name
    'schedule_free'
    """
    return named(
        "schedule_free",
        lr=lr,
        weight_decay=weight_decay,
        settings={"betas": betas, "eps": eps},
        decay=decay,
        lr_multipliers=lr_multipliers,
    )


def named(
    name: str,
    *,
    lr: float,
    weight_decay: float | None = None,
    settings: Mapping[str, Setting] | None = None,
    decay: Decay = "matrices",
    lr_multipliers: Multipliers = (),
) -> OptimizerSpec:
    """The optimizer called `name`; a setting that is None has the optimizer's own default.

    Raises one `ConfigError` with all problems; a setting that only other optimizers know is one of them.

    >>> named("sgd", lr=0.1, settings={"momentum": 0.9, "betas": None}).to_dict()["momentum"]
    0.9
    """
    kind = declaration(name)
    chosen = {key: value for key, value in (settings or {}).items() if value is not None}
    strength = kind.weight_decay if weight_decay is None else weight_decay
    several = tuple(lr_multipliers) if isinstance(lr_multipliers, Sequence) else (lr_multipliers,)
    if errors := [*problems(kind, lr=lr, weight_decay=strength, decay=decay, settings=chosen), *misfits(several, kind)]:
        raise ConfigError("\n".join(errors))
    merged = {**kind.settings, **chosen}
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in merged.items()}
    return OptimizerSpec(name, lr=lr, weight_decay=strength, settings=plain, decay=decay, lr_multipliers=several)


OPTIMIZERS: Mapping[str, Declaration] = DECLARED  # all of the above, by name
