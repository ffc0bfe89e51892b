"""Documents in text files, JSON lines and Parquet: which there are, from any one on, and what is
refused; 2 seconds.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from in_one import in_one
from refused import refused
from stated import numbers_in
from surefoot.errors import Command, DataError
from surefoot.recipes.readers.text.documents import files_of, read_documents, scan_documents

TEXTS = ["first\nof all", "", "zweites: ä €", "third " * 5000, "last"]


def parquet(
    path: Path, texts: list[Any] = TEXTS, *, column: str = "text", row_group_size: int = 2
) -> Path:
    """As FineWeb-Edu has it: some columns, several row groups."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the extra `hub`")
    from pyarrow.parquet import write_table

    ids = [f"<urn:uuid:{place}>" for place in range(len(texts))]
    rows = {column: texts, "id": ids, "score": [2.5] * len(texts)}
    write_table(pyarrow.table(rows), path, row_group_size=row_group_size)
    return path


def jsonl(path: Path, texts: list[Any] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"id": 3, "text": text}) + "\n" for text in texts))
    return path


def read(path: Path, *, column: str = "text", start: int = 0) -> list[str]:
    return [
        text
        for file in files_of([scan_documents(path)])
        for text in file.documents(column=column, start=start)
    ]


@in_one
@pytest.mark.parametrize("kind", [jsonl, parquet])
@pytest.mark.parametrize("start", range(6))
def test_documents_are_read_from_any_one_on(kind: Any, start: int, tmp_path: Path) -> None:
    name = "a.parquet" if kind is parquet else "a.jsonl"
    assert read(kind(tmp_path / name), start=start) == TEXTS[start:]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read(tmp_path / "a.txt") == ["one\r\ntwo"]
    assert read(tmp_path / "a.txt", start=1) == []


def test_gzipped_files_are_the_same_documents(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one"))
    assert read(tmp_path / "b.jsonl.gz") == TEXTS
    assert read(tmp_path / "b.txt.gz") == ["one"]


def test_a_directory_is_its_known_files_sorted_by_path(tmp_path: Path) -> None:
    for name in ("b/one.txt", "a.jsonl", "b/picture.png", "b.rst", "a/z.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    assert [file.name for file in files_of([scan_documents(tmp_path)])] == [
        "a/z.txt.gz",
        "a.jsonl",
        "b/one.txt",
        "b.rst",
    ]
    assert [file.name for file in files_of([scan_documents(tmp_path / "b" / "picture.png")])] == [
        "picture.png"
    ]


def test_what_tells_of_the_data_is_no_document_of_a_directory(tmp_path: Path) -> None:
    for name in ("README.md", "load.py", "info.json", "train/a.jsonl", "more.txt", "c.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [file.name for file in files_of([scan_documents(tmp_path)])] == [
        "more.txt",
        "train/a.jsonl",
    ]
    (tmp_path / "train" / "a.jsonl").unlink()
    assert [file.name for file in files_of([scan_documents(tmp_path)])] == ["load.py", "more.txt"]
    assert [file.name for file in files_of([scan_documents(tmp_path / "info.json")])] == [
        "info.json"
    ]


def test_a_directory_of_json_lines_named_json_is_its_rows(tmp_path: Path) -> None:
    """As C4's; README and the facts of `datasets` are none of them."""
    for name in ("en/c4-train.0.json.gz", "en/c4-train.1.json.gz"):
        (tmp_path / "en").mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "one", "url": "u"}\n' * 2))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text('{"en": {}}')
    (tmp_path / "list.json").write_text('[\n{"text": "two"}\n]')
    found = scan_documents(tmp_path)
    assert [file.name for file in found.files] == ["c4-train.0.json.gz", "c4-train.1.json.gz"]
    assert sorted(entry.path.name for entry in found.left_out) == [
        "README.md",
        "dataset_infos.json",
        "list.json",
    ]
    assert read_documents(found).texts.keys() == {
        f"en/c4-train.{file}.json.gz:{row}" for file in (0, 1) for row in (1, 2)
    }


@pytest.mark.parametrize(
    ("names", "is_said"),
    [
        (["train.txt", "val.txt"], True),
        (["TinyStories-train.txt", "TinyStories-valid.txt"], True),
        (["train/0.jsonl", "test.jsonl"], True),
        (["train.txt", "more.txt"], False),
        (["the test.txt", "the val.txt"], False),
        (["train.py", "tests/test_train.py"], False),
    ],
)
def test_parts_that_are_read_alike_are_said(
    names: list[str], is_said: bool, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "one"}')
        if not name.endswith(".jsonl"):
            (tmp_path / name).write_text("one")
    read = read_documents(scan_documents(tmp_path))
    assert len(read.texts) == len(names)
    of_parts = [numbers_in(fact) for fact in read.not_read.split("; ")]
    assert of_parts == ([[1]] if is_said else [[]])  # files of other parts than training


def test_what_is_written_is_not_read(tmp_path: Path) -> None:
    for name in ("a.txt", "out/b.txt", "outer/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    found = files_of([scan_documents(tmp_path, out=tmp_path / "outer" / ".." / "out")])
    assert [file.name for file in found] == ["a.txt", "outer/c.txt"]
    for inside in (tmp_path, tmp_path / "out"):
        with refused("input-in-output", DataError, path=inside):
            files_of([scan_documents(inside, out=tmp_path)])


def test_null_is_a_document_that_holds_nothing(tmp_path: Path) -> None:
    assert read(parquet(tmp_path / "a.parquet", ["a", None])) == ["a", ""]
    assert read(jsonl(tmp_path / "a.jsonl", ["a", None])) == ["a", ""]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"text": "a"}\n\n{"body": "b", "id": 3}', "column-missing"),
        (b'{"text": 3}', "column-not-text"),
        (b'{"text"', "line-not-json"),
        (b"[1]", "column-missing"),
        (b'{"text": "\xff"}', "text-not-utf-8"),
        (gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "file-truncated"),
        (b"", "input-empty"),
    ],
)
def test_json_lines_that_are_none_are_refused_naming_the_line(
    data: bytes, code: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with refused(code, DataError):
        read(tmp_path / "a.jsonl")


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet")
    with refused("column-missing", DataError, value="body"):
        read(path, column="body")
    with refused("column-not-text", DataError, value="score"):
        read(path, column="score")
    data = path.read_bytes()
    for damaged in (
        data[:-7],
        data[: len(data) // 2],
        b"x" * 50,
        data[:4] + b"\0" * 60 + data[64:],
    ):
        path.write_bytes(damaged)
        with refused("table-damaged", DataError, path=path):
            read(path)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused("package-not-usable", modules=["pyarrow"]) as caught:
        read(tmp_path / "a.parquet")
    assert Command('pip install "surefoot[hub]"') in caught.value.remedies


def test_text_that_is_none_and_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with refused("text-not-utf-8", DataError, line=1, byte=4):
        read(tmp_path / "a.txt")
    with refused("path-missing", DataError):
        files_of([scan_documents(tmp_path / "missing")])
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with refused("table-compressed-again", DataError):
        files_of([scan_documents(tmp_path / "a.parquet.gz")])
    (tmp_path / "empty").mkdir()
    with refused("no-documents-in-directory", DataError):
        files_of([scan_documents(tmp_path / "empty")])
