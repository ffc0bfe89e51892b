"""The precisions of a training step (fp32, tf32, bf16, fp16, fp8), and the loss scale for fp16.

The loss scale is updated on the device, because `torch.amp.GradScaler` reads its overflow flag on
the host in every step (law 12). A new precision needs an entry of `FORMATS` and a choice of the
setting `precision`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config.extras import needed_for
from surefoot.config.speed_table import CUDA_BF16_FROM
from surefoot.errors import ConfigError, Setting, out_of_range
from surefoot.memory import instruction_set
from surefoot.optim.param_groups import hidden_matrices

_FP8_FROM = (8, 9)  # Ada and Hopper
_FP8_MULTIPLE = 16  # of both sizes of a matrix, required by the hardware


@dataclass(frozen=True, kw_only=True)
class Format:
    """The properties of one precision; an entry of `FORMATS`."""

    autocast: torch.dtype | None = None  # autocast's dtype; None: float32 throughout
    tf32: bool = False  # whether float32 products and convolutions may round to TF32 on CUDA
    scaled: bool = False  # whether gradients need a loss scale
    # converts a new model in place
    convert: Callable[[nn.Module, torch.device], nn.Module] | None = None
    # raises `ConfigError` for an unsupported device
    refuse: Callable[[torch.device], None] = lambda _: None
    tolerance: float = 1e-2  # largest relative difference of two sums of the same losses
    h100_flops: float  # dense FLOP/s, from the data sheet of H100 SXM


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients above the smallest fp16 value: two tensors, updated on
    the device.

    The scale halves after a step that overflowed and doubles after `interval` good steps in a row,
    as in Micikevicius et al., 2018, section 3.2 (https://arxiv.org/abs/1710.03740). The constants
    equal the defaults of `torch.amp.GradScaler`.
    """

    scale: Tensor
    good_steps: Tensor
    interval: int = 2000

    def update(self, overflowed: Tensor) -> None:
        """Update the scale without waiting for the device. `overflowed` is a boolean device tensor
        for the last step.
        """
        grown = self.good_steps + 1 >= self.interval
        doubled = self.scale * 2.0  # must stay finite: an infinite scale would never halve again
        unchanged = torch.where(grown & torch.isfinite(doubled), doubled, self.scale)
        self.good_steps = torch.where(overflowed | grown, 0, self.good_steps + 1)
        self.scale = torch.where(overflowed, self.scale * 0.5, unchanged)


