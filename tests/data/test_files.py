"""Which files a path names, and the columns of files that differ: compared with pandas and pyarrow in one process."""

import bz2
import gzip
import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from drivetrain import ConfigurationError, DataConfig
from drivetrain_data import TableShard


def split(dataset: Any, world_size: int = 2) -> list[TableShard]:
    """Return the shards after pickling, in the same way as workers receive them."""
    config = DataConfig()
    shards = config.configure(config.open({"train": dataset}), world_size)
    return [pickle.loads(pickle.dumps(shard["train"])) for shard in shards]


def rows(dataset: Any, world_size: int = 2) -> list[dict[str, Any]]:
    return list(itertools.chain.from_iterable(shard.iter_rows() for shard in split(dataset, world_size)))


def write(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        file.write_text(content)
    else:
        pyarrow.parquet.write_table(pa.table(content), file, row_group_size=2)
    return file


def test_directories_of_a_hive_layout_are_columns(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": range(12), "region": ["eu", "us north"] * 6, "year": [2020, 2021, 2022] * 4})
    frame.to_parquet(tmp_path / "run=7" / "hive", partition_cols=["region", "year"])
    expected = sorted(map(tuple, frame.values.tolist()))
    root = tmp_path / "run=7" / "hive"
    for dataset in (root, f"{root}/region=*/**/*.parquet", f"{root}/region=*", root.as_uri()):
        (first, _) = split(dataset)
        assert first.schema().names == ["x", "region", "year"], dataset
        assert first.schema().types == [pa.int64(), pa.string(), pa.int32()]
        assert sorted((row["x"], row["region"], row["year"]) for row in rows(dataset)) == expected
        read = [batch["year"] for shard in split(dataset) for batch in shard.iter_batches(batch_size=4)]
        assert sorted(np.concatenate(read)) == sorted(frame["year"])
    files = sorted(root.rglob("*.parquet"))
    assert set(split(files)[0].schema().names) == {"x", "run", "region", "year"}  # as with pyarrow and pandas
    assert split(files[0])[0].schema().names == ["x"]


def test_column_in_files_and_directories_keeps_its_type_and_values(tmp_path: Path) -> None:
    for year in (2020, 2021):
        write(tmp_path / f"year={year}" / "0.parquet", {"x": [year], "year": pa.array([year], pa.int64())})
    write(tmp_path / "year=__HIVE_DEFAULT_PARTITION__" / "0.parquet", {"x": [0]})
    assert [(row["x"], row["year"]) for row in rows(tmp_path)] == [(2020, 2020), (2021, 2021), (0, None)]
    assert split(tmp_path)[0].schema().field("year").type == pa.int64()


def test_columns_of_all_files_are_read(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"x": [0, 1, 2]})
    write(tmp_path / "1.parquet", {"y": ["a", "b"], "x": [3, 4]})
    expected = [{"x": x, "y": y} for x, y in [(0, None), (1, None), (2, None), (3, "a"), (4, "b")]]
    assert rows(tmp_path) == expected
    for name, texts in (("csv", ("x\n0\n", "y,x\na,3\n")), ("jsonl", ('{"x":0}\n', '{"y":"a","x":3}\n'))):
        for number, text in enumerate(texts):
            write(tmp_path / name / f"{number}.{name}", text)
        assert rows(tmp_path / name) == [{"x": 0, "y": None}, {"x": 3, "y": "a"}]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([1, 2], pa.int32()), pa.array([2**40], pa.int64()), pa.int64()),
        (pa.array([1, 2]), pa.array([1.5]), pa.float64()),
        (pa.array([1.5]), pa.array([1, 2]), pa.float64()),
        (pa.array([None, None]), pa.array(["a"]), pa.string()),
        (pa.array([1.5], pa.float32()), pa.array([0.1]), pa.float64()),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[2**40]]), pa.list_(pa.int64())),
        (pa.array(["a", "b"]).dictionary_encode(), pa.array(["c"]), pa.string()),
        (pa.array([{"a": 1}]), pa.array([{"b": "x"}]), pa.struct([("a", pa.int64()), ("b", pa.string())])),
    ],
)
def test_types_are_widened(first: pa.Array, second: pa.Array, expected: pa.DataType, tmp_path: Path) -> None:
    for number, values in enumerate((first, second)):
        write(tmp_path / f"{number}.parquet", {"x": values})
    assert split(tmp_path)[0].schema().field("x").type == expected
    together = pa.chunked_array([first.cast(expected), second.cast(expected)]).to_pylist()
    assert [row["x"] for row in rows(tmp_path, 3)] == together


