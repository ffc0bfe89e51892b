"""Paths that a user gives: one place looks at them. A URL, an empty path and a path that the system
does not let us look at are refused by name, and `~` is the home directory.
"""

import errno
import os
from pathlib import Path

import pytest
import torch

import surefoot as sf
from refused import refused
from surefoot.cli.main import main
from surefoot.config.paths import local_path, look_at, path_text, unusable_path_of
from surefoot.recipes.readers.images.arrays import read_cifar, read_idx

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
    "export": lambda path: sf.load(Path()).export(path),
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
    with refused("path-is-url", value=URL):
        function(URL)


@pytest.mark.parametrize("function", [*WRITERS.values()], ids=[*WRITERS])
def test_a_url_is_refused_by_what_writes_and_no_directory_is_made(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("path-is-url", value=URL):
        function(URL)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("setting", ["run_dir", "init_from"])
def test_a_url_is_refused_as_the_directory_or_the_first_weights_of_a_run(
    setting, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with refused("path-is-url", setting=setting, value=URL):
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
def test_the_command_line_refuses_a_url_in_four_lines(arguments, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(arguments.split())
    printed = capfd.readouterr().err
    assert left.value.code == 2
    assert "[path-is-url]" in printed
    assert len(printed.splitlines()) == 4
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "url", [Path(URL), "s3:/bucket/run2", " s3://bucket/run", Path("file:///runs/a")]
)
def test_a_url_that_path_has_shortened_is_refused_too(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("path-is-url", setting="run_dir"):
        run(run_dir=url)
    with refused("path-is-url", setting="run_dir"):
        local_path(url, setting="run_dir")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("path", ["runs/a", "C:/runs/a", "C://runs", "a:b", "x//y", "./s3:/b"])
def test_what_is_no_url_is_a_path(path):
    assert local_path(path, setting="run_dir") == Path(path)


def loop_of_links(directory: Path) -> Path:
    (directory / "there").symlink_to("back")
    (directory / "back").symlink_to("there")
    return directory / "there"


UNUSABLE = {
    "an empty path": ("path-empty", lambda directory: ""),
    "blanks": ("path-empty", lambda directory: "  "),
    "300 letters": ("path-not-usable", lambda directory: directory / ("x" * 300)),
    "300 letters above": ("path-not-usable", lambda directory: directory / ("x" * 300) / "run"),
    "5,000 letters": ("path-not-usable", lambda directory: directory / ("x/" * 2500)),
    "a loop of links": ("path-not-usable", loop_of_links),
    "below a loop": ("path-not-usable", lambda directory: loop_of_links(directory) / "a"),
    "a zero byte": ("path-not-usable", lambda directory: directory / "a\0b"),
    "half a character": ("path-not-usable", lambda directory: directory / "a\ud800b"),
}


@pytest.mark.parametrize("function", [*READERS.values(), *WRITERS.values()])
@pytest.mark.parametrize("what", [*UNUSABLE])
def test_a_path_that_cannot_be_looked_at_is_refused_and_nothing_is_made(
    function, what, tmp_path, monkeypatch
):
    code, of_directory = UNUSABLE[what]
    path = of_directory(tmp_path)
    monkeypatch.chdir(tmp_path)
    there = {*tmp_path.iterdir()}
    with pytest.raises(sf.ConfigError) as caught:
        function(path)
    codes = {code}
    if what == "half a character":
        codes.add("path-not-printable")  # of what names a run
    assert caught.value.code in codes
    assert {*tmp_path.iterdir()} == there


@pytest.mark.parametrize("setting", ["run_dir", "init_from"])
@pytest.mark.parametrize("what", [*UNUSABLE])
def test_a_run_refuses_a_path_that_cannot_be_looked_at(setting, what, tmp_path, monkeypatch):
    code, of_directory = UNUSABLE[what]
    path = of_directory(tmp_path)
    monkeypatch.chdir(tmp_path)
    with refused(code, setting=setting):
        run(**{setting: path}).train()


def test_a_missing_path_can_be_looked_at(tmp_path):
    (tmp_path / "file").write_text("")
    assert look_at(tmp_path / "missing") is None
    assert look_at(tmp_path / "missing" / "below") is None
    assert look_at(tmp_path / "file" / "below") is None
    assert look_at(tmp_path / "file") is not None
    assert look_at(tmp_path) is not None


def test_the_home_directory_is_meant_by_a_tilde_as_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_text("~/runs/a", setting="run_dir") == f"{tmp_path}/runs/a"
    assert path_text("~", setting="run_dir") == str(tmp_path)
    assert local_path(Path("~/runs"), setting="run_dir") == tmp_path / "runs"
    for unchanged in ("~no-such-user/runs", "./~", "runs/~", "a~", "~.txt"):
        assert path_text(unchanged, setting="run_dir") == unchanged


def test_without_a_known_home_directory_a_tilde_is_refused(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for text in ("~", "~/runs"):
        with refused("home-directory-unknown", setting="run_dir", value=text):
            path_text(text, setting="run_dir")


def test_only_an_error_of_the_system_about_a_path_is_one_of_the_user():
    denied = PermissionError(errno.EACCES, "Permission denied", "/a/file")
    error = unusable_path_of(denied)
    assert error is not None
    assert (error.code, error.fields["path"]) == ("path-not-usable", "/a/file")
    assert error.__cause__ is denied
    assert unusable_path_of(PermissionError(errno.EACCES, "Permission denied")) is None
    assert unusable_path_of(FileNotFoundError(errno.ENOENT, "No such file", "/a/file")) is None
    assert unusable_path_of(ConnectionError("refused")) is None
    assert unusable_path_of(ValueError("wrong")) is None
    with pytest.raises(PermissionError) as of_user:
        raise denied  # in a file that is not surefoot's
    assert unusable_path_of(of_user.value) is None
