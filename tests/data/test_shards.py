"""Splitting datasets into shards, and reading shards in batches, in one process."""

import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet
import pytest

from drivetrain import ConfigurationError, DataConfig
from drivetrain_data import TableShard

ROWS = 1_003


def columns(rows: int = ROWS) -> dict[str, Any]:
    return {"id": np.arange(rows), "x": np.arange(rows, dtype=np.float32) / 2}


def parquet_files(directory: Path, rows: int = ROWS, row_group_size: int = 100) -> Path:
    for number, part in enumerate(np.array_split(np.arange(rows), 3)):
        table = pa.table({name: values[part] for name, values in columns(rows).items()})
        pyarrow.parquet.write_table(table, directory / f"{number}.parquet", row_group_size=row_group_size)
    return directory


def csv_file(directory: Path) -> str:
    pyarrow.csv.write_csv(pa.table(columns()), directory / "all.csv")
    return str(directory / "*.csv")


def json_file(directory: Path) -> Path:
    pd.DataFrame(columns()).to_json(directory / "all.jsonl", orient="records", lines=True)
    return directory / "all.jsonl"


def arrow_file(directory: Path) -> Path:
    pyarrow.feather.write_feather(pa.table(columns()), directory / "all.feather")
    return directory / "all.feather"


SOURCES: dict[str, Callable[[Path], Any]] = {
    "dict of arrays": lambda directory: columns(),
    "table": lambda directory: pa.table(columns()),
    "record batch": lambda directory: pa.RecordBatch.from_pydict({k: pa.array(v) for k, v in columns().items()}),
    "data frame": lambda directory: pd.DataFrame(columns()),
    "polars frame": lambda directory: pl.DataFrame(columns()),
    "lazy polars frame": lambda directory: pl.LazyFrame(columns()),
    "function": lambda directory: lambda: pd.DataFrame(columns()),
    "parquet directory": parquet_files,
    "parquet files": lambda directory: sorted(parquet_files(directory).iterdir()),
    "pyarrow dataset": lambda directory: pyarrow.dataset.dataset(parquet_files(directory)),
    "pyarrow dataset in memory": lambda directory: pyarrow.dataset.dataset(pa.table(columns())),
    "csv by pattern": csv_file,
    "json lines": json_file,
    "arrow file": arrow_file,
}


def split(dataset: Any, world_size: int, **options: Any) -> list[TableShard]:
    """Return the shards after pickling, in the same way as workers receive them."""
    config = DataConfig(**options)
    shards = config.configure(config.open({"train": dataset}), world_size)
    return [pickle.loads(pickle.dumps(shard["train"])) for shard in shards]


def ids(shard: TableShard, **options: Any) -> list[int]:
    return [int(number) for batch in shard.iter_batches(**options) for number in batch["id"]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_row_is_in_one_shard_and_shards_have_equal_sizes(kind: str, world_size: int, tmp_path: Path) -> None:
    shards = split(SOURCES[kind](tmp_path), world_size)

    read = [ids(shard, batch_size=64) for shard in shards]
    assert sorted(itertools.chain(*read)) == list(range(ROWS))
    assert {shard.count() for shard in shards} <= {ROWS // world_size, ROWS // world_size + 1}
    assert [len(numbers) for numbers in read] == [shard.count() for shard in shards]
    first = next(iter(shards[0].iter_batches(batch_size=3)))
    assert first["x"].tolist() == [0.0, 0.5, 1.0]
    assert shards[0].schema().names == ["id", "x"]


def test_every_worker_gets_all_rows_of_an_unsplit_dataset() -> None:
    config = DataConfig(datasets_to_split=["train"])
    shards = config.configure({"train": columns(), "valid": columns(7)}, 2)
    assert [shard["train"].count() for shard in shards] == [501, 502]
    assert [ids(shard["valid"]) for shard in shards] == [list(range(7))] * 2


def test_pickled_shard_contains_only_its_own_rows() -> None:
    table = pa.table({"x": np.zeros(1_000_000)})
    shards = DataConfig().configure({"train": table}, 100)
    assert len(pickle.dumps(shards[50]["train"])) < 100_000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [2, 3, 10, 25, 100])
@pytest.mark.parametrize("rows", [8, 9, 10, 11, 40, 41, 101, 103])
def test_every_rank_has_the_same_number_of_batches(rows: int, batch_size: int, drop_last: bool) -> None:
    for world_size in (1, 2, 3, 4):
        if drop_last and batch_size > rows // world_size:
            continue
        shards = split(columns(rows), world_size)
        sizes = [[len(b["id"]) for b in s.iter_batches(batch_size=batch_size, drop_last=drop_last)] for s in shards]
        assert len({len(of_rank) for of_rank in sizes}) == 1, sizes
        assert all(0 < size <= batch_size for of_rank in sizes for size in of_rank)
        assert drop_last or sum(itertools.chain(*sizes)) == rows
        assert not drop_last or {size for of_rank in sizes for size in of_rank} == {batch_size}


def test_local_shuffle_repeats_its_order_only_with_a_seed() -> None:
    (shard,) = split(columns(), 1)
    seeded = [ids(shard, batch_size=50, local_shuffle_buffer_size=200, local_shuffle_seed=7) for _ in range(2)]
    assert seeded[0] == seeded[1] != list(range(ROWS))
    assert sorted(seeded[0]) == list(range(ROWS))

    batches = shard.iter_batches(batch_size=50, local_shuffle_buffer_size=200)
    epochs = [[int(number) for batch in batches for number in batch["id"]] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS))


