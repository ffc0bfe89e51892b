"""What several processes could not do is found in one pass of the plain model, and that pass leaves
nothing behind. (4 s)
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from rank_processes import Ranks
from refused import refused
from surefoot.data.loader import MicroBatch
from surefoot.distributed.world import World
from surefoot.models import GPT, GPTConfig
from surefoot.train.activation_checkpointing import compute_again
from surefoot.train.parallel_check import check_first_pass
from surefoot.train.precision import precision

# torch.compile's own
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

CPU = torch.device("cpu")
WIDTH = 6
CLASSES = 3
ROWS = 4


def micro_batch(batch: Any, count: int = ROWS) -> MicroBatch:
    return MicroBatch(batch, count, 0, np.arange(ROWS), np.zeros(ROWS, dtype=np.int64))


def labelled() -> MicroBatch:
    return micro_batch((torch.randn(ROWS, WIDTH), torch.arange(ROWS) % CLASSES))


def check(
    model: nn.Module | dict[str, nn.Module],
    loss: Any,
    first: MicroBatch | None = None,
    *,
    sharded: bool = False,
    **options: Any,
) -> None:
    models = model if isinstance(model, dict) else {"model": model}
    if first is None:
        first = labelled()
    if sharded:
        options["gathered"] = list(models.values())
    check_first_pass(
        models, loss, first, precision=precision("fp32", CPU), world=World(CPU), **options
    )


class Net(nn.Module):
    """An encoder, a head, and a second head that only `both` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def penalty(self) -> Tensor:
        return self.head.weight.square().sum()


def plain(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def line_of(function: Callable[..., Any], text: str) -> str:
    """Where the first line that has a text stands in a function."""
    lines, first = inspect.getsourcelines(function)
    places = [place for place, line in enumerate(lines, start=first) if text in line]
    return f"{__file__}:{places[0]}"


# --- what is fine ---------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x[:, None])
        return self.head(hidden[:, -1])  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def with_frozen_part() -> nn.Module:
    model = Net()
    model.encoder.requires_grad_(False)
    return model


def with_blocks_computed_again() -> nn.Module:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh()),
    )
    compute_again({"model": model}, "blocks")
    return model


def compiled() -> nn.Module:
    return torch.compile(Net())  # type: ignore[return-value]


def twice(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) + F.cross_entropy(model(batch[0] * 2), batch[1])


def counted(model: Any, batch: Any) -> Any:
    return sf.Mean(plain(model, batch) * ROWS, ROWS), {"further": sf.Mean(torch.tensor(1.0), 1)}


def gradient_penalty(model: Any, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_(True)
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + gradient.square().sum()


def with_a_target_of_its_own(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        target = model.encode(batch[0]).argmax(dim=1) % CLASSES
    return F.cross_entropy(model(batch[0]), target)


def with_attributes(model: Any, batch: Any) -> Tensor:
    return plain(model, batch) * model.head.out_features + 0.01 * model.penalty()


@in_one
@pytest.mark.parametrize(
    "kind", [Net, Recurrent, Tied, with_frozen_part, with_blocks_computed_again, compiled]
)
@pytest.mark.parametrize("loss", [plain, twice, counted])
def test_a_model_that_its_loss_calls_passes(kind: Callable[[], nn.Module], loss: Any) -> None:
    check(kind(), loss)
    check(kind(), loss, sharded=True)


@pytest.mark.parametrize("loss", [with_a_target_of_its_own, with_attributes])
def test_what_needs_no_gradient_beside_the_call_passes_where_weights_are_whole(loss: Any) -> None:
    check(Net(), loss)
    with refused("model-used-outside-call"):
        check(Net(), loss, sharded=True)


def test_blocks_that_a_loss_has_computed_again_are_no_use_beside_the_call() -> None:
    check(with_blocks_computed_again(), gradient_penalty)


def test_a_loss_inside_of_forward_passes() -> None:
    shape = GPTConfig(layers=2, heads=2, width=8, context=8, vocab_size=11, tie_embeddings=True)
    model = GPT(shape)
    tokens = torch.randint(11, (ROWS, 8))

    def loss(model: Any, batch: Any) -> Any:
        def of_hidden(hidden: Any, head: Any) -> Any:
            return sf.losses.linear_cross_entropy(hidden, head, batch)

        return model(batch, loss=of_hidden)

    check(model, loss, micro_batch(tokens), sharded=True)


def test_several_models_are_called_each_by_its_name() -> None:
    def loss(models: Any, batch: Any) -> Tensor:
        return plain(models["one"], batch) + plain(models["other"], batch)

    check({"one": Net(), "other": Recurrent()}, loss)


# --- what is refused ------------------------------------------------------------------------------


def by_a_method(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) + model.encode(batch[0]).sum()  # a method


def by_a_part(model: Any, batch: Any) -> Tensor:
    hidden = model.encoder(batch[0])  # a part
    return F.cross_entropy(model.head(hidden), batch[1])


def by_forward(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model.forward(batch[0]), batch[1])  # its forward


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("loss", "named", "line"),
    [
        (by_a_method, "model.encode()", "a method"),
        (by_a_part, "model.encoder(...)", "a part"),
        (by_forward, "model.forward()", "its forward"),
    ],
)
def test_what_goes_beside_the_models_call_is_named_with_its_line(
    loss: Any, named: str, line: str, sharded: bool
) -> None:
    with refused("model-used-outside-call") as refusal:
        check(Net(), loss, sharded=sharded)

    assert f"{named} in {line_of(loss, line)}" in refusal.value.fields["uses"]


def test_a_model_that_the_loss_has_from_elsewhere_is_named() -> None:
    net = Net()

    def loss(_: Any, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])  # from elsewhere

    used = f"model(...) in {line_of(loss, 'from elsewhere')}"
    with refused("model-used-outside-call", uses=[used]):
        check(net, loss)


