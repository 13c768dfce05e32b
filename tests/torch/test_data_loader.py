"""``prepare_data_loader`` with various data loaders."""

import copy
import pickle
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
from drivetrain_torch._loader import PreparedLoader, map_tensors, wrap
from drivetrain_torch._sampling import shard
from tests.torch.conftest import gather


class Numbers(Dataset):
    """The numbers from 0 to length - 1."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index) if isinstance(index, list) else index


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
    """A subclass with a different constructor, a changed iteration, and state that methods change."""

    def __init__(self, offset: int, **options: Any) -> None:
        super().__init__(Numbers(), collate_fn=lambda numbers: torch.tensor(numbers) + offset, **options)
        self.limit: int | None = None
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, batch in enumerate(super().__iter__()):
            if number == self.limit:
                return
            yield batch

    def name(self) -> str:
        return f"pass {self.passes}"


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
    "lists of indices": lambda: DataLoader(
        Numbers(), batch_size=None, sampler=BatchSampler(SequentialSampler(Numbers()), 2, drop_last=False)
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
    if loader in ("in order", "in worker processes", "lists of indices", "subclass"):
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


def shuffled_epochs(config: dict[str, Any]) -> list[str]:
    """Iterate three times, and return the warnings."""
    loader = prepare_data_loader(DataLoader(Numbers(), batch_size=2, shuffle=config["shuffle"]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            if config["set_epoch"]:
                loader.set_epoch(epoch)
            list(loader)
    return [str(each.message) for each in caught]


def test_epochs_in_the_same_order_are_named_in_a_warning(fit: Callable[..., Result]):
    repeated = fit(shuffled_epochs, {"shuffle": True, "set_epoch": False}).return_value
    assert len(repeated) == 2
    assert "reads its rows in the same order as before, because no epoch was passed to it" in repeated[0]
    assert fit(shuffled_epochs, {"shuffle": True, "set_epoch": True}).return_value == []
    assert fit(shuffled_epochs, {"shuffle": False, "set_epoch": False}).return_value == []


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
    prepared = wrap(loader, device=torch.device("cpu"), auto_transfer=True)
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


@pytest.mark.parametrize("workers", [0, 2])
def test_subclass_with_another_constructor_keeps_its_arguments_attributes_and_methods(
    fit: Callable[..., Result], workers: int
):
    def train() -> None:
        given = RenamedLoader(100, batch_size=2)
        given.limit = 2
        loader = prepare_data_loader(given)
        assert isinstance(loader, RenamedLoader)
        step = drivetrain.get_context().get_world_size()
        first = 100 + drivetrain.get_context().get_world_rank()
        assert flatten(loader) == [first + step * number for number in range(4)]
        assert loader.name() == "pass 1"
        loader.limit = 1
        assert len(flatten(loader)) == 2
        assert given.passes == 0, "the given loader is not changed"
        assert flatten(given) == [100, 101, 102, 103]

    fit(train, workers=workers)


def test_prepared_loader_can_be_prepared_again_copied_and_pickled():
    loader = wrap(shard(NamedLoader(Numbers(), batch_size=2), rank=1, world_size=2), device=None, auto_transfer=True)
    for each in (
        wrap(loader, device=None, auto_transfer=True),
        copy.deepcopy(loader),
        pickle.loads(pickle.dumps(loader)),
    ):
        assert isinstance(each, NamedLoader)
        assert isinstance(each, PreparedLoader)
        assert flatten(each) == list(range(1, 12, 2))


def test_loader_with_running_processes_is_refused():
    loader = DataLoader(Numbers(), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    assert len(flatten(loader)) == 12
    with pytest.raises(ConfigurationError, match=r"\[DT-723\].*Prepare the loader before its first iteration"):
        shard(loader, rank=0, world_size=2)


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
    loader = wrap(
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


def order(config: dict[str, Any]) -> list[Any]:
    """Return for each rank the order of its rows in two epochs."""
    rank = drivetrain.get_context().get_world_rank()
    seed, options = config["seed"] + (100 * rank if config.get("by_rank") else 0), {}
    if config["how"] == "generator":
        options = {"generator": torch.Generator().manual_seed(seed)}
    elif config["how"] == "sampler":
        options = {"sampler": RandomSampler(Numbers(64), generator=torch.Generator().manual_seed(seed))}
    elif config["how"] == "manual_seed":
        torch.manual_seed(seed)
    loader = prepare_data_loader(DataLoader(Numbers(64), shuffle=config["how"] != "sampler", **options))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(flatten(loader))
    return gather(epochs)


@pytest.mark.parametrize("how", ["manual_seed", "generator", "sampler"])
def test_seed_of_rank_0_determines_the_order_on_all_ranks(fit: Callable[..., Result], how: str):
    one, other, again = (fit(order, {"how": how, "seed": seed, "by_rank": True}).return_value for seed in (1, 2, 1))
    assert one == again
    assert one != other
    for mine, theirs in zip(*one, strict=True):
        assert sorted(mine + theirs) == list(range(64))


def test_order_without_a_seed_is_the_same_in_every_run(fit: Callable[..., Result]):
    first, second = (fit(order, {"how": "no seed", "seed": 0}).return_value for _ in range(2))
    assert first == second


class Epochs(Dataset):
    """A dataset whose rows depend on the epoch, such as one with a schedule of augmentations."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch


class EpochStream(IterableDataset):
    """The number of the epoch, as an iterable dataset."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([100 * self.epoch])


class Collate:
    """A collate function with a method ``set_epoch``."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers) + 100 * self.epoch

    method = __call__


