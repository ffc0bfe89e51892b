"""The layers of a run: which of its steps are watched, and what was seen of them, read and made a record.

Reading waits for the device, and for the other ranks: all of them watch the same steps. What is measured, and when, is in
`watching.py` and `activity.py`; what the numbers mean in docs/watching.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.activity import Activity, Found, observed, root_mean_square
from surefoot.record import Record
from surefoot.sharding import Rows, name_of, rows_of
from surefoot.watching import Watched
from surefoot.world import World


@dataclass
class Seen:
    """Which trained parameters have had a gradient in some watched step, over all sittings of a run."""

    names: set[str] = field(default_factory=set)

    def state(self) -> list[str]:
        """What a checkpoint holds of it."""
        return sorted(self.names)

    def load_state(self, state: Sequence[str]) -> None:
        """Put back what `state` gave."""
        self.names = set(state)


class Layers:
    """Makes what watches a step, and reads it.

    trained: the parameters of each optimizer, as this rank holds them, by the name of its model.
    local_times: as in `parallel.Ranks`. compiled: modules are then not looked at, for a hook in a graph makes it another one.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        trained: Mapping[str, Sequence[nn.Parameter]],
        *,
        world: World,
        local_times: float | None,
        compiled: bool,
        seen: Seen,
    ) -> None:
        self.world, self.local_times, self.seen = world, local_times, seen
        before = {name: f"{name}." if len(models) > 1 else "" for name in models}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        for model, parameters in trained.items():
            names: dict[Tensor, str] = {held: name for name, held in models[model].named_parameters()}
            held = {name_of(parameter, names): parameter for parameter in parameters}
            self.parameters[model] = {before[model] + name: held[name] for name in names.values() if name in held}
        self.rows: dict[str, Rows | None] = {
            name: rows_of(held) for named in self.parameters.values() for name, held in named.items()
        }
        self.modules: dict[str, nn.Module] = {}
        for model, module in () if compiled else models.items():
            self.modules |= {before[model] + name: held for name, held in observed(module).items()}

    def watch(self, index: int) -> Watched:
        """What watches one step."""
        activity = Activity(self.modules) if self.modules else None
        return Watched(index, self.parameters, activity=activity, local_times=self.local_times)

    def read(self, watched: Watched, *, count: Tensor | float) -> Record | None:
        """Wait for the device; what was seen of a step that is over, as a record. None where it was not updated. Collective.

        count: targets of the whole batch.
        """
        told = self.world.gathered(self._own(watched, count)) if self.world.size > 1 else [self._own(watched, count)]
        gradients = {name: self._norm("gradient", name, told) for name in told[0]["gradient"]}
        if not told[0]["weight"]:
            return None
        self.seen.names |= {name for name, norm in gradients.items() if norm != 0}
        record: Record = {
            "kind": "layers",
            "step": watched.index + 1,
            "watched_step": watched.index,
            "gradient_norm": gradients,
            "weight_norm": {name: self._norm("weight", name, told) for name in told[0]["weight"]},
            "update_norm": {name: self._norm("update", name, told) for name in told[0]["update"]},
            "zero_rows": {name: self._zero_rows(name, told) for name in told[0]["rows"]},
            **_of_modules(told),
        }
        noise = _noise(told[0]["noise"], gradients)
        if noise is not None:
            record["noise"] = noise
        record["never_updated"] = [name for name in self.rows if name not in self.seen.names]
        return record

    def _own(self, watched: Watched, count: Tensor | float) -> dict[str, Any]:
        """What this rank has seen, as JSON."""
        gradients: dict[str, float] = {}
        for optimizer, norms in watched.gradients.items():
            factor = abs(float(watched.factors[optimizer]))
            gradients |= {name: norm * factor for name, norm in _fetched(norms).items()}
        used = _fetched({name: number for name, (number, _) in watched.rows_used.items()})
        noise = None
        if watched.first is not None and self.local_times is not None:
            (factor,) = (abs(float(held)) for held in watched.factors.values()) if watched.factors else (math.nan,)
            small_count, norm = (float(held) for held in watched.first)
            noise = [small_count, float(count), norm * factor / self.local_times]
        found = {} if watched.activity is None else watched.activity.found
        return {
            "gradient": gradients,
            "weight": _fetched(watched.weights),
            "update": _fetched(watched.updates),
            "rows": {name: [int(used[name]), rows] for name, (_, rows) in watched.rows_used.items()},
            "modules": _fetched_modules(found),
            "noise": noise,
            "first_replica": next((held.replica == 0 for held in self.rows.values() if held is not None), True),
        }

    def _norm(self, what: str, name: str, told: Sequence[Mapping[str, Any]]) -> float:
        """Of the whole parameter: over the ranks that hold it together."""
        if self.rows[name] is None:
            return float(told[0][what][name])
        return math.hypot(*(own[what][name] for own in told if own["first_replica"] and name in own[what]))

    def _zero_rows(self, name: str, told: Sequence[Mapping[str, Any]]) -> float:
        owns = told[:1] if self.rows[name] is None else [own for own in told if own["first_replica"]]
        used, rows = (sum(own["rows"][name][place] for own in owns if name in own["rows"]) for place in (0, 1))
        return 1.0 - used / rows if rows else 0.0


def _of_modules(told: Sequence[Mapping[str, Any]]) -> Record:
    """What modules gave out, on all ranks together."""
    names = dict.fromkeys(name for own in told for name in own["modules"])
    held = {name: [own["modules"][name] for own in told if name in own["modules"]] for name in names}
    flat = {name: [own for own in owns if own["flat"] is not None] for name, owns in held.items()}
    return {
        "saturated": {
            name: sum(own["flat"] for own in owns) / sum(own["numbers"] for own in owns)
            for name, owns in flat.items()
            if owns
        },
        "activation_norm": {
            name: root_mean_square([own["norm"] for own in owns], sum(own["numbers"] for own in owns))
            for name, owns in held.items()
        },
    }


def _noise(own: Sequence[float] | None, gradients: Mapping[str, float]) -> Record | None:
    """Squared norms of the gradient of a small batch and of the whole one, each of the mean over its targets."""
    if own is None:
        return None
    small, big, norm = own
    if not 0 < small < big:
        return None
    # what backward left of the small one is its total over the count of the whole batch
    small_norm, big_norm = norm * big / small, math.hypot(*gradients.values())
    return {
        "small_count": round(small),
        "small_squared": small_norm * small_norm,
        "big_count": round(big),
        "big_squared": big_norm * big_norm,
    }


def _fetched(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """On the host, all at once."""
    if not numbers:
        return {}
    return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))


def _fetched_modules(found: Mapping[str, Found]) -> dict[str, Any]:
    norms = iter(_together([norm for each in found.values() for norm in each.norms]))
    flats = iter(_together([flat for each in found.values() for flat in each.flat]))
    return {
        name: {
            "norm": math.hypot(*(next(norms) for _ in each.norms)),
            "flat": sum(int(next(flats)) for _ in each.flat) if each.flat else None,
            "numbers": each.numbers,
        }
        for name, each in found.items()
    }


def _together(numbers: Sequence[Tensor]) -> list[float]:
    return list(_fetched({str(place): number for place, number in enumerate(numbers)}).values())
