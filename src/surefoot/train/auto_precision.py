"""The choice of precision, memory format and compilation for "auto", from the measurements in
`config/speed_table.py`.

Equal commands give equal choices, because the choice does not depend on measured times or on the
loss. A resumed run keeps the earlier choice.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from surefoot.config import speed_table
from surefoot.config.speed_table import COMPILE, Choice, Facts, look_up
from surefoot.data.buckets import Buckets
from surefoot.data.nested import tensors
from surefoot.errors import Setting
from surefoot.memory import instruction_set
from surefoot.train.precision import Precision, precision

if TYPE_CHECKING:  # at run time these modules import clocks
    from surefoot.data.loader import MicroBatch
    from surefoot.train.components import Components

_OTHER_SHARE = 0.01  # largest share of a model's parameters in layers of unmeasured kinds
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class AutoChoices:
    """The reasons for an automatic precision (with memory format) and compilation; None if the user
    named the setting.

    `unknown` is true if the table has no row for this run. If the user named a precision, `auto` is
    the choice that "auto" would make.
    """

    precision: str | None = None
    compile: str | None = None
    unknown: bool = False
    auto: Choice | None = None

    def in_words(self, precision: Precision, *, channels_last: bool) -> str:
        """Describe the precision and memory format. Add the reason for the choice, or the choice
        that "auto" would make.
        """
        why = "" if self.precision is None else f" (auto: {self.precision})"
        if self.auto is not None:
            other = "" if self.auto.precision == precision.name else f" {self.auto.precision}"
            why = f'{";" if other else ", as"} "auto" would choose{other} ({self.auto.why})'
        return f"{precision.name}{', channels last' * channels_last}{why}"

    def lines(self, parts: "Components") -> list[str]:
        """Return the header's lines on compilation, on `surefoot profile`, and on slow bf16 or
        fp16.
        """
        lines = {
            f"compile {'on' if parts.compiled else 'off'} (auto: {self.compile})": self.compile
            is not None,
            "note: `surefoot profile` measures possible speedups on this machine"
            " (for a script: FILE.py:build; with compilation too: --speedups all)": self.unknown,
            f"note: this {parts.device.type} has no bf16 instructions, so bf16 is slow;"
            f" {Setting('precision', 'fp32')} is faster, but needs a new run": (
                parts.run_state.precision.emulated
            ),
            "note: fp16 on a CPU is slow and meant for tests only;"
            f" use {Setting('precision', 'bf16')} or fp32 to train": (
                parts.run_state.precision.name == "fp16" and parts.device.type == "cpu"
            ),
        }
        return [line for line, applies in lines.items() if applies]


def settle_choices(parts: "Components") -> AutoChoices:
    """Choose the precision, memory format and compilation that are "auto" in a new run. Collective.

    Rank 0 chooses for all ranks, and the choices become part of the run's identity. If the user
    named the precision, images keep their memory format. `Components.compile` compiles the models
    later.
    """
    settled, why, why_compile, silent, auto = parts.run_state.precision, None, None, False, None
    if settled.open:
        choice = Choice(*parts.world.from_main(astuple(_choice(parts))))
        settled.settle(choice.precision)
        parts.layout.settle(choice.channels_last)
        parts.identity |= {"precision": settled.name, "channels_last": parts.layout.channels_last}
        why, silent = choice.why, not choice.known
    elif parts.settings.precision != "auto":
        auto = _choice(parts)
    parts.layout.settle(False)
    if parts.compiling.open:
        on, known, why_compile = _compile_choice(parts)  # equal on all ranks
        parts.compiling.settle(on)
        parts.identity["compile"] = on
        silent = silent or not known
    return AutoChoices(why, why_compile, unknown=silent and parts.task.loss is not None, auto=auto)


def _choice(parts: "Components") -> Choice:
    if (
        parts.device.type in ("cuda", "meta")
        and not (device := precision("auto", parts.device)).open
    ):
        return Choice(
            cast(Any, device.name),
            False,
            True,
            f"this {parts.device.type} device has {device.name} instructions",
        )
    facts = run_facts(parts) if parts.world.is_main else ""
    if isinstance(facts, str):
        return Choice("fp32", False, False, facts)
    return look_up(facts, layout_open=parts.layout.open)


def _compile_choice(parts: "Components") -> tuple[bool, bool, str]:
    from surefoot.data.buckets import varied_batches

    on = COMPILE.get(parts.device.type)
    if parts.task.loss is None:
        return False, True, "the training step is custom"
    if any(trained.takes_closure for trained in parts.state.optimizers.values()):
        return False, True, "the optimizer evaluates a closure"
    if varied := varied_batches(parts.pipeline.plan, parts.pipeline.data):
        return False, True, f"{varied} change shape in almost every step"
    if on is None or parts.parallel.kind == "fsdp":
        return (
            False,
            False,
            f"not measured on {parts.device.type} with parallel = {parts.parallel.kind}",
        )
    return on, True, f"{'faster' if on else 'no faster'} in measurements"


def run_facts(parts: "Components", *, unmeasured: bool = False) -> Facts | str:
    """Return the table's key for a run, or a text that says why the table has no row for the run.

    The function may read the first micro-batch for its shapes. `unmeasured` allows a processor
    without measurements.
    """
    if parts.task.loss is None:
        return "the training step is custom"
    if parts.device.type != "cpu":
        return f"not measured on this {parts.device.type} device"
    instructions, version = instruction_set(), ".".join(torch.__version__.split(".")[:2])
    if not unmeasured and (instructions, version) not in speed_table.TABLE:
        bf16 = (
            "without bf16 instructions"
            if instructions == "none"
            else f"with instructions {instructions}"
        )
        return f"not measured on processors {bf16} in torch {version}"
    kind, plan = model_facts(parts.state.models), parts.pipeline.plan
    if kind is None:
        return "these layer types were not measured"
    layers, width = kind
    if layers == "convolution" and parts.layout.channels_last:
        layers = "convolution, channels last"
    sizes = (
        (parts.pipeline.sizes.micro_batch_size, int(plan.longest.max()))
        if isinstance(plan, Buckets)  # micro-batches differ in shape
        else _sizes(layers, parts.pipeline.first())
    )
    if sizes is None:
        return "these data shapes were not measured"
    return Facts(instructions, version, layers, width, *sizes)


def model_facts(models: Mapping[str, nn.Module]) -> tuple[str, int] | None:
    """Return a model's layer kind and the width of most of its matrices. Returns None if the
    architecture was not measured.

    >>> model_facts({"model": nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 200))})
    ('linear', 200)
    >>> model_facts({"model": nn.LSTM(8, 8)})
    """
    from surefoot.models.gpt_layers import Attention
    from surefoot.models.layers import RMSNorm
    from surefoot.models.resnet import ResNet
    from surefoot.models.seq2seq_layers import CrossAttention, SelfAttention
    from surefoot.models.simple_cnn import SimpleCNN

    parts = [part for model in models.values() for part in model.modules()]
    matrices = [part for part in parts if isinstance(part, nn.Linear | nn.Conv2d)]
    if (
        len(models) != 1
        or not matrices
        or any(isinstance(part, nn.Conv2d) and part.groups > 1 for part in matrices)
    ):
        return None
    attention = any(isinstance(part, Attention | SelfAttention) for part in parts)
    measured = (nn.Linear, nn.Conv2d, RMSNorm, *_NORMS, *((nn.Embedding,) if attention else ()))
    other = sum(_own_numbers(part) for part in parts if not isinstance(part, measured))
    if other > _OTHER_SHARE * sum(_own_numbers(part) for part in parts):
        return None
    convolutions = [part for part in matrices if isinstance(part, nn.Conv2d)]
    # width: the smaller side of a matrix; half of all parameters are in matrices at least as wide.
    # No convolution is grouped.
    widths = sorted(
        ((min(part.weight.shape[:2]), part.weight.numel()) for part in convolutions or matrices),
        reverse=True,
    )
    sums = list(accumulate(size for _, size in widths))
    width = widths[bisect_left(sums, sums[-1] / 2)][0]
    if not convolutions:
        crossed = any(isinstance(part, CrossAttention) for part in parts)
        return "encoder-decoder" if crossed else "attention" if attention else "linear", width
    if attention or 4 * sum(map(_own_numbers, convolutions)) < sum(map(_own_numbers, matrices)):
        return None
    own_layout = any(isinstance(part, SimpleCNN | ResNet) and part.channels_last for part in parts)
    return f"convolution{', channels last' * own_layout}", width


def _own_numbers(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters(recurse=False))


# Rows of a layer's input, and positions per row of tokens; None for unmeasured shapes.
def _sizes(layers: str, micro_batch: "MicroBatch | None") -> tuple[int, int] | None:
    first = None if micro_batch is None else next(tensors(micro_batch.batch), None)
    match (
        layers,
        None if first is None else first.is_floating_point(),
        () if first is None else tuple(first.shape),
    ):
        case ("linear", True, (samples, _)):
            return samples, 1
        case ("attention" | "encoder-decoder", False, (samples, positions)):
            return samples * positions, positions
        case ("convolution" | "convolution, channels last", True, (samples, _, height, width)):
            return samples * height * width, 1
    return None
