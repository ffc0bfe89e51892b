"""`surefoot export`: what others load is what was trained, however the checkpoint lies on disk. 9
seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.checkpoint import Checkpoint, Store, tensor_file, weight_files
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import write_tensors
from surefoot.checkpoint.manifest import Pieces, bounds
from surefoot.checkpoint.weight_files import read_weights
from surefoot.cli.main import main
from surefoot.memory import peak
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig

SHAPE = GPTConfig(
    layers=2, heads=2, width=16, context=12, vocab_size=257, family="gpt2", tie_embeddings=True
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Parameter(torch.randn(6, 6, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens) @ self.narrow.float()))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run_dir: Path, **changes: Any) -> sf.Run:
    tokens = torch.randint(9, (16,), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {
        "model": Tied,
        "loss": loss,
        "train_data": (tokens, tokens.roll(1)),
        "batch_size": 4,
        "length": "4 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "save_every": "2 steps",
        "splits": {"val": sf.Split((tokens, tokens))},
        "evaluate_every": "2 steps",
        "best": "max val/loss",
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    run = sf.Run(**(settings | changes))
    run.train()
    return run


def gpt_run(run_dir: Path, shape: GPTConfig = SHAPE, **changes: Any) -> sf.Run:
    tokens = torch.randint(shape.vocab_size, (8, 7), generator=torch.Generator().manual_seed(1))

    def next_token(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return trained(
        run_dir,
        model=lambda: GPT(shape),
        loss=next_token,
        train_data=(tokens, tokens.roll(1, 1)),
        splits={},
        best=None,
        identity={"model": asdict(shape)},
        extra_files={"tokenizer.json": sf.tokenizers.ByteTokenizer().to_json()},
        **changes,
    )


def resharded(run: Path, *, count: int) -> None:
    """Rewrite the newest checkpoint of a run as so many ranks would have saved it."""
    store = Store(run / "checkpoints")
    newest = store.newest_intact()
    assert newest is not None
    checkpoint, _ = newest
    unsharded: dict[str, dict[str, Tensor]] = {}
    sharded: dict[str, dict[str, Tensor]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for file in checkpoint.files:
        unsharded[file] = {}
        if file != "state":
            sharded[file] = {}
            shapes[file] = {}
        for name, tensor in checkpoint.tensors(file).items():
            if file == "state" or tensor.ndim == 0:
                unsharded[file][name] = tensor
            else:
                sharded[file][name] = tensor
                shapes[file][name] = tuple(tensor.shape)

    def pieces_of(rank: int) -> Pieces:
        rows: dict[str, dict[str, Tensor]] = {}
        for file, tensors in sharded.items():
            rows[file] = {}
            for name, tensor in tensors.items():
                begin, end = bounds(len(tensor), rank, count)
                rows[file][name] = tensor[begin:end].clone()
        return Pieces(rank, count, shapes, rows)

    class OtherRanks:
        def begin(self) -> None:
            directory = store.partial(checkpoint.step)
            self.files: dict[str, tuple[int, str]] = {}
            for rank in range(1, count):
                of_rank = Checkpoint(checkpoint.step, {}, pieces=pieces_of(rank))
                self.files |= write_tensors(of_rank, directory=directory)

        def entries(self) -> dict[str, tuple[int, str]]:
            return self.files

        def abandon(self) -> None: ...

    of_rank_0 = replace(checkpoint, files=unsharded, pieces=pieces_of(0))
    store.save(of_rank_0, others=OtherRanks())


def assert_same(
    tensors: dict[str, Tensor], expected: dict[str, Tensor], *, without: str = ""
) -> None:
    assert tensors.keys() == expected.keys() - {without}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def size_in_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@in_one
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("max_file", ["5 GB", "200 B", "260 B"])
def test_what_is_exported_is_what_was_trained_in_files_as_large_as_asked_for(
    count: int, max_file: str, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run")
    if count > 1:
        resharded(tmp_path / "run", count=count)

    export = sf.load(tmp_path / "run").export(max_file=max_file)

    assert export.directory == tmp_path / "run" / "export"
    assert export.step == 4
    assert not export.averaged
    weights = read_weights(export.directory)
    assert_same(weights, run.state.model.state_dict(), without="head.weight")
    if max_file == "5 GB":
        assert export.files == ("model.safetensors",)
        return
    index = json.loads((export.directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size_in_bytes(weights)
    files = set(export.files) - {"model.safetensors.index.json"}
    assert set(index["weight_map"].values()) == files
    largest_bytes = int(max_file.removesuffix(" B"))
    for file in files:
        tensors = safetensors.torch.load_file(export.directory / file)
        assert size_in_bytes(tensors) <= largest_bytes or len(tensors) == 1
        names = {name for name, place in index["weight_map"].items() if place == file}
        assert names == tensors.keys()


def test_the_library_loads_tied_weights_into_both_places(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    sf.load(tmp_path / "run").export()
    fresh = Tied()
    file = tmp_path / "run" / "export" / "model.safetensors"
    missing, unexpected = safetensors.torch.load_model(fresh, str(file))

    assert list(missing) == []
    assert list(unexpected) == []
    assert_same(fresh.state_dict(), run.state.model.state_dict())


@pytest.mark.parametrize("weights", ["auto", "averaged"])
def test_averaged_weights_are_taken_where_there_are_some(weights: Any, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", ema=0.5)
    export = sf.load(tmp_path / "run").export(tmp_path / "out", weights=weights)

    assert export.averaged
    averages = run.state.ema_models["model"].model.state_dict()
    assert_same(read_weights(tmp_path / "out"), averages, without="head.weight")


def test_trained_weights_are_taken_where_they_are_asked_for(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", ema=0.5)
    export = sf.load(tmp_path / "run").export(tmp_path / "out", weights="trained")

    assert not export.averaged
    weights = run.state.model.state_dict()
    assert_same(read_weights(tmp_path / "out"), weights, without="head.weight")


@pytest.mark.parametrize("max_file", ["5 GB", "200 B"])
def test_an_export_starts_a_run_of_one_file_or_several(max_file: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    out = tmp_path / "out"
    sf.load(tmp_path / "run").export(out, max_file=max_file)
    trained(tmp_path / "next", init_from=out, length="1 steps", splits={}, best=None)

    weights = Store(tmp_path / "next" / "checkpoints").at(0).tensors("model")
    assert_same(weights, run.state.model.state_dict(), without="head.weight")


def test_files_of_an_earlier_export_do_not_stay(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    sf.load(tmp_path / "run").export(tmp_path / "out", max_file="200 B")
    sf.load(tmp_path / "run").export(tmp_path / "out")

    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.fast("3-gpt2")
@pytest.mark.parametrize("layout", ["native", "gpt2"])
@pytest.mark.parametrize("count", [1, 3])
def test_no_more_than_one_tensor_is_in_memory(
    layout: Any, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = GPTConfig(
        layers=6, heads=2, width=64, context=12, vocab_size=4096, family="gpt2", tie_embeddings=True
    )
    gpt_run(tmp_path / "run", large, length="1 steps")
    if count > 1:
        resharded(tmp_path / "run", count=count)
    chunk = 4096
    for module in (tensor_file, weight_files):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr("surefoot.checkpoint.source.CHUNK_BYTES", chunk)
    with peak(torch.device("cpu")):
        sf.load(tmp_path / "run").export(layout=layout)  # what is imported by both is no tensor
    tracemalloc.start()
    with peak(torch.device("cpu")) as tensors:
        sf.load(tmp_path / "run").export(layout=layout)
    _, plain = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    of_tensors = 0
    if layout == "gpt2":
        largest_turned = 64 * 256 * 4
        of_tensors = largest_turned + 2 * chunk
    assert tensors.memory_bytes <= of_tensors
    assert plain < large.parameters * 4 / 4  # a quarter of it all
    assert plain > chunk  # it was measured at all


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("max_file", ["5 GB", "8 KB"])
def test_transformers_computes_the_same_logits_from_the_layout_gpt2(
    count: int, max_file: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    gpt_run(tmp_path / "run")
    if count > 1:
        resharded(tmp_path / "run", count=count)
    out = tmp_path / "out"
    export = sf.load(tmp_path / "run").export(out, layout="gpt2", max_file=max_file)

    theirs = transformers.GPT2LMHeadModel.from_pretrained(out).eval()
    reloaded = sf.checkpoint.load_gpt2(out).eval()
    ours = GPT(SHAPE)
    sf.load(tmp_path / "run").load_model(ours, device="cpu")
    tokens = torch.randint(257, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = ours(tokens)
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(reloaded(tokens), logits, rtol=0, atol=0)
    assert theirs.config.n_head == 2
    assert theirs.config.eos_token_id == 256
    assert {"config.json", "tokenizer.json"} <= set(export.files)
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == tokenizer


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_that_transformers_keeps_apart_are_cut_out_of_all_shards(
    tied: bool, count: int, tmp_path: Path
) -> None:
    shape = replace(SHAPE, family="llama", kv_heads=1, mlp_width=9, tie_embeddings=tied)
    gpt_run(tmp_path / "run", shape)
    if count > 1:
        resharded(tmp_path / "run", count=count)
    out = tmp_path / "out"

    sf.load(tmp_path / "run").export(out, layout="transformers", max_file="4 KB")

    theirs = read_weights(out)
    assert ("lm_head.weight" in theirs) is not tied
    model = GPT(shape)
    sf.load(tmp_path / "run").load_model(model, device="cpu")
    for layer in range(shape.layers):
        block = model.blocks[layer]
        joined = {
            "self_attn.{}_proj.weight": ("qkv", block.attention.qkv.weight),
            "mlp.{}_proj.weight": (("gate", "up"), block.mlp.up.weight),
        }
        for name, (parts, weight) in joined.items():
            pieces = [theirs[f"model.layers.{layer}.{name.format(part)}"] for part in parts]
            assert torch.equal(torch.cat(pieces), weight)
    assert torch.equal(theirs["model.norm.weight"], model.norm.weight)
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= {*os.listdir(out)}


def test_a_damaged_newest_checkpoint_is_named_and_the_next_older_one_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    resharded(tmp_path / "run", count=2)
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])

    printed = capsys.readouterr()
    damage = f"{file.name}: hash differs"
    assert printed.err == f"warning: checkpoint step-00000004 is damaged ({damage})\n"
    exported, file_line, *_ = printed.out.splitlines()
    assert f" step 2 to {tmp_path}/out" in exported
    assert file_line.startswith("  model.safetensors  ")
    with refused("checkpoint-damaged", sf.CheckpointError):
        sf.load(tmp_path / "run").export(checkpoint=4)


@pytest.mark.parametrize("beside", ["nothing", "a damaged one"])
def test_a_checkpoint_that_a_kill_has_left_between_two_names_is_exported(
    beside: str, tmp_path: Path
) -> None:
    trained(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    newest.rename(newest.with_name(".replaced-step-00000004"))
    if beside == "a damaged one":
        shutil.copytree(newest.with_name(".replaced-step-00000004"), newest)
        (newest / "manifest.json").unlink()
    assert sf.load(tmp_path / "run").export().step == 4


def test_a_checkpoint_is_chosen_by_its_step_or_as_the_best(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", optimizer=sf.optim.adamw(lr=0.05), keep_last=3)
    best = run.parts.run_state.best
    assert best is not None
    assert best.step is not None
    store = Store(tmp_path / "run" / "checkpoints")
    choices: list[tuple[Any, int]] = [("best", best.step), (2, 2), ("2", 2), ("newest", 4)]
    for choice, step in choices:
        export = sf.load(tmp_path / "run").export(checkpoint=choice)
        assert export.step == step
        assert_same(read_weights(export.directory), store.at(step).tensors("model"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without scores, from which nothing is exported."""
    run = tmp_path_factory.mktemp("plain") / "run"
    trained(run, splits={}, best=None)
    return run


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--layout", "gpt3"], 2, "[flags-not-understood]"),
        (["--weights", "mean"], 2, "--weights 'mean' is not one of auto, averaged, trained"),
        (["--weights", "averaged"], 2, "[weights-not-averaged]"),
        (["--max-file", "5 apples"], 2, "[not-a-size-in-bytes]"),
        (["--max-files", "5 GB"], 2, "[setting-unknown]"),
        (["--model", "critic"], 2, "[model-not-in-run]"),
        (["--layout", "gpt2"], 2, "[layout-of-another-model]"),
        (["--layout", "transformers"], 2, "[layout-of-another-model]"),
        (["--checkpoint", "last"], 2, "[setting-out-of-range]"),
        (["--checkpoint", "3"], 4, "[step-without-checkpoint]"),
        (["--out", "."], 2, "[output-into-run]"),
    ],
)
def test_what_cannot_be_exported_is_said_in_few_lines(
    arguments: list[str],
    status: int,
    said: str,
    plain: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(plain)
    with pytest.raises(SystemExit) as end:
        main(["export", str(plain), *arguments])

    assert end.value.code == status
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 5
    assert not (plain / "export").exists()


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("modern", True, "gpt2"),
        ("modern", True, "transformers"),
        ("llama", True, "gpt2"),
        ("gpt2", False, "gpt2"),
        ("gpt2", False, "transformers"),
    ],
)
def test_a_network_that_transformers_lacks_is_refused(
    family: Any, tied: bool, layout: Any, tmp_path: Path
) -> None:
    gpt_run(tmp_path / "run", replace(SHAPE, family=family, tie_embeddings=tied))
    with refused("layout-of-another-model", value=layout):
        sf.load(tmp_path / "run").export(layout=layout)
    assert not (tmp_path / "run" / "export").exists()


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../w.safetensors"}}'
    )
    with refused("weights-unreadable", sf.CheckpointError, path=tmp_path) as caught:
        read_weights(tmp_path)
    assert "'../w.safetensors'" in caught.value.problem


