"""Blocks computed again in the backward pass: not a bit of gradients and buffers differs, and less
is kept. (20 s)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from surefoot.memory import peak
from surefoot.models import GPT, GPTConfig, ResNet, Seq2Seq, Seq2SeqConfig
from surefoot.tools.plan import measure, summary
from surefoot.train.activation_checkpointing import _recompute_policy, compute_again

WIDTH = 8
ROWS = 6
Network = tuple[nn.Module, tuple[Tensor, ...]]  # and its inputs
both = pytest.mark.parametrize("how", ["blocks", "selective"])


class Block(nn.Module):
    """Batch statistics, dropout, and an output that depends on all three generators and on a buffer
    it moves on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, WIDTH)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.training:
            self.level += 1
        noise = random.random() + float(np.random.rand())
        y = torch.relu(self.norm(self.up(x)))
        y = F.dropout(y, 0.3, self.training) * torch.cos(self.level)
        return x + torch.tanh(self.down(y)) * (noise + scale)


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)  # type: ignore[no-any-return]


class Twice(Net):
    """Every block is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Itself(Net):
    """A model that computes again by itself."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            up = checkpoint(block.up, x, use_reentrant=False)
            x = up.sum(dim=1, keepdim=True) + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def random_weights(model: nn.Module) -> nn.Module:
    """Zeros at the start would hide differences."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gpt() -> Network:
    shape = GPTConfig(layers=2, heads=2, width=8, context=8, vocab_size=11, dropout=0.2)
    return GPT(shape), (tokens(),)


def seq2seq() -> Network:
    shape = Seq2SeqConfig(
        2, 2, heads=2, width=8, mlp_width=16, vocab_size=11, dropout=0.2, attention_dropout=0.2
    )
    return Seq2Seq(shape), (tokens(), tokens())


def resnet() -> Network:
    return ResNet(18, classes=3, channels=3, stem="cifar"), (torch.randn(ROWS, 3, 8, 8),)


def torchs_own() -> Network:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn(ROWS, 5, WIDTH),)


def with_rows(model: Callable[[], nn.Module]) -> Callable[[], Network]:
    return lambda: (model(), (torch.randn(ROWS, WIDTH),))


def tokens() -> Tensor:
    return torch.randint(1, 11, (ROWS, 8))


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def effects(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """Gradients and buffers after two passes, and what the generators would draw next."""
    seed()
    for _ in range(2):
        with within():
            outputs = model(*inputs)
        outputs.float().square().mean().backward()
    drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
    return [*(parameter.grad for parameter in model.parameters()), *model.buffers(), drawn]  # type: ignore[list-item]


def again(model: nn.Module, how: Any, **settings: Any) -> nn.Module:
    twin = copy.deepcopy(model)
    compute_again({"model": twin}, how, **settings)
    return twin


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True] * len(one)


NETWORKS = {
    "gpt": gpt,
    "seq2seq": seq2seq,
    "resnet": resnet,
    "torch's own": torchs_own,
    "plain": with_rows(Net),
    "blocks used twice": with_rows(Twice),
    "computing parts of itself again": with_rows(Itself),
}
PRECISIONS = {"fp32": nullcontext, "bf16": bfloat16}


def cases() -> Iterator[Any]:
    uses_weights_twice = ["blocks used twice", "computing parts of itself again"]
    for name, precision, how in product(NETWORKS, PRECISIONS, ["blocks", "selective"]):
        # autocast casts such a weight once, torch's selective checkpointing expects two casts
        if name in uses_weights_twice and (precision, how) == ("bf16", "selective"):
            continue
        marks = [pytest.mark.slow] if name == "resnet" else []  # of eleven million weights
        yield pytest.param(name, precision, how, marks=marks)


@pytest.mark.parametrize(("name", "precision", "how"), list(cases()))
def test_not_a_bit_of_gradients_and_buffers_differs(name: str, precision: str, how: Any) -> None:
    within = PRECISIONS[precision]
    torch.manual_seed(1)
    model, inputs = NETWORKS[name]()
    random_weights(model)
    twin = again(model, how)

    assert_equal(effects(model, inputs, within=within), effects(twin, inputs, within=within))


@both
def test_blocks_are_computed_again_where_gradients_are_asked_for_and_only_there(how: Any) -> None:
    passes = []
    model = again(Net(), how)
    for block in model.blocks:  # type: ignore[union-attr]
        block.norm.register_forward_hook(lambda *_: passes.append(1))
    inputs = torch.randn(ROWS, WIDTH)

    model(inputs).sum().backward()
    assert len(passes) == 2 * 3

    passes.clear()
    model.eval()
    with torch.no_grad():
        model(inputs)
    assert len(passes) == 3


def test_blocks_are_those_of_the_model_or_those_that_are_named() -> None:
    of_model = compute_again({"model": Net()}, "blocks")
    named = compute_again({"model": Net()}, "blocks", blocks=["blocks.1", "BatchNorm*"])
    of_several = compute_again({"one": Net(), "other": nn.Linear(2, 2)}, "blocks")

    assert list(of_model) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(named) == ["blocks.0.norm", "blocks.1", "blocks.2.norm"]
    assert list(of_several) == ["one.blocks.0", "one.blocks.1", "one.blocks.2"]


def test_gradients_through_gradients_are_the_same() -> None:
    """There a block is computed again for each of two backward passes."""
    model = random_weights(Net())
    inputs = torch.randn(ROWS, WIDTH)
    twin = again(model, "blocks")

    def penalty(model: nn.Module) -> list[Tensor]:
        seed()
        leaf = inputs.clone().requires_grad_(True)
        outputs = model(leaf).square().mean()
        (gradient,) = torch.autograd.grad(outputs, leaf, create_graph=True)
        (outputs + gradient.square().sum()).backward()
        return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]  # type: ignore[list-item]

    assert_equal(penalty(model), penalty(twin))


def test_names_and_copies_of_a_model_are_what_they_were() -> None:
    model = random_weights(Net())
    names = list(model.state_dict())
    compute_again({"model": model}, "blocks")
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    twin(torch.randn(ROWS, WIDTH)).sum().backward()

    for parameter in twin.parameters():
        if parameter.ndim > 1:
            assert parameter.grad is not None
            assert parameter.grad.any()
    for parameter in model.parameters():
        assert parameter.grad is None


# --- memory ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)).square())  # type: ignore[no-any-return]


def kept_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Of tensors kept for the backward pass, parameters apart."""
    known = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(inputs)
    assert outputs.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("blocks", [2, 8])