def test_a_parameter_is_refused_where_it_is_sharded() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return plain(model, batch) + F.linear(batch[0], model.head.weight).sum()  # a parameter

    check(Net(), loss)
    used = f"model.head.weight in {line_of(loss, 'a parameter')}"
    with refused("model-used-outside-call", uses=[used]):
        check(Net(), loss, sharded=True)


class Borrowing(Net):
    """Uses the weights of its head without calling it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encode(x), self.head.weight) + self.head.bias


def test_weights_used_beside_the_module_that_they_are_gathered_with_are_named() -> None:
    model = Borrowing()
    check(model, plain, gathered=[model.encoder, model])
    with refused("weight-used-outside-block", parameter="model.head.weight", block="model.head"):
        check(model, plain, gathered=[model.head, model.encoder, model])


def test_a_weight_is_at_home_in_the_innermost_module_that_is_gathered() -> None:
    model = with_blocks_computed_again()
    check(model, plain, gathered=[model[0], model[1], model])
    tied = Tied()
    check(tied, plain, gathered=[tied])


def attacked(model: Any, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(plain(model, (inputs, batch[1])), inputs)
    return plain(model, (batch[0] + slope.sign(), batch[1]))


def test_gradients_of_gradients_are_refused_if_weights_are_sharded_and_others_are_not() -> None:
    check(Net(), gradient_penalty)
    check(Net(), attacked, sharded=True)
    with refused("gradients-of-gradients"):
        check(Net(), gradient_penalty, sharded=True)


def of_weights_alone(model: Any, batch: Any) -> Tensor:
    return model.head.weight.sum() + model.encoder[0].weight.sum()  # type: ignore[no-any-return]


def of_nothing(models: Any, batch: Any) -> Tensor:
    return torch.zeros((), requires_grad=True)


def test_a_loss_that_calls_no_model_is_refused() -> None:
    with refused("model-not-called"):
        check(Net(), of_weights_alone)
    with refused("model-not-called"):
        check({"one": Net(), "other": Net()}, of_nothing)


def test_parameters_without_a_gradient_are_named_unless_they_are_allowed() -> None:
    model = Net()
    model.spare = nn.Linear(2, 2)
    with refused("unused-parameters", names=["spare.weight", "spare.bias"]):
        check(model, plain)
    check(model, plain, allow_unused=True)
    model.spare.requires_grad_(False)
    check(model, plain)


def test_a_model_of_several_that_is_not_called_is_one_without_gradients() -> None:
    names = [f"other.{name}" for name, _ in Net().named_parameters()]
    with refused("unused-parameters", names=names):
        check({"one": Net(), "other": Net()}, lambda models, batch: plain(models["one"], batch))


def test_a_loss_that_fails_is_left_to_the_first_step() -> None:
    check(Net(), lambda model, batch: model(batch[0][:, 1:]))


def test_of_a_rank_without_samples_nothing_is_checked() -> None:
    check(Net(), plain, MicroBatch(None, 0, 0, np.arange(0), np.arange(0)))


def test_a_loss_that_breaks_its_contract_is_told_at_once() -> None:
    with refused("loss-not-a-scalar"):
        check(Net(), lambda model, batch: model(batch[0]))


# --- what is left behind: nothing -----------------------------------------------------------------


class Wandering(Net):
    """Changes all of itself that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(dim=0)
        with torch.no_grad():
            self.head.weight.div_(2)
        self.encoder.eval()
        self.encoder[0].bias.requires_grad_(False)
        return super().forward(x) + random.random() + float(np.random.rand())


