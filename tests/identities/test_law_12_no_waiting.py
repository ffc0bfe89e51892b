"""Law 12: no function reachable from the step reads a tensor on the host, or makes one of a number
of the host. (2 s)

Ten steps of the loop under two guards: one sees what torch's own code reads, the other what Python
code asks a tensor for (`tolist` and `numpy` pass the first unseen on the CPU). The functions
allowed to read, on the CPU alone, are known by name. A number that `torch.tensor` puts on a GPU is
copied from pageable memory, and the host waits for the copy. Steps on the meta device take the
branches of a GPU, which a CPU does not take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot as sf
from in_one import in_one
from surefoot.data.loader import Feed, MicroBatch
from surefoot.data.order import Order
from surefoot.distributed.world import on_meta
from surefoot.train.layer_stats import Layers, LayerWatch
from surefoot.train.loop import Step, steps
from surefoot.train.step_watch import UNWATCHED

STEPS = 10
# some of torch's optimizers read their own counters; those with a closure read by design, and so do
# buffers that grow
ALLOWED = (
    "read_on_cpu",
    "equal_on_cpu",
    "step_unless_on_cpu",
    "step_with_closure",
    "read_for_other_shapes",
)
READING_OPERATORS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "unique2",
}
READING_METHODS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "is_nonzero",
    "equal",
    "allclose",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__contains__",
    "__repr__",
    "__format__",
}
COPYING_FUNCTIONS = {
    "tensor",
    "as_tensor",
    "new_tensor",
    "from_numpy",
    "frombuffer",
}  # of what is on the host


def is_allowed() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ALLOWED:
            return True
        frame = frame.f_back
    return False


class NoOperatorReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in READING_OPERATORS and not is_allowed():
            raise AssertionError(f"{func} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


class NoMethodReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING_METHODS and not is_allowed():
            raise AssertionError(f"Tensor.{name} reads a tensor on the host")
        if name in COPYING_FUNCTIONS and not is_allowed():
            raise AssertionError(f"{name} copies from the host")
        return func(*args, **(kwargs or {}))


class NoCopies(TorchDispatchMode):
    """Refuses copies between the CPU and the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, returned))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
        if "copy" in func.__name__ and len(devices) > 1:
            raise AssertionError(f"{func} copies from or to the host")
        return returned


def nothing_read() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(NoMethodReads())
    stack.enter_context(NoOperatorReads())
    return stack


class NothingDue:
    """A run between whose steps nothing is done."""

    stopping = False

    def metrics_after(self, done: int) -> dict[str, float]:
        return {}

    def evaluate_due(self, done: int) -> bool:
        return False

    log_due = save_due = evaluate_due

    def evaluate(self, step: Step) -> None: ...

    def log(self) -> None: ...

    save = log


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)
        )


