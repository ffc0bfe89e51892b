"""Which files of a directory a reader takes: kinds, links, hidden names, documentation; 2 s."""

from __future__ import annotations

import gzip
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

import surefoot as sf
from closed_folders import close_folder
from refused import refused
from stated import numbers_in
from surefoot.data.scan import (
    ABOUT_DATA,
    CACHE,
    EMPTY,
    HIDDEN,
    JSON_LINES,
    NO_FILE,
    OF_SYSTEM,
    OTHER_KIND,
    PACKED,
    PARQUET,
    PICTURES,
    READ_ALREADY,
    TABLES,
    TEXT,
    Scan,
    kind_of,
    printable,
    scan,
)
from surefoot.data.text_files import open_unpacked
from surefoot.errors import Command
from surefoot.recipes.readers.text.documents import files_of, scan_documents


def write(root: Path, *names: str) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one")
    return root


def names(found: Scan) -> list[str]:
    return [file.relative_to(found.path).as_posix() for file in found.files]


def reasons(found: Scan) -> dict[str, str]:
    return {entry.path.relative_to(found.path).as_posix(): entry.reason for entry in found.left_out}


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data" / "locked"
    folder.mkdir(parents=True)
    close_folder(folder, monkeypatch)
    return folder


def test_suffixes_count_without_case_and_below_a_compression(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "B.TXT", "c.Md.GZ", "d.rst.zst", "e.pdf", "f.txt.bz2", "g")
    found = scan(tmp_path, TEXT)
    assert names(found) == ["B.TXT", "a.txt", "c.Md.GZ", "d.rst.zst"]
    assert reasons(found) == dict.fromkeys(["e.pdf", "f.txt.bz2", "g"], OTHER_KIND)


@pytest.mark.parametrize("name", ["a.png.gz", "a.PARQUET.zst", "a.arrow.gz"])
def test_pictures_and_tables_are_not_taken_out_of_a_compression(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    found = scan(tmp_path, (*PICTURES, *TABLES))
    assert names(found) == []
    assert reasons(found) == {name: PACKED}


def test_names_of_programs_below_the_path_are_left_out(tmp_path: Path) -> None:
    root = write(
        tmp_path / "_old" / ".cache",
        "a.txt",
        "._a.txt",
        "_SUCCESS",
        ".ipynb_checkpoints/a.txt",
        "part/_temporary/b.txt",
        "lost+found/c.txt",
    )
    found = scan(root, TEXT)
    assert names(found) == ["a.txt"]
    assert reasons(found) == {
        ".ipynb_checkpoints": HIDDEN,
        "._a.txt": HIDDEN,
        "_SUCCESS": HIDDEN,
        "lost+found": OF_SYSTEM,
        "part/_temporary": HIDDEN,
    }


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    other = write(tmp_path / "other", "o.txt", "deep/p.txt")
    root = write(tmp_path / "data", "a.txt")
    (root / "books").symlink_to(other)
    (root / "b.txt").symlink_to(other / "o.txt")
    found = scan(root, TEXT)
    assert names(found) == ["a.txt", "b.txt", "books/deep/p.txt", "books/o.txt"]
    assert found.left_out == []


def test_no_folder_is_read_twice_and_a_loop_of_links_ends(tmp_path: Path) -> None:
    root = write(tmp_path / "data", "b/one.txt")
    other = write(tmp_path / "other", "two.txt")
    (root / "a").symlink_to(root / "b")  # comes before the folder that it points at
    (root / "b" / "up").symlink_to(root)
    (root / "c").symlink_to(other)
    (other / "back").symlink_to(root / "b")
    found = scan(root, TEXT)
    assert names(found) == ["b/one.txt", "c/two.txt"]
    assert reasons(found) == dict.fromkeys(["a", "b/up", "c/back"], READ_ALREADY)


@pytest.mark.parametrize("name", ["b.txt", "books", "b.pdf"])
def test_a_link_to_nothing_is_an_error(name: str, tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / name).symlink_to("gone")
    with refused("link-to-nothing", sf.DataError, path=tmp_path / name, target="gone"):
        scan(tmp_path, TEXT)


def test_links_that_point_at_each_other_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "b.txt").symlink_to("a.txt")
    with refused("link-to-nothing", sf.DataError):
        scan(tmp_path, TEXT)
    with refused("path-not-usable"):
        scan(tmp_path / "a.txt", TEXT)


def test_a_folder_that_cannot_be_read_is_an_error(locked: Path) -> None:
    write(locked.parent, "a.txt")
    with refused("folder-unreadable", sf.DataError, path=locked):
        scan(locked.parent, TEXT)


def test_a_name_that_cannot_be_looked_at_is_an_error(tmp_path: Path) -> None:
    with refused("path-not-usable"):
        scan(tmp_path / ("a" * 300), TEXT)
    with refused("path-missing", sf.DataError, path=tmp_path / "gone"):
        scan(tmp_path / "gone", TEXT)


