"""Forward passes that write weights are refused: an evaluation would change the training, and a
skipped step the weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from surefoot.checkpoint.fingerprint import Fingerprint, equal_fingerprints, tensor_fingerprint
from surefoot.data.loader import MicroBatch
from surefoot.errors import ConfigError, Setting
from surefoot.train.loop import Loss
from surefoot.train.step_watch import UNWATCHED, Watch

_SHOWN = 3


def refuse_max_norm(models: Mapping[str, nn.Module], *, in_run: bool = True) -> None:
    """Raise `ConfigError` for an embedding with `max_norm`, whose forward pass shortens its
    weights. `in_run` is False if the models are only evaluated.
    """
    for model_name, model in models.items():
        for name, module in model.named_modules(prefix=model_name):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                limit = f"{module.norm_type:g}, 0, {module.max_norm:g}"
                shortening = f"with torch.no_grad(): embedding.weight.renorm_({limit})"
                cure = "shorten all rows once, and set embedding.max_norm = None"
                if in_run:
                    cure = (
                        "leave out max_norm, and shorten the rows in the body of `for step in run:`"
                    )
                raise ConfigError(
                    "max-norm-writes-weights",
                    problem=f"{name} is an {type(module).__name__} with max_norm ="
                    f" {module.max_norm:g}",
                    reason="its forward pass writes its weights: an evaluation would change the"
                    " training, and a skipped step the weights",
                    remedy=f"{cure}: {shortening}",
                    name=name,
                    value=module.max_norm,
                )


def refuse_written(names_by_rank: Sequence[Sequence[str]], models: Mapping[str, nn.Module]) -> None:
    """Raise `ConfigError` if a pass has written weights on any rank."""
    names = list(dict.fromkeys(chain.from_iterable(names_by_rank)))
    if not names:
        return
    described = []
    for name in names[:_SHOWN]:
        path = name.rpartition(".")[0]
        model_name, _, inner = path.partition(".")
        described.append(f"{name} (of {type(models[model_name].get_submodule(inner)).__name__})")
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise ConfigError(
        "pass-writes-weights",
        problem=f"a forward pass writes weights: {', '.join(described)}{more}",
        reason="an evaluation would change the training, a skipped step the weights, and each rank"
        " would have others",
        remedy=[
            "compute the value without writing it",
            "write it in the body of the loop, under torch.no_grad()",
            "initialize it in the function that builds the model, if it depends on data",
            (Setting("check_state", False), "to train all the same"),
        ],
        names=names,
    )


@contextmanager
def noting_writes(models: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Yield a list that has the names of written weights after the block. Writes through `.data` or
    NumPy are seen only if they change bits.
    """
    names: list[str] = []
    before = _weights(models)
    yield names
    after = _weights(models)
    compared: dict[str, tuple[Fingerprint, Fingerprint]] = {}
    for name, (version, fingerprint) in before.items():
        if name not in after or after[name][0] != version:
            names.append(name)
        else:
            compared[name] = (fingerprint, after[name][1])
    for name, is_equal in zip(compared, equal_fingerprints([*compared.values()]), strict=True):
        if not is_equal:
            names.append(name)


def versions_of(models: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the number of in-place changes of each weight. Writes through `.data` or NumPy are not
    counted.
    """
    versions = {}
    for model_name, model in models.items():
        for name, parameter in model.named_parameters(prefix=model_name):
            versions[name] = parameter._version
    return versions


def _weights(models: Mapping[str, nn.Module]) -> dict[str, tuple[int, Fingerprint]]:
    weights: dict[str, tuple[int, Fingerprint]] = {}
    for model_name, model in models.items():
        for name, parameter in model.named_parameters(prefix=model_name):
            is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
            if is_plain and not parameter.is_meta:
                weights[name] = (parameter._version, tensor_fingerprint(parameter))
    return weights


@dataclass
class WeightCheck:
    """An observer of the first step of a run. It refuses a first pass that writes weights."""

    models: Mapping[str, nn.Module]
    inner: Watch = UNWATCHED
    losses: list[Loss] = field(default_factory=list)  # whose passes were compared

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:
        inner = self.inner.over(loss, micro_batches)

        def watched_loss(model: Any, batch: Any) -> Any:
            if any(loss is known for known in self.losses):
                return inner(model, batch)
            self.losses.append(loss)
            with noting_writes(self.models) as names:
                returned = inner(model, batch)
            refuse_written([names], self.models)
            return returned

        return watched_loss

    def before(self, names: Any, factor: Any) -> None:
        self.inner.before(names, factor)

    def after(self, names: Any) -> None:
        self.inner.after(names)
