"""Averaged weights for evaluation, in a copy of the model.

A copy follows the live model in everything that is not averaged: frozen parameters, which the
loop's body may move, buffers, extra state, submodules that the body sets, and the other attributes of
its modules.
"""

import copy
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.config.averaging import Averaging
from surefoot.distributed.shards import extra_states, plain_tensors
from surefoot.errors import ConfigError, first_line

_NARROW = (torch.bfloat16, torch.float16)  # too coarse for sums of small differences
_NOT_COPIED = frozenset([*vars(nn.Module()), "_compiled_call_impl"])  # such as `training`


@dataclass(frozen=True)
class ModelCopy:
    """A copy of a model, with pairs of (live parameter, copied parameter) on this rank, and of (live
    module, copied module).

    Without `takes_rest`, as in a run of an older behavior, its frozen parameters stay as they were
    copied.
    """

    model: nn.Module
    pairs: list[tuple[nn.Parameter, nn.Parameter]]
    modules: list[tuple[nn.Module, nn.Module]]
    takes_rest: bool = True

    @torch.no_grad()
    def copy_parameters(self, parameters: set[nn.Parameter] | None = None) -> None:
        """Copy these parameters (None: all) from the live model, for example frozen parameters,
        which averaging never updates.
        """
        for live, copied in self.pairs:
            if parameters is None or live in parameters:
                copied.copy_(live)

    @torch.no_grad()
    def copy_rest(self, live: nn.Module, *, averaged: set[nn.Parameter]) -> None:
        """Copy everything from the live model except its averaged parameters."""
        copies: dict[int, Any] = {id(module): copied for module, copied in self.modules}
        self._copy_structure(copies)
        copy_buffers(self.modules)
        extras = zip(extra_states(live), extra_states(self.model), strict=True)
        for (_, extra), (copied, _) in extras:
            copied.set_extra_state(extra)
        if not self.takes_rest:
            return
        for parameter, copied_parameter in self.pairs:
            copies[id(parameter)] = copied_parameter
            if parameter not in averaged:
                copied_tensors = plain_tensors("", copied_parameter)
                for name, tensor in plain_tensors("", parameter).items():
                    copied_tensors[name].copy_(tensor)
        for module, copied in self.modules:
            for name, buffer in module._buffers.items():
                copies[id(buffer)] = copied._buffers[name]
        self._copy_attributes(copies)

    def _copy_structure(self, copies: dict[int, Any]) -> None:
        """Follow submodules that were replaced, added or removed. The run refuses parameters that
        are new.
        """
        for module, copied in self.modules:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            children: dict[str, nn.Module | None] = {}
            for name, child in module._modules.items():
                if child is not None and id(child) not in copies:
                    copied_child = copy.deepcopy(child, {**copies}).requires_grad_(False)
                    children[name] = copied_child.train(copied.training)
                else:
                    children[name] = copies.get(id(child))
            if children != copied._modules:
                copied._modules.clear()
                copied._modules.update(children)

    def _copy_attributes(self, copies: dict[int, Any]) -> None:
        """Copy other attributes. What they hold of the live model is replaced by its copies."""
        for module, copied in self.modules:
            for name, value in vars(module).items():
                if name in _NOT_COPIED:
                    continue
                with suppress(Exception):  # of a tensor with the graph of the last pass
                    copied.__dict__[name] = copy.deepcopy(value, copies)


class EmaModel(Protocol):
    """A model copy with averaged weights, which is evaluated, sampled from and saved instead of the
    trained model.
    """

    model: nn.Module  # the copy, current as of the last `refresh`
    model_copy: ModelCopy
    updates: int  # of the live model, if the average depends on their number
    precise: dict[nn.Parameter, Tensor]  # averages that have more bits than the copy's

    def load(self, updates: int) -> None:
        """Continue after so many updates, once the copy and `precise` have the average of then."""

    def restart(self, live: nn.Module) -> None:
        """Restart the average from the live model's weights, for example after they are loaded."""

    def update(self, applied: Tensor) -> None:
        """Include one step of the live weights in the average, unless `applied` (1 or 0, on the
        device) is 0.
        """

    def refresh(self, live: nn.Module) -> None:
        """Update the copy, including everything that is not averaged; call this method before the
        copy is evaluated or saved.
        """


def copy_model(model: nn.Module, *, takes_rest: bool = True) -> ModelCopy:
    """Return a copy of a model with `requires_grad` off.

    >>> copy_model(nn.Linear(1, 1)).model.weight.requires_grad
    False
    """
    try:
        copied = copy.deepcopy(model).requires_grad_(False)
    except RuntimeError as problem:
        raise ConfigError(
            "model-not-copied",
            problem=f"{type(model).__name__} cannot be copied, but averages need a copy of the"
            f" model: {first_line(problem)}",
            reason="one of its attributes is a tensor computed from parameters",
            remedy="leave averages (ema, schedule-free) out, or use"
            " torch.nn.utils.parametrizations.weight_norm and spectral_norm",
            setting="ema",
        ) from problem
    pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
    modules = list(zip(model.modules(), copied.modules(), strict=True))
    return ModelCopy(copied, pairs, modules, takes_rest)