def test_of_each_block_only_its_input_is_kept(blocks: int) -> None:
    model = nn.Sequential(*(Wide() for _ in range(blocks)))
    inputs = torch.randn(64, 32)
    narrow = 64 * 32 * 4
    wide = 64 * 128 * 4
    # without: what goes into each layer, and what the sigmoid and the square are differentiated by,
    # one of them shared
    assert kept_bytes(model, inputs) == blocks * (narrow + 2 * wide)
    assert kept_bytes(again(model, "blocks"), inputs) == blocks * narrow


def test_selective_keeps_more_than_blocks_and_less_than_all() -> None:
    model = nn.Sequential(*(Wide() for _ in range(8)))
    inputs = torch.randn(64, 32)

    def peak_bytes(model: nn.Module) -> int:
        with peak(torch.device("cpu")) as measured:
            model(inputs)
        return measured.memory_bytes

    blocks = peak_bytes(again(model, "blocks"))
    selective = peak_bytes(again(model, "selective"))
    off = peak_bytes(model)

    assert blocks < 0.5 * selective
    assert selective < 0.8 * off


@pytest.mark.parametrize(("drop_fraction", "kept"), [(0.0, True), (0.1, False)])
def test_attention_is_kept_unless_it_drops_weights_and_so_moves_the_generator_on(
    drop_fraction: float, kept: bool
) -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1, 1, 2, 4)

    by_position = _recompute_policy(None, operator, q, q, q, drop_fraction)
    by_keyword = _recompute_policy(None, operator, q, q, q, dropout_p=drop_fraction)

    assert by_position == by_keyword
    assert (by_position == CheckpointPolicy.MUST_SAVE) == kept


@both
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_gradients_are_the_same_with_dropout_in_attention(how: Any) -> None:
    model = random_weights(torchs_own()[0]).cuda()
    inputs = (torch.randn(ROWS, 64, WIDTH, device="cuda"),)
    twin = again(model, how)

    def within() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=torch.bfloat16)  # flash attention is for 16 bits

    expected = effects(model, inputs, within=within)
    for one, other in zip(expected, effects(twin, inputs, within=within), strict=True):
        # its backward pass adds in any order
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


