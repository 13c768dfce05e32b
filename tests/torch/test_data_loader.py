"""``prepare_data_loader`` with various data loaders."""

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import drivetrain
from drivetrain import ConfigurationError, Result, TrainingFailedError
from drivetrain_torch import prepare_data_loader
from drivetrain_torch._loader import PreparedLoader, map_tensors, shard
from tests.torch.conftest import gather


class Numbers(Dataset):
    """The numbers from 0 to length - 1."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    """The numbers 0 to 11, as an iterable dataset."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class PairsOfNeighbours(BatchSampler):
    """A custom batch sampler."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(12)), batch_size=2, drop_last=False)


class NamedLoader(DataLoader):
    """A subclass with the constructor of DataLoader."""


class RenamedLoader(DataLoader):
    """A subclass with a different constructor."""

    def __init__(self, name: str) -> None:
        super().__init__(Numbers())


def flatten(batches: Any) -> list[int]:
    return [number for batch in batches for number in (batch.tolist() if isinstance(batch, torch.Tensor) else [batch])]


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=2),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "shuffled with a generator": lambda: DataLoader(
        Numbers(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "without batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "in worker processes": lambda: DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"),
    "plain batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 3, drop_last=True)
    ),
    "own DistributedSampler": lambda: DataLoader(Numbers(), batch_size=2, sampler=DistributedSampler(Numbers())),
    "own DistributedSampler in batches": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(DistributedSampler(Numbers()), 2, drop_last=False)
    ),
    "subclass": lambda: NamedLoader(Numbers(), batch_size=2),
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "subset": lambda: DataLoader(Numbers(), batch_size=2, sampler=SubsetRandomSampler(range(12))),
    "weighted": lambda: DataLoader(Numbers(), sampler=WeightedRandomSampler([1.0] * 12, 12, replacement=False)),
    "with replacement": lambda: DataLoader(Numbers(), sampler=RandomSampler(Numbers(), replacement=True)),
    "other length": lambda: DataLoader(Numbers(), sampler=RandomSampler(Numbers(), num_samples=7)),
    "own batch sampler": lambda: DataLoader(Numbers(), batch_sampler=PairsOfNeighbours()),
    "list as batch sampler": lambda: DataLoader(Numbers(), batch_sampler=[[0, 1], [2, 3]]),
}

UNSHARDED = {
    "iterable": "Stream is an IterableDataset",
    "subset": "SubsetRandomSampler",
    "weighted": "WeightedRandomSampler",
    "with replacement": "RandomSampler",
    "other length": "RandomSampler",
    "own batch sampler": "the batch sampler PairsOfNeighbours",
    "list as batch sampler": "the batch sampler list",
}


def two_epochs(config: dict[str, Any]) -> list[Any]:
    """Return for each rank its data of two epochs, the warnings it received, and the length of its loader."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = prepare_data_loader(LOADERS[config["loader"]](), **config.get("options", {}))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(flatten(loader))
    sized = not isinstance(loader.dataset, IterableDataset)
    return gather((epochs, [str(warning.message) for warning in caught], len(loader) if sized else None))


@pytest.mark.parametrize("loader", [name for name in LOADERS if name not in UNSHARDED])
def test_shards_are_disjoint_and_complete_in_every_epoch(fit: Callable[..., Result], loader: str):
    (first, messages, batches), (second, *_) = fit(two_epochs, {"loader": loader}).return_value
    for mine, theirs in zip(first, second, strict=True):
        assert len(mine) == len(theirs) == 6
        assert sorted(mine + theirs) == list(range(12))
    assert messages == []
    assert batches == {"without batches": 6, "plain batch sampler": 2}.get(loader, 3)
    if loader in ("in order", "in worker processes", "subclass"):
        assert first == [[0, 2, 4, 6, 8, 10]] * 2
    else:
        assert first[0] != first[1], "each epoch has a different order"


@pytest.mark.parametrize("loader", list(UNSHARDED))
def test_data_that_cannot_be_sharded_is_kept_whole_with_one_warning(fit: Callable[..., Result], loader: str):
    for epochs, messages, _ in fit(two_epochs, {"loader": loader}).return_value:
        assert [len(epoch) for epoch in epochs] == [{"other length": 7, "list as batch sampler": 4}.get(loader, 12)] * 2
        (message,) = messages
        assert UNSHARDED[loader] in message
        assert "add_dist_sampler=False" in message


@pytest.mark.parametrize("loader", ["in order", "iterable", "own batch sampler"])
def test_without_a_sampler_every_rank_reads_everything_without_a_warning(fit: Callable[..., Result], loader: str):
    outcome = fit(two_epochs, {"loader": loader, "options": {"add_dist_sampler": False}}).return_value
    assert all(epochs == [list(range(12))] * 2 and messages == [] for epochs, messages, _ in outcome)


@pytest.mark.parametrize("loader", ["in order", "shuffled", "iterable", "subset"])
def test_single_worker_reads_everything_without_a_warning(fit: Callable[..., Result], loader: str):
    ((epochs, messages, _),) = fit(two_epochs, {"loader": loader}, workers=0).return_value
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert messages == []