def copy_buffers(modules: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Copy the buffers of live modules to their copies. Buffers may have become None or another
    tensor, of any shape.
    """
    clones: dict[int, Tensor] = {}  # by buffer, which several modules may share
    for module, copied in modules:
        copied_buffers = copied._buffers
        for name, buffer in module._buffers.items():
            copied_buffer = copied_buffers.get(name)
            if buffer is None:
                copied_buffers[name] = None
            elif copied_buffer is not None and _takes(copied_buffer, buffer):
                copied_buffer.detach().copy_(buffer.detach())
            else:
                copied_buffers[name] = clones.setdefault(id(buffer), buffer.detach().clone())


def _takes(target: Tensor, source: Tensor) -> bool:
    """Return whether `target` can hold the values of `source`."""
    is_expanded = 0 in target.stride()  # several elements in one place
    return target.shape == source.shape and target.dtype == source.dtype and not is_expanded


class Ema:
    """A model copy (`copy_model`) whose parameters are moving averages of the live model's
    parameters.

    A move of decay d replaces the average by d * average + (1 - d) * weights (`Averaging`).
    Averages of 16-bit weights are kept in float32 (`precise`), because 16 bits cannot hold the sum
    of an average and a small difference. Evaluate, sample from or save `model`, but do not train
    it. `trained` contains the live parameters to average; None means all parameters with
    `requires_grad`.

    >>> live = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(live.weight)
    >>> average = Ema(copy_model(live), Averaging(0.999))
    >>> _ = nn.init.constant_(live.weight, 11)
    >>> average.update(torch.tensor(True)), average.model.weight.item()
    (None, 9.0)
    """

    def __init__(
        self,
        model_copy: ModelCopy,
        averaging: Averaging,
        *,
        trained: set[nn.Parameter] | None = None,
    ) -> None:
        self.averaging = averaging
        self.model_copy = model_copy
        self.model = model_copy.model
        self.updates = 0
        self.precise: dict[nn.Parameter, Tensor] = {}
        self._is_behind = False  # `precise` was moved since the last `refresh`
        # other parameters are not averaged: the average of infinite values (a mask) would be NaN
        if trained is None:
            trained = {live for live, _ in model_copy.pairs if live.requires_grad}
        self.follow(trained)

    def follow(self, trained: set[nn.Parameter]) -> None:
        """Average these live parameters from now on. The averages of new ones begin at the copy's
        values.
        """
        precise: dict[nn.Parameter, Tensor] = {}
        self.averaged: set[nn.Parameter] = set()
        self._live: list[Tensor] = []
        self._averages: list[Tensor] = []
        for live, copied in self.model_copy.pairs:
            if live not in trained:
                continue
            average = copied.detach()
            if copied.dtype in _NARROW and not self.averaging.is_older:
                average = self.precise.get(live, average.float())
                precise[live] = average
            self.averaged.add(live)
            self._live.append(live)
            self._averages.append(average)
        self.precise = precise
        self._drop_negative_zeros()

    def load(self, updates: int) -> None:
        self.updates = updates
        self._is_behind = False

    def restart(self, live: nn.Module) -> None:
        self.updates = 0
        self.model_copy.copy_parameters()
        self._begin()
        self.refresh(live)

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        self.updates += 1
        self._is_behind = True
        if self.updates == self.averaging.start:
            self._begin()
        move = self.averaging.move_at(self.updates)
        if move == 0:
            return
        if self.precise:  # one kernel converts all weights; subtracting would take one for each
            difference = [torch.empty_like(average) for average in self._averages]
            torch._foreach_copy_(difference, self._live)
            torch._foreach_sub_(difference, self._averages)
        else:
            difference = list(torch._foreach_sub(self._live, self._averages))
        share = 1.0 - self.averaging.decay_of(move)
        torch._foreach_mul_(difference, applied.to(difference[0].dtype) * share)
        torch._foreach_add_(self._averages, difference)

    @torch.no_grad()
    def refresh(self, live: nn.Module) -> None:
        if self.updates < self.averaging.start:
            self._begin()
            self._is_behind = True
        if self._is_behind:
            for parameter, copied in self.model_copy.pairs:
                if parameter in self.precise:
                    copied.copy_(self.precise[parameter])
            self._is_behind = False
        self.model_copy.copy_rest(live, averaged=self.averaged)

    @torch.no_grad()
    def _begin(self) -> None:
        torch._foreach_copy_(self._averages, self._live)
        self._drop_negative_zeros()

    def _drop_negative_zeros(self) -> None:
        # adding 0 * difference, as a skipped step does, changes no finite value except -0.0
        torch._foreach_add_(self._averages, 0.0)
