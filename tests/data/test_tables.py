from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.data.gathering import read_many_fn
from surefoot.data.loader import in_order
from surefoot.errors import DataError
from surefoot.run.messages import header
from surefoot.train.run_identity import differences

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pandas = pytest.importorskip("pandas")

CPU = torch.device("cpu")
COLUMNS = {
    "x": [[0.5 * row, 1.0] for row in range(10)],
    "y": [*range(10)],
    "name": [f"row {row}" for row in range(10)],
}


@pytest.fixture
def table() -> Any:
    return pyarrow.table(COLUMNS)


@pytest.fixture
def path(table: Any, tmp_path: Path) -> Path:
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    return tmp_path / "rows.parquet"


def hugging_face() -> Any:
    return datasets.Dataset.from_dict(COLUMNS)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pyarrow.array([7], "uint8"), torch.tensor(7, dtype=torch.uint8)),
        (pyarrow.array([0.5], "float32"), torch.tensor(0.5)),
        (pyarrow.array([True]), torch.tensor(True)),
        (
            pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.int32())),
            torch.tensor([1, 2], dtype=torch.int32),
        ),
        (
            pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.float64(), 2)),
            torch.tensor([1, 2], dtype=torch.float64),
        ),
        (pyarrow.array([[True, False]]), torch.tensor([True, False])),
        (pyarrow.array([[[1, 2], [3, 4]]]), torch.tensor([[1, 2], [3, 4]])),
        (pyarrow.array([[[1], [3, 4]]]), [torch.tensor([1]), torch.tensor([3, 4])]),
        (
            pyarrow.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6).reshape(1, 2, 3)),
            torch.arange(6).reshape(2, 3),
        ),
        (pyarrow.array(["a"]), "a"),
        (pyarrow.array(["a"]).dictionary_encode(), "a"),
        (pyarrow.array([b"a"]), b"a"),
        (pyarrow.array([["a", "b"]]), ["a", "b"]),
        (pyarrow.array([{"p": 1, "q": "a"}]), {"p": torch.tensor(1), "q": "a"}),
        *[
            (pyarrow.array([None], kind), None)
            for kind in (
                "int64",
                "string",
                pyarrow.list_(pyarrow.int8()),
                pyarrow.list_(pyarrow.string()),
                pyarrow.struct({"p": pyarrow.int8()}),
                pyarrow.fixed_shape_tensor(pyarrow.int8(), [2]),
            )
        ],
        (pyarrow.array([date(2026, 1, 2)]), date(2026, 1, 2)),
    ],
)
def test_a_value_has_the_type_of_its_column(column: Any, expected: Any, tmp_path: Path) -> None:
    table = sf.data.Table(pyarrow.table({"c": column}))
    written = table.write_arrow(tmp_path / "c.arrow")

    for value in (table[0]["c"], written[0]["c"]):
        assert type(value) is type(expected)
        assert str(value) == str(expected)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(value, expected)


def write_stream(path: Path, table: Any) -> Path:
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def build_table(kind: str, table: Any, path: Path) -> Any:
    """The same rows, from memory, from files, and from a copy of a table."""
    match kind:
        case "memory":
            return sf.data.Table(table)
        case "parquet":
            return sf.data.Table(str(path), max_cache_bytes=0)
        case "arrow":
            return sf.data.Table(path).write_arrow(path.parent / "rows.arrow")
        case "stream":
            return sf.data.Table(write_stream(path.parent / "stream.arrow", table))
        case "directory":
            return sf.data.Table(path.parent)
        case "pandas":
            turned_twice = table.to_pandas().iloc[::-1].iloc[::-1]
            return sf.data.Table(turned_twice)
        case "pickled":
            return pickle.loads(pickle.dumps(sf.data.Table(path)))


@pytest.mark.parametrize(
    "kind", ["memory", "parquet", "arrow", "stream", "directory", "pandas", "pickled"]
)
def test_rows_are_the_same_in_every_kind_of_table(kind: str, table: Any, path: Path) -> None:
    expected = sf.data.Table(table)

    rows = build_table(kind, table, path)

    assert len(rows) == 10
    for row in (9, 0, 5, 3, 4, 8, 1):
        assert str(rows[row]) == str(expected[row])
    # a run may go on with an Arrow file that was written from Parquet
    assert fingerprint(rows) == fingerprint(expected)
    with pytest.raises(IndexError):
        rows[10]


