"""An interrupted epoch resumes with the same or another number of workers: each row is read exactly once."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from drivetrain import ConfigurationError, DataConfig
from drivetrain_data import TableShard

ROWS = 1_003
Batch = list[int]


def parquet_files(directory: Path) -> str:
    for number, part in enumerate(np.array_split(np.arange(ROWS), 3)):
        pyarrow.parquet.write_table(pa.table({"id": part}), directory / f"{number}.parquet", row_group_size=100)
    return str(directory)


def hugging_face(directory: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"id": list(range(ROWS))})


SOURCES: dict[str, Callable[[Path], Any]] = {
    "table": lambda directory: pa.table({"id": np.arange(ROWS)}),
    "files": parquet_files,
    "hugging face": hugging_face,
}
ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"local_shuffle_buffer_size": 50, "local_shuffle_seed": 3},
    "full batches only": {"drop_last": True},
}


def shards_of(dataset: Any, world_size: int, state: dict[str, Any] | None = None, **config: Any) -> list[TableShard]:
    options = {"positions": {"train": state}} if state else {}
    configured = DataConfig(**config).configure({"train": dataset}, world_size, **options)
    return [shards["train"] for shards in configured]


def resume(dataset: Any, world_size: int, state: dict[str, Any] | None) -> list[TableShard]:
    """Return the shards of the next attempt, after the state was written to a checkpoint and read."""
    state = json.loads(json.dumps(state))
    shards = shards_of(dataset, world_size, state)
    if state is not None:
        for shard in shards:
            shard.load_state_dict(state)
    return shards


def read_batches(
    shards: list[TableShard], batches: int | None, **options: Any
) -> tuple[list[list[Batch]], dict[str, Any]]:
    """Return some batches of each rank (None for all remaining ones), and the state after them."""
    iterators = [iter(shard.iter_batches(batch_size=17, **options)) for shard in shards]
    taken = [[batch["id"].tolist() for batch in itertools.islice(each, batches)] for each in iterators]
    states = [shard.state_dict() for shard in shards]
    assert all(state == states[0] for state in states)
    return taken, states[0]


def ids(*batches: list[list[Batch]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(itertools.chain.from_iterable(batches))))


@pytest.mark.parametrize("sizes", [(3, 2, 4), (1, 4, 3), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("order", ["in order", "shuffled"])
@pytest.mark.parametrize("kind", SOURCES)
def test_each_row_is_read_once_when_the_number_of_workers_changes(
    kind: str, order: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    dataset = SOURCES[kind](tmp_path)
    read, state = [], None
    for size, batches in zip(sizes, (5, 4, None), strict=True):
        taken, state = read_batches(resume(dataset, size, state), batches, **ORDERS[order])
        read.append(taken)
    assert ids(*read) == list(range(ROWS))

    following, _ = read_batches(resume(dataset, 2, state), None, **ORDERS[order])
    assert ids(following) == list(range(ROWS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", SOURCES)
def test_same_batches_follow_with_the_same_number_of_workers(kind: str, order: str, tmp_path: Path) -> None:
    dataset, options = SOURCES[kind](tmp_path), ORDERS[order]
    undisturbed, _ = read_batches(shards_of(dataset, 2), None, **options)

    first, state = read_batches(shards_of(dataset, 2), 3, **options)
    second, state = read_batches(resume(dataset, 2, state), 4, **options)
    third, state = read_batches(resume(dataset, 2, state), None, **options)

    assert [[*a, *b, *c] for a, b, c in zip(first, second, third, strict=True)] == undisturbed
    assert state["batches"] == 0


def test_epoch_that_was_split_again_resumes_with_the_same_number_of_workers(tmp_path: Path) -> None:
    dataset = parquet_files(tmp_path)
    first, state = read_batches(shards_of(dataset, 3), 4)
    second, state = read_batches(resume(dataset, 2, state), 3)
    third, state = read_batches(resume(dataset, 2, state), 2)
    fourth, _ = read_batches(resume(dataset, 4, state), None)
    assert ids(first, second, third, fourth) == list(range(ROWS))


def test_state_counts_consumed_batches_and_not_prefetched_ones() -> None:
    (shard,) = shards_of({"id": np.arange(100)}, 1)
    batches = iter(shard.iter_batches(batch_size=10, prefetch_batches=5))
    assert shard.state_dict()["batches"] == 0
    for count in range(1, 11):
        next(batches)
        assert shard.state_dict()["batches"] == count
    assert next(batches, None) is None
    assert shard.state_dict()["batches"] == 0


def test_state_of_a_tensorflow_dataset_leaves_out_no_rows_that_tensorflow_has_read_ahead() -> None:
    pytest.importorskip("tensorflow")
    rows = {"x": np.arange(100), "y": np.arange(100)}
    (shard,) = shards_of(rows, 1)
    ahead = iter(shard.to_tf("x", "y", batch_size=10).prefetch(5))
    next(ahead)
    (resumed,) = resume(rows, 1, shard.state_dict())
    assert [int(x) for batch, _ in resumed.to_tf("x", "y", batch_size=10) for x in batch] == list(range(100))
    assert (resumed.state_dict()["batches"], resumed.state_dict()["epoch"]) == (0, 1)


def test_new_iteration_is_a_new_epoch() -> None:
    (shard,) = shards_of({"id": np.arange(100)}, 1)
    next(iter(shard.iter_batches(batch_size=10)))
    second = iter(shard.iter_batches(batch_size=20))
    assert next(second)["id"][0] == 0
    assert shard.state_dict()["batches"] == 1


def test_unsplit_dataset_resumes_with_any_number_of_workers() -> None:
    config = {"datasets_to_split": []}
    first, state = read_batches(shards_of({"id": np.arange(100)}, 2, **config), 2)
    shards = shards_of({"id": np.arange(100)}, 3, state, **config)
    for shard in shards:
        shard.load_state_dict(state)
    second, _ = read_batches(shards, None)
    assert [ids([first[0], rest]) for rest in second] == [list(range(100))] * 3


def test_stream_resumes_with_the_same_number_of_workers() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": list(range(100))}).to_iterable_dataset(num_shards=2)
    first, state = read_batches(shards_of(stream, 2), 1)
    second, _ = read_batches(resume(stream, 2, state), None)
    assert ids(first, second) == list(range(100))
    with pytest.raises(ConfigurationError, match="split once, among 1 workers, got one that was split among 2 workers"):
        resume(stream, 1, state)


def test_stream_of_a_single_file_skips_only_the_rows_of_its_rank() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"id": list(range(100))}).to_iterable_dataset(num_shards=1)
    first, state = read_batches(shards_of(stream, 2), 1)
    second, _ = read_batches(resume(stream, 2, state), None)
    assert ids(first, second) == list(range(100))


def test_states_that_do_not_match_are_rejected() -> None:
    (shard,) = shards_of({"id": np.arange(100)}, 1)
    with pytest.raises(ConfigurationError, match=r"expected the return value of state_dict\(\), got"):
        shard.load_state_dict({"epoch": 3})
    _, other = read_batches(shards_of({"id": np.arange(90)}, 1), 2)
    with pytest.raises(ConfigurationError, match="with 100 rows, got the state of a dataset with 90 rows"):
        shard.load_state_dict(other)
    _, of_two = read_batches(shards_of({"id": np.arange(100)}, 2), 2)
    with pytest.raises(ConfigurationError, match="split once, among 1 workers, got one that was split among 2 workers"):
        shard.load_state_dict(of_two)

    next(iter(shard.iter_batches(batch_size=17, local_shuffle_buffer_size=20)))
    with pytest.raises(ConfigurationError, match="Add local_shuffle_seed"):
        shard.state_dict()

    _, state = read_batches(shards_of({"id": np.arange(100)}, 1), 2)
    shard.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="expected the same batch options as in the epoch that is resumed"):
        next(iter(shard.iter_batches(batch_size=5)))
    assert next(iter(shard.iter_batches(batch_size=17)))["id"][0] == 34


def test_epoch_with_rows_kept_together_is_not_split_again() -> None:
    dataset = {"id": np.arange(100), "group": np.arange(100) // 10}
    config = {"keep_together": {"train": "group"}}
    _, state = read_batches(shards_of(dataset, 2, **config), 1)
    with pytest.raises(ConfigurationError, match="split once, among 3 workers, got one that was split among 2 workers"):
        shards_of(dataset, 3, state, **config)[0].load_state_dict(state)