# --- in runs --------------------------------------------------------------------------------------


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def run_of(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(24, WIDTH, generator=generator), torch.randint(3, (24,), generator=generator)
    settings: dict[str, Any] = {
        "model": Net,
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "8 steps",
        "ema": 0.9,
        "optimizer": sf.optim.adamw(lr=1e-2),
        "splits": {"all": sf.Split(data)},
        "evaluate_every": "2 steps",
        "device": "cpu",
        "run_dir": run_dir,
        "console": False,
        "report": False,
        "save_every": "2 steps",
    }
    return sf.Run(loss=loss, train_data=data, **settings | changes)


def trained(**changes: Any) -> list[Tensor]:
    run = run_of(**changes)
    run.train()
    state = run.state
    tensors = [*state.model.state_dict().values()]
    tensors += state.ema_models["model"].model.state_dict().values()
    return [tensor.detach().clone() for tensor in tensors]


@pytest.fixture(scope="module")
def without() -> list[Tensor]:
    """The end of a run that computes nothing again."""
    return trained()


@both
def test_a_run_is_the_same_to_the_bit(how: Any, without: list[Tensor]) -> None:
    assert_equal(trained(activation_checkpointing=how), without)


@both
def test_a_run_may_go_on_with_another_setting(
    how: Any, without: list[Tensor], tmp_path: Path
) -> None:
    trained(run_dir=tmp_path / "run", stop_after="4 steps")

    assert_equal(trained(run_dir=tmp_path / "run", activation_checkpointing=how), without)


def test_averages_are_not_computed_again() -> None:
    run = run_of(activation_checkpointing="blocks")
    assert "forward" in vars(run.state.models["model"].get_submodule("blocks.0"))
    assert "forward" not in vars(run.state.ema_models["model"].model.get_submodule("blocks.0"))


@pytest.mark.parametrize("how", ["off", "blocks", "selective"])
def test_plan_says_what_is_computed_again_and_measures_the_memory(how: Any) -> None:
    large: dict[str, Any] = {"batch_size": 256, "micro_batch_size": 256, "model": lambda: Net(6)}
    run = run_of(activation_checkpointing=how, **large)

    text = "\n".join(map(str, summary.sections(run.parts)))
    measured_bytes = measure.measure(run.parts).activation_bytes

    is_on = how != "off"
    off_bytes = measure.measure(run_of(**large).parts).activation_bytes
    assert (f"activation checkpointing: {how}, in 6 x Block" in text) == is_on
    assert (measured_bytes < 0.8 * off_bytes) == is_on


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (
            {"activation_checkpointing_modules": ["Block"]},
            "checkpointed-modules-without-checkpointing",
        ),
        (
            {"activation_checkpointing": "blocks", "model": lambda: nn.Linear(WIDTH, 3)},
            "model-without-blocks",
        ),
        ({"activation_checkpointing": "all"}, "setting-of-wrong-type"),
        (
            {"activation_checkpointing": "blocks", "activation_checkpointing_modules": ["Blok"]},
            "no-such-block",
        ),
    ],
)
def test_what_cannot_be_computed_again_is_refused(settings: dict[str, Any], code: str) -> None:
    with refused(code):
        run_of(**settings)


def in_place() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def test_a_product_that_is_changed_in_place_is_no_matter_to_blocks() -> None:
    expected = trained(model=in_place)

    assert_equal(trained(model=in_place, activation_checkpointing="blocks"), expected)


def test_a_product_that_is_changed_in_place_is_named_by_selective() -> None:
    with refused("selective-checkpointing-in-place"):
        trained(model=in_place, activation_checkpointing="selective")


class Drifting(nn.Module):
    """Takes another way each time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            return torch.tanh(self.layer(x))
        return x + 1


def test_a_block_that_is_not_the_same_again_is_told() -> None:
    with refused("recomputed-otherwise", where="at step 0"):
        trained(
            model=lambda: nn.Sequential(Drifting(), Drifting(), nn.Linear(WIDTH, 3)),
            activation_checkpointing="blocks",
            activation_checkpointing_modules=["Drifting"],
        )


# --- compiled -------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A block without what torch.compile leaves to Python."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.tanh(y)


compiling = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@both
@compiling
def test_compiled_blocks_give_the_same_gradients_and_write_their_buffers_once(how: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Plain(), Plain())
    inputs = (torch.randn(ROWS, WIDTH),)
    twin = again(model, how)
    graph = torch.compile(twin, dynamic=False, backend="aot_eager")

    for one, other in zip(effects(model, inputs), effects(graph, inputs), strict=True):  # type: ignore[arg-type]
        # operators are taken apart, and round otherwise
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@both
@compiling
def test_a_block_that_cannot_be_compiled_whole_is_an_error_and_not_computed_without_its_buffers(
    how: Any,
) -> None:
    model = nn.Sequential(Plain(breaks=True), Plain(breaks=True))
    compute_again({"model": model}, how)
    graph = torch.compile(model, dynamic=False, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        graph(torch.randn(ROWS, WIDTH))


# --- on several ranks -----------------------------------------------------------------------------


def of_rank(parallel: str) -> dict[str, list[Tensor]]:
    from torch.distributed.tensor import DTensor

    def local(tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    tensors = {}
    for how in ("off", "blocks", "selective"):
        at_end = trained(activation_checkpointing=how, parallel=parallel)
        tensors[how] = [local(tensor) for tensor in at_end]
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_on_two_ranks_not_a_bit_differs(parallel: str, ranks: Ranks) -> None:
    for tensors in ranks(2, of_rank, parallel=parallel):
        assert_equal(tensors["blocks"], tensors["off"])
        assert_equal(tensors["selective"], tensors["off"])