def test_rows_of_several_files_are_one_table(table: Any, path: Path) -> None:
    expected = sf.data.Table(table)

    rows = sf.data.Table([path, write_stream(path.parent / "stream.arrow", table)])

    assert len(rows) == 20
    for row in (9, 0, 5, 3, 4, 8, 1):
        assert str(rows[row]) == str(rows[10 + row]) == str(expected[row])
    with pytest.raises(IndexError):
        rows[20]


def write_and_fingerprint(path: Path, numbers: list[int], *, row_group_size: int = 4) -> Any:
    table = pyarrow.table(COLUMNS | {"y": numbers})
    path.parent.mkdir()
    parquet.write_table(table, path, row_group_size=row_group_size)
    return fingerprint(sf.data.Table(path))


def test_the_fingerprint_does_not_depend_on_the_path(tmp_path: Path) -> None:
    first = write_and_fingerprint(tmp_path / "a" / "t.parquet", [*range(10)])
    second = write_and_fingerprint(tmp_path / "b" / "t.parquet", [*range(10)])

    assert first == second


def test_the_fingerprint_depends_on_every_row(tmp_path: Path) -> None:
    hashes = {write_and_fingerprint(tmp_path / "whole" / "t.parquet", [*range(10)])["sha256"]}

    for row in range(10):
        numbers = [*range(10)]
        numbers[row] += 7
        path = tmp_path / f"changed-{row}" / "t.parquet"
        changed = write_and_fingerprint(path, numbers, row_group_size=2 + row % 3)
        hashes.add(changed["sha256"])

    assert len(hashes) == 11


def test_a_large_table_decodes_few_row_groups_for_its_fingerprint(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"x": np.arange(100_000)}), tmp_path / "t.parquet", row_group_size=1_000
    )
    table = sf.data.Table(tmp_path / "t.parquet", max_cache_bytes=0)
    table.fingerprint()
    assert table._decodings <= 34


@pytest.mark.parametrize(("name", "reader"), [("a.csv", "read_csv"), ("A.JSONL", "read_json")])
def test_a_file_of_another_kind_is_refused_with_what_reads_it(
    name: str, reader: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("a,b\n1,2\n")
    with refused("table-of-another-kind", DataError, path=str(tmp_path / name)) as caught:
        sf.data.Table(tmp_path / name)
    assert reader in str(caught.value.remedies)


def test_random_rows_of_parquet_say_what_to_write_and_rows_in_order_do_not(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.table({"x": np.arange(2_000)}), tmp_path / "t.parquet", row_group_size=10
    )
    table = sf.data.Table(tmp_path / "t.parquet", max_cache_bytes=0)
    assert [int(table[row]["x"]) for row in range(2_000)] == [*range(2_000)]
    order = np.random.default_rng(0).permutation(2_000).tolist() * 2
    with pytest.warns(UserWarning, match=r"table\.write_arrow\('train\.arrow'\)"):
        assert [int(table[row]["x"]) for row in order] == order


def test_decoded_row_groups_are_limited(path: Path) -> None:
    def count_decoded(table: Any) -> list[int]:
        """The row groups in memory after each of these rows."""
        counts = []
        for row in (0, 5, 9, 0):
            table[row]
            counts.append(len(table._decoded))
        return counts

    unlimited = sf.data.Table(path)

    assert count_decoded(sf.data.Table(path, max_cache_bytes=0)) == [1, 1, 1, 1]
    assert count_decoded(unlimited) == [1, 2, 3, 3]
    assert unlimited._decodings == 3


def test_the_row_group_that_was_read_last_stays_in_memory(path: Path) -> None:
    group_bytes = parquet.ParquetFile(path).read_row_group(0).nbytes
    table = sf.data.Table(path, max_cache_bytes=2 * group_bytes)

    for row in (0, 5, 0, 9, 0):
        table[row]

    assert table._decodings == 3


def test_columns_that_are_none_are_refused(path: Path) -> None:
    with refused("table-column-unknown", DataError, column="z", available=[*COLUMNS]):
        sf.data.Table(path, columns=["z"])
    with refused("table-columns-one-text", setting="columns", value="x"):
        sf.data.Table(path, columns="x")


def test_a_path_without_table_is_refused(path: Path) -> None:
    (path.parent / "empty").mkdir()

    with refused("path-missing", DataError):
        sf.data.Table(path.with_name("none.parquet"))
    with refused("no-table-in-directory", DataError):
        sf.data.Table(path.parent / "empty")
    with refused("path-is-url"):
        sf.data.Table("s3://bucket/t.parquet")


def test_a_list_of_rows_is_no_table() -> None:
    with refused("table-source-unknown", DataError):
        sf.data.Table([{"x": 1}, {"x": 2}])


def test_a_damaged_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))

    with refused("table-damaged", DataError):
        sf.data.Table(path)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(pyarrow.table({"x": np.zeros(10_000)}), tmp_path / "rows.feather")

    with refused("table-compressed", DataError):
        sf.data.Table(tmp_path / "rows.feather")