def test_gradients_are_let_go_as_they_are_made() -> None:
    counts = []

    def note(_: Tensor) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        counts.append(sum(gradient is not None for gradient in gradients))

    model = Net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    check(model, plain)

    assert max(counts) == 1


def failing(model: Any, batch: Any) -> Tensor:
    plain(model, batch)
    raise ValueError


def tensors_of(model: nn.Module) -> list[Any]:
    """Parameters, their gradients and buffers."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*model.parameters(), *gradients, *model.buffers()]


def generator_states() -> list[Any]:
    of_numpy = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    return [random.getstate(), of_numpy, torch.get_rng_state().tolist()]


@pytest.mark.parametrize("loss", [plain, failing])
def test_nothing_is_changed(loss: Any) -> None:
    model = Wandering()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    first = labelled()
    tensors = tensors_of(model)
    values = [tensor.detach().clone() for tensor in tensors]
    generators = generator_states()

    check(model, loss, first, allow_unused=True)

    assert generator_states() == generators
    after = tensors_of(model)
    assert [id(tensor) for tensor in after] == [id(tensor) for tensor in tensors]
    assert all(map(torch.equal, after, values))
    assert all(part.training for part in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


# --- in a run -------------------------------------------------------------------------------------


def run_of(model: Any, loss: Any, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(1)
    data = (
        torch.randn(16, WIDTH, generator=generator),
        torch.randint(CLASSES, (16,), generator=generator),
    )
    settings: dict[str, Any] = {
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "2 steps",
        "device": "cpu",
    }
    return sf.Run(
        model=model,
        loss=loss,
        train_data=data,
        optimizer=sf.optim.sgd(lr=0.1),
        console=False,
        **settings | changes,
    )


def on_a_rank(*, beside_on: int, parallel: str = "auto") -> float | str:
    """A run whose loss goes beside the model on one rank: a weight of what was trained, or what was
    refused.
    """

    def loss(model: Any, batch: Any) -> Tensor:  # of one text on all ranks
        if int(os.environ["RANK"]) == beside_on:
            return by_a_part(model, batch)
        return plain(model, batch)

    try:
        run = run_of(Net, loss, parallel=parallel)
        run.train()
    except sf.ConfigError as refusal:
        return str(refusal.code)
    return float(run.state.models["model"].get_parameter("head.weight").detach().sum())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_every_rank_of_a_run_refuses_what_one_of_them_found(parallel: str, ranks: Ranks) -> None:
    codes = ranks(2, on_a_rank, beside_on=1, parallel=parallel)

    assert codes == ["model-used-outside-call"] * 2


class Dropping(nn.Module):
    """Leaves each block out on the rank of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            if place != int(os.environ["RANK"]):
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def which_drops(*, sharding: dict[str, Any]) -> str:
    strategy = sf.fsdp(find_unused_parameters=True, **sharding)
    try:
        run_of(Dropping, plain, parallel=strategy).train()
    except sf.ConfigError as refusal:
        return str(refusal.code)
    return "trained"


def test_ranks_that_call_other_blocks_than_each_other_are_refused_where_weights_are_gathered(
    ranks: Ranks,
) -> None:
    """Without this check each rank would get rows of two different blocks."""
    assert ranks(2, which_drops, sharding={}) == ["unlike-blocks"] * 2
    assert ranks(2, which_drops, sharding={"blocks": ["head"]}) == ["trained"] * 2


def test_a_run_of_several_ranks_trains(ranks: Ranks) -> None:
    first, second = ranks(2, on_a_rank, beside_on=-1)

    assert isinstance(first, float)
    assert first == second


def test_a_run_of_a_single_process_may_go_beside_the_models_call() -> None:
    run_of(Net, by_a_part).train()