@dataclass
class Precision:
    """One precision on one device. Weights stay float32."""

    name: str
    device: torch.device
    loss_scale: LossScale | None = None
    _plain: AbstractContextManager[None] = field(default_factory=nullcontext, repr=False)

    @property
    def emulated(self) -> bool:
        """True if the device is known to lack bf16 instructions, so that bf16 is slow."""
        if self.name == "bf16" and self.device.type == "cuda":
            return torch.cuda.get_device_capability(self.device) < CUDA_BF16_FROM
        return self.name == "bf16" and self.device.type == "cpu" and instruction_set() == "none"

    def autocast(self) -> AbstractContextManager[object]:
        dtype = FORMATS[self.name].autocast
        return self._plain if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, start: Tensor, gradient: Tensor | None) -> None:
        """Run `start.backward(gradient)`; on the CPU, skip the checks of its Python wrapper.

        `gradient` must be a new tensor, since the gradient of a parameter may share its memory.
        """
        if not start.is_cpu or type(start) is not Tensor or torch._C._len_torch_function_stack():
            start.backward(gradient)  # type: ignore[no-untyped-call]
            return
        gradient = torch.ones_like(start) if gradient is None else gradient
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(
            (start,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """Allow TF32 products and convolutions on CUDA only if the precision is tf32; restore
        torch's settings at the end.
        """
        if self.device.type != "cuda":
            yield
            return
        products_before = torch.get_float32_matmul_precision()
        convolutions_before = torch.backends.cudnn.allow_tf32
        tf32 = FORMATS[self.name].tf32
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products_before)
            torch.backends.cudnn.allow_tf32 = convolutions_before

    def tensors(self) -> dict[str, Tensor]:
        scale = self.loss_scale
        if scale is None:
            return {}
        return {"scale": scale.scale, "good_steps": scale.good_steps}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        scale = self.loss_scale
        if scale is not None:
            device = scale.scale.device
            scale.scale = tensors["scale"].to(device)
            scale.good_steps = tensors["good_steps"].to(device)


def precision(name: str, device: torch.device, *, updates_on: str | None = None) -> Precision:
    """Return the precision called `name`. Its loss scale is on `updates_on` (default: `device`).
    Raises `ConfigError` if unsupported.

    The name "auto" means bf16 on devices with such instructions, and fp32 elsewhere. A run chooses
    by more facts: see `plan.resolve`.

    >>> precision("auto", torch.device("cpu")).name
    'fp32'
    """
    if name == "auto":
        name = "bf16" if computes_bf16(device) else "fp32"
    if name not in FORMATS:
        raise out_of_range("precision", name, f"one of auto, {', '.join(FORMATS)}")
    FORMATS[name].refuse(device)
    if not FORMATS[name].scaled:
        return Precision(name, device)
    scale = torch.tensor(65536.0, device=updates_on or device)
    good_steps = torch.tensor(0, device=updates_on or device)
    return Precision(name, device, LossScale(scale, good_steps))


def computes_bf16(device: torch.device) -> bool:
    """Return True for a CUDA device with bf16 instructions, and for the meta device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= CUDA_BF16_FROM
    return device.type == "meta"


def with_fp8(model: nn.Module, device: torch.device) -> nn.Module:
    """Convert a model's hidden linear layers in place to float8 products, forward and backward;
    return the model.

    Each tensor is scaled by its own largest magnitude, to e4m3 in the forward pass and e5m2 for
    gradients (Micikevicius et al., 2022, section 3, https://arxiv.org/abs/2209.05433). Parameters
    stay the same objects. Only `nn.Linear` layers with sizes in multiples of 16 are converted;
    heads and layers that share an embedding's weight are not. The CPU emulates float8 slowly.
    Raises `ConfigError` without torchao, or if the model has no such layer.
    """
    hidden = hidden_matrices(model)
    converted = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module.weight not in hidden:
            continue
        if all(size % _FP8_MULTIPLE == 0 for size in module.weight.shape):
            converted.append(name)
    if not converted:
        raise ConfigError(
            "model-without-fp8-layers",
            problem=f"precision = fp8: {type(model).__name__} has no hidden nn.Linear with sizes in"
            f" multiples of {_FP8_MULTIPLE}",
            remedy=Setting("precision", "bf16"),
            setting="precision",
            value="fp8",
        )
    with needed_for("precision = fp8", "torchao", instead=Setting("precision", "bf16")):
        torchao = import_module("torchao.float8")
    config = torchao.Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    in_eval_mode = [name for name, module in model.named_modules() if not module.training]
    torchao.convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in converted, config=config
    )
    for name in in_eval_mode:  # torchao's new layers are in training mode
        model.get_submodule(name).training = False
    return model


def _refuse_tf32(device: torch.device) -> None:
    if device.type not in ("cuda", "meta"):
        raise _without_hardware("tf32", "a CUDA device", device.type, instead="fp32")


def _refuse_fp8(device: torch.device) -> None:
    device_name = device.type
    capability = (0, 0)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        device_name = f"{torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]})"
    if device.type != "meta" and capability < _FP8_FROM:
        needs = f"a GPU of compute capability {_FP8_FROM[0]}.{_FP8_FROM[1]} or more"
        raise _without_hardware("fp8", needs, device_name, instead="bf16")


def _without_hardware(name: str, needs: str, device: str, *, instead: str) -> ConfigError:
    return ConfigError(
        "precision-without-hardware",
        problem=f"precision = {name} needs {needs}; this device is {device}",
        remedy=Setting("precision", instead),
        setting="precision",
        value=name,
        device=device,
    )


# All precisions by name; "auto" becomes one of them when a run is built
FORMATS: dict[str, Format] = {
    "fp32": Format(tolerance=1e-4, h100_flops=67e12),
    "tf32": Format(tf32=True, refuse=_refuse_tf32, tolerance=1e-3, h100_flops=494e12),
    "bf16": Format(autocast=torch.bfloat16, h100_flops=989e12),
    "fp16": Format(autocast=torch.float16, scaled=True, h100_flops=989e12),
    # all other layers use bf16 autocast, and weights stay float32
    "fp8": Format(
        autocast=torch.bfloat16, convert=with_fp8, refuse=_refuse_fp8, h100_flops=1979e12
    ),
}
