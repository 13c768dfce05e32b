"""``DataConfig(shuffle=...)``: an order that depends on the seed and the epoch, and not on the number of workers."""

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from drivetrain import ConfigurationError, DataConfig
from drivetrain_data import TableShard
from tests.data.test_position import ROWS, SOURCES

WINDOW = 160


def shards_of(dataset: Any, world_size: int, state: Any = None, *, seed: int = 5, **config: Any) -> list[TableShard]:
    """Return the shards as the workers receive them, after they have loaded a position."""
    options = {"positions": {"train": state}} if state else {}
    configured = DataConfig(shuffle={"train": seed}, shuffle_rows=WINDOW, **config).configure(
        {"train": dataset}, world_size, **options
    )
    shards = [pickle.loads(pickle.dumps(each["train"])) for each in configured]
    for shard in shards if state else ():
        shard.load_state_dict(state)
    return shards


def read(shards: list[TableShard], batches: int | None = None, **options: Any) -> list[int]:
    """Return the rows of an epoch, or of its first batches, of one rank after the other."""
    return [
        row
        for shard in shards
        for batch in itertools.islice(shard.iter_batches(batch_size=16, **options), batches)
        for row in batch["id"].tolist()
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_order_is_the_same_on_any_number_of_workers(source: str, tmp_path: Path):
    dataset = SOURCES[source](tmp_path)
    orders = []
    for world_size in (1, 2, 3, 5):
        shards = shards_of(dataset, world_size)
        epochs = [read(shards) for _ in range(2)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
        orders.append(epochs)
    assert orders == [orders[0]] * 4
    first, second = orders[0]
    assert first != second
    assert read(shards_of(dataset, 2, seed=6)) != first
    places = [len({row // (WINDOW // 8) for row in first[start : start + 16]}) for start in range(0, 900, 16)]
    assert np.mean(places) > 4, "the rows of a batch are from different places in the dataset"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("options", [{}, {"local_shuffle_buffer_size": 20, "local_shuffle_seed": 3}], ids=str)
def test_epoch_is_resumed_by_another_number_of_workers(source: str, options: dict[str, Any], tmp_path: Path):
    dataset = SOURCES[source](tmp_path)
    shards = shards_of(dataset, 2)
    read(shards)
    rows = Counter(read(shards, 9, **options))
    for world_size, batches in ((3, 4), (3, 2), (1, 5), (5, None)):
        state = json.loads(json.dumps(shards[0].state_dict()))
        assert state["epoch"] == 1
        shards = shards_of(dataset, world_size, state)
        rows += Counter(read(shards, batches, **options))
    assert rows == Counter(range(ROWS))
    following = read(shards)
    assert sorted(following) == list(range(ROWS))


def test_remaining_batches_are_those_of_the_undisturbed_epoch(tmp_path: Path):
    dataset = SOURCES["files"](tmp_path)
    undisturbed = shards_of(dataset, 2)
    read(undisturbed)
    whole = [read([shard]) for shard in undisturbed]
    shards = shards_of(dataset, 2)
    read(shards)
    first = [read([shard], 7) for shard in shards]
    resumed = shards_of(dataset, 2, shards[0].state_dict())
    assert [start + read([shard]) for start, shard in zip(first, resumed, strict=True)] == whole


def test_dataset_that_every_worker_reads_has_the_same_order_on_each():
    shards = shards_of(SOURCES["table"](Path()), 2, datasets_to_split=[])
    one, other = (read([shard]) for shard in shards)
    assert one == other
    assert sorted(one) == list(range(ROWS))
    assert one != list(range(ROWS))


def test_window_of_one_row_still_mixes_the_rows():
    (shards,) = DataConfig(shuffle={"train": 0}, shuffle_rows=1).configure({"train": {"id": np.arange(50)}}, 1)
    rows = read([shards["train"]])
    assert sorted(rows) == list(range(50))
    assert rows != list(range(50))


def test_settings_that_cannot_be_used_are_refused():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": [1, 2]}).to_iterable_dataset()
    with pytest.raises(ConfigurationError, match=r"\[DT-740\].*got an IterableDataset"):
        shards_of(stream, 1)
    with pytest.raises(ConfigurationError, match=r"\[DT-109\].*shuffle"):
        DataConfig(shuffle={"other": 1}).open({"train": pa.table({"id": [1]})})
    for wrong in ({"shuffle": {"train": -1}}, {"shuffle": {"train": "a"}}, {"shuffle_rows": 0}):
        with pytest.raises(ConfigurationError, match=r"\[DT-101\] DataConfig\(shuffle"):
            DataConfig(**wrong)
    with pytest.raises(ConfigurationError, match=r"\[DT-102\].*keep_together"):
        DataConfig(shuffle={"train": 1}, keep_together={"train": "id"})
