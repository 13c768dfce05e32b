"""Hugging Face datasets: the same values and orders as when they are iterated over in one process."""

import functools
import itertools
from typing import Any

import cloudpickle
import numpy as np
import pytest

from drivetrain import ConfigurationError, DataConfig
from drivetrain_data import TableShard

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def split(dataset: Any, world_size: int = 2, state: dict[str, Any] | None = None) -> list[TableShard]:
    """Return the shards after pickling, in the same way as workers receive them."""
    config = DataConfig()
    positions = {"positions": {"train": state}} if state else {}
    shards = config.configure(config.open({"train": dataset}), world_size, **positions)
    received: list[TableShard] = cloudpickle.loads(cloudpickle.dumps([shard["train"] for shard in shards]))
    return received


def values(shard: TableShard, column: str = "x", batch_size: int = 3) -> list[Any]:
    return [value.tolist() for batch in shard.iter_batches(batch_size=batch_size) for value in batch[column]]


def pictures(widths: list[int]) -> Any:
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    images = [image.fromarray(generator.integers(0, 255, (4, width, 3), np.uint8)) for width in widths]
    features = {
        "image": datasets.Image(),
        "x": datasets.Value("float64"),
        "grid": datasets.Array2D((2, 2), "int32"),
        "text": datasets.Value("string"),
    }
    columns = {"image": images, "x": [0.1 * n for n in range(len(widths))], "grid": [[[1, 2], [3, 4]]] * len(widths)}
    columns["text"] = [str(n) for n in range(len(widths))]
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_transform_runs_in_the_worker_on_the_rows_of_each_batch() -> None:
    base = datasets.Dataset.from_dict({"x": list(range(20))})
    transformed = base.with_transform(
        lambda rows: {"twice": [2 * x for x in rows["x"]], "rows": [len(rows["x"])] * len(rows["x"])}
    )
    shards = split(transformed)
    assert shards[0].schema().names == ["twice", "rows"]
    assert [values(shard, "twice") for shard in shards] == [list(range(0, 20, 2)), list(range(20, 40, 2))]
    assert values(shards[0], "rows") == [3] * 9 + [1]
    torch = pytest.importorskip("torch")
    padded = base.with_transform(lambda rows: {"ids": torch.ones(len(rows["x"]), max(rows["x"]) + 1)})
    shapes = [tuple(batch["ids"].shape) for batch in split(padded, 1)[0].iter_torch_batches(batch_size=4)]
    assert shapes == [(4, 4), (4, 8), (4, 12), (4, 16), (4, 20)]


def test_errors_of_a_transform_name_the_dataset_and_the_column() -> None:
    base = datasets.Dataset.from_dict({"x": list(range(4))})
    with pytest.raises(ConfigurationError, match=r"DT-743.*'train'.*as many rows as it gets, got 1 rows for 3"):
        values(split(base.with_transform(lambda rows: {"x": [1]}), 1)[0])
    with pytest.raises(ConfigurationError, match=r"DT-743.*'train'.*column 'x'"):
        values(split(base.with_transform(lambda rows: {"x": [object() for _ in rows["x"]]}), 1)[0])


def test_columns_of_a_format_are_selected() -> None:
    dataset = pictures([5, 5, 5])
    for selected, names in (
        (dataset.with_format(columns=["x"]), ["x"]),
        (dataset.with_format("torch", columns=["x", "image"]), ["image", "x"]),
        (dataset.remove_columns("image").with_format("arrow", columns=["x"]), ["x"]),
        (dataset.with_format("numpy", columns=["x"], output_all_columns=True), ["x", "image", "grid", "text"]),
    ):
        (shard,) = split(selected, 1)
        assert shard.schema().names == names
        assert list(next(iter(shard.iter_batches()))) == names
        assert shard.to_pandas().columns.tolist() == names


@pytest.mark.parametrize("widths", [[5, 5, 5, 5], [5, 6, 7, 8]], ids=["equal shapes", "different shapes"])
@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_values_are_those_of_the_format(kind: str | None, widths: list[int]) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    dataset = pictures(widths).with_format(kind)
    (shard,) = split(dataset, 1)
    batches = list(shard.iter_batches(batch_size=2))
    for start, batch in zip((0, 2), batches, strict=True):
        expected = dataset[start : start + 2]
        for name in ("image", "x", "grid", "text"):
            for got, value in zip(batch[name], expected[name], strict=True):
                np.testing.assert_array_equal(got, np.asarray(value))
            assert kind is None or name == "text" or batch[name][0].dtype == np.asarray(expected[name][0]).dtype
    assert batches[0]["image"].shape == ((2,) if len(set(widths)) > 1 else np.asarray(dataset[:2]["image"]).shape)
    assert batches[0]["grid"].shape == (2, 2, 2)
    frame = shard.to_pandas()
    np.testing.assert_array_equal(frame["image"][3], np.asarray(dataset[3]["image"]))
    for row, expected in zip(shard.iter_rows(), dataset, strict=True):
        np.testing.assert_array_equal(row["image"], np.asarray(expected["image"]))
    shuffled = shard.iter_batches(batch_size=3, local_shuffle_buffer_size=4, local_shuffle_seed=1)
    assert sorted(text for batch in shuffled for text in batch["text"]) == list("0123")


