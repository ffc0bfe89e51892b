"""AdamW with both moments in 8 bits, by bitsandbytes' block-wise quantization.

The library's AdamW8bit waits for the device after every parameter and counts steps on the host,
where a skipped step cannot be undone. This class avoids both problems, with the same quantization
map, blocks of 256 and 32 bits for small parameters.
"""

from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.config.extras import needed_for
from surefoot.errors import Setting
from surefoot.optim.in_place import by_group, count_step, replace, subtract
from surefoot.optim.kinds.kind import OptimizerKind, Shapes

BLOCK = 256
# elements; smaller parameters (norms, biases) need 32-bit state, which costs little
SMALLEST = 4096


class AdamW8bit(Optimizer):
    """8-bit AdamW in float32 arithmetic (Dettmers et al., 2022, sections 2.1 and 2.2:
    https://arxiv.org/abs/2110.02861).

    The state of a large parameter is `exp_avg` and `exp_avg_sq` as 8-bit codes, and the largest
    magnitude of each block of 256. If the attribute `found_inf` is 1, a step changes no bit.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.quantization = quantization()
        # the 256 values of the codes, from -1 to 1, or from 0 to 1 for squares
        signed_values = self.quantization.create_dynamic_map(signed=True)
        unsigned_values = self.quantization.create_dynamic_map(signed=False)
        self.maps: dict[tuple[str, torch.device], Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                device = parameter.device
                if ("exp_avg", device) not in self.maps:
                    self.maps["exp_avg", device] = signed_values.to(device)
                    self.maps["exp_avg_sq", device] = unsigned_values.to(device)

    @by_group
    def step(
        self, parameters: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        count_step([self.state[parameter]["step"] for parameter in parameters], found_inf=found_inf)
        # one by one, so that only one parameter has 32-bit moments at a time
        for parameter in parameters:
            update = self._update(parameter, group, found_inf)
            subtract(
                [parameter],
                [update],
                rate=group["lr"],
                decay=group["weight_decay"],
                found_inf=found_inf,
            )

    def _update(self, parameter: Tensor, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        mean = self._read(state, "exp_avg").lerp_(gradient, 1.0 - beta1)
        square = self._read(state, "exp_avg_sq").lerp_(gradient.square(), 1.0 - beta2)
        self._write(state, "exp_avg", mean, found_inf)
        self._write(state, "exp_avg_sq", square, found_inf)
        root = square.div_(1.0 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        return mean.div_(1.0 - beta1 ** state["step"]).div_(root)

    def _read(self, state: dict[str, Any], key: str) -> Tensor:
        codes: Tensor = state[key]
        if codes.dtype is not torch.uint8:
            return codes.clone()
        moment: Tensor = self.quantization.dequantize_blockwise(
            # resumed codes have the parameter's strides, which the CUDA kernel misreads
            codes.contiguous(),
            absmax=state[f"{key}_largest"],
            code=self.maps[key, codes.device],
            blocksize=BLOCK,
        )
        return moment

    def _write(
        self, state: dict[str, Any], key: str, value: Tensor, found_inf: Tensor | None
    ) -> None:
        if state[key].dtype is not torch.uint8:
            replace(state[key], value, found_inf=found_inf)
            return
        codes, largest = self._codes(key, value)
        replace(state[key], codes, found_inf=found_inf)
        replace(state[f"{key}_largest"], largest, found_inf=found_inf)

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return zero moments, as 8-bit codes with their scales if the parameter has at least
        `SMALLEST` elements.
        """
        state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device)}
        for key in ("exp_avg", "exp_avg_sq"):
            zeros = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            if parameter.numel() >= SMALLEST:
                state[key], state[f"{key}_largest"] = self._codes(key, zeros)
            else:
                state[key] = zeros
        return state

    def _codes(self, key: str, value: Tensor) -> tuple[Tensor, Tensor]:
        codes, blocks = self.quantization.quantize_blockwise(
            value, code=self.maps[key, value.device], blocksize=BLOCK
        )
        return codes, blocks.absmax


def quantization() -> ModuleType:
    """Return `bitsandbytes.functional`; raise `ConfigError` if bitsandbytes is missing or cannot be
    loaded.
    """
    import logging

    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.level = logging.ERROR  # it warns of missing inference kernels
    try:
        with needed_for("adamw8bit", "bitsandbytes", instead=Setting("optimizer.name", "adamw")):
            from bitsandbytes import functional
    finally:
        log.level = level
    return functional


def _moment_bytes(elements: int) -> int:
    if elements < SMALLEST:
        return elements * 4
    blocks = -(-elements // BLOCK)  # rounded up
    return elements + blocks * 4


def _state_bytes(_: AdamW8bit, shapes: Shapes) -> int:
    return sum(2 * _moment_bytes(prod(shape)) for shape, _ in shapes)


KINDS = (
    OptimizerKind(
        name="adamw8bit",
        cls=AdamW8bit,
        state_bytes=_state_bytes,
        shardable=False,
        on_shards="its blocks of 256 elements would end at a rank's last row, and depend on the number of ranks",
        skip="own arithmetic",
    ),
)
