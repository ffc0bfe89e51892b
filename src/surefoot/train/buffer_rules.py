"""What becomes of a buffer that the micro-batches of a step change: the rules, and the rule of each
buffer.

Buffers of torch's normalizations have the mean over the micro-batches. Others go from one
micro-batch to the next, as in a plain loop, unless `Run(buffers=...)` declares another rule. A
buffer whose change does not depend on the batch, such as those of spectral normalization, is
advanced once a step; `buffer_check.py` finds these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surefoot.config.behavior import BUFFERS_IN_ORDER
from surefoot.errors import ConfigError, Setting

BufferRule = Literal["mean", "sum", "max", "min", "in order"]
"""What a step leaves in a buffer. mean and sum are of the changes in all micro-batches, max and min
of the values after them. in order: each micro-batch starts from what the one before it left."""

StepRule = BufferRule | Literal["last"]
"""last: each micro-batch starts from the buffer at the start of the step; the last one counts."""

OF_COUPLED_LOSS = "a loss of the whole batch encodes the micro-batches of all ranks at once"
"""Why buffers cannot go in order from rank to rank with a coupled loss."""

_SHOWN = 6  # names in an error message


@dataclass(frozen=True, slots=True)
class StepBuffer:
    """A persistent buffer, its name for the user, and its declared rule, if any."""

    module: nn.Module
    key: str
    name: str
    is_norm: bool
    declared: BufferRule | None = None

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers[self.key]


@dataclass(frozen=True)
class BufferFindings:
    """What passes over two micro-batches have shown of the buffers without a declared rule.

    once: their changes do not depend on the batch. in_order: both micro-batches leave another value
    than the later one alone. overwritten: they leave the value of the later one.
    """

    once: tuple[str, ...] = ()
    in_order: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()

    def __or__(self, other: "BufferFindings") -> "BufferFindings":
        in_order = {*self.in_order, *other.in_order}
        once = {*self.once, *other.once} - in_order
        overwritten = {*self.overwritten, *other.overwritten} - in_order
        return BufferFindings(
            tuple(sorted(once)), tuple(sorted(in_order)), tuple(sorted(overwritten))
        )


def buffers_of(
    models: Mapping[str, nn.Module], *, prefixed: bool | None = None
) -> Iterator[StepBuffer]:
    """Yield the persistent buffers of some models. Their names begin with that of the model if
    `prefixed`; if it is None, only those of several models do.
    """
    visited: set[nn.Module] = set()
    if prefixed is None:
        prefixed = len(models) > 1
    for model_name, model in models.items():
        for prefix, module in model.named_modules(prefix=model_name if prefixed else ""):
            if module in visited:
                continue
            visited.add(module)
            is_norm = isinstance(module, _NormBase)
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    name = f"{prefix}.{key}" if prefix else key
                    yield StepBuffer(module, key, name, is_norm)


def declared_rule(
    name: str, declared: Mapping[str, BufferRule], *, tensor: Tensor
) -> BufferRule | None:
    """Return the rule of the last pattern that matches the name of a buffer. Raises `ConfigError`
    if its numbers have no such rule.

    >>> import torch
    >>> patterns = {"*": "mean", "*.queue": "in order"}
    >>> declared_rule("encoder.queue", patterns, tensor=torch.zeros(2))
    'in order'
    """
    rule: BufferRule | None = None
    for pattern, named_rule in declared.items():
        if fnmatchcase(name, pattern):
            rule = named_rule
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    has_no_mean = rule == "mean" and not has_fractions
    has_no_order = rule in ("max", "min") and tensor.is_complex()
    has_no_sum = rule == "sum" and str(tensor.dtype) == "torch.bool"
    if has_no_mean or has_no_order or has_no_sum:
        raise ConfigError(
            "buffer-rule-misfit",
            problem=f"buffers: {name} is {tensor.dtype}, which has no {rule}",
            remedy=[Setting("buffers", {name: "in order"}), "another rule that it has"],
            setting="buffers",
            value=rule,
            name=name,
        )
    return rule


def refuse_unmatched(declared: Mapping[str, BufferRule], names: list[str]) -> None:
    """Raise `ConfigError` for a pattern that matches no buffer."""
    for pattern in declared:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:_SHOWN]) or "none"
            more = ", ..." if len(names) > _SHOWN else ""
            raise ConfigError(
                "buffer-unknown",
                problem=f"buffers: no persistent buffer matches {pattern!r}",
                reason=f"buffers of this run: {shown}{more}",
                setting="buffers",
                value=pattern,
            )


def undeclared_error(names: Sequence[str], *, ranks: int, began: str = "") -> ConfigError:
    """Return the error for buffers that need a declared rule on several ranks. `began` says when
    they began to change, if that was after the first step.
    """
    subject = f"the buffers {', '.join(names[:_SHOWN])} depend"
    if len(names) == 1:
        subject = f"the buffer {names[0]} depends"
    return ConfigError(
        "buffer-needs-rule",
        problem=f"{subject} on all micro-batches of a step, which {ranks} ranks share{began}",
        reason="each rank would have another value, and a checkpoint holds one",
        remedy=[
            (
                Setting("buffers", {names[0]: "in order"}),
                "for a queue: the passes of the ranks then follow one another",
            ),
            '"sum" for a count',
            '"mean" for an average',
            '"max" or "min" for an extreme',
        ],
        setting="buffers",
        names=[*names],
        ranks=ranks,
    )


def impossible_order(names: Sequence[str], why: str) -> ConfigError:
    """Return the error for buffers in order whose passes cannot follow one another."""
    return ConfigError(
        "buffer-order-impossible",
        problem=f"the buffer {names[0]} is declared in order, but {why}",
        reason="each micro-batch must start from what the one before it left, on any rank",
        remedy=["train on one rank", "declare another rule"],
        setting="buffers",
        names=[*names],
    )


def check_rules(value: Any, *, setting: str) -> None:
    """Raise `ConfigError` unless the setting maps patterns of names to rules."""
    rules = get_args(BufferRule)
    is_valid = isinstance(value, Mapping) and all(
        isinstance(pattern, str) and rule in rules for pattern, rule in value.items()
    )
    if not is_valid:
        raise ConfigError(
            "buffer-rule-unknown",
            problem=f"{setting} = {value!r} does not map names of buffers to rules",
            reason=f"the rules are {', '.join(map(repr, rules))}",
            remedy=Setting("buffers", {"queue": "in order"}),
            setting=setting,
            value=value,
        )


def rule_of(
    buffer: StepBuffer, tensor: Tensor, *, behavior: int, several_ranks: bool, once: bool
) -> StepRule:
    """Return the rule of a buffer. `once`: its change does not depend on the batch."""
    if buffer.declared is not None:
        return buffer.declared
    if behavior < BUFFERS_IN_ORDER or buffer.is_norm:
        return "mean" if tensor.is_floating_point() else "last"
    return "last" if once or several_ranks else "in order"