class OwnEpochLoader(DataLoader):
    """A loader class with its own method ``set_epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return (batch + 100 * self.epoch for batch in super().__iter__())


class EpochBatches(BatchSampler):
    """A custom batch sampler whose inner sampler has a method ``set_epoch``."""

    def __iter__(self) -> Iterator[Any]:
        return ([index + 100 * self.sampler.epoch for index in batch] for batch in super().__iter__())


WITH_EPOCHS: dict[str, Callable[[], DataLoader]] = {
    "dataset": lambda: DataLoader(Epochs()),
    "dataset in worker processes": lambda: DataLoader(Epochs(), num_workers=1, multiprocessing_context="fork"),
    "subset": lambda: DataLoader(torch.utils.data.Subset(Epochs(), range(2))),
    "concatenated datasets": lambda: DataLoader(torch.utils.data.ConcatDataset([Epochs(), Epochs()])),
    "stacked datasets": lambda: DataLoader(
        torch.utils.data.StackDataset(x=Epochs()), collate_fn=lambda rows: torch.tensor([row["x"] for row in rows])
    ),
    "subset of a subset": lambda: DataLoader(
        torch.utils.data.Subset(torch.utils.data.Subset(Epochs(), [0, 1]), [0, 1])
    ),
    "stream": lambda: DataLoader(EpochStream()),
    "stream without batches": lambda: DataLoader(EpochStream(), batch_size=None),
    "chained streams": lambda: DataLoader(torch.utils.data.ChainDataset([EpochStream(), EpochStream()])),
    "collate function": lambda: DataLoader(Numbers(4), collate_fn=Collate()),
    "method as collate function": lambda: DataLoader(Numbers(4), collate_fn=Collate().method),
    "loader": lambda: OwnEpochLoader(Numbers(4)),
    "batch sampler": lambda: DataLoader(
        range(1000), batch_sampler=EpochBatches(DistributedSampler(Numbers(4)), 2, drop_last=False)
    ),
}


@pytest.mark.filterwarnings("ignore:.*prepare_data_loader cannot shard")
@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_reaches_every_part_of_a_loader_that_takes_it(fit: Callable[..., Result], workers: int):
    def train() -> dict[str, list[int]]:
        found = {}
        for name, make in WITH_EPOCHS.items():
            loader = prepare_data_loader(make(), add_dist_sampler="stream" not in name)
            loader.set_epoch(3)
            found[name] = flatten(loader)
        return found

    for name, numbers in fit(train, workers=workers).return_value.items():
        assert numbers, name
        assert {number // 100 for number in numbers} == {3}, name


def test_epoch_that_cannot_reach_running_loader_processes_is_named_in_a_warning():
    loader = wrap(
        DataLoader(Epochs(), num_workers=1, persistent_workers=True, multiprocessing_context="fork"),
        device=None,
        auto_transfer=True,
    )
    loader.set_epoch(1)
    assert flatten(loader) == [100, 101, 102, 103]
    with pytest.warns(UserWarning, match="does not reach Epochs in the loader processes"):
        loader.set_epoch(2)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"num_workers": 1}, {"batch_size": None}], ids=str)
@pytest.mark.parametrize(("rows", "world_size"), [(33, 2), (8, 2), (10, 4), (1, 3)])
def test_rows_without_the_repeated_rows_are_each_row_once(rows: int, world_size: int, options: dict[str, Any]):
    counted, batches = [], set()
    for rank in range(world_size):
        given = DataLoader(Numbers(rows), **{"batch_size": 4, **options})
        loader = wrap(shard(given, rank=rank, world_size=world_size), device=None, auto_transfer=True)
        for batch in loader:
            numbers = flatten([batch])
            counted += numbers[: len(numbers) - loader.repeated_rows]
        batches.add(len(loader))
    assert len(batches) == 1
    if options.get("drop_last"):
        assert len(set(counted)) == len(counted)
    else:
        assert sorted(counted) == list(range(rows))


def test_data_is_sharded_along_a_dimension_of_a_mesh(fit: Callable[..., Result]):
    def train() -> list[Any]:
        rank = drivetrain.get_context().get_world_rank()
        torch.manual_seed(rank)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        by_mesh = prepare_data_loader(DataLoader(Numbers(), shuffle=True), mesh=mesh)
        by_rank = prepare_data_loader(DataLoader(Numbers()), num_replicas=2, rank=rank // 2)
        alone = prepare_data_loader(DataLoader(Numbers(), shuffle=True), num_replicas=1, rank=0)
        return gather([flatten(loader) for loader in (by_mesh, by_rank, alone)])

    first, second, third, fourth = fit(train, workers=4).return_value
    assert first == second
    assert third == fourth
    for mine, theirs in zip(first[:2], third[:2], strict=True):
        assert sorted(mine + theirs) == list(range(12))
    assert first[2] == third[2], "all ranks load all rows in the same order"


@pytest.mark.parametrize("options", [{"num_replicas": 2}, {"rank": 0}, {"num_replicas": 2, "rank": 2}], ids=str)
def test_incomplete_position_is_refused(fit: Callable[..., Result], options: dict[str, int]):
    def train() -> None:
        prepare_data_loader(DataLoader(Numbers()), **options)

    with pytest.raises(TrainingFailedError, match="expected num_replicas and a rank from 0 to num_replicas - 1"):
        fit(train, workers=0)
