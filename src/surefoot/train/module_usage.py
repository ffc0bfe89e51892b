"""Detection of submodules and weights that the loss uses outside the model's forward call, by line
of the user's code.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError, Setting, SurefootError

_TORCH = str(Path(torch.__file__).parent / "_").removesuffix("_")
_SHOWN = 3


class ModuleUsage:
    """Records the modules and sharded parameters that the loss uses outside a call of the model.

    `gathered` are the modules that FSDP gathers separately, innermost first and the models last, or
    empty without FSDP. A sharded parameter may be used only while the module that gathers it is
    being called.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], *, gathered: Sequence[nn.Module] = ()
    ) -> None:
        self.sharded = bool(gathered)
        self.called = False
        self.inside = 0
        self.running = False  # the loss is being called
        # by the line of the user's code: the module or parameter used there
        self.outside: dict[str, str] = {}
        # by module: a weight used while this module was not being called
        self.displaced: dict[str, str] = {}
        self.differentiated = False  # the loss took gradients of gradients
        self.order: list[str] = []  # names of the gathered modules in the order of their calls
        self.at_work: Counter[int] = Counter()
        self.is_single = len(models) == 1
        # names by id
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        for model_name, model in models.items():
            for name, module in model.named_modules(prefix=model_name):
                self.modules[id(module)] = name
            for name, parameter in model.named_parameters(prefix=model_name):
                self.parameters[id(parameter)] = name
        self.gathered = {id(module): self.modules[id(module)] for module in gathered}
        # the innermost gathered module of each parameter
        self.homes: dict[int, int] = {}
        for module in reversed(gathered):
            for parameter in module.parameters():
                self.homes[id(parameter)] = id(module)

    def through(self, model: nn.Module, /, *inputs: Any, **named: Any) -> Any:
        """Call `model` for the loss; record the call and any second-order gradient through the
        model's outputs.
        """
        self.called = True
        self.inside += 1
        try:
            outputs = model(*inputs, **named)
        finally:
            self.inside -= 1
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._went_back)  # type: ignore[no-untyped-call]
        return outputs

    def over(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Wrap the loss to record its uses of modules and parameters."""

        def watched_loss(models: Any, batch: Any) -> Any:
            with ExitStack() as stack:
                stack.callback(register_module_forward_pre_hook(self._entered).remove)
                if self.sharded:
                    after_call = register_module_forward_hook(self._left, always_call=True)
                    stack.callback(after_call.remove)
                    stack.enter_context(_Uses(self))
                self.running = True
                stack.callback(self.at_work.clear)
                stack.callback(setattr, self, "running", False)
                return loss(models, batch)

        self.loss_code = watched_loss.__code__
        return watched_loss

    def problems(self) -> list[SurefootError]:
        """Return what would be wrong on several ranks; empty if nothing is."""
        errors = self.outside_problems()
        if self.displaced:
            block, weight = next(iter(self.displaced.items()))
            errors.append(
                ConfigError(
                    "weight-used-outside-block",
                    problem=f"{weight} is used outside a call of {block}, and FSDP gathers it only"
                    " for that call",
                    remedy=[
                        ("shard other blocks:", Setting("fsdp.blocks")),
                        Setting("parallel", "ddp"),
                    ],
                    parameter=weight,
                    block=block,
                )
            )
        if self.differentiated:
            errors.append(
                ConfigError(
                    "gradients-of-gradients",
                    problem="the loss takes gradients of gradients"
                    " (torch.autograd.grad(..., create_graph=True))",
                    reason="FSDP does not gather weights again for them",
                    remedy=Setting("parallel", "ddp"),
                    setting="loss",
                )
            )
        if not errors and not self.called:
            which = "the model" if self.is_single else "any of the models"
            errors.append(
                ConfigError(
                    "model-not-called",
                    problem=f"the loss never calls {which} that it receives",
                    reason="gradients would not be summed over processes",
                    remedy="call it: def loss(model, batch): outputs = model(...)",
                    setting="loss",
                )
            )
        return errors

    def outside_problems(self) -> list[SurefootError]:
        """Return the error of a model used outside its call; empty if every use is inside."""
        if not self.outside:
            return []
        uses = [f"{what} in {where}" for where, what in self.outside.items()]
        listed = uses[:_SHOWN]
        if len(uses) > _SHOWN:
            listed.append(f"and {len(uses) - _SHOWN} more")
        effect = "its gradients would not be summed"
        if self.sharded:
            effect = "its weights are not gathered"
        return [
            ConfigError(
                "model-used-outside-call",
                problem="the loss uses the model outside of its call, where"
                f" {effect} over processes: {'; '.join(listed)}",
                remedy="call the model that the loss receives, model(...), and use its parameters"
                " only in its forward, which may take further arguments:"
                " model(inputs, targets=targets)",
                setting="loss",
                uses=uses,
            )
        ]

    def _went_back(self, _: Tensor) -> None:
        # the loss itself computes a gradient with a graph, for which FSDP cannot gather weights
        if self.sharded and self.running and torch.is_grad_enabled():
            self.differentiated = True

    def _entered(self, module: nn.Module, _: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation in the backward pass
            return
        if id(module) in self.gathered:
            self.at_work[id(module)] += 1
            self.order.append(self.gathered[id(module)])
        if self.inside or id(module) not in self.modules:
            return
        if self.sharded:
            is_lost = any(True for _ in module.parameters())
        else:
            is_lost = torch.is_grad_enabled() and any(
                parameter.requires_grad for parameter in module.parameters()
            )
        if is_lost:
            self._note(f"{self.modules[id(module)]}(...)")

    def _left(self, module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in self.gathered and torch._C._current_graph_task_id() == -1:
            self.at_work[id(module)] -= 1

    def used(self, parameter: Tensor) -> None:
        """Record a parameter that contributed to a tensor with a gradient."""
        name = self.parameters[id(parameter)]
        home = self.homes.get(id(parameter), 0)
        if not self.inside:
            self._note(name)
        elif not self.at_work[home]:
            self.displaced.setdefault(self.gathered[home], name)

    def _note(self, what: str) -> None:
        frames: list[FrameType] = []  # from the loss inwards to here
        inner: FrameType | None = sys._getframe()
        while inner is not None and inner.f_code is not self.loss_code:
            frames.insert(0, inner)
            inner = inner.f_back
        # the innermost frame of the user's code before a method of a module, which it names
        of_user = frames[0]
        for frame in frames:
            code = frame.f_code
            is_of_user = not code.co_filename.startswith((_TORCH, __file__))
            first_argument = code.co_varnames[0] if code.co_argcount else ""
            owner = id(frame.f_locals.get(first_argument))
            if owner in self.modules:
                if is_of_user:
                    what = f"{self.modules[owner]}.{code.co_name}()"
                break
            if is_of_user:
                of_user = frame
        # the first use on a line is the outermost
        self.outside.setdefault(f"{of_user.f_code.co_filename}:{of_user.f_lineno}", what)


class _Uses(TorchFunctionMode):
    def __init__(self, watch: ModuleUsage) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if isinstance(returned, Tensor) and returned.requires_grad:
            for used in pytree.tree_leaves((args, kwargs)):
                if id(used) in self.watch.parameters and returned is not used:
                    self.watch.used(used)
        return returned
