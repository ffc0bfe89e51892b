"""Layers that save and load in a form of their own: two keys for one weight, transposed, cloned,
extra state, quantised.

Each is a network of `WIDTH` features; all of it is trained but what `frozen` says.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

WIDTH = 6


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one type and shape and have the same bytes."""
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    numbers = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return same_kind and torch.equal(*numbers)


class TwoKeys(nn.Module):
    """One weight for two linear maps, saved as two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = (inputs @ self.both.t()).chunk(2, -1)
        return torch.tanh(left) + right

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        own = self.both if keep_vars else self.both.detach()
        destination[prefix + "left"] = own[:WIDTH].clone()
        destination[prefix + "right"] = own[WIDTH:].clone()

    def _load_from_state_dict(
        self, state: Any, prefix: str, _: Any, strict: bool, missing: Any, *more: Any
    ) -> None:
        with torch.no_grad():
            self.both.copy_(torch.cat([state[prefix + "left"], state[prefix + "right"]]))


class Transposed(nn.Linear):
    """A weight that a hook saves with its dimensions exchanged."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_post_hook(turn_saved)
        self.register_load_state_dict_pre_hook(turn_loaded)


def turn_saved(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t().contiguous()


def turn_loaded(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].t()


class Cloning(nn.Linear):
    """What it saves shares no memory with what it is."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        state = super().state_dict(*arguments, **named)
        for name, tensor in state.items():
            state[name] = tensor.detach().clone()
        return state


class Wrapper(nn.Module):
    """A model around another, whose methods take no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output

    def state_dict(self) -> Any:  # type: ignore[override]
        return {
            "wrapped": {
                name: tensor.detach().clone() for name, tensor in self.inner.state_dict().items()
            },
            "of": 1,
        }

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return self.inner.load_state_dict(state["wrapped"])


class TensorExtra(nn.Linear):
    """Extra state that is a tensor, which grows: the largest input of each pass."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.largest = torch.zeros(0)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.cat([self.largest, inputs.detach().abs().max()[None]])
        return super().forward(inputs) * (1 + self.largest.sum() / 100)

    def get_extra_state(self) -> Tensor:
        return self.largest

    def set_extra_state(self, state: Tensor) -> None:
        self.largest = state


class NestedExtra(TensorExtra):
    """Extra state that is no tensor at first, and then holds numbers, text and tensors."""

    def get_extra_state(self) -> Any:
        if not len(self.largest):
            return None
        return {
            "passes": len(self.largest),
            0: "zero",
            "0": [self.largest, (1.5, None)],
            "none": None,
        }

    def set_extra_state(self, state: Any) -> None:
        self.largest = torch.zeros(0) if state is None else state["0"][0]


class Renaming(nn.Linear):
    """A weight of another name in files."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "kernel"] = self.weight.detach() * 1
        destination[prefix + "offset"] = self.bias.detach() * 1

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[prefix + "kernel"])
            self.bias.copy_(state[prefix + "offset"])


class Caching(nn.Linear):
    """What it computes with while it is frozen is made of its weight when that is loaded, by a
    hook.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.requires_grad_(False)
        self.doubled = 2 * self.weight.detach()
        self.register_load_state_dict_post_hook(double)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.doubled, self.bias)


def double(module: nn.Module, _: Any) -> None:
    module.doubled = 2 * module.weight.detach()  # type: ignore[assignment,operator]


class Quantised(nn.Module):
    """Frozen codes of 8 bits with a scale a row, and a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.codes * self.scale, self.bias)  # type: ignore[operator]


class Codes(torch.Tensor):
    """A tensor that wraps codes and their scale, as quantisation libraries make them."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes = codes
        self.scale = scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Codes:
        return Codes(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        first = arguments[0]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Codes(first.codes, first.scale)
        if function in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return Codes(first.codes.clone(), first.scale.clone())
        raise NotImplementedError(f"{function} of Codes")


class Wrapped(Quantised):
    """As Quantised, by a parameter of a tensor class of its own, which cannot be copied into."""

    def __init__(self) -> None:
        super().__init__()
        codes = self.codes
        scale = self.scale
        del self.codes, self.scale
        self.weight = nn.Parameter(Codes(codes, scale), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(inputs, weight.codes * weight.scale, self.bias)


class Tied(nn.Module):
    """One weight by two names, of which a hook makes two clones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cloning(), Cloning()
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(inputs)))
        return output


LAYERS: dict[str, Any] = {
    "two keys for one weight": TwoKeys,
    "a transposing hook": Transposed,
    "clones": Cloning,
    "tied clones": Tied,
    "extra state: a tensor": TensorExtra,
    "extra state: nested": NestedExtra,
    "other names": Renaming,
    "a cache made by a load hook": Caching,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "the old weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "the old spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "codes of 8 bits": Quantised,
    "a tensor class": Wrapped,
}


def network(kind: str) -> nn.Module:
    """A network with a layer of that kind, and a head."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the old weight norm
        return (
            Wrapper()
            if kind == "a wrapper"
            else nn.Sequential(LAYERS[kind](), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        )


KINDS = [*LAYERS, "a wrapper"]