def test_local_shuffle_covers_more_rows_of_files_than_a_batch(tmp_path: Path) -> None:
    (shard,) = split(parquet_files(tmp_path), 1)
    numbers = ids(shard, batch_size=10, local_shuffle_buffer_size=300, local_shuffle_seed=0)
    assert sorted(numbers) == list(range(ROWS))
    assert max(numbers[:10]) - min(numbers[:10]) > 150


@pytest.mark.parametrize("batch_format", ["default", "numpy", "pandas", "pyarrow", None])
def test_batches_have_the_requested_format(batch_format: str | None) -> None:
    (shard,) = split(columns(10), 1)
    (first, _) = shard.iter_batches(batch_size=6, batch_format=batch_format)
    kind = {"pandas": pd.DataFrame, "pyarrow": pa.Table}.get(batch_format or "", dict)
    assert type(first) is kind
    assert list(np.asarray(first["x"])) == [0, 0.5, 1, 1.5, 2, 2.5]


def test_arrays_and_lists_of_equal_length_keep_their_shape() -> None:
    images = np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3)
    lists = [[number, number + 1] for number in range(5)]
    ragged = [[0] * number for number in range(5)]
    (shard,) = split({"images": images, "lists": lists, "ragged": ragged, "text": list("abcde")}, 1)
    batch = next(iter(shard.iter_batches(batch_size=4)))
    np.testing.assert_array_equal(batch["images"], images[:4])
    np.testing.assert_array_equal(batch["lists"], lists[:4])
    assert [len(row) for row in batch["ragged"]] == [0, 1, 2, 3]
    assert batch["text"].tolist() == list("abcd")


def test_dictionary_columns_and_nulls_become_values() -> None:
    table = pa.table({"kind": pa.array(["a", "b", "a"]).dictionary_encode(), "x": pa.array([1.0, None, 3.0])})
    batch = next(iter(split(table, 1)[0].iter_batches()))
    assert batch["kind"].tolist() == ["a", "b", "a"]
    assert np.isnan(batch["x"]).tolist() == [False, True, False]


def test_torch_batches_have_the_requested_dtypes() -> None:
    torch = pytest.importorskip("torch")
    (shard,) = split({"x": np.ones((4, 2)), "y": np.arange(4)}, 1)
    batch = next(iter(shard.iter_torch_batches(batch_size=3, dtypes={"x": torch.float16})))
    assert (batch["x"].dtype, batch["x"].shape, batch["y"].dtype) == (torch.float16, (3, 2), torch.int64)
    batch["x"] += 1  # tensors are writable
    assert next(iter(shard.iter_torch_batches(dtypes=torch.float32)))["y"].dtype == torch.float32
    collated = shard.iter_torch_batches(batch_size=4, collate_fn=lambda arrays: torch.from_numpy(arrays["y"].copy()))
    assert [tensor.tolist() for tensor in collated] == [[0, 1, 2, 3]]
    (texts,) = split({"text": ["a", "b"]}, 1)
    with pytest.raises(ConfigurationError, match="got column 'text'"):
        next(iter(texts.iter_torch_batches()))


