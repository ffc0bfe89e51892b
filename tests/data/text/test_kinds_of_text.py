"""What is no prose is read as what it is, or refused by its kind; 4 seconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.data.text.shards import TokenShards
from surefoot.errors import Command, ConfigError, DataError
from surefoot.recipes import gpt
from surefoot.recipes.readers.text.documents import files_of, load_documents, scan_documents
from surefoot.recipes.readers.text.prepare_shards import prepare_shards
from surefoot.tokenizers import ByteTokenizer
from tiny_gpt import tiny_config

TEXTS = ["caf\u00e9\n", "", "two\nlines", "\u65e5\u672c"]
ROWS = [{"id": place, "text": text, "url": "u"} for place, text in enumerate(TEXTS)]


def prepare_bytes(out: Path, path: Path, **settings: Any) -> TokenShards:
    """Token shards of one file, with one token for each byte."""
    return prepare_shards(out, [path], tokenizer=ByteTokenizer(), processes=1, **settings)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def json_lines(path: Path) -> None:
    write_rows(path, ROWS)


def parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)


def arrow(path: Path, *, stream: bool, dictionary: bool = False) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    if dictionary:
        table = table.set_column(1, "text", table["text"].dictionary_encode())
    write = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with path.open("wb") as file, write(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


KINDS: dict[str, Callable[[Path], None]] = {
    "a.jsonl": json_lines,
    "a.NDJSON": json_lines,
    "a.json": json_lines,
    "a.parquet": parquet,
    "a.arrow": lambda path: arrow(path, stream=False),
    "a.feather": lambda path: arrow(path, stream=False, dictionary=True),
    "a.ARROW": lambda path: arrow(path, stream=True),
    "a": parquet,  # as the cache of huggingface_hub names files
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_documents_for_a_run_and_for_shards(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / name)

    documents = load_documents(tmp_path / name)
    shards = prepare_bytes(tmp_path / "shards", tmp_path / name)

    assert documents == {f"{name}:{row}": TEXTS[row - 1] for row in (1, 3, 4)}
    tokens: list[int] = []
    for text in documents.values():
        tokens += [*text.encode(), 256]
    assert np.concatenate(shards.arrays).tolist() == tokens


@pytest.mark.parametrize("start", range(6))
def test_rows_of_arrow_are_read_from_any_one_on(start: int, tmp_path: Path) -> None:
    arrow(tmp_path / "a.arrow", stream=True)
    [file] = files_of([scan_documents(tmp_path)])
    assert [*file.documents(column="text", start=start)] == TEXTS[start:]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_another_column_is_read_by_name(name: str, tmp_path: Path) -> None:
    KINDS[name](tmp_path / name)
    assert [*load_documents(tmp_path / name, column="url").values()] == ["u"] * 4
    with refused("column-missing", DataError, value="body", setting="data.column"):
        load_documents(tmp_path / name, column="body")
    with refused("column-not-text", DataError, value="id"):
        load_documents(tmp_path / name, column="id")


NO_PROSE = {
    "a.json": json.dumps([{"text": "a"}], indent=1),
    "b.json": '[{"text": "a"}]',
    "c.json": "{\n}",
    "a.csv": "id,text\n1,hello\n",
    "a.CSV": "id,text\n1,hello\n",
    "a.tsv": "id\ttext\n",
    "a.html": "<html><body>hello</body></html>\n",
    "a.htm": "hello\n",
    "a.xml": "<?xml version='1.0'?><a/>",
    "a.svg": "<svg/>",
    "a.rtf": "{\\rtf1 hello}",
    "a.ipynb": '{"cells": []}\n',
    "page": "  <!DOCTYPE HTML>\n<p>hello</p>",
    "feed.log": "<?xml version='1.0'?><a/>",
    "rows": '{"text": "a"}\n' * 3,
    "list.data": '[\n  {"text": "a"}\n]\n',
    "rows.txt": '{"text": "a"}\n' * 3,
    "list.TXT": '[\n  {"text": "a"}\n]\n',
    "page.txt": "<html>\n<p>hello</p>",
    "dump.text": "<?xml version='1.0'?><a/>",
    "drawing.txt": "<svg xmlns='x'></svg>",
    "letter.txt": "{\\rtf1 hello}",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", NO_PROSE)
def test_what_is_no_prose_is_refused_unless_it_is_named_as_text(
    name: str, packed: bool, tmp_path: Path
) -> None:
    content = NO_PROSE[name].encode()
    path = tmp_path / name
    if packed:
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)

    with refused("no-prose", DataError, path=path):
        load_documents(path)
    with refused("no-prose", DataError, path=path):
        prepare_bytes(tmp_path / "out", path)

    (text,) = load_documents(path, read_as="text").values()
    shards = prepare_bytes(tmp_path / "out", path, read_as="text")
    assert text == NO_PROSE[name]
    assert shards.arrays[0].tolist() == [*content, 256]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "story", "a.tex", "a.c", "a.log"])
def test_text_of_any_other_name_is_text(name: str, tmp_path: Path) -> None:
    for text in ("hello <html> { world }\n", "[1] a footnote\n", "{ a brace\n", "3\n"):
        (tmp_path / name).write_text(text)
        assert load_documents(tmp_path / name) == {name: text}


def test_a_directory_is_its_text_and_rows_and_with_read_as_everything_that_is_text(
    tmp_path: Path,
) -> None:
    json_lines(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.csv").write_text("1,2\n")
    (tmp_path / "README.md").write_text("about")
    assert [*load_documents(tmp_path)] == ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4", "b.txt"]
    assert "c.csv" in load_documents(tmp_path, read_as="text")
    assert load_documents(tmp_path, read_as="text")["a.jsonl"].startswith('{"id": 0, ')


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow", "a.csv", "a.bin"])
def test_a_pointer_of_git_lfs_is_refused_whatever_it_stands_for(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)

    with refused("git-lfs-pointer", DataError, path=tmp_path / name) as caught:
        gpt.build(tiny_config(tmp_path / name))
    assert caught.value.remedies == (Command("git lfs pull"),)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow"])
def test_a_pointer_of_git_lfs_in_a_directory_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)

    with refused("git-lfs-pointer", DataError, path=tmp_path / name) as caught:
        gpt.build(tiny_config(tmp_path))
    assert caught.value.remedies == (Command("git lfs pull"),)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.parquet", sf.data.Table),
        ("a.arrow", sf.data.Table),
        ("a.tsv", lambda path: sf.data.load_pairs(path, source="en", target="de")),
        ("a.jsonl", lambda path: sf.data.load_questions(path, ByteTokenizer())),
    ],
)
def test_no_reader_takes_a_pointer_of_git_lfs(name: str, read: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    with refused("git-lfs-pointer", DataError, path=tmp_path / name):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("utf-16le", "hello world"),
        ("utf-16be", "hello world\n" * 99),
        ("utf-32le", "hello world"),
        ("utf-32be", "hello world"),
        ("utf-16le", "ab"),
        ("utf-16le", "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440"),
        ("utf-16be", "\u65e5\u672c\u8a9e\n\u65e5\u672c"),
        ("utf-16le", "x" * 100_000),
    ],
)
def test_wide_characters_without_a_mark_are_named(encoding: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    for read_as in (None, "text"):
        with refused("text-of-wide-characters", DataError, path=path, encoding=encoding) as caught:
            load_documents(path, read_as=read_as)  # type: ignore[arg-type]
    [remedy] = caught.value.remedies
    assert isinstance(remedy, Command)
    assert f"-f {encoding} " in remedy.line


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"hello" + b"\0" * 500, 1),
        (b"one\ntwo\nth\0ree", 3),
        (b"\0", 1),
        (bytes(range(1, 128)) * 9 + b"\0", 10),
        (np.arange(100, dtype="<u2").tobytes(), 1),
    ],
)
def test_text_with_nul_bytes_is_refused(data: bytes, line: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(DataError) as caught:
            load_documents(path)
        assert caught.value.code in ("text-with-nul", "text-of-wide-characters")
        if caught.value.code == "text-with-nul":
            assert caught.value.fields["where"].endswith(f", line {line}")


@pytest.mark.parametrize("write", [json_lines, parquet])
def test_a_row_with_a_nul_character_is_refused(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("a.jsonl" if write is json_lines else "a.parquet")
    monkeypatch.setitem(ROWS[2], "text", "a\0b")
    write(path)
    where = f"{path}, line 3" if write is json_lines else f"{path}, row 2"
    with refused("text-with-nul", DataError, where=where):
        load_documents(path)


@pytest.mark.parametrize("read_as", ["txt", "Text", ""])
def test_another_read_as_is_refused(read_as: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with refused("setting-out-of-range", ConfigError, value=read_as):
        load_documents(tmp_path, read_as=read_as)
    with refused("setting-out-of-range", ConfigError, value=read_as):
        prepare_shards(
            tmp_path / "out", [tmp_path / "a.txt"], tokenizer=ByteTokenizer(), read_as=read_as
        )


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"text": "one"}, {"text": ""}, {"text": None}], "2 empty rows are left out"),
        ([{"text": "one", "id": 1}], "of each row only text is read, not id"),
    ],
)
def test_shards_say_which_rows_and_keys_are_not_read(
    rows: list[dict[str, Any]], line: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "a.jsonl", rows)

    lines: list[str] = []
    prepare_bytes(tmp_path / "out", tmp_path / "a.jsonl", say=lines.append)

    assert line in lines


@pytest.mark.parametrize("name", ["a.bin", "a.pkl", "a.PICKLE"])
def test_binary_files_are_no_text_unless_they_are_named_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"hello " * 20)
    with refused("binary-file", DataError, path=tmp_path / name):
        load_documents(tmp_path / name)

    run = gpt.build(tiny_config(tmp_path / name, **{"data.read_as": "text"}))

    assert run.parts.settings.data_summary[0].startswith("text of")


@pytest.fixture
def rows_and_table(tmp_path: Path) -> Path:
    """A directory of rows, of which one is empty, and a table that is not read."""
    scored = [{"text": "the cat sat on the mat", "score": 1}] * 9
    write_rows(tmp_path / "a.jsonl", [*ROWS, *scored])
    (tmp_path / "b.CSV").write_text("1,2\n")
    return tmp_path


def test_the_header_says_which_rows_and_keys_are_not_read(rows_and_table: Path) -> None:
    run = gpt.build(tiny_config(rows_and_table))

    of_data, of_documents, *_ = run.parts.settings.data_summary
    *_, files, kinds, look, keys, empty_rows = of_data.split("; ")
    assert numbers_in(files) == [1, 2]
    assert kinds.partition(": ")[2] == "1 .CSV"
    assert look.startswith(f"surefoot data look {rows_and_table} ")
    assert " text " in keys
    assert keys.endswith(" id, score, url")
    assert numbers_in(empty_rows) == [1]
    assert of_documents.startswith("12 documents, ")


def test_the_header_says_that_rows_are_read_as_one_text(rows_and_table: Path) -> None:
    run = gpt.build(tiny_config(rows_and_table / "a.jsonl", **{"data.read_as": "text"}))

    assert run.parts.settings.data_summary[1].startswith("1 file, ")


def test_a_run_that_read_rows_as_prose_goes_on_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    write_rows(path, [{"text": "the cat sat"}] * 40)
    run_dir = str(tmp_path / "run")
    with monkeypatch.context() as older:
        older.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 9)
        gpt.build(tiny_config(path, run_dir=run_dir, stop_after="2 steps")).train()

    run = gpt.build(tiny_config(path, run_dir=run_dir))
    run.train()

    assert run.state.step == 4
    tokens = np.concatenate(run.parts.settings.train_data.arrays)
    assert bytes(tokens[tokens < 256].astype("u1")).startswith(b'{"text": "the cat sat"}\n')
