from __future__ import annotations

import pickle
import re
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
    for read in (table[0]["c"], written[0]["c"]):
        assert type(read) is type(expected)
        torch.testing.assert_close(read, expected) if isinstance(expected, torch.Tensor) else None
        assert str(read) == str(expected)


@pytest.mark.parametrize(
    "kind", ["memory", "parquet", "arrow", "stream", "both", "directory", "pandas", "pickled"]
)
def test_rows_are_the_same_in_every_kind_of_table(kind: str, table: Any, path: Path) -> None:
    def stream() -> Path:
        with pyarrow.ipc.new_stream(path.parent / "stream.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        return path.parent / "stream.arrow"

    rows = {
        "memory": lambda: sf.data.Table(table),
        "parquet": lambda: sf.data.Table(str(path), max_cache_bytes=0),
        "arrow": lambda: sf.data.Table(path).write_arrow(path.parent / "rows.arrow"),
        "stream": lambda: sf.data.Table(stream()),
        "both": lambda: sf.data.Table([path, stream()]),
        "directory": lambda: sf.data.Table(path.parent),
        "pandas": lambda: sf.data.Table(table.to_pandas().iloc[::-1].iloc[::-1]),
        "pickled": lambda: pickle.loads(pickle.dumps(sf.data.Table(path))),
    }[kind]()
    order = [9, 0, 5, 3, 4, 8, 1]
    assert str([rows[row] for row in order]) == str([sf.data.Table(table)[row] for row in order])
    assert len(rows) == (20 if kind == "both" else 10)
    if kind == "both":
        assert str(rows[13]) == str(rows[3])
    else:  # a run may go on with an Arrow file that was written from Parquet
        assert fingerprint(rows) == fingerprint(sf.data.Table(table))
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_the_fingerprint_does_not_depend_on_the_path_but_on_the_rows(
    table: Any, tmp_path: Path
) -> None:
    def of(row: int, directory: str) -> Any:
        changed = table.set_column(
            1, "y", pyarrow.array([7 * (index == row) + index for index in range(10)])
        )
        (tmp_path / directory).mkdir()
        parquet.write_table(changed, tmp_path / directory / "t.parquet", row_group_size=2 + row % 3)
        return fingerprint(sf.data.Table(tmp_path / directory / "t.parquet"))

    prints = [of(-1, "a"), of(-1, "b"), *(of(row, f"changed-{row}") for row in range(10))]
    assert prints[0] == prints[1]
    assert len({each["sha256"] for each in prints}) == 11


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
    table = sf.data.Table(path, max_cache_bytes=0)
    assert [len(table._decoded) for row in (0, 5, 9, 0) if table[row]] == [1, 1, 1, 1]
    table = sf.data.Table(path)
    assert [len(table._decoded) for row in (0, 5, 9, 0) if table[row]] == [1, 2, 3, 3]
    assert table._decodings == 3
    few = sf.data.Table(
        path, max_cache_bytes=2 * max(group.nbytes for group in table._decoded.values())
    )
    assert [few[row] is not None for row in (0, 5, 0, 9, 0)] == [True] * 5
    assert few._decodings == 3, "the group that was read last stays"


def test_what_cannot_be_read_is_named(path: Path) -> None:
    (path.parent / "empty").mkdir()
    available = ["x", "y", "name"]
    with refused("table-column-unknown", DataError, column="z", available=available):
        sf.data.Table(path, columns=["z"])
    with refused("table-columns-one-text", setting="columns", value="x"):
        sf.data.Table(path, columns="x")
    with refused("path-missing", DataError):
        sf.data.Table(path.with_name("none.parquet"))
    with refused("path-is-url"):
        sf.data.Table("s3://bucket/t.parquet")
    with refused("table-damaged", DataError):
        sf.data.Table(damaged(path))
    with refused("table-compressed", DataError):
        sf.data.Table(compressed(path))
    with refused("table-columns-differ", DataError, columns=["z"], first=available):
        sf.data.Table([path, other(path)])
    with refused("no-table-in-directory", DataError):
        sf.data.Table(path.parent / "empty")
    with refused("table-source-unknown", DataError):
        sf.data.Table([{"x": 1}, {"x": 2}])


def damaged(path: Path) -> Path:
    path.with_name("damaged.parquet").write_bytes(path.read_bytes()[:-40] + bytes(40))
    return path.with_name("damaged.parquet")


def compressed(path: Path) -> Path:
    from pyarrow import feather

    rows = pyarrow.table({"x": np.zeros(10_000)})
    feather.write_feather(rows, path.with_name("rows.feather"))
    return path.with_name("rows.feather")


def other(path: Path) -> Path:
    parquet.write_table(pyarrow.table({"z": [1]}), path.with_name("other.parquet"))
    return path.with_name("other.parquet")


def test_without_pyarrow_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.config.extras.is_installed", lambda module: module != "pyarrow")
    with refused("package-not-usable", modules=["pyarrow"]):
        sf.data.Table("t.parquet")


def test_nulls_inside_a_list_are_refused() -> None:
    with refused("table-value-unreadable", DataError, column="x", row=0):
        sf.data.Table(pyarrow.table({"x": [[1, None]]}))[0]


# --- files that differ ----------------------------------------------------------------------------


def written(folder: Path, *tables: dict[str, Any], kind: str = "parquet") -> Path:
    for number, columns in enumerate(tables):
        rows = pyarrow.table(columns)
        if kind == "parquet":
            parquet.write_table(rows, folder / f"{number}.parquet")
        else:
            with pyarrow.ipc.new_file(folder / f"{number}.arrow", rows.schema) as writer:
                writer.write_table(rows)
    return folder


def column(values: list[Any], kind: Any) -> Any:
    return pyarrow.array(values, kind)


PARTS = {
    "another order": ({"x": [1.0], "y": [1]}, {"y": [2], "x": [3.0]}, [3.0], None),
    "int64 beside double": (
        {"x": [1.0], "y": [1]},
        {"x": [3], "y": [2]},
        [3.0],
        "x (double, int64)",
    ),
    "double beside int64": (
        {"x": [3], "y": [1]},
        {"x": [0.5], "y": [2]},
        [0.5],
        "x (int64, double)",
    ),
    "int32 beside int64": (
        {"x": column([1], "int32"), "y": [1]},
        {"x": [1 << 40], "y": [2]},
        [1 << 40],
        "x (int32, int64)",
    ),
    "nulls only": ({"x": [1.0], "y": [1]}, {"x": [None], "y": [2]}, [None], "x (double, null)"),
    "empty lists": (
        {"x": [[1.0, 2.0]], "y": [1]},
        {"x": [[]], "y": [2]},
        [[]],
        "x (list<element: double>, list<element: null>)",
    ),
    "lists of integers": (
        {"x": [[1.0, 2.0]], "y": [1]},
        {"x": [[3, 4]], "y": [2]},
        [[3.0, 4.0]],
        "x (list<element: double>, list<element: int64>)",
    ),
    "dictionary beside text": (
        {"x": ["a"], "y": [1]},
        {"x": pyarrow.array(["b"]).dictionary_encode(), "y": [2]},
        ["b"],
        "x (string, dictionary<values=string, indices=int32, ordered=0>)",
    ),
    "dictionaries with other indices": (
        {"x": column(["a"], pyarrow.dictionary("int8", "string")), "y": [1]},
        {"x": column(["b"], pyarrow.dictionary("int16", "string")), "y": [2]},
        ["b"],
        None,
    ),
    "binary text": (
        {"x": ["a"], "y": [1]},
        {"x": ["ä".encode()], "y": [2]},
        ["ä"],
        "x (string, binary)",
    ),
    "large text": (
        {"x": column(["a"], "large_string"), "y": [1]},
        {"x": ["b"], "y": [2]},
        ["b"],
        "x (large_string, string)",
    ),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("case", PARTS)
def test_files_whose_columns_differ_are_one_table(case: str, kind: str, tmp_path: Path) -> None:
    first, second, expected, note = PARTS[case]
    rows = sf.data.Table(written(tmp_path, first, second, kind=kind))
    assert [*rows[1]] == [*rows[0]] == ["x", "y"]
    read = rows[1]["x"]
    assert (read.tolist() if isinstance(read, torch.Tensor) else read) == expected[0]
    assert type(rows[0]["x"]) is type(read) or read is None
    if isinstance(read, torch.Tensor):
        assert read.dtype == rows[0]["x"].dtype
    assert rows[1]["y"] == 2
    if note is not None:
        names = [text.replace("item", "element") for text in rows.reading_notes]
        assert [text.partition(": ")[2] for text in names] == [note]
    (tmp_path / "out").mkdir()
    copied = rows.write_arrow(tmp_path / "out" / "rows.arrow")
    assert str([copied[0], copied[1]]) == str([rows[0], rows[1]])
    assert fingerprint(copied) == fingerprint(rows)


def test_the_cure_for_columns_that_no_type_holds_works(tmp_path: Path) -> None:
    written(tmp_path, {"x": [1.0], "y": [1]}, {"x": ["a"], "y": [2]})
    with refused("table-types-differ", DataError, column="x", types=["double", "string"]):
        sf.data.Table(tmp_path)
    assert [int(row["y"]) for row in sf.data.Table(tmp_path, columns=["y"])] == [1, 2]
    written(tmp_path, {"x": [1.0], "y": [1]}, {"z": ["a"], "y": [2]})
    with refused("table-columns-differ", DataError, columns=["z", "y"], first=["x", "y"]):
        sf.data.Table(tmp_path)
    assert [int(row["y"]) for row in sf.data.Table(tmp_path, columns=["y"])] == [1, 2]


def test_a_value_that_its_common_type_cannot_hold_is_named(tmp_path: Path) -> None:
    rows = sf.data.Table(written(tmp_path, {"x": [1.0]}, {"x": [2**53 + 1]}))
    with refused("table-value-unreadable", DataError, column="x", row=1) as caught:
        rows[1]
    assert "astype" in str(caught.value)
    assert "columns=[]" not in str(caught.value)
    for path in tmp_path.iterdir():
        path.unlink()
    rows = sf.data.Table(written(tmp_path, {"x": ["a"]}, {"x": [b"\xff"]}))
    with refused("table-value-unreadable", DataError, column="x", row=1):
        rows[1]


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    for label, folder in (("cat", "label=cat/fold=1"), ("big%20dog", "label=big%20dog/fold=12")):
        (tmp_path / folder).mkdir(parents=True)
        parquet.write_table(pyarrow.table({"x": [len(label)]}), tmp_path / folder / "0.parquet")
    rows = sf.data.Table(tmp_path)
    assert [row["label"] for row in rows] == ["big dog", "cat"]
    assert [row["fold"].tolist() for row in rows] == [12, 1]
    assert rows[0]["fold"].dtype == torch.int64  # of which losses take labels
    assert [note.partition(": ")[2] for note in rows.reading_notes] == ["fold, label"]
    assert [[*row] for row in sf.data.Table(tmp_path, columns=["label"])] == [["label"]] * 2
    copied = rows.write_arrow(tmp_path / "rows.arrow")
    assert fingerprint(copied) == fingerprint(rows)
    assert pickle.loads(pickle.dumps(rows))[1]["label"] == "cat"


def test_parts_in_one_directory_are_said(tmp_path: Path, table: Any) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert sf.data.Table(tmp_path).reading_notes == ()
    (tmp_path / "test").mkdir()
    parquet.write_table(table, tmp_path / "test" / "0.parquet")
    together = sf.data.Table(tmp_path)
    assert [note.partition(": ")[2] for note in together.reading_notes] == ["test, training"]
    assert len(together) == 30
    assert sf.data.Table(tmp_path / "test").reading_notes == ()


def test_values_of_folders_are_integers_only_if_all_are(tmp_path: Path) -> None:
    for folder in ("zip=01234", "zip=5", "zip=__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / folder).mkdir()
        parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / folder / "0.parquet")
    assert [row["zip"] for row in sf.data.Table(tmp_path)] == ["01234", "5", None]


def test_what_a_table_did_stands_in_the_header(tmp_path: Path) -> None:
    written(tmp_path, {"x": [1.0]}, {"x": [3]})
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
    said = " ".join(header(run.parts, resumed=False).split())
    assert said.count(": x (double, int64)") == 1
    (files,) = re.findall(r"\d+ \w+ \d+ files; [^;]*: 1 \.txt", said)
    assert numbers_in(files)[:2] == [2, 3]


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
    rows = sf.data.Table(frame)
    of_columns = sf.data.Table({"x": frame["x"], "text": frame["text"]})
    assert of_columns[1]["x"].isnan()
    for name, dtype in (("x", torch.float64), ("f", torch.float32)):
        assert rows[1][name].isnan()
        assert rows[1][name].dtype == dtype
    assert rows[0]["lists"].isnan().tolist() == [False, True]
    assert (rows[1]["text"], rows[1]["nullable"]) == (None, None)
    batch = next(iter(in_order(sf.data.Table(frame[["x"]]), batch_size=2, seed=0, device=CPU)))
    assert batch.batch["x"].isnan().tolist() == [False, True]


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
    with refused("table-column-unreadable", DataError, column="x") as caught:
        sf.data.Table(frame[["x"]])
    assert "columns=" not in str(caught.value)
    with refused("table-column-unknown", DataError, column="z"):
        sf.data.Table(frame[["y"]], columns=["y", "z"])


def test_dates_that_python_has_not_are_refused_with_their_column(tmp_path: Path) -> None:
    far = np.array(["20000-01-01"], dtype="datetime64[s]")
    for source in (pandas.DataFrame({"x": far, "y": [1]}), pyarrow.table({"x": far, "y": [1]})):
        with refused("table-dates-far", DataError, column="x"):
            sf.data.Table(source)
    assert [*sf.data.Table(pandas.DataFrame({"x": far, "y": [1]}), columns=["y"])[0]] == ["y"]
    rows = sf.data.Table(written(tmp_path, {"x": pyarrow.array(far), "y": [1]}))
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


@pytest.mark.parametrize(
    "kind", [None, "torch", "numpy", "transformed", "selected", "subset", "split"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_face_data_are_batches_of_their_rows(kind: str | None, workers: int) -> None:
    data = hugging_face()
    indices = [*range(10)]
    if kind in ("torch", "numpy"):
        data = data.with_format(kind, columns=["x", "y"])
    elif kind == "transformed":
        data = data.with_transform(
            lambda rows: {"x": torch.tensor(rows["x"]), "y": torch.tensor(rows["y"])}
        )
    elif kind == "selected":
        indices = [3, 1, 8, 9]
        data = data.select(indices)
    elif kind == "subset":
        indices = [3, 1, 8, 9]
        data = Subset(data, indices)
    elif kind == "split":
        data = data.train_test_split(test_size=3, seed=0)["test"]
        indices = [*data["y"]]
    assert check_samples(data, seed=0) == len(indices)
    batches = [
        each.batch for each in in_order(data, batch_size=3, seed=0, device=CPU, workers=workers)
    ]
    assert torch.cat([batch["y"] for batch in batches]).tolist() == indices
    assert torch.cat([batch["x"] for batch in batches]).tolist() == [
        COLUMNS["x"][index] for index in indices
    ]


def test_rows_of_hugging_face_are_read_together_and_one_by_one_where_a_transform_may_draw() -> None:
    data = hugging_face()
    together = read_many_fn(data.with_format("torch"))
    assert together is not None
    assert str(together([3, 1])) == str(
        [data.with_format("torch")[3], data.with_format("torch")[1]]
    )
    assert str(read_many_fn(Subset(data, [5, 7]))([1, 0])) == str([data[7], data[5]])
    assert read_many_fn(data.with_transform(lambda rows: rows)) is None
    assert read_many_fn([1, 2]) is None


def test_the_fingerprint_of_hugging_face_data_is_that_of_their_rows(tmp_path: Path) -> None:
    data = hugging_face()
    datasets.disable_progress_bars()
    for name in ("a", "b"):
        data.save_to_disk(tmp_path / name)
    prints = [
        fingerprint(each)
        for each in (data, *(datasets.load_from_disk(tmp_path / name) for name in "ab"))
    ]
    assert prints[0] == prints[1] == prints[2]
    others = [
        data.select(range(9)),
        data.select([*range(8), 9, 8]),
        data.remove_columns("name"),
        data.rename_column("x", "z"),
    ]
    hashes = {fingerprint(each)["sha256"] for each in (data, *others)}
    assert len(hashes) == 5
    assert (
        fingerprint(data.map(lambda row: row)) == prints[0]
    )  # the data set's own fingerprint differs


def test_a_run_of_the_first_version_knows_no_hash_of_hugging_face_data() -> None:
    now = {"data": {"plan": {}, **fingerprint(hugging_face())}}
    before = {"data": {name: part for name, part in now["data"].items() if name != "sha256"}}
    assert differences(before, now) == []
    assert differences(now, {"data": now["data"] | {"sha256": "0"}})
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
