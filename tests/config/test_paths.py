"""Paths that a user gives: a URL is refused by name wherever a file of this machine is meant."""

from pathlib import Path

import pytest
import torch

import surefoot as sf
from surefoot.cli.main import main
from surefoot.config.paths import local_path
from surefoot.data.images.arrays import read_cifar, read_idx

URL = "s3://bucket/run"
READERS = {
    "documents": sf.data.load_documents,
    "images": sf.data.load_images,
    "pairs": lambda path: sf.data.load_pairs(path, source="en", target="de"),
    "questions": lambda path: sf.data.load_questions(path, tokenizer=sf.tokenizers.ByteTokenizer()),
    "tokenizer": sf.tokenizers.load,
    "byte pairs": sf.tokenizers.BPETokenizer.load,
    "subwords": sf.tokenizers.SubwordTokenizer.load,
    "shards": sf.data.TokenShards.open,
    "idx": lambda path: read_idx(path, dimensions=1),
    "cifar": read_cifar,
    "gpt2": sf.checkpoint.load_gpt2,
    "store": sf.checkpoint.Store,
    "report": sf.report.write_page,
    "a saved run": sf.load,
    "inputs of prepare_shards": lambda path: sf.data.prepare_shards(
        "shards", [path], tokenizer=sf.tokenizers.ByteTokenizer(), processes=1
    ),
}
WRITERS = {
    "shards": lambda path: sf.data.write_shards(torch.arange(4).numpy(), path, vocab_size=4),
    "prepared shards": lambda path: sf.data.prepare_shards(
        path, ["here"], tokenizer=sf.tokenizers.ByteTokenizer(), processes=1
    ),
    "schedules": lambda path: sf.plan.plot_schedules(
        {"linear": sf.schedules.linear()}, "8 steps", out=path
    ),
    "report": lambda path: sf.load(Path()).report(out=path),
    "export": lambda path: sf.load("run").export(path),
    "gpt2": lambda path: sf.checkpoint.save_gpt2(
        sf.models.GPT(sf.models.GPTConfig(layers=1, heads=1, width=2, context=2, vocab_size=2)),
        path,
        eos_id=None,
    ),
}


def run(**settings) -> sf.Run:
    return sf.Run(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.ones(4, 1),),
        batch_size=2,
        length="2 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        console=False,
        **settings,
    )


@pytest.mark.parametrize("function", [*READERS.values()], ids=[*READERS])
def test_a_url_is_refused_by_what_reads(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.ConfigError, match="'s3://bucket/run' is a URL"):
        function(URL)


@pytest.mark.parametrize("function", [*WRITERS.values()], ids=[*WRITERS])
def test_a_url_is_refused_by_what_writes_and_no_directory_is_made(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.ConfigError, match="'s3://bucket/run' is a URL"):
        function(URL)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("setting", ["run_dir", "init_from"])
def test_a_url_is_refused_as_the_directory_or_the_first_weights_of_a_run(
    setting, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.ConfigError, match=f"{setting} 's3://bucket/run' is a URL"):
        run(**{setting: URL})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "arguments",
    [
        "train images --run-dir s3://bucket/run",
        "train images --init-from gs://bucket/run",
        "train images --data.path https://host/images",
        "train images --config s3://bucket/run.toml",
        "report s3://bucket/run",
        "diagnose file:///runs/a",
        "compare images --vary seed=1,2 --out s3://bucket/run",
    ],
)
def test_the_command_line_refuses_a_url_in_three_lines(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    printed = capfd.readouterr().err
    assert left.value.code == 2
    assert "is a URL" in printed
    assert len(printed.splitlines()) == 3
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "url", [Path(URL), "s3:/bucket/run2", " s3://bucket/run", Path("file:///runs/a")]
)
def test_a_url_that_path_has_shortened_is_refused_too(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sf.ConfigError, match="is a URL"):
        run(run_dir=url)
    with pytest.raises(sf.ConfigError, match=r"a directory called '(s3|file):'"):
        local_path(url, setting="run_dir")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("path", ["runs/a", "C:/runs/a", "C://runs", "a:b", "x//y", "./s3:/b"])
def test_what_is_no_url_is_a_path(path):
    assert local_path(path, setting="run_dir") == Path(path)
