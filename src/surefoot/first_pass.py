"""One pass of the plain model before several processes share it: what would be wrong there without a word is named here.

DDP and FSDP2 see only what goes through the model's own call. Gradients of what a loss computes beside it are not added up over
processes, sharded weights are not gathered for it, and a parameter that gets no gradient is waited for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError
from surefoot.loss_sum import LossSum
from surefoot.micro_batch import MicroBatch
from surefoot.precision import Precision
from surefoot.seeding import untouched
from surefoot.world import World

_TORCH = str(Path(torch.__file__).parent / "_").removesuffix("_")
_SHOWN = 3


def check_first_pass(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch | None,
    *,
    precision: Precision,
    world: World,
    allow_unused: bool = False,
    sharded: bool = False,
) -> None:
    """Pass one micro-batch forward and backward; `ConfigError` with all that several processes could not do; collective.

    Refused are trained parameters that get no gradient (unless `allow_unused`), a loss that never calls a model it is given, and
    what it computes with the model's parts outside of that call, by name and line; with `sharded`, with its parameters too.
    `micro_batch` is this rank's, None where it has none: then no rank checks. A pass that fails is left to the first step,
    where its error is explained. Parameters, buffers, gradients, modes and random generators are afterwards what they were.

    >>> from surefoot.precision import precision
    >>> import numpy as np
    >>> micro_batch = MicroBatch(torch.ones(4, 2), 4, 0, np.arange(4), np.zeros(4, dtype=np.int64))
    >>> cpu = torch.device("cpu")
    >>> settings = {"precision": precision("fp32", cpu), "world": World(cpu)}
    >>> check_first_pass({"model": nn.Linear(2, 1)}, lambda model, batch: model(batch).mean(), micro_batch, **settings)
    >>> check_first_pass({"model": nn.Linear(2, 1)}, lambda model, batch: model.weight.sum(), micro_batch, **settings)
    Traceback (most recent call last):
        ...
    surefoot.errors.ConfigError: the loss never calls the model that it is given: no gradient would be added up over processes
      call it: def loss(model, batch): outputs = model(...)
    """
    if micro_batch is not None and micro_batch.count == 0:
        micro_batch = None
    if any(world.gathered(micro_batch is None)) or micro_batch is None:
        return
    watch = _Watch(models, sharded=sharded)
    try:
        unused = _passed(models, loss, micro_batch, precision, watch)
        found = watch.problems()
        if not found and unused and not allow_unused:
            found = [_about_unused(unused)]
    except ConfigError as refused:
        found = watch.problems() or [str(refused)]
    except Exception:
        found = watch.outside_problems()
    told: list[list[str]] = world.gathered(found)
    every = list(dict.fromkeys(problem for of_rank in told for problem in of_rank))
    if every:
        raise ConfigError("\n".join(every))


def _passed(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch,
    precision: Precision,
    watch: _Watch,
) -> list[str]:
    """Names of the trained parameters that got no gradient."""
    handed: dict[str, Any] = {name: _Handed(model, name, watch) for name, model in models.items()}
    given = handed["model"] if list(handed) == ["model"] else handed
    with _unchanged(models), precision.numerics(), _eagerly():
        with watch.watching(), precision.autocast():
            result = loss(given, micro_batch.batch)
        if not watch.calls:
            return []
        part, _ = LossSum(micro_batch.count).add(result, micro_batch.count)
        part.backward()  # type: ignore[no-untyped-call]
        return [
            f"{prefix}{name}"
            for prefix, model in _prefixed(models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]


class _Handed:
    """A model as the loss gets it on one of several processes: called through, all else its own."""

    def __init__(self, model: nn.Module, name: str, watch: _Watch) -> None:
        self.model, self.name, self.watch = model, name, watch

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.watch.calls[self.name] += 1
        self.watch.inside += 1
        try:
            return self.model(*inputs, **named)
        finally:
            self.watch.inside -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class _Watch:
    """Notices modules and, where they are sharded, parameters that are used while no model is being called."""

    def __init__(self, models: Mapping[str, nn.Module], *, sharded: bool) -> None:
        self.sharded = sharded
        self.calls: Counter[str] = Counter()
        self.inside = 0
        self.outside: dict[str, str] = {}  # what was used, by the user's line
        self.names = list(models)
        self.roots = {id(model): name for name, model in models.items()}
        self.modules = {
            id(part): ".".join(filter(None, [name, place]))
            for name, model in models.items()
            for place, part in model.named_modules()
        }
        self.parameters = {
            id(parameter): f"{name}.{place}"
            for name, model in models.items()
            for place, parameter in model.named_parameters()
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._entered).remove)
            if self.sharded:
                stack.enter_context(_Uses(self))
            yield

    def problems(self) -> list[str]:
        """In words; that a model is never called only where nothing says what is done instead."""
        found = self.outside_problems()
        if found or self.calls:
            return found
        which = "the model that it is" if len(self.names) == 1 else "any of the models that it is"
        return [
            f"the loss never calls {which} given: no gradient would be added up over processes\n"
            "  call it: def loss(model, batch): outputs = model(...)"
        ]

    def outside_problems(self) -> list[str]:
        """What was used outside of the models' calls."""
        if not self.outside:
            return []
        shown = [f"{what} in {where}" for where, what in self.outside.items()]
        more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
        lost = "its weights are not gathered" if self.sharded else "its gradients would not be added up"
        return [
            f"the loss uses the model outside of its call, where {lost} over processes:\n  "
            + "\n  ".join(["; ".join([*shown[:_SHOWN], *more])])
            + "\n  call the model that the loss is given, model(...), and compute all with parameters in its forward,\n"
            "  which may take what it needs: model(inputs, targets=targets)"
        ]

    def _entered(self, module: nn.Module, _: Any) -> None:
        if self.inside or id(module) not in self.modules or not self._matters(module):
            return
        if torch._C._current_graph_task_id() == -1:  # in a backward pass blocks are computed again, outside of any call
            self.note(f"{self.modules[id(module)]}(...)")

    def _matters(self, module: nn.Module) -> bool:
        if self.sharded:
            return next(module.parameters(), None) is not None
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())

    def note(self, what: str) -> None:
        """Remember a use by the line of the user's code that led to it; the first of a line is the outermost."""
        frames = _frames_of_loss()
        users, method = frames[0], None
        for frame in frames:
            first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
            owner = id(frame.f_locals.get(first))
            others = frame.f_code.co_filename.startswith((_TORCH, __file__))
            if owner in self.modules:
                method = None if others else f"{self.modules[owner]}.{frame.f_code.co_name}()"
                break
            users = users if others else frame
        self.outside.setdefault(f"{users.f_code.co_filename}:{users.f_lineno}", method or what)