def test_pipes_and_devices_are_no_data(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to("/dev/zero")
    found = scan(tmp_path, TEXT)
    assert names(found) == ["a.txt"]
    assert reasons(found) == {"b.txt": NO_FILE, "c.txt": NO_FILE}


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "a.txt"
    os.mkfifo(pipe)
    with refused("path-no-file", sf.DataError, path=pipe):
        scan(pipe, TEXT)
    with refused("path-no-file", sf.DataError, path=pipe):
        sf.data.load_documents(pipe)
    with refused("file-unreadable", sf.DataError, path=pipe), open_unpacked(pipe):
        pass


@pytest.mark.parametrize("data", ["a.txt", "a.jsonl", "a.parquet", "part/a.csv", "a.json", "a.png"])
@pytest.mark.parametrize(
    "about",
    [
        "README.md",
        "readme.txt",
        "README_zh-CN.md",
        "readme.md.gz",
        "LICENSE.md",
        "LICENSE-Apache-2.0.txt",
        "license_gplv3.txt",
        "LICENSE-v2.0.txt",
        "dataset_card.md",
    ],
)
def test_what_tells_of_data_files_is_no_data(about: str, data: str, tmp_path: Path) -> None:
    write(tmp_path, about, data)
    found = scan(tmp_path, TEXT)
    assert names(found) == [name for name in [data] if kind_of(Path(name)) in TEXT]
    assert reasons(found)[about] == ABOUT_DATA


@pytest.mark.parametrize(
    "name",
    ["license_plates.txt", "citation_001.txt", "readme_notes.txt", "license-miter.txt", "cards.md"],
)
def test_text_whose_name_begins_as_that_of_a_license_is_data(name: str, tmp_path: Path) -> None:
    write(tmp_path, "a.txt", name)
    assert set(names(scan(tmp_path, TEXT))) == {"a.txt", name}


def test_beside_records_all_documentation_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl.gz", "notes.md", "load.py", "more.txt")
    found = scan(tmp_path, (*TEXT, *JSON_LINES))
    assert names(found) == ["a.jsonl.gz", "more.txt"]
    assert reasons(found) == {"notes.md": ABOUT_DATA, "load.py": ABOUT_DATA}


def test_results_that_datasets_stores_beside_its_tables_are_no_data(tmp_path: Path) -> None:
    saved = ("train/data-00000-of-00001.arrow", "train/cache-0a1b2c3d4e5f6071.arrow")
    result = "train/cache-0a1b2c3d4e5f6071_00000_of_00002.arrow"
    own = ("cache-flow.arrow", "alone/cache-0a1b2c3d4e5f6071.arrow")
    found = scan(write(tmp_path, *saved, result, *own), TABLES)
    assert names(found) == [own[1], own[0], saved[0]]
    assert reasons(found) == {saved[1]: CACHE, result: CACHE}
    assert "not read: 2 cached;" in found.line()


def test_a_directory_of_documentation_is_data(tmp_path: Path) -> None:
    everything = {"README.md", "guide/LICENSE.md", "guide/first.md", "code.py", "notes.rst"}
    write(tmp_path, *everything)
    assert set(names(scan(tmp_path, TEXT))) == everything


def test_empty_files_of_text_and_of_rows_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    (tmp_path / "b.txt").touch()
    (tmp_path / "c.jsonl").touch()
    found = scan(tmp_path, (*TEXT, *JSON_LINES))
    assert names(found) == ["a.txt"]
    assert reasons(found) == {"b.txt": EMPTY, "c.jsonl": EMPTY}
    assert "read 1 of 3 files; not read: 1 empty .txt, 1 empty .jsonl;" in found.line()


def test_the_output_inside_the_input_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "out/b.txt", "outer/c.txt")
    found = scan(tmp_path, TEXT, out=tmp_path / "outer" / ".." / "out")
    assert names(found) == ["a.txt", "outer/c.txt"]
    assert found.left_out == []


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, "_notes.xyz")
    assert scan(tmp_path / "_notes.xyz", TEXT).files == [tmp_path / "_notes.xyz"]