def test_files_with_other_columns_are_refused(path: Path) -> None:
    other = path.with_name("other.parquet")
    parquet.write_table(pyarrow.table({"z": [1]}), other)

    with refused("table-columns-differ", DataError, columns=["z"], first=[*COLUMNS]):
        sf.data.Table([path, other])


def test_without_pyarrow_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.config.extras.is_installed", lambda module: module != "pyarrow")
    with refused("package-not-usable", modules=["pyarrow"]):
        sf.data.Table("t.parquet")


def test_nulls_inside_a_list_are_refused() -> None:
    with refused("table-value-unreadable", DataError, column="x", row=0):
        sf.data.Table(pyarrow.table({"x": [[1, None]]}))[0]


# --- files that differ ----------------------------------------------------------------------------


def write_tables(folder: Path, *tables: dict[str, Any], kind: str = "parquet") -> Path:
    """One file for each table, and the folder that they are in."""
    folder.mkdir(exist_ok=True)
    for number, columns in enumerate(tables):
        rows = pyarrow.table(columns)
        if kind == "parquet":
            parquet.write_table(rows, folder / f"{number}.parquet")
        else:
            with pyarrow.ipc.new_file(folder / f"{number}.arrow", rows.schema) as writer:
                writer.write_table(rows)
    return folder


@dataclass(frozen=True)
class Difference:
    """A column x whose types differ in two files: its only value in each, the second one as it is
    read, and the types that a note tells.
    """

    first: Any
    second: Any
    read: Any
    note: str | None


