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
        self.index = index
        self.parameters = layers.parameters
        self.activity = Activity(layers.modules)
        # with several optimizers, the gradient's optimizer is not known
        self.local_times = layers.local_times if len(layers.parameters) == 1 else None
        self.gradients: dict[str, Named] = {}  # norms by optimizer, without `factors`
        self.factors: dict[str, Tensor | float] = {}
        self.weights: Named = {}  # before the update
        self.updates: Named = {}
        # nonzero rows and all rows of each matrix's gradient
        self.rows_used: dict[str, tuple[Tensor, int]] = {}
        # targets and gradient norm of the first micro-batch
        self.first: tuple[Tensor | float, Tensor] | None = None
        self._copies: dict[str, list[Tensor]] = {}

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:
        """Wrap the loss to record module outputs. The second call of the wrapper records the first
        micro-batch's gradient norm.
        """
        self.first = None
        can_tell_first = self.local_times is not None and not self._gradients()
        counts: list[Tensor | float] = []  # of the micro-batches so far

        def watched_loss(model: Any, batch: Any) -> Any:
            if can_tell_first and len(counts) == 1:
                self.first = counts[0], gradient_norm(self._gradients(), factor=1.0)
            is_padding = len(counts) < len(micro_batches) and micro_batches[len(counts)].is_padding
            with nullcontext() if is_padding else self.activity:
                result = loss(model, batch)
            if result is None:
                return None
            mean = result[0] if isinstance(result, tuple) else result
            count = mean.detach().count if isinstance(mean, Mean) else None
            if count is None:
                count = next(each.count for each in micro_batches if each.batch is batch)
            counts.append(count)
            return result

        return watched_loss

    def before(self, names: Iterable[str], factor: Tensor | float) -> None:
        """Record the norms of gradients and weights, and copy the weights for `after`."""
        for name in names:
            parameters = self.parameters[name]
            weights = [p.detach() for p in parameters.values()]
            gradients = {
                key: p.grad.detach() for key, p in parameters.items() if p.grad is not None
            }
            norms = _norms([*gradients.values(), *weights])  # in one call of a kernel
            self.gradients[name] = dict(zip(gradients, norms[: len(gradients)], strict=True))
            self.weights |= zip(parameters, norms[len(gradients) :], strict=True)
            self.factors[name] = factor
            for key, gradient in gradients.items():
                if gradient.ndim > 1:
                    self.rows_used[key] = (_used_rows(gradient), gradient.shape[0])
            self._copies[name] = [weight.clone() for weight in weights]

    def after(self, names: Iterable[str]) -> None:
        """Record the norm of each parameter's change since `before`; the norm is 0 if the update
        was skipped.
        """
        for name in names:
            changes = self._copies.pop(name)
            torch._foreach_sub_(changes, [p.detach() for p in self.parameters[name].values()])
            self.updates |= zip(self.parameters[name], _norms(changes), strict=True)

    def _gradients(self) -> list[Tensor]:
        parameters = chain.from_iterable(named.values() for named in self.parameters.values())
        return [p.grad for p in parameters if p.grad is not None]


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes == {torch.float32}:
        return list(torch._foreach_norm(tensors))
    norms: dict[int, Tensor] = {}
    for dtype in dtypes:
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        wide = torch.promote_types(dtype, torch.float32)
        of_dtype = torch._foreach_norm([tensors[index] for index in indices], 2, wide)
        norms |= zip(indices, of_dtype, strict=True)
    return [norms[index] for index in range(len(tensors))]


def _used_rows(gradient: Tensor) -> Tensor:
    matrix = gradient if gradient.ndim == 2 else gradient.flatten(1)
    if not matrix.numel():  # rows without elements have no maximum
        return torch.count_nonzero(matrix.any(1))
    # `any` takes 5 times as long for a large matrix
    return torch.count_nonzero(matrix.abs().amax(1))


