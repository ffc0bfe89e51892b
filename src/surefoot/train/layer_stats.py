"""Per-layer statistics of one step, kept on the device: norms of each parameter's gradient, weights
and update.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.data.loader import MicroBatch
from surefoot.distributed.shards import Rows, name_of, rows_of
from surefoot.distributed.world import World
from surefoot.mean import Mean, read_numbers
from surefoot.optim.clipping import gradient_norm
from surefoot.tracking.record import Record
from surefoot.train.layer_hooks import Activity, observed
from surefoot.train.step_watch import Loss, Named


class LayerWatch:
    """The measurements of one step. If one optimizer is updated several times in a step, the last
    update counts.
    """

    def __init__(self, index: int, layers: "Layers") -> None:
        self.index, self.parameters, self.activity = (
            index,
            layers.parameters,
            Activity(layers.modules),
        )
        # with several optimizers, the gradient's optimizer is not known
        self.local_times = layers.local_times if len(layers.parameters) == 1 else None
        self.gradients: dict[str, Named] = {}  # norms by optimizer, without `factors`
        self.factors: dict[str, Tensor | float] = {}
        self.weights: Named = {}  # before the update
        self.updates: Named = {}
        self.rows_used: dict[
            str, tuple[Tensor, int]
        ] = {}  # nonzero rows and all rows of each matrix's gradient
        self.first: tuple[Tensor | float, Tensor] | None = (
            None  # targets and gradient norm of the first micro-batch
        )
        self._copies: dict[str, list[Tensor]] = {}

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:
        """Wrap the loss to record module outputs. The second call of the wrapper records the first
        micro-batch's gradient norm.
        """
        self.first = None
        several = self.local_times is not None and not self._gradients()
        counted: list[Tensor | float] = []

        def watched(model: Any, batch: Any) -> Any:
            if several and len(counted) == 1:
                self.first = counted[0], gradient_norm(self._gradients(), factor=1.0)
            repeated = len(counted) < len(micro_batches) and micro_batches[len(counted)].is_padding
            with nullcontext() if repeated else self.activity:
                result = loss(model, batch)
            if result is None:
                return None
            part = result[0] if isinstance(result, tuple) else result
            own = part.detach().count if isinstance(part, Mean) else None
            counted.append(
                next(each.count for each in micro_batches if each.batch is batch)
                if own is None
                else own
            )
            return result

        return watched

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Record the norms of gradients and weights, and copy the weights for `after`."""
        for name in names:
            parameters = self.parameters[name]
            weights = [p.detach() for p in parameters.values()]
            graded = {key: p.grad.detach() for key, p in parameters.items() if p.grad is not None}
            norms = _norms([*graded.values(), *weights])
            self.gradients[name] = dict(zip(graded, norms, strict=False))
            self.factors[name] = factor
            self.weights |= zip(parameters, norms[len(graded) :], strict=True)
            self.rows_used |= {
                key: (_used_rows(p), p.shape[0]) for key, p in graded.items() if p.ndim > 1
            }
            self._copies[name] = [p.clone() for p in weights]

    def after(self, names: Iterable[str]) -> None:
        """Record the norm of each parameter's change since `before`; the norm is 0 if the update
        was skipped.
        """
        for name in names:
            changes = self._copies.pop(name)
            torch._foreach_sub_(changes, [p.detach() for p in self.parameters[name].values()])
            self.updates |= zip(self.parameters[name], _norms(changes), strict=True)

    def _gradients(self) -> list[Tensor]:
        return [
            p.grad
            for named in self.parameters.values()
            for p in named.values()
            if p.grad is not None
        ]


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes == {torch.float32}:
        return list(torch._foreach_norm(tensors))
    norms: dict[int, Tensor] = {}
    for dtype in dtypes:
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        norms |= zip(
            indices,
            torch._foreach_norm([tensors[index] for index in indices], 2, wide),
            strict=True,
        )
    return [norms[index] for index in range(len(tensors))]


def _used_rows(gradient: Tensor) -> Tensor:
    matrix = gradient if gradient.ndim == 2 else gradient.flatten(1)
    # `any` takes 5 times as long for a large matrix; it is needed for rows without elements
    return torch.count_nonzero(matrix.abs().amax(1) if matrix.numel() else matrix.any(1))


