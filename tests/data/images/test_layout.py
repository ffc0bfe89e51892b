"""Which pictures of a directory are trained on, with which labels, and what is said of the others:
parts and classes of folders, and files of labels; 3 seconds.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import surefoot as sf
from refused import refused
from surefoot.cli.main import main
from surefoot.data import scan
from surefoot.recipes.readers.images import layout
from surefoot.recipes.readers.images.layout import PictureLayout, layout_of_behavior_1, read_layout
from surefoot.train.run_identity import refuse_differences, refuse_other_data

TWO = ("cat", "dog")


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Image.new("RGB", (8, 8), (len(path.name), 0, 0)).save(file, format="PNG")


def build(root: Path, *folders: str, count: int = 6) -> Path:
    """Pictures 0.png, 1.png and so on in each of these folders."""
    for folder in folders:
        for number in range(count):
            picture(root / folder / f"{number}.png")
    return root


def of(part: str, classes: tuple[str, ...] = TWO) -> list[str]:
    """The folders of classes in a part."""
    return [f"{part}/{name}" for name in classes]


def read(root: Path, classes: tuple[str, ...] | None = None) -> PictureLayout:
    return read_layout(root, classes)


def used(pictures: PictureLayout, part: str) -> dict[str, list[str]]:
    """The pictures of a part below the root, by class."""
    files = pictures.parts[part]
    by_class: dict[str, list[str]] = {}
    for path, label in zip(files.paths, files.labels.tolist(), strict=True):
        of_class = by_class.setdefault(pictures.classes[label], [])
        of_class.append(path.relative_to(pictures.path).as_posix())
    return by_class


def left_out(pictures: PictureLayout) -> dict[str, str]:
    """The reason for each file and folder that is not used."""
    reasons = {}
    for entry in pictures.left_out:
        reasons[entry.path.relative_to(pictures.path).as_posix()] = entry.reason
    return reasons


def assert_nothing_is_said(pictures: PictureLayout) -> None:
    assert pictures.notes() == []
    assert pictures.not_read() == ""


def first_and_last_word(note: str) -> tuple[str, str]:
    words = note.split()
    return words[0], words[-1]


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", ["train", "Train", "TRAIN", "training", "Training"])
@pytest.mark.parametrize("val", ["validation", "Valid", "val", "dev", "DEV"])
@pytest.mark.parametrize("test", ["test", "Testing", "eval", "Evaluation"])
def test_parts_are_named_as_in_datasets_without_case(
    train: str, val: str, test: str, tmp_path: Path
) -> None:
    found = read(build(tmp_path, *of(train), *of(val), *of(test), count=2))

    assert found.classes == TWO
    for part, folder in (("training", train), ("val", val), ("test", test)):
        assert used(found, part) == {
            "cat": [f"{folder}/cat/0.png", f"{folder}/cat/1.png"],
            "dog": [f"{folder}/dog/0.png", f"{folder}/dog/1.png"],
        }
    assert_nothing_is_said(found)


def test_the_names_are_those_of_datasets() -> None:
    split = pytest.importorskip("datasets").Split
    names = pytest.importorskip("datasets.data_files").SPLIT_KEYWORDS

    assert {*layout.PARTS["training"]} == {*names[split.TRAIN]}
    assert {*layout.PARTS["val"]} == {*names[split.VALIDATION]}
    assert {*layout.PARTS["test"]} == {*names[split.TEST]}


def test_a_second_folder_for_a_part_is_not_used_and_said(tmp_path: Path) -> None:
    folders = [*of("train"), *of("Training"), *of("dev"), *of("val"), *of("test"), *of("eval")]

    found = read(build(tmp_path, *folders, count=1))

    for part, folder in (("training", "train"), ("val", "val"), ("test", "test")):
        assert {path.parent.parent.name for path in found.parts[part].paths} == {folder}
    assert found.parts.keys() == {"training", "val", "test"}
    assert left_out(found) == dict.fromkeys(("Training", "dev", "eval"), layout.SECOND)


def test_folders_and_files_beside_the_parts_are_said(tmp_path: Path) -> None:
    build(tmp_path, *of("train"), "bird", "validate/cat", ".")
    for name in ("notes.txt", "notes.csv", ".hidden"):
        (tmp_path / name).write_text("a,b\n")
    picture(tmp_path / "train" / "stray.png")

    found = read(tmp_path)

    assert found.classes == TWO
    strays = {f"{number}.png": layout.NO_CLASS for number in range(6)}
    assert left_out(found) == strays | {
        "bird": layout.NO_PART,
        "validate": layout.NO_PART,
        "train/stray.png": layout.NO_CLASS,
        "notes.txt": layout.OTHER_KIND,
        "notes.csv": layout.OTHER_KIND,
        ".hidden": scan.HIDDEN,
    }
    assert found.not_read().startswith("read 12 of 22 files")
    assert "folder (bird)" in found.not_read()


@pytest.mark.parametrize("place", ["", "train"])
@pytest.mark.parametrize("name", ["@eaDir", "lost+found", "System Volume Information"])
def test_folders_of_the_file_system_are_no_classes(place: str, name: str, tmp_path: Path) -> None:
    folders = of(place) if place else TWO
    build(tmp_path, *folders)
    picture(tmp_path / place / name / "thumbnail.png")
    found = read(tmp_path)
    assert found.classes == TWO
    assert left_out(found) == {(Path(place) / name).as_posix(): scan.OF_SYSTEM}


def test_a_link_to_another_class_is_no_class(tmp_path: Path) -> None:
    build(tmp_path, *TWO)
    (tmp_path / "alias").symlink_to(tmp_path / "cat")
    found = read(tmp_path)
    assert found.classes == TWO
    assert left_out(found) == {"alias": scan.READ_ALREADY}


def test_hidden_folders_beside_the_parts_are_said(tmp_path: Path) -> None:
    build(tmp_path, *of("train"), ".cache")

    assert left_out(read(tmp_path)) == {".cache": scan.HIDDEN}


def test_links_to_nothing_are_refused(tmp_path: Path) -> None:
    build(tmp_path, *of("train"))
    (tmp_path / "val").symlink_to(tmp_path / "missing")
    with refused("link-to-nothing", sf.DataError, path=tmp_path / "val"):
        read(tmp_path)


def test_pictures_in_no_class_folder_are_said(tmp_path: Path) -> None:
    found = read(build(tmp_path, *TWO, "."))
    assert left_out(found) == {f"{number}.png": layout.NO_CLASS for number in range(6)}


@pytest.mark.parametrize("name", ["train", "Train", "training"])
def test_a_folder_of_pictures_that_is_named_train_is_a_class_beside_others(
    name: str, tmp_path: Path
) -> None:
    found = read(build(tmp_path, name, "car", "bus"))
    assert found.classes == tuple(sorted(["bus", "car", name]))
    assert len(found.parts["training"].paths) == 18


@pytest.mark.parametrize("name", ["test", "Val", "eval"])
def test_a_folder_of_pictures_that_is_named_as_another_part_is_asked_for(
    name: str, tmp_path: Path
) -> None:
    build(tmp_path, name, "car", "bus")

    with refused("part-or-class", sf.DataError, path=tmp_path / name):
        read(tmp_path)
    with_it = read(tmp_path, ("car", "bus", name))
    without = read(tmp_path, ("car", "bus"))

    assert with_it.classes == ("car", "bus", name)
    assert len(without.parts["training"].paths) == 12
    assert left_out(without) == {name: layout.NO_LABELS}


@pytest.mark.parametrize(
    ("folders", "code"),
    [
        (["train", "val"], "part-or-class"),
        (["train", "test"], "part-or-class"),
        (of("val"), "training-part-missing"),
        ([*TWO, *of("test")], "training-part-missing"),
        (["train", *of("val")], "training-part-missing"),
        ([*of("seg_train/seg_train"), *of("seg_test/seg_test")], "classes-look-like-parts"),
        ([*of("train2017"), *of("val2017")], "classes-look-like-parts"),
        ([*of("My Training Set"), *of("My Test Set")], "classes-look-like-parts"),
        ([*of("TrainSet"), *of("TestSet")], "classes-look-like-parts"),
        ([*of("trn"), *of("tst"), *of("vld")], "classes-look-like-parts"),
        (of("PetImages"), "images-without-classes"),
        (of("train/train"), "images-without-classes"),
        (["."], "images-without-classes"),
        (["images"], "images-without-classes"),
    ],
)
def test_a_directory_that_could_be_read_in_two_ways_or_none_is_refused(
    folders: list[str], code: str, tmp_path: Path
) -> None:
    build(tmp_path, *folders)
    with refused(code, sf.DataError):
        read(tmp_path)


@pytest.mark.parametrize("folders", [["steam_train", "car"], ["test tube", "flask"]])
def test_classes_that_are_named_like_parts_and_have_no_folders_are_classes(
    folders: list[str], tmp_path: Path
) -> None:
    assert read(build(tmp_path, *folders)).classes == tuple(sorted(folders))


def test_classes_with_folders_that_only_begin_like_one_part_are_classes(tmp_path: Path) -> None:
    build(tmp_path, *of("trains"), *of("cars"))
    assert read(tmp_path).classes == ("cars", "trains")


# --- classes --------------------------------------------------------------------------------------


def test_a_part_that_lacks_a_class_is_used_and_said(tmp_path: Path) -> None:
    classes = ("bird", *TWO)

    found = read(build(tmp_path, *of("train", classes), *of("val"), "test/bird"))

    assert found.classes == classes
    assert used(found, "test").keys() == {"bird"}
    of_val, of_test = found.notes()
    assert first_and_last_word(of_val) == ("val", "bird")
    assert of_test.startswith("test ")
    assert of_test.endswith(" cat, dog")


def test_a_training_part_that_lacks_a_class_is_used_if_the_classes_are_named(
    tmp_path: Path,
) -> None:
    classes = ("bird", *TWO)
    build(tmp_path, *of("train"), *of("test", classes))
    with refused("class-unknown", sf.DataError, path=tmp_path / "test" / "bird"):
        read(tmp_path)

    found = read(tmp_path, classes)

    (note,) = found.notes()
    assert first_and_last_word(note) == ("training", "bird")
    assert len(found.parts["test"].paths) == 18


TINY = [
    "--length=2 steps",
    "--batch-size=4",
    "--model.width=2",
    "--report=false",
    "--tensorboard=false",
    "--precision=fp32",
]


def train_tiny(data: Path, run_dir: Path, *flags: str) -> None:
    main(["train", "images", f"--data.path={data}", f"--run-dir={run_dir}", *TINY, *flags])


def test_a_run_whose_validation_lacks_a_class_trains_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "data", *of("train", ("bird", *TWO)), *of("val"), "test", "more", count=2)

    train_tiny(tmp_path / "data", tmp_path / "run")

    out = " ".join(capsys.readouterr().out.split())
    assert "3 classes: bird, cat, dog" in out
    assert re.search(r"\bval [^;.]*\bbird\b", out)
    assert "test/ " in out
    assert "1 folder (more)" in out


@pytest.mark.parametrize("inside", ["test", "test/images", "test/unknown"])
def test_pictures_without_labels_are_for_predict(inside: str, tmp_path: Path) -> None:
    found = read(build(tmp_path, *of("train"), inside))
    assert found.parts.keys() == {"training"}
    assert left_out(found) == {"test": layout.NO_LABELS}


@pytest.mark.parametrize("folders", [of("train"), TWO], ids=["parts", "classes"])
def test_empty_parts_are_absent_and_said(folders: list[str], tmp_path: Path) -> None:
    build(tmp_path, *folders)
    (tmp_path / "test" / "cat").mkdir(parents=True)

    assert left_out(read(tmp_path)) == {"test": layout.NO_PICTURES}


def test_an_empty_class_folder_is_refused_unless_the_classes_are_named(tmp_path: Path) -> None:
    build(tmp_path, *of("train"))
    (tmp_path / "train" / "ant").mkdir()
    with refused("class-without-images", sf.DataError, path=tmp_path / "train" / "ant"):
        read(tmp_path)
    (note,) = read(tmp_path, ("ant", *TWO)).notes()
    assert first_and_last_word(note) == ("training", "ant")


def test_named_classes_without_any_picture_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with refused("images-missing", sf.DataError):
        sf.data.load_images(tmp_path, classes=TWO)


def test_names_that_are_composed_differently_are_one_class(tmp_path: Path) -> None:
    composed = "caf\u00e9"
    decomposed = "cafe\u0301"

    found = read(build(tmp_path, "train/the", f"train/{decomposed}", f"val/{composed}"))

    assert found.classes == (composed, "the")
    assert used(found, "val").keys() == {composed}
    assert read(tmp_path, ("the", decomposed)).classes == ("the", composed)


# --- names that are not UTF-8 ---------------------------------------------------------------------


CAFE = os.fsdecode(b"caf\xe9")


@pytest.fixture
def latin_1(tmp_path: Path) -> Path:
    """Two classes whose names, and those of their pictures, are Latin-1."""
    for folder in (CAFE, os.fsdecode(b"th\xe9")):
        for number in range(4):
            picture(tmp_path / "data" / folder / os.fsdecode(b"n\xe9%d.png" % number))
    return tmp_path / "data"


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode")
def test_names_that_are_not_utf_8_are_trained_stored_and_predicted(
    latin_1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train_tiny(latin_1, run_dir, "--data.val-fraction=0.25", "--stop-after=1 steps")
    main(["resume", str(run_dir)])
    capsys.readouterr()

    main(["predict", str(run_dir), str(latin_1 / CAFE), "--top-k=2"])

    out = capsys.readouterr().out
    assert out.isascii()
    assert r"caf\\xe9" in out


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode")
def test_an_error_names_a_file_whose_name_is_not_utf_8(latin_1: Path) -> None:
    (latin_1 / CAFE / os.fsdecode(b"n\xe9.png")).write_bytes(b"no picture")

    with refused("picture-unknown", sf.DataError) as caught:
        read_all(sf.data.load_images(latin_1, val_fraction=0.2, size=8, channels=3))
    assert r"n\xe9.png" in str(caught.value)


def read_all(sets: Any) -> None:
    for part in (sets.train, sets.val):
        for sample in range(len(part)):
            part[sample]


# --- files of labels ------------------------------------------------------------------------------


def labeled(root: Path, text: str, name: str = "labels.csv") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(text.encode())


ROWS = "0.png,cat\n1.png,dog\n2.png,cat\n3.png,dog\n"


def labels_of_rows(folder: str) -> dict[str, list[str]]:
    """The pictures of a folder by the class that `ROWS` gives them."""
    cats = [(Path(folder) / name).as_posix() for name in ("0.png", "2.png")]
    dogs = [(Path(folder) / name).as_posix() for name in ("1.png", "3.png")]
    return {"cat": cats, "dog": dogs}


@pytest.mark.parametrize(
    "text",
    [
        "file,label\n" + ROWS,
        ROWS,
        "File_Name,Class\r\n" + ROWS.replace("\n", "\r\n"),
        "\ufefffilename;category\n" + ROWS.replace(",", ";"),
        "label,,image\n" + "cat,x,0.png\ndog,,1.png\ncat,,2.png\ndog,,3.png\n",
        "id,label\n" + ROWS.replace(".png", ""),
        "id,breed\n" + ROWS.replace(".png", ""),
        "Image ID,Class Name\n" + ROWS,
        'file,label\n"./0.png", cat\n\n1.png,"dog"\n2.png,cat\n3.png,dog',
    ],
)
def test_a_file_of_labels_beside_pictures_is_taken(text: str, tmp_path: Path) -> None:
    labeled(build(tmp_path, ".", count=4), text)

    found = read(tmp_path)

    assert used(found, "training") == labels_of_rows(".")
    assert_nothing_is_said(found)


def test_columns_of_a_file_of_labels_that_are_not_used_are_said(tmp_path: Path) -> None:
    for part in ("train", "val"):
        build(tmp_path, part, count=2)
    rows = "train/0.png,cat,train,3\ntrain/1.png,dog,train,4\nval/0.png,cat,test,5\n"
    labeled(tmp_path, "file,label,split,age\n" + rows)

    of_columns, of_classes = read(tmp_path).notes()

    assert of_columns.startswith("labels.csv ")
    assert of_columns.endswith(": split, age")
    assert first_and_last_word(of_classes) == ("val", "dog")


def test_labels_may_name_pictures_in_folders(tmp_path: Path) -> None:
    labeled(build(tmp_path, "images", count=4), "file,label\nimages/0.png,cat\nimages\\1.png,dog\n")
    found = read(tmp_path)
    assert used(found, "training") == {"cat": ["images/0.png"], "dog": ["images/1.png"]}
    assert left_out(found) == dict.fromkeys(("images/2.png", "images/3.png"), layout.NO_ROW)


@pytest.mark.parametrize("part", [".", "train"])
def test_labels_beside_the_one_folder_of_pictures_name_those_in_it(
    part: str, tmp_path: Path
) -> None:
    labeled(build(tmp_path, f"{part}/images", count=4) / part, "file,label\n" + ROWS)

    found = read(tmp_path)

    assert used(found, "training") == labels_of_rows(f"{part}/images")
    assert_nothing_is_said(found)


def test_each_part_has_its_file_of_labels(tmp_path: Path) -> None:
    for part in ("train", "test"):
        labeled(build(tmp_path, part, count=4) / part, "file,label\n" + ROWS, "metadata.csv")

    found = read(tmp_path)

    assert used(found, "training") == labels_of_rows("train")
    assert used(found, "test") == labels_of_rows("test")
    assert_nothing_is_said(found)


def test_one_file_of_labels_names_the_pictures_of_all_parts(tmp_path: Path) -> None:
    build(tmp_path, "train", "val", count=4)
    rows = ["file,label"]
    for row in ROWS.splitlines():
        rows += [f"train/{row}", f"val/{row}"]
    labeled(tmp_path, "\n".join(rows))

    found = read(tmp_path)

    assert found.parts.keys() == {"training", "val"}
    assert used(found, "training") == labels_of_rows("train")
    assert used(found, "val") == labels_of_rows("val")


def test_labels_beside_train_name_pictures_in_it_and_not_those_of_test(tmp_path: Path) -> None:
    """As in competitions: test/ has pictures of the same names, without labels."""
    labeled(build(tmp_path, "train", "test", count=4), "id,label\n" + ROWS.replace(".png", ""))
    found = read(tmp_path)
    assert {path.parent.name for path in found.parts["training"].paths} == {"train"}
    assert found.parts.keys() == {"training"}
    assert left_out(found) == {"test": layout.NO_LABELS}


def test_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,{number}\n" for number in range(12))
    labeled(build(tmp_path, ".", count=12), "file,label\n" + rows)
    assert read(tmp_path).classes == tuple(map(str, range(12)))


@pytest.mark.parametrize("row", ["9.png,cat", "0.png,dog", "../0.png,cat", "0.png"])
def test_a_row_that_names_no_picture_or_two_labels_is_refused(row: str, tmp_path: Path) -> None:
    labeled(build(tmp_path, ".", count=4), "file,label\n" + ROWS + row + "\n")

    with refused("labels-file-row", sf.DataError, line=6):
        read(tmp_path)


def test_a_label_that_is_no_named_class_is_refused(tmp_path: Path) -> None:
    labeled(build(tmp_path, ".", count=4), "file,label\n" + ROWS)
    with refused("class-unknown", sf.DataError, label="cat"):
        read(tmp_path, ("dog", "bird"))


def test_two_files_of_labels_are_refused(tmp_path: Path) -> None:
    build(tmp_path, ".", count=4)
    for name in ("a.csv", "b.csv"):
        labeled(tmp_path, "file,label\n" + ROWS, name)
    with refused("labels-files-several", sf.DataError):
        read(tmp_path)


def test_class_folders_need_no_file_of_labels_and_it_is_said(tmp_path: Path) -> None:
    labeled(build(tmp_path, *TWO), "file,label\ncat/0.png,dog\n")
    found = read(tmp_path)
    assert len(used(found, "training")["cat"]) == 6
    assert left_out(found) == {"labels.csv": layout.OTHER_KIND}


UNREADABLE = {
    "latin-1": "file,label\n0.png,caf\u00e9\n".encode("latin-1"),
    "open-quote": b'file,label\n0.png,"' + b"cat\n" * 40_000,
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("parts", [False, True])
def test_beside_class_folders_no_csv_file_is_read(
    parts: bool, content: bytes, tmp_path: Path
) -> None:
    folders = of("train") if parts else TWO
    build(tmp_path, *folders)
    (tmp_path / "meta.csv").write_bytes(content)
    assert read(tmp_path).classes == TWO


def test_of_other_tables_only_the_header_is_read(tmp_path: Path) -> None:
    labeled(build(tmp_path, ".", count=4), "file,label\n" + ROWS)
    sizes = "file,width,height\n" + "0.png,8,8\n" * 10_000
    (tmp_path / "sizes.csv").write_bytes(sizes.encode() + b"\xe9")
    assert used(read(tmp_path), "training") == labels_of_rows(".")


@pytest.mark.parametrize(
    ("kind", "code"), [("latin-1", "text-not-utf-8"), ("open-quote", "labels-file-damaged")]
)
def test_a_file_of_labels_that_cannot_be_read_is_refused(
    kind: str, code: str, tmp_path: Path
) -> None:
    build(tmp_path, ".", count=4)
    (tmp_path / "labels.csv").write_bytes(UNREADABLE[kind])
    with refused(code, sf.DataError):
        read(tmp_path)


@pytest.mark.parametrize(
    ("pictures", "place", "others"),
    [
        ("images", ".", []),
        ("images", ".", ["test"]),
        ("train/images", ".", []),
        ("train/images", "train", ["test/images"]),
    ],
)
def test_labels_may_leave_out_the_one_folder_of_pictures(
    pictures: str, place: str, others: list[str], tmp_path: Path
) -> None:
    build(tmp_path, pictures, *others, count=4)
    labeled(tmp_path / place, "file,label\n" + ROWS)

    assert used(read(tmp_path), "training") == labels_of_rows(pictures)


@pytest.mark.parametrize("folder", [".", "images", "train"])
def test_a_file_of_labels_that_names_no_picture_is_named(folder: str, tmp_path: Path) -> None:
    build(tmp_path, folder, count=4)
    labeled(tmp_path, "file,label\nother.png,cat\nmore.png,dog\n")
    code = "part-or-class" if folder == "train" else "images-without-classes"
    with refused(code, sf.DataError) as caught:
        read(tmp_path)
    assert "other.png" in caught.value.reason


# --- runs that began earlier ----------------------------------------------------------------------


def test_a_run_of_an_older_behavior_reads_the_same_files(tmp_path: Path) -> None:
    build(tmp_path, *of("train"), *of("dev"), "train/_more", count=4)
    for name in ("new.jfif", "old.JPG", "._copy.png"):
        picture(tmp_path / "train" / "cat" / name)
    os.symlink(tmp_path / "dev" / "cat", tmp_path / "train" / "cat" / "linked")

    before = layout_of_behavior_1(tmp_path, None)
    datasets = sf.data.load_images(tmp_path, behavior=9, val_fraction=0.2)

    assert before.classes == datasets.classes == ("_more", *TWO)
    assert before.parts.keys() == {"training"}
    names = ["._copy.png", "0.png", "1.png", "2.png", "3.png", "old.JPG"]
    assert used(before, "training")["cat"] == [f"train/cat/{name}" for name in names]
    assert len(datasets.train) == 11
    assert len(datasets.val) == 3
    assert not datasets.fitting.as_shown


def test_parts_of_an_older_behavior_are_named_exactly(tmp_path: Path) -> None:
    build(tmp_path, *of("Train"), *of("Test"))
    assert layout_of_behavior_1(tmp_path, None).classes == ("Test", "Train")


def test_pixels_of_an_older_behavior_are_those_of_0_1_0(tmp_path: Path) -> None:
    """The orientation is ignored, transparency too, and 16 bits are divided by 257."""
    stored = np.arange(64, dtype=np.uint8).reshape(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in TWO:
        folder = tmp_path / name
        folder.mkdir()
        Image.fromarray(stored).save(folder / "turned.png", exif=exif)
        clear = Image.merge("LA", [Image.fromarray(stored), Image.new("L", (8, 8), 0)])
        clear.save(folder / "clear.png")
        Image.fromarray(stored.astype(np.uint16) * 257).save(folder / "wide.png")

    datasets = sf.data.load_images(tmp_path, behavior=1, val_fraction=0.2)

    (mean,) = datasets.mean
    (std,) = datasets.std
    for sample in range(len(datasets.train)):
        normalized, _ = datasets.train[sample]
        pixels = np.rint((normalized.numpy()[0] * std + mean) * 255)
        assert np.array_equal(pixels, stored)


@pytest.mark.parametrize("refuse", [refuse_differences, partial(refuse_other_data, step=4)])
@pytest.mark.parametrize(
    ("behavior", "is_told"), [pytest.param({}, True, id="1"), ({"behavior": 10}, False)]
)
def test_a_script_is_told_how_its_run_reads_pictures_as_it_began(
    behavior: dict[str, int], is_told: bool, refuse: Any
) -> None:
    saved = {"data": {"sha256": "a"}, "length": "8 steps", "seed": 0, "identity": None}
    changed = saved | {"data": {"sha256": "b", "as_shown": True}}

    with pytest.raises(sf.CheckpointError) as caught:
        refuse(saved | behavior, changed | behavior, where="a run")

    assert ("load_images(..., behavior=1)" in str(caught.value)) == is_told
    assert ("load_images" in str(caught.value)) == is_told
