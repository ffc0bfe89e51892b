"""Rules for the base learning rate and learning-rate factors for parts of a model, without
importing torch.

A factor of 0 freezes a parameter. Factors are multiplied:
`adamw(3e-4, lr_multipliers=[layer_decay(0.75), frozen("embedding.*")])`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from surefoot.config.keywords import known_keywords
from surefoot.config.numpy_numbers import plain_number
from surefoot.errors import ConfigError, SurefootError, out_of_range, together
from surefoot.optim.validation import Declaration

if TYPE_CHECKING:
    from torch import nn

FROZEN = "frozen"
"""Of an optimizer's settings, the patterns of `frozen`: `optimizer.frozen`."""
_SHOWN = 12  # names in an error message
_BY_NAME = "give factors by name: sf.optim.LRMultipliers(lambda model: {...}, identity={...})"


@known_keywords
def scale_lr(
    lr: float, *, batch_size: int, base_batch_size: int, rule: Literal["linear", "sqrt"] = "linear"
) -> float:
    """Return the base learning rate for `batch_size`, if `lr` works well for `base_batch_size`.

    "linear", for SGD, returns lr * batch_size / base_batch_size and needs a warm-up (Goyal et al.,
    2017, section 2: https://arxiv.org/abs/1706.02677). "sqrt", for Adam-like optimizers, uses the
    square root of that ratio (Malladi et al., 2022, section 4: https://arxiv.org/abs/2205.10287).
    Both rules hold while batches are small compared with the data set.

    >>> (
    ...     scale_lr(0.1, batch_size=1024, base_batch_size=256),
    ...     scale_lr(3e-4, batch_size=1024, base_batch_size=256, rule="sqrt"),
    ... )
    (0.4, 0.0006)
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if size < 1:
            raise out_of_range(name, size, "1 sample or more")
    if rule not in ("linear", "sqrt"):
        raise out_of_range("rule", rule, "'linear' or 'sqrt'")
    ratio = batch_size / base_batch_size
    if rule == "sqrt":
        ratio = math.sqrt(ratio)
    return lr * ratio


@known_keywords
def noam_lr(d_model: int, *, warmup_steps: int, factor: float = 1.0) -> float:
    """Return the base learning rate of "Attention is all you need" for
    `sf.schedules.inverse_sqrt(warmup_steps)`.

    The peak learning rate is factor * d_model^-0.5 * warmup_steps^-0.5 (Vaswani et al., 2017,
    equation 3: https://arxiv.org/abs/1706.03762). Other libraries call the schedule "Noam", after
    Noam Shazeer.

    >>> round(noam_lr(512, warmup_steps=4000), 6)
    0.000699
    """
    for name, size in (("d_model", d_model), ("warmup_steps", warmup_steps)):
        if size < 1:
            raise out_of_range(name, size, "a whole number from 1 on")
    return factor / math.sqrt(d_model * warmup_steps)


@known_keywords
@dataclass(frozen=True)
class LRMultipliers:
    """A function from a model to learning-rate factors by parameter name; the default is 1, and 0
    freezes a parameter.

    The parameter names are from `model.named_parameters()`. `identity` is JSON that must be equal
    when a run resumes. A custom rule:

    >>> from torch import nn
    >>> slow_biases = LRMultipliers(
    ...     lambda model: {name: 0.1 for name, held in model.named_parameters() if held.ndim == 1},
    ...     identity={"slow_biases": 0.1},
    ... )
    >>> slow_biases.factors(nn.Linear(2, 2))
    {'bias': 0.1}
    """

    factors: "Callable[[nn.Module], Mapping[str, float]]"
    identity: Mapping[str, Any] = field(kw_only=True)
    like_adam_only: bool = field(default=False, kw_only=True)  # False: fits any optimizer

    def __post_init__(self) -> None:
        if not callable(self.factors):
            raise ConfigError(
                "lr-factors-not-a-function",
                problem=f"LRMultipliers: factors = {self.factors!r} is not a function of the model",
                reason="a dictionary by parameter name can be returned by one",
                remedy="write LRMultipliers(lambda model: {...}, identity={...})",
                setting="factors",
                value=self.factors,
            )


@known_keywords
def layer_decay(decay: float) -> LRMultipliers:
    """Return learning-rate factors that fall toward the input: decay^(D - d) at depth d of D.

    The head has the factor 1, and embeddings have the factor decay^D. Layer decay is for
    fine-tuning (Howard and Ruder 2018, section 3.1: https://arxiv.org/abs/1801.06146), with depths
    as in BEiT (Bao et al., 2022: https://arxiv.org/abs/2106.08254; `param_groups.depths`). A model
    without a list of blocks raises `ConfigError`.

    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Embedding(9, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 9, bias=False)
    ... )
    >>> layer_decay(0.5).factors(model)
    {'0.weight': 0.25, '1.weight': 0.5, '2.weight': 1.0}
    """
    if not 0 < decay <= 1:
        raise out_of_range("layer_decay", decay, "above 0 and at most 1, such as 0.75")

    def factors(model: "nn.Module") -> dict[str, float]:
        from surefoot.optim.param_groups import depths

        depth_of = depths(model)
        if depth_of is None:
            children = [name for name, _ in model.named_children()]
            raise ConfigError(
                "model-without-depths",
                problem=f"layer_decay finds no depths in {type(model).__name__}: it has no"
                " nn.ModuleList or nn.Sequential of blocks",
                reason=f"its submodules: {_list_names(children)}",
                remedy=["put its blocks into one of these", _BY_NAME],
                setting="layer_decay",
                value=decay,
            )
        deepest = max(depth_of.values())
        return {name: decay ** (deepest - depth) for name, depth in depth_of.items()}

    return LRMultipliers(factors, identity={"layer_decay": decay})


@known_keywords
def width_scaling(*, base_width: int) -> LRMultipliers:
    """Return factors that transfer a learning rate found at `base_width` to the model's width
    (muP).

    Hidden matrices and the head have the factor base_width / width (Yang et al., 2022, table 3,
    Adam: https://arxiv.org/abs/2203.03466). Embeddings, other input matrices, biases and norms have
    the factor 1. The width is the head's number of inputs, and all hidden widths must grow with it.
    The factors fit Adam-like optimizers, including Lion. Initialize the head with 0 (or with
    variance proportional to 1 / width^2), and hidden matrices with variance proportional to 1 /
    width. A head tied to an embedding counts as the embedding.

    >>> from torch import nn
    >>> model = nn.Sequential(
    ...     nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 2)
    ... )
    >>> width_scaling(base_width=32).factors(model)
    {'2.weight': 0.5, '4.weight': 0.5}
    """
    if isinstance(base_width, bool) or not isinstance(base_width, int) or base_width < 1:
        meaning = "a whole number of at least 1, the width for which lr was tuned"
        raise out_of_range("base_width", base_width, meaning)

    def factors(model: "nn.Module") -> dict[str, float]:
        from surefoot.optim.param_groups import EMBEDDINGS, final_layer, input_matrices, matrices

        head = final_layer(model)
        inputs = set(input_matrices(model))
        first_owners = {parameter: owner for owner, parameter in reversed(matrices(model))}
        scaled = []  # the names of hidden matrices and the head
        for name, parameter in model.named_parameters():
            owner = first_owners.get(parameter)
            is_hidden = owner is not None and not isinstance(owner, EMBEDDINGS)
            if is_hidden and parameter not in inputs:
                scaled.append(name)
        if head is None or not scaled:
            raise ConfigError(
                "model-without-hidden-width",
                problem=f"base_width: {type(model).__name__} has no hidden width",
                reason="it needs at least two layers with a matrix",
                remedy=["omit base_width", _BY_NAME],
                setting="base_width",
                value=base_width,
            )
        width = next(weight.shape[1] for owner, weight in matrices(model) if owner is head)
        return dict.fromkeys(scaled, base_width / width)

    return LRMultipliers(factors, identity={"base_width": base_width}, like_adam_only=True)


@known_keywords
def frozen(*patterns: str) -> LRMultipliers:
    """Return the factor 0 for all parameters whose names match a pattern; * matches any text.

    Frozen parameters keep every bit and have no gradient, weight decay, optimizer state or average.
    A pattern without a match raises `ConfigError`. A tied parameter is frozen if any of its names
    matches. In training mode, the batch statistics of frozen layers are still updated.

    >>> from torch import nn
    >>> frozen("0.*", "*.bias").factors(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    {'0.weight': 0.0, '0.bias': 0.0, '1.bias': 0.0}
    """
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise out_of_range("frozen", patterns, "names of parameters, such as 'embedding.*'")

    def factors(model: "nn.Module") -> dict[str, float]:
        named = list(model.named_parameters(remove_duplicate=False))
        names = match_frozen([name for name, _ in named], patterns, model=type(model).__name__)
        chosen = {parameter for name, parameter in named if name in names}
        return {name: 0.0 for name, parameter in model.named_parameters() if parameter in chosen}

    return LRMultipliers(factors, identity={FROZEN: list(patterns)})


def match_frozen(names: Sequence[str], patterns: Sequence[str], *, model: str) -> set[str]:
    """Return the names that match a pattern. Raises `ConfigError` for a pattern without a match.
    `model` is the name of the model's class.

    >>> sorted(match_frozen(["0.weight", "0.bias", "1.bias"], ["*.bias"], model="Sequential"))
    ['0.bias', '1.bias']
    """
    matches: set[str] = set()
    unmatched = []
    for pattern in dict.fromkeys(patterns):
        of_pattern = [name for name in names if fnmatchcase(name, pattern)]
        matches.update(of_pattern)
        if not of_pattern:
            unmatched.append(pattern)
    if unmatched:
        available: dict[str, None] = {}  # all parameters of a submodule as one pattern
        for name in names:
            submodule, dot, _ = name.partition(".")
            available[f"{submodule}.*" if dot else name] = None
        raise ConfigError(
            "frozen-parameter-unknown",
            problem=f"frozen: no parameter of {model} matches {' or '.join(map(repr, unmatched))}",
            reason=f"available: {_list_names([*available])}",
            setting="frozen",
            value=unmatched,
        )
    return matches


def frozen_patterns(lr_multipliers: Sequence[LRMultipliers]) -> list[str]:
    """Return the patterns of `frozen` among learning-rate factors.

    >>> frozen_patterns([layer_decay(0.5), frozen("0.*", "*.bias")])
    ['0.*', '*.bias']
    """
    patterns: list[str] = []
    for rate in lr_multipliers:
        if is_frozen(rate.identity):
            patterns += rate.identity[FROZEN]
    return patterns


def with_frozen(
    lr_multipliers: Sequence[LRMultipliers], patterns: Sequence[str]
) -> tuple[LRMultipliers, ...]:
    """Return learning-rate factors that freeze other parameters, or none without patterns.

    >>> [dict(rate.identity) for rate in with_frozen([frozen("0.*"), layer_decay(0.5)], ["1.*"])]
    [{'frozen': ['1.*']}, {'layer_decay': 0.5}]
    """
    new = [frozen(*patterns)] if patterns else []
    others: list[LRMultipliers] = []
    place = None  # of the first one that is replaced
    for rate in lr_multipliers:
        if not is_frozen(rate.identity):
            others.append(rate)
        elif place is None:
            place = len(others)
    if place is None:
        place = len(others)
    return (*others[:place], *new, *others[place:])


def is_frozen(identity: Mapping[str, Any]) -> bool:
    """Return True for the identity of `frozen`."""
    return identity.keys() == {FROZEN} and isinstance(identity[FROZEN], list)


def factors_of(model: "nn.Module", lr_multipliers: Sequence[LRMultipliers]) -> dict[str, float]:
    """Return each parameter's product of factors; raise `ConfigError` for invalid factors and
    unknown names.

    >>> from torch import nn
    >>> factors_of(nn.Linear(2, 2), [frozen("bias")])
    {'weight': 1.0, 'bias': 0.0}
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    first_names = {}  # by name, because a tied parameter has several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_names[name] = names[parameter]
    product = dict.fromkeys(names.values(), 1.0)
    problems: list[SurefootError] = []
    for rate in lr_multipliers:
        rule = f"lr_multipliers {dict(rate.identity)}"
        of_rule: dict[str, float] = {}  # by first name
        for name, given_factor in rate.factors(model).items():
            factor = plain_number(given_factor)
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if name not in first_names:
                problems.append(
                    ConfigError(
                        "lr-multiplier-unknown",
                        problem=f"{rule}: {type(model).__name__} has no parameter {name!r}",
                        setting="lr_multipliers",
                        parameter=name,
                    )
                )
            elif not is_number or not 0 <= factor < math.inf:
                problems.append(
                    ConfigError(
                        "lr-multiplier-out-of-range",
                        problem=f"{rule}: the factor {factor!r} for {name} must be a number of at"
                        " least 0",
                        setting="lr_multipliers",
                        value=factor,
                        parameter=name,
                    )
                )
            elif of_rule.setdefault(first_names[name], factor) != factor:
                first = first_names[name]
                before = of_rule[first]
                problems.append(
                    ConfigError(
                        "lr-multipliers-of-tied-parameter",
                        problem=f"{rule}: {first} and {name} are one tied parameter, with the"
                        f" factors {before!r} and {factor!r}",
                        setting="lr_multipliers",
                        value=[before, factor],
                        parameters=[first, name],
                    )
                )
        for name, factor in of_rule.items():
            product[name] *= factor
    if problems:
        raise together(problems)
    return product


def misfits(lr_multipliers: Sequence[Any], optimizer: Declaration) -> list[SurefootError]:
    """Return an error for each value that is not an `LRMultipliers` or does not fit the
    optimizer.
    """
    problems: list[SurefootError] = []
    for rate in lr_multipliers:
        if not isinstance(rate, LRMultipliers):
            meaning = "LRMultipliers, such as sf.optim.layer_decay(0.75), or several in a list"
            problems.append(out_of_range("lr_multipliers", rate, meaning))
        elif rate.like_adam_only and not optimizer.like_adam:
            setting = ", ".join(f"{key} = {value!r}" for key, value in rate.identity.items())
            problems.append(
                ConfigError(
                    "lr-multipliers-of-adam",
                    problem=f"{setting} does not fit {optimizer.name}",
                    reason="muP has different factors for it",
                    setting="lr_multipliers",
                    value=dict(rate.identity),
                    optimizer=optimizer.name,
                )
            )
    return problems


def freeze(model: "nn.Module", factors: Mapping[str, float]) -> None:
    """Set `requires_grad` to False for the parameters whose factor is 0."""
    for name, parameter in model.named_parameters():
        if factors[name] == 0:
            parameter.requires_grad_(False)


def _list_names(names: list[str]) -> str:
    shown = names[:_SHOWN]
    if len(names) > _SHOWN:
        shown.append("...")
    return ", ".join(shown) or "none"