class Memory(nn.Module):
    """A queue of inputs and a count of samples; with `grows`, also a buffer of another shape in each
    step.
    """

    def __init__(self, *, grows: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.grows = grows
        self.register_buffer("queue", torch.zeros(6, 5))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("past", torch.zeros(0, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.queue = torch.cat([inputs.detach(), self.queue])[:6]
            self.count += len(inputs)
            if self.grows:
                self.past = torch.cat([self.past, inputs.detach()])
        outputs: Tensor = self.linear(inputs)
        return outputs


class LargeNet(nn.Sequential):
    """Large enough for a state of 8 bits."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 1000), nn.ReLU(), nn.Linear(1000, 5), nn.Linear(5, 3))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def counted_loss(model: Any, batch: Any) -> Any:
    outputs = model(batch[0])
    right = sf.Mean((outputs.argmax(1) == batch[1]).sum(), len(batch[1]))
    return sf.losses.cross_entropy(outputs, batch[1]), {"accuracy": right}


def logits(model: Any, batch: Any) -> Any:
    return model(batch[0]), batch[1]


def loss_of_logits(model: Any, features: Any) -> Tensor:
    return F.cross_entropy(*features)


def build(train: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": train,
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "schedule": sf.schedules.cosine(warmup="10%"),
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def of_groups() -> Any:
    """Return a schedule with a factor for each group: weights, and what has no decay."""

    def build_scheduler(optimizer: torch.optim.Optimizer) -> Any:
        rates: list[Callable[[int], float]] = [lambda step: 0.9**step, lambda step: 0.5**step]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rates[: len(optimizer.param_groups)])

    return sf.schedules.from_scheduler(build_scheduler)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(40, 5, generator=generator)
    inputs[7] = torch.nan  # bad steps are decided without reading too
    return inputs, torch.randint(3, (40,), generator=generator)


def micro_batches() -> list[list[MicroBatch]]:
    """Those of all steps, gathered beforehand: what happens to data on the host is no part of the
    step.
    """
    feed = Feed(
        data(),
        Order(0, samples=40, batch_size=8),
        seed=0,
        micro_batch_size=4,
        device=torch.device("cpu"),
    )
    feed.start(0)
    return [feed.micro_batches(step) for step in range(STEPS)]


@in_one
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": sf.optim.sgd(lr=0.1, momentum=0.9)},
        {"optimizer": lambda groups: torch.optim.RMSprop(groups, lr=1e-2)},
        {"optimizer": lambda groups: torch.optim.NAdam(groups, lr=1e-2)},
        {"optimizer": torch.optim.LBFGS},
        {"optimizer": sf.optim.lion(1e-3)},
        {"optimizer": sf.optim.adafactor()},
        {"optimizer": sf.optim.muon(1e-3)},
        {"optimizer": sf.optim.schedule_free(1e-2)},
        {"ema": 0.9},
        {"clip": "value 0.1"},
        {
            "clip": "adaptive 0.01",
            "model": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        },
        {"clip": "auto 0.9"},
        {"clip": "auto 0.9", "loss": counted_loss, "precision": "fp16"},
        {"clip": "off", "micro_batch_size": 8},
        {"loss": counted_loss, "ema": 0.9},
        {"loss": sf.losses.whole_batch(logits, loss_of_logits)},
        {"loss": sf.losses.whole_batch(logits, loss_of_logits), "precision": "fp16"},
        {"model": Memory, "buffers": {"queue": "in order", "count": "sum"}},
        {"model": lambda: Memory(grows=True), "buffers": {"past": "in order", "count": "sum"}},
        {"schedule": of_groups()},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp16", "loss": counted_loss, "clip": "value 0.1", "ema": 0.9},
    ],
    ids=lambda changes: ",".join(changes) or "adamw",
)
def test_steps_read_nothing_on_the_host(changes: dict[str, Any]) -> None:
    assert_nothing_is_read(changes)


@pytest.mark.slow
def test_steps_with_a_state_of_8_bits_read_nothing_on_the_host() -> None:
    pytest.importorskip("bitsandbytes")
    assert_nothing_is_read({"optimizer": sf.optim.adamw8bit(1e-2), "model": LargeNet})


def steps_of(
    run: sf.Run, fed: Sequence[Any], *, length: int, watch: Callable[[int], LayerWatch]
) -> Iterator[Any]:
    """Steps with nothing due between them; each second one is watched."""
    return steps(
        run.parts.task,
        run.state,
        feed=fed.__getitem__,
        record=run.parts.run_state.meter.add,
        clock=lambda phase: None,
        periodic=NothingDue(),
        length=length,
        watch=lambda index: watch(index) if index % 2 else UNWATCHED,
    )


def assert_nothing_is_read(changes: dict[str, Any]) -> None:
    """Every second step is watched."""
    run = build(data(), **changes)
    fed = micro_batches()
    watched_layers = layers(run)
    watches: list[LayerWatch] = []

    def watch(index: int) -> LayerWatch:
        watches.append(LayerWatch(index, watched_layers))
        return watches[-1]

    ended_steps = []
    with nothing_read():
        for step in steps_of(run, fed, length=STEPS, watch=watch):
            assert step.grad_norm is not None
            step.log(norm_again=step.grad_norm, index=step.index)
            ended_steps.append(step)

    assert len(ended_steps) == STEPS
    bad_steps = STEPS // 5  # sample 7 comes once in five steps
    skipped = [float(step.skipped) for step in ended_steps if step.skipped is not None]
    assert sum(skipped) >= bad_steps
    values, _ = run.parts.run_state.meter.read()
    assert values["skipped"] >= bad_steps
    assert len(watches) == STEPS // 2
    for layer_watch in watches:
        assert watched_layers.read(layer_watch, count=8) is not None


def layers(run: sf.Run) -> Layers:
    return Layers(
        run.state.models,
        {name: trained.parameters for name, trained in run.state.optimizers.items()},
        world=run.parts.world,
        local_times=run.parts.task.ranks.local_times,
        compiled=False,
        updated=run.parts.run_state.updated_parameters,
    )


@in_one
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": sf.optim.lion(1e-3)},
        {"optimizer": sf.optim.adafactor()},
        {"optimizer": sf.optim.muon(1e-3)},
        {"optimizer": sf.optim.schedule_free(1e-2), "schedule": None},
        {"ema": 0.9, "micro_batch_size": 8},
        {"clip": "value 0.1"},
        {
            "clip": "adaptive 0.01",
            "model": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        },
        {"clip": "auto 0.9", "loss": counted_loss},
    ],
    ids=lambda changes: ",".join(changes) or "adamw",
)
def test_steps_on_a_device_read_nothing_and_copy_nothing(changes: dict[str, Any]) -> None:
    with on_meta(1):
        run = build(data(), **changes)
    fed = on("meta")
    made = 0
    with nothing_read(), NoCopies():
        for step in steps_of(
            run, fed, length=3, watch=lambda index: LayerWatch(index, layers(run))
        ):
            assert step.skipped is not None
            assert step.skipped.is_meta
            made += 1
    assert made == 3


def on(device: str) -> list[list[MicroBatch]]:
    return [
        [
            MicroBatch(
                tuple(t.to(device) for t in part.batch),
                part.count,
                part.index,
                part.sample_ids,
                part.epochs,
            )
            for part in parts
        ]
        for parts in micro_batches()
    ]


@in_one
@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        float,
        bool,
        int,
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.cpu(),
        repr,
        lambda t: f"{t}",
        lambda t: torch.equal(t, t),
        torch.nonzero,
        lambda t: t[t > 0],
        lambda t: max(t, t + 1),
        lambda t: torch.tensor(2.0, device=t.device),
        lambda t: torch.as_tensor(2, device=t.device),
        lambda t: t.new_tensor([1.0]),
        lambda t: t.to("meta"),
    ],
)
def test_the_guards_see_a_read(read: Any) -> None:
    value = torch.tensor([2.0]).squeeze()
    with (
        pytest.raises(AssertionError, match=r"reads a tensor|copies from"),
        nothing_read(),
        NoCopies(),
    ):
        read(value)


def test_only_the_named_function_may_read() -> None:
    def read_on_cpu(flag: Tensor) -> float:
        return float(flag)

    two = torch.tensor(2.0)
    with nothing_read():
        assert read_on_cpu(two) == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": sf.optim.sgd(lr=0.1, momentum=0.9)},
        {"precision": "fp16", "ema": 0.9},
        {"clip": "value 0.1"},
        {
            "clip": "adaptive 0.01",
            "model": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        },
        {"clip": "auto 0.9"},
    ],
)
def test_on_a_gpu_steps_wait_for_nothing(changes: dict[str, Any]) -> None:
    run = build(data(), **({"device": "cuda"} | changes))
    fed = on("cuda")
    looking = layers(run)
    arguments: dict[str, Any] = {
        "record": run.parts.run_state.meter.add,
        "clock": lambda phase: None,
        "periodic": NothingDue(),
        "watch": lambda index: LayerWatch(index, looking),
    }
    for _ in steps(run.parts.task, run.state, feed=fed.__getitem__, length=2, **arguments):
        pass  # the first steps load kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in steps(run.parts.task, run.state, feed=fed.__getitem__, length=STEPS, **arguments):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