DIFFERENCES = {
    "int64 beside double": Difference([1.0], [3], 3.0, "x (double, int64)"),
    "double beside int64": Difference([3], [0.5], 0.5, "x (int64, double)"),
    "int32 beside int64": Difference(
        pyarrow.array([1], "int32"), [1 << 40], 1 << 40, "x (int32, int64)"
    ),
    "nulls only": Difference([1.0], [None], None, "x (double, null)"),
    "empty lists": Difference(
        [[1.0, 2.0]], [[]], [], "x (list<element: double>, list<element: null>)"
    ),
    "lists of integers": Difference(
        [[1.0, 2.0]], [[3, 4]], [3.0, 4.0], "x (list<element: double>, list<element: int64>)"
    ),
    "dictionary beside text": Difference(
        ["a"],
        pyarrow.array(["b"]).dictionary_encode(),
        "b",
        "x (string, dictionary<values=string, indices=int32, ordered=0>)",
    ),
    "dictionaries with other indices": Difference(
        pyarrow.array(["a"], pyarrow.dictionary("int8", "string")),
        pyarrow.array(["b"], pyarrow.dictionary("int16", "string")),
        "b",
        None,
    ),
    "binary text": Difference(["a"], ["ä".encode()], "ä", "x (string, binary)"),
    "large text": Difference(
        pyarrow.array(["a"], "large_string"), ["b"], "b", "x (large_string, string)"
    ),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("case", DIFFERENCES)
def test_files_whose_columns_differ_in_type_are_one_table(
    case: str, kind: str, tmp_path: Path
) -> None:
    difference = DIFFERENCES[case]
    tables = [{"x": difference.first, "y": [1]}, {"x": difference.second, "y": [2]}]

    first, second = rows = sf.data.Table(write_tables(tmp_path / "in", *tables, kind=kind))

    assert [*first] == [*second] == ["x", "y"]
    assert second["y"] == 2
    value = second["x"]
    if isinstance(value, torch.Tensor):
        assert value.tolist() == difference.read
        assert value.dtype == first["x"].dtype
    else:
        assert value == difference.read
        assert value is None or type(value) is type(first["x"])
    if difference.note is not None:
        (note,) = rows.reading_notes
        assert note.replace("item", "element").partition(": ")[2] == difference.note


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_copy_of_files_whose_columns_differ_in_type_is_the_same_table(
    case: str, kind: str, tmp_path: Path
) -> None:
    difference = DIFFERENCES[case]
    tables = [{"x": difference.first, "y": [1]}, {"x": difference.second, "y": [2]}]
    rows = sf.data.Table(write_tables(tmp_path / "in", *tables, kind=kind))

    copied = rows.write_arrow(tmp_path / "rows.arrow")

    assert str([*copied]) == str([*rows])
    assert fingerprint(copied) == fingerprint(rows)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_files_whose_columns_differ_in_order_are_one_table(kind: str, tmp_path: Path) -> None:
    tables = [{"x": [1.0], "y": [1]}, {"y": [2], "x": [3.0]}]

    first, second = rows = sf.data.Table(write_tables(tmp_path / "in", *tables, kind=kind))

    assert [*first] == [*second] == ["x", "y"]
    assert (second["x"], second["y"]) == (3.0, 2)
    copied = rows.write_arrow(tmp_path / "rows.arrow")
    assert str([*copied]) == str([*rows])
    assert fingerprint(copied) == fingerprint(rows)


def test_columns_that_no_type_holds_can_be_left_out(tmp_path: Path) -> None:
    write_tables(tmp_path, {"x": [1.0], "y": [1]}, {"x": ["a"], "y": [2]})

    with refused("table-types-differ", DataError, column="x", types=["double", "string"]):
        sf.data.Table(tmp_path)
    assert [int(row["y"]) for row in sf.data.Table(tmp_path, columns=["y"])] == [1, 2]


def test_columns_that_not_all_files_have_can_be_left_out(tmp_path: Path) -> None:
    write_tables(tmp_path, {"x": [1.0], "y": [1]}, {"z": ["a"], "y": [2]})

    with refused("table-columns-differ", DataError, columns=["z", "y"], first=["x", "y"]):
        sf.data.Table(tmp_path)
    assert [int(row["y"]) for row in sf.data.Table(tmp_path, columns=["y"])] == [1, 2]


def test_a_number_that_its_common_type_cannot_hold_is_named(tmp_path: Path) -> None:
    rows = sf.data.Table(write_tables(tmp_path, {"x": [1.0]}, {"x": [2**53 + 1]}))

    with refused("table-value-unreadable", DataError, column="x", row=1) as caught:
        rows[1]
    assert "astype" in str(caught.value)
    assert "columns=[]" not in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    rows = sf.data.Table(write_tables(tmp_path, {"x": ["a"]}, {"x": [b"\xff"]}))

    with refused("table-value-unreadable", DataError, column="x", row=1):
        rows[1]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A directory whose folders name values of two columns."""
    for name in ("label=cat/fold=1", "label=big%20dog/fold=12"):
        (tmp_path / name).mkdir(parents=True)
        parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / name / "0.parquet")
    return tmp_path


def test_names_of_folders_are_columns(folders: Path) -> None:
    rows = sf.data.Table(folders)

    assert [row["label"] for row in rows] == ["big dog", "cat"]
    assert [row["fold"].tolist() for row in rows] == [12, 1]
    assert rows[0]["fold"].dtype == torch.int64  # of which losses take labels
    (note,) = rows.reading_notes
    assert note.partition(": ")[2] == "fold, label"


def test_names_of_folders_are_columns_that_can_be_chosen(folders: Path) -> None:
    rows = sf.data.Table(folders, columns=["label"])

    assert [[*row] for row in rows] == [["label"], ["label"]]


def test_copies_of_a_table_have_the_columns_of_its_folders(folders: Path) -> None:
    rows = sf.data.Table(folders)

    written = rows.write_arrow(folders / "rows.arrow")
    pickled = pickle.loads(pickle.dumps(rows))

    assert fingerprint(written) == fingerprint(rows)
    assert pickled[1]["label"] == "cat"


def test_parts_in_one_directory_are_said(tmp_path: Path, table: Any) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / f"{name}.parquet")

    together = sf.data.Table(tmp_path)

    assert len(together) == 30
    (note,) = together.reading_notes
    assert note.partition(": ")[2] == "test, training"


def test_nothing_is_said_of_a_directory_of_one_part(tmp_path: Path, table: Any) -> None:
    for name in ("train/train-00000-of-00002", "train/train-00001-of-00002", "test/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / f"{name}.parquet")

    assert sf.data.Table(tmp_path / "train").reading_notes == ()
    assert sf.data.Table(tmp_path / "test").reading_notes == ()


def test_values_of_folders_are_integers_only_if_all_are(tmp_path: Path) -> None:
    for folder in ("zip=01234", "zip=5", "zip=__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / folder).mkdir()
        parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / folder / "0.parquet")
    assert [row["zip"] for row in sf.data.Table(tmp_path)] == ["01234", "5", None]


def test_what_a_table_did_stands_in_the_header(tmp_path: Path) -> None:
    write_tables(tmp_path, {"x": [1.0]}, {"x": [3]})
    (tmp_path / "notes.txt").write_text("x")
    rows = sf.data.Table(tmp_path)
    run = sf.Run(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch["x"].float()[:, None]).mean(),
        train_data=rows,
        splits={"val": sf.Split(rows)},
        batch_size=1,
        length="1 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        console=False,
    )

    text = " ".join(header(run.parts, resumed=False).split())

    assert text.count(": x (double, int64)") == 1
    (of_files,) = re.findall(r"\d+ \w+ \d+ files; [^;]*: 1 \.txt", text)
    assert numbers_in(of_files)[:2] == [2, 3]


# --- what is no table -----------------------------------------------------------------------------


def test_nan_of_pandas_is_nan() -> None:
    nan = float("nan")
    frame = pandas.DataFrame(
        {
            "x": [1.0, nan],
            "f": np.array([1.0, nan], dtype="float32"),
            "lists": [[1.0, nan], [2.0, 3.0]],
            "text": ["a", None],
            "nullable": pandas.array([1.5, None], dtype="Float64"),
        }
    )

    first, second = sf.data.Table(frame)

    assert second["x"].isnan()
    assert second["x"].dtype == torch.float64
    assert second["f"].isnan()
    assert second["f"].dtype == torch.float32
    assert first["lists"].isnan().tolist() == [False, True]
    assert second["text"] is None
    assert second["nullable"] is None


def test_nan_of_columns_of_pandas_is_nan() -> None:
    columns = {"x": pandas.Series([1.0, float("nan")]), "text": pandas.Series(["a", None])}

    assert sf.data.Table(columns)[1]["x"].isnan()


def test_nan_of_pandas_is_nan_in_a_batch() -> None:
    rows = sf.data.Table(pandas.DataFrame({"x": [1.0, float("nan")]}))

    (micro_batch,) = in_order(rows, batch_size=2, seed=0, device=CPU)

    assert micro_batch.batch["x"].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (lambda: pandas.Series([1, 2]), "table-of-one-column"),
        (lambda: pandas.DataFrame({"x": [1j], "y": [1]}), "table-column-unreadable"),
        (lambda: pandas.DataFrame({"x": [object()], "y": [1]}), "table-column-unreadable"),
        (lambda: pandas.DataFrame({"x": [1, "a"], "y": [1, 2]}), "table-column-unreadable"),
        (lambda: pandas.DataFrame([[1, 2]], columns=["x", "x"]), "table-source-unknown"),
        (lambda: pandas.DataFrame({"x": [1]}).groupby("x"), "table-source-unknown"),
        (lambda: {"x": np.array([1j])}, "table-source-unknown"),
        (lambda: np.ones((2, 2)), "table-source-unknown"),
        (lambda: pyarrow.array([1, 2]), "table-source-unknown"),
        (lambda: 7, "table-source-unknown"),
    ],
)
def test_what_is_no_table_is_one_error(source: Any, code: str) -> None:
    with refused(code, DataError):
        sf.data.Table(source())


def test_a_column_that_fits_into_no_table_can_be_left_out() -> None:
    frame = pandas.DataFrame({"x": [1j], "y": [1]})

    with refused("table-column-unreadable", DataError, column="x"):
        sf.data.Table(frame)
    assert sf.data.Table(frame, columns=["y"])[0]["y"] == 1


def test_the_only_column_is_not_left_out() -> None:
    frame = pandas.DataFrame({"x": [1j]})

    with refused("table-column-unreadable", DataError, column="x") as caught:
        sf.data.Table(frame)
    assert "columns=" not in str(caught.value)


def test_an_unknown_column_of_pandas_is_refused() -> None:
    with refused("table-column-unknown", DataError, column="z"):
        sf.data.Table(pandas.DataFrame({"y": [1]}), columns=["y", "z"])


FAR_DATES = {"x": np.array(["20000-01-01"], dtype="datetime64[s]"), "y": [1]}


@pytest.mark.parametrize("build", [pandas.DataFrame, pyarrow.table])
def test_dates_that_python_has_not_are_refused_with_their_column(build: Any) -> None:
    with refused("table-dates-far", DataError, column="x"):
        sf.data.Table(build(FAR_DATES))


def test_dates_that_python_has_not_can_be_left_out() -> None:
    (row,) = sf.data.Table(pandas.DataFrame(FAR_DATES), columns=["y"])

    assert [*row] == ["y"]


def test_dates_of_files_that_python_has_not_are_refused_where_they_are_read(
    tmp_path: Path,
) -> None:
    rows = sf.data.Table(write_tables(tmp_path, FAR_DATES))

    with refused("table-value-unreadable", DataError, column="x", row=0):
        rows[0]


@pytest.mark.parametrize(
    ("data", "call"),
    [
        (
            lambda: datasets.DatasetDict(train=hugging_face(), test=hugging_face()),
            "data['train']",
        ),
        (lambda: {"train": [1], "val": [2]}, "data['train']"),
        (lambda: pyarrow.table(COLUMNS), "sf.data.Table(table)"),
        (lambda: pandas.DataFrame(COLUMNS), "sf.data.Table(table)"),
        (lambda: "t.parquet", "sf.data.Table(path)"),
    ],
)
def test_what_is_not_rows_is_refused_with_what_to_write(data: Any, call: str) -> None:
    with refused("data-set-of-other-kind", DataError) as caught:
        check_samples(data(), seed=0)
    assert call in str(caught.value.remedies[0])


def to_tensors(rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(rows["x"]), "y": torch.tensor(rows["y"])}


SOME = [3, 1, 8, 9]


@pytest.mark.parametrize(
    ("change", "indices"),
    [
        pytest.param(lambda data: data, [*range(10)], id="as it is"),
        pytest.param(
            lambda data: data.with_format("torch", columns=["x", "y"]), [*range(10)], id="torch"
        ),
        pytest.param(
            lambda data: data.with_format("numpy", columns=["x", "y"]), [*range(10)], id="numpy"
        ),
        pytest.param(lambda data: data.with_transform(to_tensors), [*range(10)], id="transformed"),
        pytest.param(lambda data: data.select(SOME), SOME, id="selected"),
        pytest.param(lambda data: Subset(data, SOME), SOME, id="subset"),
        pytest.param(
            lambda data: data.train_test_split(test_size=3, seed=0)["test"],
            hugging_face().train_test_split(test_size=3, seed=0)["test"]["y"],
            id="split",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_face_data_are_batches_of_their_rows(
    change: Any, indices: list[int], workers: int
) -> None:
    data = change(hugging_face())

    assert check_samples(data, seed=0) == len(indices)
    micro_batches = in_order(data, batch_size=3, seed=0, device=CPU, workers=workers)
    batches = [micro_batch.batch for micro_batch in micro_batches]

    expected = [COLUMNS["x"][index] for index in indices]
    assert torch.cat([batch["y"] for batch in batches]).tolist() == [*indices]
    assert torch.cat([batch["x"] for batch in batches]).tolist() == expected


def test_rows_of_hugging_face_are_read_together() -> None:
    data = hugging_face().with_format("torch")

    read_rows = read_many_fn(data)

    assert read_rows is not None
    assert str(read_rows([3, 1])) == str([data[3], data[1]])


def test_rows_of_a_part_of_hugging_face_data_are_read_together() -> None:
    data = hugging_face()

    read_rows = read_many_fn(Subset(data, [5, 7]))

    assert read_rows is not None
    assert str(read_rows([1, 0])) == str([data[7], data[5]])


def test_rows_are_read_one_by_one_where_a_transform_may_draw() -> None:
    assert read_many_fn(hugging_face().with_transform(lambda rows: rows)) is None


def test_rows_of_a_list_are_read_one_by_one() -> None:
    assert read_many_fn([1, 2]) is None


def test_the_fingerprint_of_hugging_face_data_does_not_depend_on_where_they_are(
    tmp_path: Path,
) -> None:
    data = hugging_face()
    datasets.disable_progress_bars()
    for name in ("a", "b"):
        data.save_to_disk(tmp_path / name)
        stored = datasets.load_from_disk(tmp_path / name)
        assert fingerprint(stored) == fingerprint(data)


def test_the_fingerprint_of_hugging_face_data_is_not_the_one_of_the_library() -> None:
    data = hugging_face()
    mapped = data.map(lambda row: row)

    assert mapped._fingerprint != data._fingerprint
    assert fingerprint(mapped) == fingerprint(data)


def test_the_fingerprint_of_hugging_face_data_depends_on_rows_order_and_columns() -> None:
    data = hugging_face()
    all_data = [
        data,
        data.select(range(9)),
        data.select([*range(8), 9, 8]),
        data.remove_columns("name"),
        data.rename_column("x", "z"),
    ]

    hashes = {fingerprint(rows)["sha256"] for rows in all_data}

    assert len(hashes) == 5


def test_a_run_of_the_first_version_knows_no_hash_of_hugging_face_data() -> None:
    facts = {"plan": {}, **fingerprint(hugging_face())}
    without_hash = {name: value for name, value in facts.items() if name != "sha256"}

    assert differences({"data": without_hash}, {"data": facts}) == []
    assert differences({"data": facts}, {"data": facts | {"sha256": "0"}})


def test_a_run_of_the_first_version_knows_the_hash_of_tensors() -> None:
    tensors = {"data": fingerprint((torch.ones(3),))}

    assert differences({"data": {"type": "tuple", "samples": 3}}, tensors)


def test_a_data_set_of_pyarrow_is_a_table(path: Path, table: Any) -> None:
    dataset = pytest.importorskip("pyarrow.dataset").dataset(path)
    assert fingerprint(sf.data.Table(dataset)) == fingerprint(sf.data.Table(table))
    assert sf.data.Table(dataset)[9]["name"] == "row 9"
    with refused("data-set-of-other-kind", DataError):
        check_samples(dataset, seed=0)


def test_a_lazy_frame_of_polars_is_a_table(path: Path, table: Any) -> None:
    frame = pytest.importorskip("polars").scan_parquet(path)
    rows = sf.data.Table(frame)
    assert [rows[row]["y"] for row in range(10)] == [*range(10)]
    assert [row["name"] for row in rows] == COLUMNS["name"]
    with refused("data-set-of-other-kind", DataError):
        check_samples(frame, seed=0)


@pytest.mark.parametrize("kind", ["ParquetFile", "ParquetDataset"])
def test_a_parquet_file_of_pyarrow_is_a_table(kind: str, tmp_path: Path, table: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table, tmp_path / "rows.parquet")
    source = getattr(parquet, kind)(tmp_path / "rows.parquet")
    assert fingerprint(sf.data.Table(source)) == fingerprint(sf.data.Table(table))
    with refused("data-set-of-other-kind", DataError):
        check_samples(source, seed=0)


def test_a_scanner_of_pyarrow_is_a_table(path: Path, table: Any) -> None:
    scanner = pytest.importorskip("pyarrow.dataset").dataset(path).scanner()
    assert fingerprint(sf.data.Table(scanner)) == fingerprint(sf.data.Table(table))
    with refused("data-set-of-other-kind", DataError):
        check_samples(scanner, seed=0)


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        ("lance.dataset", "LanceDataset", "to_table"),
        ("lance.dataset", "LanceScanner", "to_table"),
        ("polars.lazyframe.frame", "LazyFrame", "collect"),
    ],
)
def test_a_source_of_another_library_is_read_by_the_call_that_makes_a_table(
    module: str, name: str, method: str, table: Any
) -> None:
    kind = type(name, (), {"__module__": module, method: lambda _: table})
    assert fingerprint(sf.data.Table(kind())) == fingerprint(sf.data.Table(table))
    with refused("data-set-of-other-kind", DataError):
        check_samples(kind(), seed=0)
