"""`surefoot export`: what others load is what was trained, however the checkpoint lies on disk. 9
seconds.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
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
    found = (store.newest_intact() or pytest.fail("nothing there"))[0]
    whole = {file: found.tensors(file) for file in found.files}
    spread = {
        file: {name: held for name, held in tensors.items() if held.ndim > 0}
        for file, tensors in whole.items()
        if file != "state"
    }
    shapes = {
        file: {name: tuple(held.shape) for name, held in tensors.items()}
        for file, tensors in spread.items()
    }

    def of(place: int) -> Pieces:
        rows = {
            file: {
                name: held[slice(*bounds(len(held), place, count))].clone()
                for name, held in tensors.items()
            }
            for file, tensors in spread.items()
        }
        return Pieces(place, count, shapes, rows)

    class Beside:
        def begin(self) -> None:
            partial = store.partial(found.step)
            self.found: dict[str, tuple[int, str]] = {}
            for place in range(1, count):
                self.found |= write_tensors(
                    Checkpoint(found.step, {}, pieces=of(place)), directory=partial
                )

        def entries(self) -> dict[str, tuple[int, str]]:
            return self.found

        def abandon(self) -> None: ...

    once = {
        file: {name: held for name, held in tensors.items() if name not in spread.get(file, {})}
        for file, tensors in whole.items()
    }
    store.save(Checkpoint(found.step, once, found.state, found.log, of(0)), others=Beside())


def state_of(run: sf.Run, kind: str = "models") -> dict[str, Tensor]:
    model = run.state.models["model"] if kind == "models" else run.state.ema_models["model"].model
    return model.state_dict()


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, without: str = ""
) -> None:
    assert found.keys() == expected.keys() - {without}
    assert all(torch.equal(found[name], expected[name]) for name in found)


@in_one
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("max_file", ["5 GB", "200 B", "260 B"])
def test_what_is_exported_is_what_was_trained_in_files_as_large_as_asked_for(
    count: int, max_file: str, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run")
    if count > 1:
        resharded(tmp_path / "run", count=count)
    done = sf.load(tmp_path / "run").export(max_file=max_file)
    assert (done.directory, done.step, done.averaged) == (tmp_path / "run" / "export", 4, False)
    found = read_weights(done.directory)
    assert_same(found, state_of(run), without="head.weight")
    if max_file == "5 GB":
        assert done.files == ("model.safetensors",)
        return
    index = json.loads((done.directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        held.numel() * held.element_size() for held in found.values()
    )
    assert set(index["weight_map"].values()) == set(done.files) - {"model.safetensors.index.json"}
    for file in set(index["weight_map"].values()):
        held = safetensors.torch.load_file(done.directory / file)
        size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
        assert size <= int(max_file.split(maxsplit=1)[0]) or len(held) == 1
        assert {name for name, where in index["weight_map"].items() if where == file} == held.keys()


def test_the_library_loads_tied_weights_into_both_places(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    sf.load(tmp_path / "run").export()
    fresh = Tied()
    missing, unexpected = safetensors.torch.load_model(
        fresh, str(tmp_path / "run" / "export" / "model.safetensors")
    )
    assert (list(missing), list(unexpected)) == ([], [])
    assert_same(fresh.state_dict(), state_of(run))


@pytest.mark.parametrize(
    ("weights", "kind"), [("auto", "averages"), ("averaged", "averages"), ("trained", "models")]
)
def test_averaged_weights_are_taken_where_there_are_some_and_trained_ones_where_they_are_asked_for(
    weights: Any, kind: str, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", ema=0.5)
    done = sf.load(tmp_path / "run").export(tmp_path / "out", weights=weights)
    assert done.averaged is (kind == "averages")
    assert_same(read_weights(tmp_path / "out"), state_of(run, kind), without="head.weight")


def test_an_export_starts_a_run_of_one_file_or_several(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    for max_file in ("5 GB", "200 B"):
        sf.load(tmp_path / "run").export(tmp_path / "out", max_file=max_file)
        trained(
            tmp_path / max_file, init_from=tmp_path / "out", length="1 steps", splits={}, best=None
        )
        first = Store(tmp_path / max_file / "checkpoints").at(0).tensors("model")
        assert_same(first, state_of(run), without="head.weight")


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
    all_of_it = large.parameters * 4
    largest_turned = 64 * 256 * 4
    assert tensors.memory_bytes <= (0 if layout == "native" else largest_turned + 2 * chunk)
    assert plain < all_of_it / 4
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
    done = sf.load(tmp_path / "run").export(tmp_path / "out", layout="gpt2", max_file=max_file)
    assert {"config.json", "tokenizer.json"} <= set(done.files)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "run" / "tokenizer.json"
    ).read_bytes()
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    ours = GPT(SHAPE)
    sf.load(tmp_path / "run").load_model(ours, device="cpu")
    tokens = torch.randint(257, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            sf.checkpoint.load_gpt2(tmp_path / "out").eval()(tokens), ours(tokens), rtol=0, atol=0
        )
    assert (theirs.config.n_head, theirs.config.eos_token_id) == (2, 256)


def test_a_damaged_newest_checkpoint_is_named_and_the_next_older_one_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run")
    resharded(tmp_path / "run", count=2)
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert (
        said.err
        == "warning: checkpoint step-00000004 is damaged (model.00002-of-00002.safetensors: hash differs)\n"
    )
    exported, file_line, *_ = said.out.splitlines()
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
    for which, step in (("best", best.step), (2, 2), ("2", 2), ("newest", 4)):
        done = sf.load(tmp_path / "run").export(checkpoint=which)
        assert done.step == step
        assert_same(read_weights(done.directory), store.at(step).tensors("model"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without scores, from which nothing is exported."""
    run = tmp_path_factory.mktemp("plain") / "run"
    trained(run, splits={}, best=None)
    return run


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["--layout", "gpt3"],
            2,
            "[flags-not-understood]",
        ),
        (["--weights", "mean"], 2, "--weights 'mean' is not one of auto, averaged, trained"),
        (["--weights", "averaged"], 2, "[weights-not-averaged]"),
        (["--max-file", "5 apples"], 2, "[not-a-size-in-bytes]"),
        (
            ["--max-files", "5 GB"],
            2,
            "[setting-unknown]",
        ),
        (["--model", "critic"], 2, "[model-not-in-run]"),
        (["--layout", "gpt2"], 2, "[layout-of-another-model]"),
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