@pytest.mark.parametrize("prefetch_batches", [0, 1, 3])
def test_breaking_out_of_an_iteration_ends_its_thread(prefetch_batches: int) -> None:
    (shard,) = split(columns(), 1)
    for _ in range(3):
        for batch in shard.iter_batches(batch_size=10, prefetch_batches=prefetch_batches):
            assert len(batch["id"]) == 10
            break
    for thread in threading.enumerate():
        if thread.name == "drivetrain batches":
            thread.join(10)
            assert not thread.is_alive()


def test_error_while_reading_is_raised_in_the_loop_over_batches(tmp_path: Path) -> None:
    (shard,) = split(parquet_files(tmp_path), 1)
    (tmp_path / "1.parquet").write_bytes(b"nothing")
    with pytest.raises((OSError, pa.ArrowInvalid)):
        ids(shard)


def test_shard_as_rows_table_and_data_frame() -> None:
    (shard,) = split(columns(3), 1)
    assert list(shard.iter_rows()) == [{"id": 0, "x": 0.0}, {"id": 1, "x": 0.5}, {"id": 2, "x": 1.0}]
    assert shard.to_table().num_rows == len(shard.to_pandas()) == 3
    assert [len(batch["id"]) for batch in shard.iter_batches(batch_size=None)] == [3]


def test_hugging_face_datasets_and_streams_are_split() -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"id": list(range(103)), "text": ["a"] * 103})
    shards = split(whole, 2)
    assert [len(ids(shard, batch_size=10)) for shard in shards] == [51, 52]
    streams = split(whole.to_iterable_dataset(num_shards=2), 2)
    assert sorted(itertools.chain(*(ids(shard, batch_size=10) for shard in streams))) == list(range(103))
    assert sum(stream.count() for stream in streams) == 103


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (3, "of type int"),
        ([], "of type list"),
        ("/no/such/file.parquet", "files that can be opened, got an error for ['/no/such/file.parquet']: /no/such"),
        ("/no/such/*.csv", "files that can be opened, got no files at ['/no/such/*.csv']"),
        ({"a": [1], "b": [1, 2]}, "columns of the same length, got {'a': 1, 'b': 2}"),
    ],
)
def test_invalid_datasets_are_rejected(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        DataConfig().open({"train": dataset})
    assert message in str(error.value)
    assert "'train'" in str(error.value)


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="got 'train'"):
        DataConfig(datasets_to_split="train")
    with pytest.raises(ConfigurationError, match=r"names of datasets \('train'\), got 'tain'"):
        DataConfig(datasets_to_split=["tain"]).open({"train": columns()})
    (shard,) = split(columns(), 1)
    for options in ({"batch_size": 0}, {"prefetch_batches": -1}, {"batch_format": "torch"}):
        with pytest.raises(ConfigurationError):
            shard.iter_batches(**options)
    few = split(columns(3), 4)
    with pytest.raises(ConfigurationError, match="at least 1 rows per shard for a batch, got a shard with 0"):
        few[0].iter_batches()
    with pytest.raises(
        ConfigurationError, match=r"at least 600 rows per shard for a batch \(drop_last=True\), got a shard with 501"
    ):
        split(columns(), 2)[1].iter_batches(batch_size=600, drop_last=True)