@pytest.mark.parametrize(("drop_last", "read"), [(False, [6, 6]), (True, [5, 5])])
def test_remainder_is_dropped_only_if_the_loader_drops_the_last_batch(drop_last: bool, read: list[int]):
    loader = DataLoader(Numbers(11), batch_size=1, drop_last=drop_last)
    shards = [flatten(shard(loader, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(part) for part in shards] == read
    assert len(set(shards[0] + shards[1])) == (10 if drop_last else 11)


def collate(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers)


def initialize(worker: int) -> None:
    pass


ARGUMENTS: dict[str, Any] = {
    "batch_size": 4,
    "drop_last": True,
    "num_workers": 2,
    "collate_fn": collate,
    "timeout": 7,
    "worker_init_fn": initialize,
    "generator": torch.Generator(),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory": True,
    "in_order": False,
}


@pytest.mark.parametrize("name", [*ARGUMENTS, "dataset", "multiprocessing_context"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_every_argument_of_the_loader_is_kept(name: str, sharded: bool):
    given = DataLoader(Numbers(), shuffle=True, multiprocessing_context="forkserver", **ARGUMENTS)
    loader = shard(given, rank=1, world_size=2) if sharded else given
    prepared = PreparedLoader(loader, device=torch.device("cpu"), auto_transfer=True)
    assert getattr(prepared, name) == getattr(given, name)
    if name in ARGUMENTS:
        assert getattr(prepared, name) == ARGUMENTS[name]


def test_prepared_loader_is_a_data_loader_and_passes_the_epoch_to_its_sampler(fit: Callable[..., Result]):
    def train() -> None:
        loader = prepare_data_loader(DataLoader(Numbers(), shuffle=True))
        assert isinstance(loader, DataLoader)
        assert isinstance(loader.sampler, DistributedSampler)
        assert loader.sampler.shuffle
        loader.sampler.set_epoch(3)
        assert loader.sampler.epoch == 3
        loader.set_epoch(4)
        assert loader.sampler.epoch == 4

    fit(train)


def test_subclass_keeps_its_class_and_extra_attributes(fit: Callable[..., Result]):
    def train() -> None:
        loader = NamedLoader(Numbers())
        assert type(shard(loader, rank=0, world_size=2)) is NamedLoader
        extended = DataLoader(Stream())
        extended.custom = "kept"
        assert prepare_data_loader(extended, add_dist_sampler=False).custom == "kept"

    fit(train)


def test_subclass_that_cannot_be_recreated_is_refused_with_a_remedy():
    with pytest.raises(ConfigurationError, match=r"RenamedLoader .*\. Create it with a DistributedSampler yourself"):
        shard(RenamedLoader("mine"), rank=0, world_size=2)


def test_argument_that_is_not_a_loader_is_refused(fit: Callable[..., Result]):
    def train() -> None:
        prepare_data_loader([1, 2])

    with pytest.raises(TrainingFailedError, match=r"expected a torch.utils.data.DataLoader, got \[1, 2\]"):
        fit(train)


Point = namedtuple("Point", ["x", "y"])
CPU = torch.zeros(2)


class Movable:
    """A batch class as defined by a third-party library."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> "Movable":
        return Movable(device.type)


@pytest.mark.parametrize(
    "batch",
    [
        CPU,
        [CPU, CPU],
        (CPU, "text", 3, None),
        {"a": CPU, "b": {"c": [CPU]}},
        OrderedDict(a=CPU),
        Point(CPU, Point(CPU, 1)),
        [{"a": (CPU, [Point(CPU, CPU)])}],
        Movable(),
    ],
    ids=["tensor", "list", "tuple", "dict", "OrderedDict", "namedtuple", "nested", "to"],
)
def test_nested_batches_are_moved_and_keep_their_structure(batch: Any):
    dataset = [batch]
    loader = PreparedLoader(
        DataLoader(dataset, batch_size=None, collate_fn=lambda item: item),
        device=torch.device("meta"),
        auto_transfer=True,
    )
    (moved,) = loader
    assert structure(moved, "meta") == structure(batch, "cpu")
    assert structure(batch, "cpu"), "the original batch is unchanged"


def structure(value: Any, device: str) -> Any:
    """Return the nested types of a value, and check that its tensors are on the device."""
    if isinstance(value, (torch.Tensor, Movable)):
        assert torch.device(value.device).type == device
        return type(value)
    if isinstance(value, dict):
        return type(value), {key: structure(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [structure(item, device) for item in value]
    return value


def test_batches_are_unchanged_if_they_are_not_moved(fit: Callable[..., Result]):
    def train() -> bool:
        batch = Movable()
        loader = DataLoader([batch], batch_size=None, collate_fn=lambda item: item)
        (loaded,) = prepare_data_loader(loader, add_dist_sampler=False, move_to_device=False)
        return loaded is batch

    assert fit(train, workers=0).return_value


def test_strings_and_numbers_are_unchanged():
    assert map_tensors(lambda tensor: tensor.to("meta"), {"a": "text", "b": [1, 2.5, None]}) == {
        "a": "text",
        "b": [1, 2.5, None],
    }


def test_loader_with_persistent_workers_can_be_iterated_repeatedly(fit: Callable[..., Result]):
    def train() -> list[Any]:
        loader = prepare_data_loader(DataLoader(Numbers(), num_workers=1, persistent_workers=True))
        rank = drivetrain.get_context().get_world_rank()
        assert [flatten(loader) for _ in range(3)] == [list(range(rank, 12, 2))] * 3
        return gather(len(loader))

    assert fit(train).return_value == [6, 6]