def test_a_modern_network_is_no_gpt2(tmp_path: Path) -> None:
    gpt_run(tmp_path / "run", GPTConfig(layers=1, heads=2, width=16, context=12, vocab_size=257))
    with refused("layout-of-another-model", value="gpt2"):
        sf.load(tmp_path / "run").export(layout="gpt2")


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../w.safetensors"}}'
    )
    with refused("weights-unreadable", sf.CheckpointError, path=tmp_path) as caught:
        read_weights(tmp_path)
    assert "'../w.safetensors'" in caught.value.problem


@pytest.mark.parametrize("which", ["newest", "best"])
@pytest.mark.parametrize("by", ["export", "load_model"])
def test_a_checkpoint_that_is_removed_at_any_read_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, by: str
) -> None:
    """The run trains: it saves step 8, whose weights are others, and removes all but step 0."""
    trained(tmp_path / "run", keep_last=1)
    checkpoints = Store(tmp_path / "run" / "checkpoints").at(4)
    state = {**checkpoints.state, "monitor": {**checkpoints.state["monitor"], "step": 8}}
    weights = {name: tensor + 1 for name, tensor in checkpoints.tensors("model").items()}
    best = checkpoints.saved.best_step if which == "best" else 4
    before = Store(tmp_path / "run" / "checkpoints").at(best or 4).tensors("model")["norm.bias"]
    later = replace(checkpoints, step=8, files={**checkpoints.files, "model": weights}, state=state)

    def done(place: Path) -> dict[str, Tensor]:
        if by == "load_model":
            return dict(sf.load(place).load_model(Tied, checkpoint=which).state_dict())
        result = sf.load(place).export(place / "out", checkpoint=which)
        assert (result.step, result.damaged) in ((best, ()), (8, ()))
        return read_weights(place / "out")

    read = Disk.read
    reads = [0]
    monkeypatch.setattr(Disk, "read", lambda *a, **k: reads.append(0) or read(*a, **k))
    done(tmp_path / "run")
    count = len(reads)
    assert count > 4
    for number in range(1, count):
        place = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "run", place)
        left = [number]

        def removing(*arguments: Any, place: Path = place, left: Any = left, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                Store(place / "checkpoints", keep_last=9).save(later)
                for step in {best, 4}:
                    shutil.rmtree(place / "checkpoints" / f"step-{step:08d}")
            return read(*arguments, **more)

        monkeypatch.setattr(Disk, "read", removing)
        found = done(place)["norm.bias"]
        assert torch.equal(found, weights["norm.bias"]) or torch.equal(found, before)