def _read_groups(
    groups: Mapping[tuple[str, str], Sequence[Tensor]],
) -> dict[tuple[str, str], list[float]]:
    """Return the numbers of the tensors of each group. One read brings all of them to the host."""
    numbers = iter(read_numbers(list(chain.from_iterable(groups.values()))))
    return {name: list(islice(numbers, len(group))) for name, group in groups.items()}


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
        self.world = world
        self.local_times = local_times
        self.updated = updated
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}  # by model and name
        self.rows: dict[str, Rows | None] = {}
        self.modules: dict[str, nn.Module] = {}
        prefixes = {name: f"{name}." if len(models) > 1 else "" for name in models}
        for model_name, parameters in trained.items():
            names: dict[Tensor, str] = {
                parameter: name for name, parameter in models[model_name].named_parameters()
            }
            by_name = {name_of(parameter, names): parameter for parameter in parameters}
            in_order: dict[str, nn.Parameter] = {}  # of the model
            for name in names.values():
                if name in by_name:
                    in_order[prefixes[model_name] + name] = by_name[name]
            self.parameters[model_name] = in_order
            self.rows |= {name: rows_of(parameter) for name, parameter in in_order.items()}
        if not compiled:
            for model_name, model in models.items():
                for name, module in observed(model).items():
                    self.modules[prefixes[model_name] + name] = module

    def watch(self, index: int) -> LayerWatch:
        """Return the watch of a step."""
        return LayerWatch(index, self)

    def read(self, watched: LayerWatch, *, count: Tensor | float) -> Record | None:
        """Return the record of a finished step of `count` targets, or None if nothing was updated.
        Waits for the device. Collective.
        """
        by_rank = [self._numbers(watched, count)]
        if self.world.size > 1:
            by_rank = self.world.gathered(by_rank[0])
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

    def _numbers(self, watched: LayerWatch, count: Tensor | float) -> dict[str, Any]:
        """Return the measurements of this rank as numbers, which one read brings to the host."""
        modules = watched.activity.by_module
        groups: dict[tuple[str, str], Sequence[Tensor]] = {
            ("weight", ""): [*watched.weights.values()],
            ("update", ""): [*watched.updates.values()],
            ("rows", ""): [number for number, _ in watched.rows_used.values()],
        }
        for optimizer, norms in watched.gradients.items():
            groups["gradient", optimizer] = [*norms.values()]
        for name, activity in modules.items():
            groups["norm", name] = activity.norms
            groups["flat", name] = activity.flat
        numbers = _read_groups(groups)

        factors = {name: abs(float(factor)) for name, factor in watched.factors.items()}
        gradient_norms = {}
        for optimizer, norms in watched.gradients.items():
            for name, norm in zip(norms, numbers["gradient", optimizer], strict=True):
                gradient_norms[name] = norm * factors[optimizer]
        used = dict(zip(watched.rows_used, numbers["rows", ""], strict=True))
        of_modules = {}
        for name, activity in modules.items():
            of_modules[name] = {
                "norm": math.hypot(*numbers["norm", name]),
                "flat": sum(numbers["flat", name]) if activity.flat else None,
                "numbers": activity.numbers,
            }
        noise = None
        if watched.first is not None and self.local_times is not None:
            (factor,) = factors.values() or (math.nan,)
            small_count, norm = map(float, watched.first)
            noise = [small_count, float(count), norm * factor / self.local_times]
        sharded_rows = [rows for rows in self.rows.values() if rows is not None]
        return {
            "gradient": gradient_norms,
            "weight": dict(zip(watched.weights, numbers["weight", ""], strict=True)),
            "update": dict(zip(watched.updates, numbers["update", ""], strict=True)),
            "rows": {
                name: [int(used[name]), rows] for name, (_, rows) in watched.rows_used.items()
            },
            "modules": of_modules,
            "noise": noise,
            "first_replica": not sharded_rows or sharded_rows[0].replica == 0,
        }

    def _norms(self, what: str, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        of_main: dict[str, float] = by_rank[0][what]
        if len(by_rank) == 1:
            return of_main
        return {name: math.hypot(*self._of_shards(what, name, by_rank)) for name in of_main}

    def _zero_rows(self, name: str, by_rank: Sequence[Mapping[str, Any]]) -> float:
        used = 0
        rows = 0
        for used_of_shard, rows_of_shard in self._of_shards("rows", name, by_rank):
            used += used_of_shard
            rows += rows_of_shard
        return 1.0 - used / rows if rows else 0.0

    def _of_shards(self, what: str, name: str, by_rank: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return a number of a parameter from each rank of the first replica, or of rank 0 if the
        parameter is not sharded.
        """
        if self.rows[name] is None:
            holders = [by_rank[0]]
        else:
            holders = [of_rank for of_rank in by_rank if of_rank["first_replica"]]
        return [of_rank[what][name] for of_rank in holders if name in of_rank[what]]


def _of_modules(by_rank: Sequence[Mapping[str, Any]]) -> Record:
    """Return the values of a record from the modules that ran on any rank."""
    by_module: dict[str, list[Mapping[str, Any]]] = {}
    for of_rank in by_rank:
        for name, activity in of_rank["modules"].items():
            by_module.setdefault(name, []).append(activity)
    saturated_fraction = {}
    activation_rms = {}
    for name, activities in by_module.items():
        norm = math.hypot(*(activity["norm"] for activity in activities))
        elements = sum(activity["numbers"] for activity in activities)
        activation_rms[name] = norm / math.sqrt(max(1, elements))
        measured = [activity for activity in activities if activity["flat"] is not None]
        if measured:
            saturated = sum(activity["flat"] for activity in measured)
            elements = sum(activity["numbers"] for activity in measured)
            saturated_fraction[name] = saturated / elements
    return {"saturated_fraction": saturated_fraction, "activation_rms": activation_rms}


def _noise(noise: Sequence[float] | None, gradients: Mapping[str, float]) -> Record:
    """Return the values of a record from (targets of the first micro-batch, targets of the step,
    gradient norm of the first micro-batch).
    """
    if noise is None:
        return {}
    small_count, big_count, norm = noise
    if not 0 < small_count < big_count:
        return {}
    # backward divided the small batch's total by the count of the whole batch
    small_norm = norm * big_count / small_count
    big_norm = math.hypot(*gradients.values())
    return {
        "grad_noise": {
            "small_count": round(small_count),
            "small_squared": small_norm * small_norm,
            "big_count": round(big_count),
            "big_squared": big_norm * big_norm,
        }
    }
