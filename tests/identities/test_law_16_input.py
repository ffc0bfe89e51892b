"""Law 16: what was there and is not trained on is said in one line: files, folders, rows, keys,
classes; and what cannot be read is an error. (10 s)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from closed_folders import close_folder
from refused import refused
from stated import numbers_in

SOURCE = Path(sf.__file__).parent
# Files below data/ and recipes/ that list a directory themselves, and why they may.
LISTS_ITSELF = {
    "data/scan.py": "the scanner",
    "recipes/readers/text/corpora.py": "the standard library of Python, the same for every run",
    "data/text/token_cache.py": "the cache of tokens",
    "recipes/readers/text/prepare_shards.py": "shards that it has written",
    "data/workers.py": "threads of a process",
    "data/streams/opening.py": "tapes of a run",
    "data/streams/writer.py": "tapes of a run",
    "data/streams/shards.py": "tapes of a run",
    "recipes/readers/images/layout.py": "names of folders, which are parts or classes",
    "recipes/readers/pairs/files.py": "names for an error",
    "recipes/readers/pairs/part_files.py": "names for an error",
    "recipes/gpt/corpus.py": "shards of an unfinished preparation",
    "recipes/export/export.py": "tokenizers of a run",
    "recipes/finetune/models.py": "weights that it has written",
    "recipes/finetune/model_directory.py": "weights of a model's directory",
    "recipes/finetune/corpus.py": "a tokenizer that it has written",
}
LISTING = re.compile(r"\.(rglob|iterdir|glob)\(|os\.(walk|scandir|listdir)\(")


def write_text(root: Path) -> None:
    for number in range(4):
        (root / f"{number}.txt").write_text(f"text number {number}\n" * 20)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_chats(root: Path) -> None:
    rows = [{"prompt": f"{number} + 1?", "completion": f"{number + 1}"} for number in range(9)]
    write_rows(root / "rows.jsonl", rows)


def write_pairs(root: Path) -> None:
    (root / "train.en").write_text("".join(f"the word {number}\n" for number in range(200)))
    (root / "train.de").write_text("".join(f"das Wort {number}\n" for number in range(200)))


def write_pictures(root: Path) -> None:
    from PIL import Image

    for label in ("cat", "dog"):
        (root / label).mkdir()
        for number in range(6):
            Image.new("L", (4, 4), 40 * number).save(root / label / f"{number}.png")


def write_tables(root: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    for number in range(2):
        write_table(pyarrow.table({"x": [number, 3.0]}), root / f"{number}.parquet")


def said_of_text(root: Path) -> list[str]:
    from surefoot.recipes.gpt.config import Data
    from surefoot.recipes.gpt.corpus import read_corpus

    read = read_corpus(Data(path=str(root), tokenizer="bytes", val_fraction=0.25, cache=False))
    return read.in_words[:1]  # the line of the header


def said_of_preparation(root: Path) -> list[str]:
    lines = list[str]()
    sf.data.prepare_shards(
        root.parent / "shards",
        [root],
        tokenizer=sf.tokenizers.ByteTokenizer(),
        processes=1,
        say=lines.append,
    )
    return lines


def said_of_chats(root: Path) -> list[str]:
    from surefoot.recipes.finetune.conversations import read_conversations

    return read_conversations(str(root), setting="data.path").lines()


def said_of_pairs(root: Path) -> list[str]:
    return [*sf.data.load_pairs(root, val_fraction=0.2).notes]


def said_of_pictures(root: Path) -> list[str]:
    images = sf.data.load_images(root, val_fraction=0.2)
    return [*images.notes, images.not_read]


def said_of_tables(root: Path) -> list[str]:
    return [*sf.data.Table(root).reading_notes]


@dataclass(frozen=True)
class Reader:
    """How its files are written, the suffix of one, and what it says of a directory."""

    write: Callable[[Path], None]
    suffix: str
    said: Callable[[Path], list[str]]
    folder: str = "."
    """A folder whose own folders are searched: a folder beside classes would be a class."""


READERS = {
    "text": Reader(write_text, ".txt", said_of_text),
    "preparation": Reader(write_text, ".txt", said_of_preparation),
    "chats": Reader(write_chats, ".jsonl", said_of_chats),
    "pairs": Reader(write_pairs, ".tsv", said_of_pairs),
    "pictures": Reader(write_pictures, ".png", said_of_pictures, folder="cat"),
    "tables": Reader(write_tables, ".parquet", said_of_tables),
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    return READERS[request.param]


@pytest.fixture
def root(reader: Reader, tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    reader.write(root)
    return root


def lines_of_files(reader: Reader, root: Path) -> list[str]:
    """The line about what is not read: none, or one."""
    text = "\n".join(reader.said(root))
    lines = re.findall(r"read [\d,]+ of [\d,]+ files?; not read: .*? says why", text)
    assert len(lines) <= 1
    return lines


def test_where_everything_is_read_nothing_is_said(reader: Reader, root: Path) -> None:
    assert lines_of_files(reader, root) == []


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("notes.xyz", "1 .xyz"),
        ("notes.XYZ.gz", "1 .XYZ.gz"),
        ("NOTES", "1 NOTES"),
        ("LICENSE", "1 LICENSE"),
        ("._a{suffix}", "1 hidden"),
        ("_SUCCESS{suffix}", "1 hidden"),
        (".ipynb_checkpoints/a{suffix}", "1 hidden folder (.ipynb_checkpoints)"),
        ("_temporary/0/a{suffix}", "1 hidden folder (_temporary)"),
    ],
)
def test_each_file_that_is_not_read_is_counted_in_one_line(
    reader: Reader, root: Path, name: str, counted: str
) -> None:
    file = root / name.format(suffix=reader.suffix)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("nothing that can be read")
    (line,) = lines_of_files(reader, root)
    assert f": {counted}; surefoot data look {root} " in line


def test_a_folder_that_cannot_be_read_is_an_error(
    reader: Reader, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = root / "closed"
    closed.mkdir()
    close_folder(closed, monkeypatch)
    with refused("folder-unreadable", sf.DataError, path=closed):
        reader.said(root)


def test_a_link_to_nothing_is_an_error(reader: Reader, root: Path) -> None:
    link = root / f"link{reader.suffix}"
    link.symlink_to("gone")
    with refused("link-to-nothing", sf.DataError, path=link):
        reader.said(root)


def test_a_loop_of_links_ends_and_is_said(reader: Reader, root: Path) -> None:
    (root / reader.folder / "again").symlink_to(root)
    (line,) = lines_of_files(reader, root)
    assert "not read: 1 folder (again);" in line


def test_no_reader_lists_files_itself() -> None:
    listing = set()
    for part in ("data", "recipes"):
        for file in (SOURCE / part).rglob("*.py"):
            if LISTING.search(file.read_text()):
                listing.add(file.relative_to(SOURCE).as_posix())
    assert listing == {*LISTS_ITSELF}


def test_a_key_of_texts_that_nothing_uses_is_named(tmp_path: Path) -> None:
    rows = [{"text": f"a text {number}", "id": number} for number in range(9)]
    write_rows(tmp_path / "a.jsonl", rows)
    (line,) = said_of_text(tmp_path)
    assert "id" in line


def test_a_key_of_chats_that_nothing_uses_is_named_with_its_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "2?", "completion": "2", "source": "me"}] * 9
    write_rows(tmp_path / "a.jsonl", rows)
    assert any(line.endswith(": source (9 rows)") for line in said_of_chats(tmp_path))


def test_a_key_of_pairs_that_nothing_uses_is_named(tmp_path: Path) -> None:
    rows = [{"en": f"word {number}", "de": f"Wort {number}", "by": "me"} for number in range(99)]
    write_rows(tmp_path / "a.jsonl", rows)
    assert "by" in "; ".join(said_of_pairs(tmp_path / "a.jsonl"))


def test_folders_beside_the_parts_are_said(tmp_path: Path) -> None:
    for part in ("train", "extra"):
        (tmp_path / part).mkdir()
        write_pictures(tmp_path / part)
    assert "extra" in "; ".join(said_of_pictures(tmp_path))


def files_in_header(header: str) -> list[float]:
    """How many files are read, of how many, beside one that is not."""
    text = " ".join(header.split())
    (line,) = re.findall(r"\d+ \w+ \d+ files; [^;]*: 1 \.xyz; surefoot data look", text)
    read_count, file_count, *_ = numbers_in(line)
    return [read_count, file_count]


def test_the_header_of_a_run_has_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot.cli.main import main

    (tmp_path / "data").mkdir()
    write_text(tmp_path / "data")
    (tmp_path / "data" / "notes.xyz").touch()
    options = [
        f"--data.path={tmp_path / 'data'}",
        "--data.tokenizer=bytes",
        "--data.cache=False",
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=8",
        "--batch-size=4",
        "--length=1 step",
        "--cloze-questions=0",
        f"--run-dir={tmp_path / 'run'}",
        "--device=cpu",
    ]

    main(["train", "gpt", *options])

    assert files_in_header(capsys.readouterr().out) == [4, 5]


def test_the_header_of_a_run_on_tables_has_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    write_tables(tmp_path / "data")
    (tmp_path / "data" / "notes.xyz").touch()
    run = sf.Run(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch["x"][:, None].float()).square().mean(),
        train_data=sf.data.Table(tmp_path / "data"),
        optimizer=sf.optim.sgd(lr=0.1),
        batch_size=2,
        length="1 step",
        device="cpu",
    )

    run.train()

    assert files_in_header(capsys.readouterr().out) == [2, 3]