def test_types_without_a_common_type_are_refused_before_the_start(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"x": [1]})
    write(tmp_path / "1.parquet", {"x": ["a"]})
    with pytest.raises(ConfigurationError, match=r"DT-742.*'train'.*another type in .*1\.parquet.*Field x") as error:
        split(tmp_path)
    assert error.value.code == "DT-742"


def test_integers_that_no_float_can_represent_are_refused_before_the_start(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"x": [1, 2**53 + 1]})
    assert [row["x"] for row in rows(tmp_path)] == [1, 2**53 + 1]
    write(tmp_path / "1.parquet", {"x": [1.5]})
    with pytest.raises(ConfigurationError, match=r"DT-742.*'train'.*column 'x'.*9007199254740993 in .*0\.parquet"):
        split(tmp_path)


CSV = ["x,y\n", *["1,\n"] * 400_000, "1.5,abc\n"]
JSON = [*['{"x":1}\n'] * 400_000, '{"x":1.5,"y":"abc"}\n']


@pytest.mark.parametrize(("name", "lines"), [("rows.csv", CSV), ("rows.jsonl", JSON)])
def test_types_that_widen_within_a_text_file(name: str, lines: list[str], tmp_path: Path) -> None:
    """After the part of the file from which Arrow infers the types."""
    write(tmp_path / name, "".join(lines))
    first, second = split(tmp_path / name)
    assert first.schema().names == ["x", "y"]
    assert first.schema().types == [pa.float64(), pa.string()]
    (*_, last) = second.iter_batches(batch_size=1_000)
    assert (last["x"][-1], last["y"][-1]) == (1.5, "abc")
    assert first.count() + second.count() == 400_001


def test_text_that_resembles_another_type_remains_text(tmp_path: Path) -> None:
    write(tmp_path / "0.csv", "code\n01\n02\n")
    write(tmp_path / "1.csv", "code\nA3\n")
    assert [row["code"] for row in rows(tmp_path)] == ["01", "02", "A3"]
    for number, day in enumerate(("2020-01-01", "unknown")):
        write(tmp_path / "json" / f"{number}.jsonl", f'{{"day": "{day}"}}\n')
    assert [row["day"] for row in rows(tmp_path / "json")] == ["2020-01-01", "unknown"]


def parquet(file: Path) -> Path:
    return write(file, {"x": [1, 2, 3]})


def text(separator: str, opener: Callable[..., Any] = open) -> Callable[[Path], Path]:
    def write_text(file: Path) -> Path:
        with opener(file, "wt") as stream:
            stream.write(f"x{separator}y\n1{separator}a\n2{separator}b\n3{separator}c\n")
        return file

    return write_text


def json_lines(file: Path) -> Path:
    with gzip.open(file, "wt") as stream:
        stream.write('{"x":1}\n{"x":2}\n{"x":3}')
    return file


FILES: dict[str, Callable[[Path], Path]] = {
    "rows.parquet": parquet,
    "ROWS.PARQUET": parquet,
    "rows.snappy.parquet": parquet,
    "part[1].parquet": parquet,
    "rows [a-b]*.parquet": parquet,
    "without_suffix": parquet,
    "_rows.parquet": parquet,
    "rows.CSV": text(","),
    "rows.tsv": text("\t"),
    "rows.csv.gz": text(",", gzip.open),
    "rows.tsv.bz2": text("\t", bz2.open),
    "rows.jsonl.gz": json_lines,
}


@pytest.mark.parametrize("name", FILES)
def test_names_of_files(name: str, tmp_path: Path) -> None:
    file = FILES[name](tmp_path / name)
    assert [row["x"] for row in rows(file)] == [1, 2, 3]
    assert [row["x"] for row in rows([str(file)])] == [1, 2, 3]


def test_home_directory_and_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    parquet(tmp_path / "data" / "rows.parquet")
    for path in ("~/data", "~/data/*.parquet", "data", "data/rows.parquet"):
        assert [row["x"] for row in rows(path)] == [1, 2, 3], path
    shards = split("data")
    monkeypatch.chdir("/")
    assert [row["x"] for shard in shards for row in shard.iter_rows()] == [1, 2, 3]


