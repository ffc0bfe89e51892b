"""A file that is no text is named by its first bytes, with a cure that helps; a compressed file that
fills the memory is refused.
"""

from __future__ import annotations

import gzip
import lzma
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.config import toml
from surefoot.config.file_kinds import KINDS
from surefoot.config.paths import file_text
from surefoot.data import text_files

TEXT = "Grüße an alle\n" * 20


def zipped() -> bytes:
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", TEXT)
    return data.getvalue()


FILES = {
    "utf-32": (TEXT.encode("utf-32"), "iconv -f utf-32 -t utf-8"),
    "utf-16": (TEXT.encode("utf-16"), "iconv -f utf-16 -t utf-8"),
    "xz": (lzma.compress(TEXT.encode()), "unxz -k"),
    "zip": (zipped(), "unzip"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "pdftotext"),
    "pdf by chance UTF-8": (b"%PDF-1.7\n1 0 obj\n", "pdftotext"),
    "twice gzipped": (gzip.compress(gzip.compress(TEXT.encode())), "gunzip -k"),
    "latin-1": (TEXT.encode("latin-1"), "iconv -f latin1 -t utf-8"),
}


@pytest.mark.parametrize("what", [*FILES])
def test_the_cure_is_that_of_what_the_file_is(what: str, tmp_path: Path) -> None:
    data, command = FILES[what]
    file = tmp_path / "a b.txt"
    file.write_bytes(data)
    with pytest.raises(sf.DataError) as caught:
        sf.data.load_documents(file)
    (remedy,) = caught.value.remedies
    assert isinstance(remedy, sf.errors.Command)
    assert remedy.line.startswith(command)
    assert f"'{file}'" in remedy.line


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_is_refused_and_none_is_told_to_be_latin_1(kind, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(gzip.compress(kind.start + b"\xff\xfe\xfd\n"))  # packed: as another content
    with pytest.raises(sf.DataError) as caught:
        sf.data.load_documents(file)
    assert "latin1" not in str(caught.value)


def test_a_line_in_the_middle_of_a_file_has_no_first_bytes_of_a_file() -> None:
    with refused("text-not-utf-8", sf.DataError, line=7, byte=1) as caught:
        text_files.decode_utf8(b"\xff\xfe", "a.jsonl", first_line=7)
    assert "latin1" in caught.value.remedies[0].line


def test_a_compressed_file_that_fills_the_memory_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "UNPACKED_BYTES", 100_000)
    bomb = tmp_path / "a.txt.gz"
    bomb.write_bytes(gzip.compress(b"\n" * 10_000_000))
    with refused("unpacked-too-large", sf.DataError, path=bomb):
        sf.data.load_documents(bomb)


def test_what_is_below_either_limit_is_read_whole(tmp_path, monkeypatch) -> None:
    text = "".join(f"line {number}\n" for number in range(30_000))
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(text_files, "UNPACKED_BYTES", 1000)
    assert sf.data.load_documents(packed) == {"a.txt.gz": text}
    small = tmp_path / "b.txt.gz"
    small.write_bytes(gzip.compress(b"a" * 1000))
    assert sf.data.load_documents(small) == {"b.txt.gz": "a" * 1000}


def test_toml_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert toml.values("\ufeffseed = 3") == {"seed": 3}
    file = tmp_path / "config.toml"
    file.write_text('[program]\nkind = "script"\n', encoding="utf-8-sig")
    assert toml.program(file_text(file)) == {"kind": "script"}
    file.write_text("seed = 3", encoding="utf-16")
    with refused("file-not-utf-8", path=file) as caught:
        file_text(file)
    assert caught.value.remedies[0].line.startswith("iconv -f utf-16")