def test_rows_of_a_group_are_kept_together(tmp_path: Path) -> None:
    groups = np.repeat(np.arange(40), np.random.default_rng(1).integers(1, 60, 40))
    dataset = {"group": groups, "id": np.arange(len(groups))}
    pyarrow.parquet.write_table(pa.table(dataset), tmp_path / "groups.parquet", row_group_size=50)
    for source in (dataset, tmp_path / "groups.parquet"):
        for world_size in (1, 2, 3, 4):
            shards = split(source, world_size, keep_together={"train": "group"})
            groups_of_shards = [set(shard.to_table()["group"].to_pylist()) for shard in shards]
            assert sum(map(len, groups_of_shards)) == len(set().union(*groups_of_shards)) == 40
            assert sum(shard.count() for shard in shards) == len(groups)
            assert max(shard.count() for shard in shards) - len(groups) / world_size < 60


def test_rows_that_cannot_be_kept_together_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"the same 'group' next to each other, got some apart\. Sort"):
        split({"group": [1, 2, 1]}, 2, keep_together={"train": "group"})
    with pytest.raises(ConfigurationError, match=r"column 'query' by which to keep rows together, got 'group'"):
        split({"group": [1, 2, 1]}, 2, keep_together={"train": "query"})


def test_memory_stays_constant_while_a_large_dataset_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    schema = pa.schema([("x", pa.float64())])
    with pyarrow.parquet.ParquetWriter(file, schema, use_dictionary=False) as writer:
        for number in range(40):  # 4 MB each
            writer.write_table(pa.table({"x": np.random.default_rng(number).random(500_000)}, schema=schema))
    code = f"""
from pathlib import Path
from drivetrain import DataConfig

def own_megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1e3

(shards,) = DataConfig().configure({{"train": {str(file)!r}}}, 1)
batches = shards["train"].iter_batches(batch_size=10_000, local_shuffle_buffer_size=100_000)
sizes, rows = [], 0
for number, batch in enumerate(batches):
    rows += len(batch["x"])
    sizes += [own_megabytes()] if number % 100 == 0 else []
print(rows, max(sizes[2:]) - sizes[1])
"""
    output = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert int(output[0]) == 20_000_000
    assert float(output[1]) < 40, f"grew by {output[1]} MB while 160 MB were read"


@pytest.mark.parametrize("kind", ["table", "parquet", "arrow"])
def test_writing_to_tensors_does_not_change_the_next_epoch(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    dataset = {
        "table": lambda: pa.table(columns()),
        "parquet": lambda: parquet_files(tmp_path),
        "arrow": lambda: arrow_file(tmp_path),
    }[kind]()
    (shard,) = split(dataset, 1)
    batches = shard.iter_torch_batches(batch_size=64)
    for _ in range(2):
        read = []
        for batch in batches:
            read += batch["id"].tolist()
            batch["id"].zero_()
        assert read == list(range(ROWS))


def test_array_type_of_a_column_depends_only_on_the_batch(tmp_path: Path) -> None:
    """Not on the row groups, nor on nulls or lists of other lengths in the same row group."""
    numbers = [*range(10), None, *range(11, 20)]
    lists = [[1.0, 2.0]] * 9 + [[3.0]] * 11
    table = pa.table({"number": numbers, "list": lists, "flag": [True, False] * 10})
    for group_rows in (1, 3, 7, 20):
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=group_rows)
        for dataset in (table, str(tmp_path / "rows.parquet")):
            (shard,) = split(dataset, 1)
            first, second, third, fourth = shard.iter_batches(batch_size=5)
            assert [batch["number"].dtype.kind for batch in (first, second, third, fourth)] == ["i", "i", "f", "i"]
            assert first["list"].shape == (5, 2)
            assert second["list"].dtype == object
            assert third["list"].shape == (5, 1)
            assert np.isnan(third["number"][0])
            assert fourth["number"].tolist() == [15, 16, 17, 18, 19]
            assert first["flag"].dtype == bool


def test_tables_without_rows_are_skipped(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows, none = pa.table({"x": [1.0, 2.0]}), pa.table({"x": pa.array([], pa.float64())})
    for name, table in (("0", none), ("1", rows), ("2", none)):
        pyarrow.feather.write_feather(table, tmp_path / f"{name}.feather")
    (shard,) = split(str(tmp_path), 1)
    for batch_size in (None, 1, 2):
        batches = shard.iter_torch_batches(batch_size=batch_size)
        assert [value for batch in batches for value in batch["x"].tolist()] == [1.0, 2.0]