def loaded_bias(run_dir: Path, choice: str, steps: set[int]) -> Tensor:
    del steps  # which one was loaded, nobody is told
    return sf.load(run_dir).load_model(Tied, checkpoint=choice).state_dict()["norm.bias"]


def exported_bias(run_dir: Path, choice: str, steps: set[int]) -> Tensor:
    export = sf.load(run_dir).export(run_dir / "out", checkpoint=choice)
    assert export.step in steps
    assert export.damaged == ()
    return read_weights(run_dir / "out")["norm.bias"]


@pytest.mark.parametrize("choice", ["newest", "best"])
@pytest.mark.parametrize("read_bias", [exported_bias, loaded_bias])
def test_a_checkpoint_that_is_removed_at_any_read_is_chosen_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    read_bias: Callable[[Path, str, set[int]], Tensor],
) -> None:
    """The run trains: it saves step 8, whose weights are others, and removes all but step 0."""
    trained(tmp_path / "run", keep_last=1)
    store = Store(tmp_path / "run" / "checkpoints")
    step_4 = store.at(4)
    chosen_step = 4
    if choice == "best":
        assert step_4.saved.best_step is not None
        chosen_step = step_4.saved.best_step
    bias_before = store.at(chosen_step).tensors("model")["norm.bias"]
    weights = {name: tensor + 1 for name, tensor in step_4.tensors("model").items()}
    files = {**step_4.files, "model": weights}
    state = {**step_4.state, "monitor": {**step_4.state["monitor"], "step": 8}}
    step_8 = replace(step_4, step=8, files=files, state=state)
    read = Disk.read
    reads = 0
    run_dir = tmp_path / "run"
    removed_at: int | None = None

    def counted_read(*arguments: Any, **named: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == removed_at:
            Store(run_dir / "checkpoints", keep_last=9).save(step_8)
            for step in {chosen_step, 4}:
                shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
        return read(*arguments, **named)

    monkeypatch.setattr(Disk, "read", counted_read)
    read_bias(run_dir, choice, {chosen_step})
    count = reads
    assert count > 4

    for number in range(1, count):
        run_dir = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "run", run_dir)
        reads = 0
        removed_at = number
        bias = read_bias(run_dir, choice, {chosen_step, 8})
        assert torch.equal(bias, weights["norm.bias"]) or torch.equal(bias, bias_before)