def test_torch_batches_of_a_torch_format_are_those_of_the_dataset() -> None:
    torch = pytest.importorskip("torch")
    dataset = pictures([5, 5, 5]).remove_columns("text").with_format("torch")
    (batch,) = split(dataset, 1)[0].iter_torch_batches()
    for name, expected in dataset[:].items():
        assert torch.equal(batch[name], torch.as_tensor(expected))
        assert batch[name].dtype == expected.dtype
    (mixed,) = split(pictures([5, 6]).remove_columns("text"), 1)
    with pytest.raises(ConfigurationError, match="column 'image' of type object whose rows have different shapes"):
        next(iter(mixed.iter_torch_batches()))


def test_missing_images_and_streams_of_images() -> None:
    dataset = pictures([5, 6, 7, 8])
    with_gap = datasets.Dataset.from_dict(
        {"image": [dataset[0]["image"], None]}, features=datasets.Features(image=datasets.Image())
    )
    (batch,) = split(with_gap, 1)[0].iter_batches()
    assert batch["image"][1] is None
    np.testing.assert_array_equal(batch["image"][0], np.asarray(dataset[0]["image"]))
    shards = split(dataset.to_iterable_dataset(num_shards=2))
    widths = [row.shape for shard in shards for batch in shard.iter_batches() for row in batch["image"]]
    assert widths == [(4, width, 3) for width in (5, 6, 7, 8)]
    assert shards[0].schema().names == ["image", "x", "grid", "text"]


def test_format_does_not_slow_down_datasets_without_one() -> None:
    (shard,) = split(datasets.Dataset.from_dict({"x": list(range(10))}), 1)
    assert not shard.reader.converts


def test_epochs_of_a_shuffled_stream_have_the_orders_of_set_epoch() -> None:
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=1, buffer_size=5)
    stream.set_epoch(2)
    expected = []
    for epoch in (2, 3, 4):
        nodes = [split_dataset_by_node(stream, rank, 2) for rank in range(2)]
        for node in nodes:
            node.set_epoch(epoch)
        expected.append([[row["x"] for row in node] for node in nodes])
    assert expected[0] != expected[1] != expected[2]

    shards = split(stream)
    epochs = [[values(shard) for shard in shards] for _ in range(3)]
    assert epochs == expected
    assert sorted(itertools.chain(*epochs[2])) == list(range(40))

    shards = split(stream)
    assert [values(shard) for shard in shards] == expected[0]
    iterators = [iter(shard.iter_batches(batch_size=3)) for shard in shards]
    first = [next(batches)["x"].tolist() for batches in iterators]
    state = shards[0].state_dict()
    resumed = split(stream, state=state)
    for shard in resumed:
        shard.load_state_dict(state)
    rest = [values(shard) for shard in resumed]
    assert [start + end for start, end in zip(first, rest, strict=True)] == expected[1]
    state = resumed[0].state_dict()
    later = split(stream, state=state)
    for shard in later:
        shard.load_state_dict(state)
    assert [values(shard) for shard in later] == [values(shard) for shard in resumed] == expected[2]


def test_dataset_dict_is_refused_with_its_splits() -> None:
    rows = datasets.Dataset.from_dict({"x": [1, 2]})
    for splits in (datasets.DatasetDict(train=rows, test=rows), datasets.IterableDatasetDict(train=rows, test=rows)):
        with pytest.raises(ConfigurationError) as error:
            split(splits)
        assert error.value.code == "DT-744"
        assert "datasets={'train': splits['train'], 'test': splits['test']}" in str(error.value)


def test_datasets_without_rows_are_refused() -> None:
    rows = datasets.Dataset.from_dict({"x": [1, 2]})
    with pytest.raises(ConfigurationError, match=r"DT-741.*'train'.*at least one row, got none"):
        split(rows.select([]))
    empty = datasets.IterableDataset.from_generator(functools.partial(iter, ()))
    with pytest.raises(ConfigurationError, match=r"DT-741.*'train'.*at least one row for each worker"):
        values(split(empty)[0])