class _Uses(TorchFunctionMode):
    """Notices parameters that something with a gradient is made of."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self.watch.inside and isinstance(made, Tensor) and made.requires_grad:
            for used in pytree.tree_leaves((args, kwargs)):
                if id(used) in self.watch.parameters and made is not used:
                    self.watch.note(self.watch.parameters[id(used)])
        return made


def _frames_of_loss() -> Sequence[FrameType]:
    """The frames from the loss inwards to where this is asked."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _passed.__code__:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


@contextmanager
def _unchanged(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Parameters, buffers, gradients, modes and the generators, afterwards as they were; gradients absent meanwhile."""
    parts = [part for model in models.values() for part in model.modules()]
    parameters = {id(p): p for model in models.values() for p in model.parameters()}.values()
    buffers = [(part, name, held) for part in parts for name, held in part._buffers.items() if held is not None]
    values = [(held, held.detach().clone()) for held in [*parameters, *(held for _, _, held in buffers)]]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    modes = [(part, part.training) for part in parts]
    for parameter in parameters:
        parameter.grad = None
    try:
        with untouched():
            yield
    finally:
        for part, name, held in buffers:
            part._buffers[name] = held
        with torch.no_grad():
            for held, value in values:
                held.copy_(value)
        for parameter, trained, gradient in flags:
            parameter.requires_grad_(trained)
            parameter.grad = gradient
        for part, training in modes:
            part.training = training


def _eagerly() -> AbstractContextManager[Any]:
    """Nothing is compiled for one pass; torch's compiler is not even imported for it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _prefixed(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    return [("" if len(models) == 1 else f"{name}.", model) for name, model in models.items()]


def _about_unused(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    several = len(names) != 1
    return (
        f"{len(names)} parameter{'s' * several} get{'s' * (not several)} no gradient, and other processes would wait for"
        f" {'them' if several else 'it'}: {shown}\n"
        "  do not train what is not used: requires_grad_(False), or surefoot.frozen(...) among the optimizer's rates;\n"
        "  or, where that changes from batch to batch, allow it: parallel=surefoot.ddp(unused=True)"
    )