def test_the_line_counts_kinds_and_is_empty_without_any(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    assert scan(tmp_path, TEXT).line() == ""
    write(tmp_path, "b.JPG", "c.JPG", "d.csv.gz", "README.md", "LICENSE", "._a.txt", ".git/x")
    read, not_read, why = scan(tmp_path, TEXT).line().split("; ")
    assert numbers_in(read) == [1, 7]
    assert not_read.partition(": ")[2] == (
        "2 .JPG, 1 hidden, 1 hidden folder (.git), 1 LICENSE, 1 README.md, 1 .csv.gz"
    )
    assert why.startswith(f"surefoot data look {tmp_path} ")
    folder = tmp_path / "a b"
    write(folder, "a.txt", "b.JPG")
    assert scan(folder, TEXT).line().split("; ")[2].startswith(f"surefoot data look '{folder}' ")
    shutil.rmtree(folder)
    for number in range(9):
        write(tmp_path, f"x.{number}")
    assert "9 others;" in scan(tmp_path, TEXT).line()


def test_names_that_are_not_utf_8_are_shown_with_escapes(tmp_path: Path) -> None:
    write(tmp_path, "a.txt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).touch()
    line = scan(tmp_path, TEXT).line()
    assert "1 caf\\xe9;" in line
    assert line.isascii()
    assert printable("caf\u00e9") == "caf\u00e9"


def test_pictures_are_the_raster_formats_that_pillow_reads_alone() -> None:
    from PIL import Image

    Image.init()
    ours = {suffix for suffix, name in Image.registered_extensions().items() if name in Image.OPEN}
    other = {".ps", ".eps", ".bufr", ".grib", ".h5", ".hdf", ".mpg", ".mpeg", ".wmf", ".emf"}
    assert {*PICTURES} >= ours - other  # an older Pillow reads fewer
    assert not other & {*PICTURES}


def test_text_is_read_out_of_gzip_and_zstandard(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one"))
    assert sf.data.load_documents(tmp_path) == {"a.txt.gz": "one\n"}
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.ZstdCompressor().compress(part) for part in (b"two\n", b"three")]
    (tmp_path / "b.TXT.zst").write_bytes(b"".join(frames))
    assert sf.data.load_documents(tmp_path) == {"a.txt.gz": "one\n", "b.TXT.zst": "two\nthree\n"}
    for damaged in (b"".join(frames)[:-3], frames[0] + b"no frame"):
        (tmp_path / "b.TXT.zst").write_bytes(damaged)
        with refused("file-truncated", sf.DataError):
            sf.data.load_documents(tmp_path)


def test_what_is_unpacked_is_not_copied_at_each_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(bytes(1 << 24)))
    with open_unpacked(tmp_path / "a.txt.zst") as file:
        file.read(1)
        tracemalloc.start()
        try:
            rest = sum(len(file.read(1 << 17)) for _ in range(4))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert rest == 1 << 19
    assert most < 1 << 20


def test_without_its_package_zstandard_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.config.extras.is_installed", lambda module: False)
    (tmp_path / "a.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with refused("package-not-usable") as caught:
        sf.data.load_documents(tmp_path)
    assert Command('pip install "surefoot[zstd]"') in caught.value.remedies


def test_a_directory_without_text_says_what_it_has(tmp_path: Path) -> None:
    write(tmp_path, "a.csv")
    with refused("no-documents-in-directory", sf.DataError, path=tmp_path):
        sf.data.load_documents(tmp_path)
    with refused("no-documents-in-directory", sf.DataError, path=tmp_path):
        files_of([scan_documents(tmp_path)])


def test_tables_have_their_usual_suffixes(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    for nth, name in enumerate(["a.parquet", "b.PARQUET", "c.pq", "d.parq", "_metadata.parquet"]):
        write_table(pyarrow.table({"x": [nth]}), tmp_path / name)
    table = sf.data.Table(tmp_path)
    assert [int(table[row]["x"]) for row in range(len(table))] == [0, 1, 2, 3]
    assert PARQUET == (".parquet", ".pq", ".parq")


def test_pictures_of_every_suffix_and_behind_links_are_read(tmp_path: Path) -> None:
    from PIL import Image

    root = tmp_path / "pictures"
    write(root, "cat/notes.txt", "dog/.ipynb_checkpoints/x.png", "dog/_thumb.png")
    for place in ("cat/a.png", "cat/b.JFIF", "dog/c.bmp", "../more/d.tga"):
        (root / place).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), "red").save(
            root / place, format="JPEG" if place.endswith("JFIF") else None
        )
    (root / "dog" / "more").symlink_to(tmp_path / "more")
    images = sf.data.load_images(root, val_fraction=0.25)
    assert len(images.train) + len(images.val) == 4
    read, not_read, why = images.not_read.split("; ")
    assert numbers_in(read) == [4, 6]
    assert not_read.endswith(": 1 .txt, 1 hidden folder (.ipynb_checkpoints), 1 hidden")
    assert why.startswith(f"surefoot data look {root} ")


def test_no_picture_starts_another_program(tmp_path: Path) -> None:
    from PIL import Image

    from surefoot.recipes.readers.images.folder import open_picture

    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.eps")
    shutil.move(tmp_path / "a.eps", tmp_path / "a.png")
    with refused("picture-starts-a-program", sf.DataError, path=tmp_path / "a.png"):
        open_picture(tmp_path / "a.png")


def test_a_run_that_began_before_lists_files_as_it_did(tmp_path: Path) -> None:
    from surefoot.recipes.readers.text.corpora import texts_as_before

    write(tmp_path, "a.txt", "B.TXT", ".hidden/c.txt", "_d.txt", "README.md", "e.txt.gz")
    assert [*texts_as_before(tmp_path)] == [".hidden/c.txt", "README.md", "_d.txt", "a.txt"]
    assert [*sf.data.load_documents(tmp_path)] == ["B.TXT", "a.txt", "e.txt.gz"]