class Layers:
    """A factory that creates `LayerWatch` objects and converts each object to a record.

    `trained` are each model's optimized parameters on this rank. If `compiled` is true, modules are
    not observed, since a hook would change the graph. `updated` are the names of parameters that
    had a nonzero gradient in a watched step of any session.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        trained: Mapping[str, Sequence[nn.Parameter]],
        *,
        world: World,
        local_times: float | None,
        compiled: bool,
        updated: set[str],
    ) -> None:
        self.world, self.local_times, self.updated = world, local_times, updated
        before = {name: f"{name}." if len(models) > 1 else "" for name in models}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        for model, parameters in trained.items():
            names: dict[Tensor, str] = {
                each: name for name, each in models[model].named_parameters()
            }
            by_name = {name_of(parameter, names): parameter for parameter in parameters}
            self.parameters[model] = {
                before[model] + name: by_name[name] for name in names.values() if name in by_name
            }
        self.rows: dict[str, Rows | None] = {
            name: rows_of(each)
            for named in self.parameters.values()
            for name, each in named.items()
        }
        self.modules: dict[str, nn.Module] = {
            before[model] + name: part
            for model, module in models.items()
            for name, part in ({} if compiled else observed(module)).items()
        }

    def watch(self, index: int) -> LayerWatch:
        """Return the watch of a step."""
        return LayerWatch(index, self)

    def read(self, watched: LayerWatch, *, count: Tensor | float) -> Record | None:
        """Return the record of a finished step of `count` targets, or None if nothing was updated.
        Waits for the device. Collective.
        """
        own = self._own(watched, count)
        by_rank = self.world.gathered(own) if self.world.size > 1 else [own]
        gradients = self._norms("gradient", by_rank)
        if not by_rank[0]["weight"]:
            return None
        self.updated.update(name for name, norm in gradients.items() if norm != 0)
        return {
            "kind": "layer_stats",
            "step": watched.index + 1,
            "measured_step": watched.index,
            "grad_norm": gradients,
            "weight_norm": self._norms("weight", by_rank),
            "update_norm": self._norms("update", by_rank),
            "zero_grad_row_fraction": {
                name: self._zero_rows(name, by_rank) for name in by_rank[0]["rows"]
            },
            **_of_modules(by_rank),
            **_noise(by_rank[0]["noise"], gradients),
            "never_updated": [name for name in self.rows if name not in self.updated],
        }

    def _own(self, watched: LayerWatch, count: Tensor | float) -> dict[str, Any]:
        modules = watched.activity.by_module
        rows_used = {name: number for name, (number, _) in watched.rows_used.items()}
        named = [*watched.gradients.values(), watched.weights, watched.updates, rows_used]
        outputs = [number for each in modules.values() for number in (*each.norms, *each.flat)]
        numbers = iter(read_numbers([*chain.from_iterable(map(dict.values, named)), *outputs]))
        *gradients, weights, updates, used = (
            dict(zip(each, numbers, strict=False)) for each in named
        )
        factors = [abs(float(factor)) for factor in watched.factors.values()]
        noise = None
        if watched.first is not None and self.local_times is not None:
            (factor,) = factors or (math.nan,)
            small_count, norm = (float(held) for held in watched.first)
            noise = [small_count, float(count), norm * factor / self.local_times]
        return {
            "gradient": {
                name: norm * factor
                for factor, norms in zip(factors, gradients, strict=True)
                for name, norm in norms.items()
            },
            "weight": weights,
            "update": updates,
            "rows": {
                name: [int(used[name]), rows] for name, (_, rows) in watched.rows_used.items()
            },
            "modules": {
                name: {
                    "norm": math.hypot(*islice(numbers, len(each.norms))),
                    "flat": sum(islice(numbers, len(each.flat))) if each.flat else None,
                    "numbers": each.numbers,
                }
                for name, each in modules.items()
            },
            "noise": noise,
            "first_replica": next(
                (held.replica == 0 for held in self.rows.values() if held is not None), True
            ),
        }

    def _norms(self, what: str, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        own: dict[str, float] = by_rank[0][what]
        if len(by_rank) == 1:
            return own
        return {name: math.hypot(*self._parts(what, name, by_rank)) for name in own}

    def _zero_rows(self, name: str, by_rank: Sequence[Mapping[str, Any]]) -> float:
        used, rows = map(sum, zip(*self._parts("rows", name, by_rank), strict=True))
        return 1.0 - used / rows if rows else 0.0

    def _parts(self, what: str, name: str, by_rank: Sequence[Mapping[str, Any]]) -> list[Any]:
        holders = (
            by_rank[:1]
            if self.rows[name] is None
            else [own for own in by_rank if own["first_replica"]]
        )
        return [own[what][name] for own in holders if name in own[what]]


def _of_modules(by_rank: Sequence[Mapping[str, Any]]) -> Record:
    by_module = {
        name: [own["modules"][name] for own in by_rank if name in own["modules"]]
        for name in dict.fromkeys(name for own in by_rank for name in own["modules"])
    }
    flat = {
        name: [own for own in owns if own["flat"] is not None] for name, owns in by_module.items()
    }
    return {
        "saturated_fraction": {
            name: sum(own["flat"] for own in owns) / sum(own["numbers"] for own in owns)
            for name, owns in flat.items()
            if owns
        },
        "activation_rms": {
            name: math.hypot(*(own["norm"] for own in owns))
            / math.sqrt(max(1, sum(own["numbers"] for own in owns)))
            for name, owns in by_module.items()
        },
    }


def _noise(own: Sequence[float] | None, gradients: Mapping[str, float]) -> Record:
    small, big, norm = own or (0.0, 0.0, 0.0)
    if not 0 < small < big:
        return {}
    # backward divided the small batch's total by the count of the whole batch
    small_norm, big_norm = norm * big / small, math.hypot(*gradients.values())
    small_of = {"small_count": round(small), "small_squared": small_norm * small_norm}
    return {"grad_noise": {**small_of, "big_count": round(big), "big_squared": big_norm * big_norm}}