def test_pattern_below_a_directory_with_brackets(tmp_path: Path) -> None:
    parquet(tmp_path / "run[1]" / "a" / "0.parquet")
    write(tmp_path / "run1" / "a" / "0.parquet", {"x": [9]})
    assert [row["x"] for row in rows(f"{tmp_path}/run[1]/*/*.parquet")] == [1, 2, 3]
    assert [row["x"] for row in rows(f"{tmp_path}/run[1]/**/*.parquet")] == [1, 2, 3]
    assert [row["x"] for row in rows(f"{tmp_path}/run?/a/*.parquet")] == [9]


def test_other_files_in_a_directory_are_skipped(tmp_path: Path) -> None:
    parquet(tmp_path / "rows" / "0.parquet")
    for name in ("README", "README.md", "_SUCCESS", ".rows.parquet.crc", "_metadata", "_temporary/0.parquet"):
        write(tmp_path / "rows" / name, "no data")
    for path in (tmp_path / "rows", f"{tmp_path}/rows/*"):
        assert [row["x"] for row in rows(path)] == [1, 2, 3]
    with pytest.raises(ConfigurationError, match=r"DT-742.*README"):
        split([tmp_path / "rows" / "0.parquet", tmp_path / "rows" / "README"])
    (tmp_path / "text").mkdir()
    text(",")(tmp_path / "text" / "0.csv")
    write(tmp_path / "text" / "1.csv", "")
    assert [row["x"] for row in rows(tmp_path / "text")] == [1, 2, 3]


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    parquet(tmp_path / "both" / "0.parquet")
    text(",")(tmp_path / "both" / "1.csv")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "damaged" / "0.parquet", "no data")
    write(tmp_path / "array.json", '[{"x": 1}, {"x": 2}]')
    write(tmp_path / "ragged.csv", "x,y\n1\n")
    for path, message in (
        ("both", "one format, got .csv, .parquet"),
        ("empty", "got no files at"),
        ("missing", "does not exist"),
        ("missing-*.csv", "got no files at"),
        ("damaged", "0.parquet"),
        ("array.json", "one JSON object per line"),
        ("ragged.csv", "Expected 2 columns"),
    ):
        with pytest.raises(ConfigurationError) as error:
            split(os.fspath(tmp_path / path))
        assert error.value.code == "DT-742"
        assert message in str(error.value)
        assert str(tmp_path / path).removesuffix("0.parquet") in str(error.value) or path == "both"
    with pytest.raises(ConfigurationError, match=r"DT-742.*missing-\*"):
        split([str(tmp_path / "both/*.parquet"), str(tmp_path / "missing-*")])


def test_datasets_without_rows_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "rows.parquet")
    none = pa.table({"x": pa.array([], pa.int64())})
    for dataset in (
        write(tmp_path / "none.parquet", none),
        none,
        none.to_pandas(),
        {"x": []},
        write(tmp_path / "header.csv", "x,y\n"),
    ):
        with pytest.raises(ConfigurationError, match=r"DT-741.*'train'.*at least one row"):
            split(dataset)


def test_pyarrow_dataset_with_a_filter_is_refused(tmp_path: Path) -> None:
    dataset = pyarrow.dataset.dataset(parquet(tmp_path / "rows.parquet"))
    selected = dataset.filter(pyarrow.dataset.field("x") > 1)
    with pytest.raises(ConfigurationError, match=r"DT-742.*'train'.*to_table\(\)"):
        split(selected)
    assert [row["x"] for row in rows(selected.to_table())] == [2, 3]


def test_column_of_a_user_error_is_named(tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    for dataset in (
        pd.DataFrame({"a": [1], "mixed": [b""]}).assign(mixed=[object()]),
        pd.DataFrame({"a": [1, 2, 3], "mixed": [1, "x", 2.0]}),
        {"a": [1, 2, 3], "mixed": [1, "x", 2.0]},
        {"mixed": 5},
        pd.DataFrame({"a": [1], "mixed": [1j]}),
        pl.DataFrame({"a": [1], "mixed": [object()]}, strict=False),
    ):
        with pytest.raises(ConfigurationError, match=r"DT-743.*'train'.*'mixed'"):
            split(dataset)
    for equal in (
        pd.DataFrame([[1, 2]], columns=["same", "same"]),
        pa.table([[1], [2]], names=["same", "same"]),
        write(tmp_path / "equal.csv", "same,same\n1,2\n"),
        pd.DataFrame([[1, 2]], columns=["same", "other"]).rename(columns={"other": "same"}),
    ):
        with pytest.raises(ConfigurationError, match=r"DT-743.*'train'.*different names, got several named 'same'"):
            split(equal)
