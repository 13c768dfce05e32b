"""A prepared loader that is interrupted at any batch continues there, on any number of workers."""

import copy
import itertools
import json
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain import Checkpoint, ConfigurationError, Result, get_checkpoint, get_context, report
from drivetrain_torch import get_random_states, prepare_data_loader, set_random_states
from drivetrain_torch._loader import PreparedLoader, wrap
from drivetrain_torch._sampling import accept_epochs, shard
from tests.torch.conftest import gather

ROWS = 53
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cannot shard"),
    pytest.mark.filterwarnings("ignore:this data loader shuffles"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


class Augmented(Dataset):
    """Rows of their number and of random numbers from the generators of torch, Python and NumPy."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> list[float]:
        return [row, torch.rand(()).item(), random.random(), float(np.random.rand())]


def seed_all(seed: int = 7) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def prepared(given: DataLoader, rank: int = 0, world_size: int = 1, *, replay: bool = True) -> PreparedLoader:
    """Return the loader that ``prepare_data_loader`` returns on a rank."""
    if world_size > 1:
        given = shard(given, rank=rank, world_size=world_size)
    else:
        accept_epochs(given)
    return wrap(given, device=None, auto_transfer=True, world_size=world_size, replay=replay)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def rows_of(batch: Any) -> list[int]:
    values = torch.stack(batch) if isinstance(batch, list) else batch
    return values[0].int().tolist() if values.dim() > 1 else values.int().flatten().tolist()


def values_of(batch: Any) -> list[list[float]]:
    return [column.tolist() for column in batch]


def loaders(world_size: int, **options: Any) -> list[PreparedLoader]:
    seed_all()
    data = Augmented(options.pop("rows", ROWS))
    return [prepared(DataLoader(data, **options), rank, world_size, replay=False) for rank in range(world_size)]


def read(ranks: list[PreparedLoader], batches: int | None = None) -> tuple[list[int], list[int], dict[str, Any]]:
    """Return the rows that the ranks read in the order of the epoch, the repeated ones, and the state at the end."""
    read, repeated = [], []
    states = []
    columns = []
    for loader in ranks:
        rows: list[int] = []
        for batch in itertools.islice(loader, batches):
            numbers = rows_of(batch)
            own = len(numbers) - loader.repeated_rows
            rows += numbers[:own]
            repeated += numbers[own:]
        states.append(through_json(loader.state_dict()))
        columns.append(rows)
    read = [row for rows in itertools.zip_longest(*columns) for row in rows if row is not None]
    return read, repeated, states[0]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("processes", [0, 1, 3])
def test_every_row_is_read_once_when_the_number_of_workers_changes_twice(
    shuffle: bool, drop_last: bool, processes: int
):
    sizes = [(1, 2, 3), (2, 1, 5), (3, 5, 1), (5, 2, 2), (2, 2, 3), (1, 1, 1)]
    if processes:
        sizes = sizes[:2] if processes == 1 else sizes[2:3]
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "num_workers": processes}
    if processes:
        options["multiprocessing_context"] = "fork"
    for before, between, after in sizes:
        first = loaders(before, batch_size=3, **options)
        for loader in first:
            loader.set_epoch(4)
        one, repeated, state = read(first, 2)
        assert not repeated
        second = loaders(between, batch_size=2, **options)
        for loader in second:
            loader.load_state_dict(state)
            loader.set_epoch(4)
        two, repeated, state = read(second, 2)
        assert not repeated
        assert state["rows"] in (None, [[len(one), ROWS]])
        third = loaders(after, batch_size=3, **options)
        for loader in third:
            loader.load_state_dict(state)
        three, repeated, state = read(third)
        assert (state["epoch"], state["batches"], state["rows"]) == (5, 0, None)
        order = one + two + three
        if drop_last:
            assert len(set(order)) == len(order)
            assert ROWS - len(order) < 3 * after + after
        else:
            assert sorted(order) == list(range(ROWS))
            assert len(repeated) == -len(three) % after
        if shuffle and before > 1:
            whole = DistributedSampler(Augmented(), num_replicas=1, rank=0)
            whole.set_epoch(4)
            assert order == list(whole)[: len(order)]
        following, *_ = read(third)
        assert len(following) >= ROWS - 3 * after - after, "the next epoch is a whole one"


def test_order_of_one_worker_is_continued_by_several():
    for given in (
        {"shuffle": True},
        {"shuffle": True, "generator": 3},
        {"sampler": 5},
        {"sampler": 5, "generator": 3},
        {"shuffle": False},
    ):

        def options(given: dict[str, Any] = given) -> dict[str, Any]:
            made = dict(given)
            if "generator" in made:
                made["generator"] = torch.Generator().manual_seed(made["generator"])
            if "sampler" in made:
                made["sampler"] = RandomSampler(Augmented(), generator=torch.Generator().manual_seed(made["sampler"]))
            return made

        seed_all()
        plain = [row for batch in DataLoader(Augmented(), batch_size=4, **options()) for row in rows_of(batch)]
        for processes in ({}, {"num_workers": 2, "multiprocessing_context": "fork"}):
            seed_all()
            one = prepared(DataLoader(Augmented(), batch_size=4, **options(), **processes))
            first, _, state = read([one], 3)
            torch.rand(3)
            ranks = [prepared(DataLoader(Augmented(), batch_size=2, **options()), rank, 2) for rank in range(2)]
            for loader in ranks:
                loader.load_state_dict(state)
            second, _, state = read(ranks, 4)
            (again,) = (prepared(DataLoader(Augmented(), batch_size=4, **options())) for _ in range(1))
            again.load_state_dict(state)
            third, _, _ = read([again])
            assert first + second + third == plain, given


def epochs_of(
    make: Callable[[], PreparedLoader],
    stop_at: tuple[int, int] | None = None,
    *,
    again: Callable[[], PreparedLoader] | None = None,
) -> tuple[list[Any], Any]:
    """Return the batches of three epochs with other random draws between them, and the final random numbers.

    At ``stop_at``, an epoch and a batch, all generators and the loader are replaced, as when a run resumes.
    """
    seed_all()
    loader = make()
    batches: list[Any] = []
    epoch, inside = 0, 0
    while epoch < 3:
        loader.set_epoch(epoch)
        stopped = False
        for batch in loader:
            batches.append(copy.deepcopy(batch))
            torch.rand(2), random.random(), np.random.rand()  # as dropout does
            inside += 1
            if (epoch, inside) == stop_at:
                stopped = True
                break
        if stopped:
            stop_at = None
            state = through_json(loader.state_dict())
            generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
            del loader
            seed_all(99)
            loader = (again or make)()
            loader.load_state_dict(state)
            torch.set_rng_state(generators[0])
            random.setstate(generators[1])
            np.random.set_state(generators[2])
        else:
            epoch, inside = epoch + 1, 0
    return batches, (torch.rand(3).tolist(), random.random(), float(np.random.rand()))


def same(one: Any, other: Any) -> bool:
    return pickle.dumps(torch.utils.data.default_convert(one)) == pickle.dumps(other) or repr(one) == repr(other)


class OwnOrder(Sampler):
    """A sampler that draws its order from the global generator of Python."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        rows = list(range(ROWS))
        random.shuffle(rows)
        return iter(rows)


class Stateful(Sampler):
    """A sampler that saves its own position."""

    def __init__(self) -> None:
        self.order = random.Random(3).sample(range(ROWS), ROWS)
        self.position = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        while self.position < ROWS:
            self.position += 1
            yield self.order[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Stream(IterableDataset):
    """Augmented rows in a random order, split among the loader processes."""

    def __iter__(self) -> Iterator[list[float]]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        rows = list(range(number, ROWS, count))
        random.shuffle(rows)
        data = Augmented()
        return (data[row] for row in rows)


class Changed(DataLoader):
    """A loader whose batches are not those of its sampler."""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number % 3 != 1:
                yield batch


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


KINDS: dict[str, Callable[..., DataLoader]] = {
    "in order": lambda **options: DataLoader(Augmented(), **options),
    "shuffled": lambda **options: DataLoader(Augmented(), shuffle=True, **options),
    "generator": lambda **options: DataLoader(Augmented(), shuffle=True, generator=generator(), **options),
    "sampler with generator": lambda **options: DataLoader(
        Augmented(), sampler=RandomSampler(Augmented(), generator=generator()), **options
    ),
    "with replacement": lambda **options: DataLoader(
        Augmented(), sampler=RandomSampler(Augmented(), replacement=True), **options
    ),
    "subset": lambda **options: DataLoader(Augmented(), sampler=SubsetRandomSampler(range(20)), **options),
    "weighted": lambda **options: DataLoader(
        Augmented(), sampler=WeightedRandomSampler([1.0] * ROWS, 30, generator=generator()), **options
    ),
    "own order": lambda **options: DataLoader(Augmented(), sampler=OwnOrder(), **options),
    "own DistributedSampler": lambda **options: DataLoader(
        Augmented(), sampler=DistributedSampler(Augmented(), num_replicas=2, rank=1), **{**options, "drop_last": True}
    ),
    "batch sampler": lambda **options: DataLoader(
        Augmented(),
        batch_sampler=BatchSampler(OwnOrder(), 4, drop_last=False),
        **{name: value for name, value in options.items() if name != "batch_size"},
    ),
    "iterable": lambda **options: DataLoader(Stream(), **options),
    "changed": lambda **options: Changed(Augmented(), shuffle=True, **options),
}
PROCESSES: dict[str, dict[str, Any]] = {
    "main process": {},
    "1 process": {"num_workers": 1, "multiprocessing_context": "fork"},
    "3 processes": {"num_workers": 3, "multiprocessing_context": "fork"},
}


@pytest.mark.parametrize(
    ("kind", "processes", "world_size"),
    [
        *itertools.product(KINDS, ["main process"], [1, 2]),
        *itertools.product(KINDS, ["1 process"], [1]),
        *itertools.product(["in order", "shuffled"], ["1 process"], [2]),
        *itertools.product(["shuffled", "iterable"], ["3 processes"], [2]),
    ],
)
def test_interrupted_run_has_the_batches_and_random_numbers_of_an_undisturbed_one(
    kind: str, processes: str, world_size: int
):
    def make() -> PreparedLoader:
        return prepared(KINDS[kind](batch_size=4, **PROCESSES[processes]), world_size - 1, world_size)

    undisturbed = epochs_of(make)
    if kind != "changed" and not (kind == "iterable" and world_size == 2):
        given = epochs_of(lambda: Plain(KINDS[kind](batch_size=4, **PROCESSES[processes]), world_size))  # type: ignore[arg-type,return-value]
        assert repr(given) == repr(undisturbed), "the same as without drivetrain"
    points = [(0, 1), (1, 3)] if processes == "main process" else [(1, 2)]
    for point in points:
        assert repr(epochs_of(make, point)) == repr(undisturbed), point


class Plain:
    """A plain data loader with the sampler that users write without drivetrain."""

    def __init__(self, given: DataLoader, world_size: int) -> None:
        self.loader = given
        self.sampler = given.sampler
        if (
            given.batch_size
            and world_size == 2
            and (type(given.sampler).__name__ == "SequentialSampler" or _is_random(given.sampler))
        ):
            shuffle = type(given.sampler) is RandomSampler
            own = given.generator or getattr(given.sampler, "generator", None)
            seed = own.initial_seed() if own else 0
            self.sampler = DistributedSampler(
                given.dataset, num_replicas=2, rank=1, shuffle=shuffle, seed=seed if shuffle else 0
            )
            self.loader = DataLoader(
                given.dataset,
                batch_size=4,
                sampler=self.sampler,
                num_workers=given.num_workers,
                generator=given.generator,
                multiprocessing_context=given.multiprocessing_context,
            )

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _is_random(sampler: Any) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement


@pytest.mark.parametrize("processes", PROCESSES)
def test_rows_are_skipped_without_loading_them_if_the_loader_does_not_replay(processes: str):
    def make(*, replay: bool) -> PreparedLoader:
        return prepared(
            DataLoader(Augmented(), batch_size=4, shuffle=True, **PROCESSES[processes]), 0, 2, replay=replay
        )

    undisturbed = epochs_of(lambda: make(replay=False))
    skipped = epochs_of(lambda: make(replay=False), (1, 2))
    assert [rows_of(batch) for batch in skipped[0]] == [rows_of(batch) for batch in undisturbed[0]]
    assert skipped[1] == undisturbed[1], "the main process draws the same numbers"
    changed = [number for number, pair in enumerate(zip(*(run[0] for run in (undisturbed, skipped)), strict=True))
               if repr(pair[0]) != repr(pair[1])]  # fmt: skip
    assert changed == ([] if processes == "main process" else list(range(9, 14))), "only the rest of the epoch differs"


def test_sampler_with_a_state_continues_by_itself_also_on_another_number_of_workers():
    for processes in PROCESSES.values():

        def make(world_size: int, processes: dict[str, Any] = processes) -> PreparedLoader:
            given = DataLoader(Augmented(), batch_size=4, sampler=Stateful(), **processes)
            return prepared(given, 0, world_size)

        whole, *_ = read([make(1)])
        assert whole == Stateful().order
        first, _, state = read([make(1)], 3)
        assert state["part"] == {"position": 12}, "prefetched batches do not count"
        loader = make(2)
        loader.load_state_dict(state)
        second, _, state = read([loader], 2)
        assert state["part"] == {"position": 20}
        loader.load_state_dict(state)
        rest, _, state = read([loader])
        assert first + second + rest == whole
        assert state["epoch"] == 1
        assert read([loader])[0] == whole, "the next epoch is a whole one"


class Numbered(IterableDataset):
    """The numbers of rows, of which the dataset saves its position. A second list of numbers is that of each epoch."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < ROWS:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_stream_with_a_state_continues_by_itself_if_it_cannot_be_read_again():
    for options in ({"world_size": 2}, {"replay": False}):
        first, _, state = read([prepared(DataLoader(Numbered(), batch_size=4))], 3)
        loader = prepared(DataLoader(Numbered(), batch_size=4), **options)
        loader.load_state_dict(state)
        second, _, state = read([loader], 2)
        again = prepared(DataLoader(Numbered(), batch_size=4))
        again.load_state_dict(state)
        rest, _, state = read([again])
        assert first + second + rest == list(range(ROWS))
        assert read([again])[0] == list(range(ROWS)), "the next epoch is a whole one"


@pytest.mark.parametrize("replay", [True, False])
def test_stream_of_hugging_face_continues(replay: bool):
    datasets = pytest.importorskip("datasets")

    def make() -> PreparedLoader:
        data = datasets.Dataset.from_dict({"row": list(range(ROWS))}).to_iterable_dataset(num_shards=4)
        data = data.shuffle(seed=3, buffer_size=10 if replay else 1)
        return prepared(DataLoader(data.with_format("torch"), batch_size=4), replay=replay)

    def numbers(loader: PreparedLoader, batches: int | None = None) -> list[int]:
        return [row for batch in itertools.islice(loader, batches) for row in batch["row"].tolist()]

    loader = make()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert epochs[0] != epochs[1] or not replay
    loader = make()
    first = numbers(loader, 5)
    resumed = make()
    resumed.load_state_dict(through_json(loader.state_dict()))
    resumed.set_epoch(0)
    assert first + numbers(resumed) == epochs[0]
    again = numbers(resumed)
    assert again == epochs[0], "the same epoch again, from its first row"
    resumed.set_epoch(1)
    assert numbers(resumed) == epochs[1]


def test_persistent_processes_continue_with_the_same_rows():
    options = {"batch_size": 4, "shuffle": True, "persistent_workers": True, **PROCESSES["1 process"]}

    def make() -> PreparedLoader:
        return prepared(DataLoader(Augmented(), **options))

    undisturbed = epochs_of(make)
    assert repr(epochs_of(make, (0, 3))) == repr(undisturbed), "in the first epoch of the processes, all is the same"
    rows, numbers = epochs_of(make, (1, 3))
    assert [rows_of(batch) for batch in rows] == [rows_of(batch) for batch in undisturbed[0]]
    assert numbers == undisturbed[1], "the main process draws the same numbers"
    loader = make()
    read([loader])
    between = through_json(loader.state_dict())
    generators = torch.get_rng_state()
    following, *_ = read([loader])
    resumed = make()
    resumed.load_state_dict(between)
    torch.set_rng_state(generators)
    assert read([resumed])[0] == following, "a position between two epochs"
    with pytest.raises(ConfigurationError, match=r"\[DT-728\].*got one with running processes"):
        resumed.load_state_dict(between)


def test_set_epoch_keeps_the_position_only_in_its_own_epoch():
    def make() -> PreparedLoader:
        return prepared(DataLoader(Augmented(), batch_size=4, shuffle=True), 0, 2)

    loader = make()
    loader.set_epoch(0)
    whole = [read([loader])[0]]
    loader.set_epoch(1)
    whole.append(read([loader])[0])
    loader.set_epoch(0)
    first, _, state = read([loader], 3)
    assert (state["epoch"], state["batches"]) == (0, 3)
    for passed, expected in (
        ([0], whole[0][len(first) :]),
        ([], whole[0][len(first) :]),
        ([0, 0], whole[0][len(first) :]),
        ([1], whole[1]),
        ([1, 0], whole[0]),
    ):
        resumed = make()
        resumed.load_state_dict(state)
        for epoch in passed:
            resumed.set_epoch(epoch)
        assert read([resumed])[0] == expected, passed
    assert loader.state_dict()["batches"] == 3
    loader.set_epoch(5)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"], state["plan"]) == (5, 0, None)


def test_state_without_set_epoch_counts_the_epochs():
    loader = prepared(DataLoader(Augmented(), batch_size=4, shuffle=True), 0, 2)
    whole, _, state = read([loader])
    assert (state["epoch"], state["set_epoch"]) == (1, None)
    first, _, state = read([loader], 2)
    assert (state["epoch"], state["batches"]) == (1, 2)
    resumed = prepared(DataLoader(Augmented(), batch_size=4, shuffle=True), 0, 2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert first + read([resumed])[0] == whole, "without set_epoch, each epoch has the same order"
    assert (resumed.state_dict()["epoch"], resumed.state_dict()["batches"]) == (2, 0)


def test_position_at_the_last_batch_is_the_end_of_the_epoch_until_the_loop_ends():
    for drop_last, world_size in itertools.product((False, True), (1, 2, 3)):
        loader = prepared(DataLoader(Augmented(), batch_size=4, drop_last=drop_last), 0, world_size)
        states = [through_json(loader.state_dict()) for _ in loader]
        assert (states[-1]["epoch"], states[-1]["batches"]) == (0, len(loader))
        for other in (1, 2, 5):
            resumed = prepared(DataLoader(Augmented(), batch_size=4, drop_last=drop_last), 0, other)
            resumed.load_state_dict(states[-1])
            assert read([resumed])[0] == [], "the code after the loop follows"
            assert (resumed.state_dict()["epoch"], resumed.state_dict()["batches"]) == (1, 0)
            assert len(read([resumed])[0]) > 1


def test_loader_and_its_position_survive_pickling_and_copies():
    loader = prepared(DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator()))
    first, *_ = read([loader], 3)
    for same in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert same.state_dict() == loader.state_dict()
        again = prepared(DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator()))
        again.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))
        rest, *_ = read([again])
        assert sorted(first + rest) == list(range(ROWS))
    other = prepared(loader)
    assert other.state_dict()["batches"] == 0, "a loader that is prepared again has its own position"


def test_small_states_are_the_usual_case():
    loader = prepared(DataLoader(Augmented(), batch_size=4, shuffle=True), 0, 2)
    *_, state = read([loader], 3)
    assert len(json.dumps(state)) < 300
    assert state == {
        **dict.fromkeys(("rows", "processes", "part", "set_epoch")),
        "total": ROWS,
        "world_size": 2,
        "batches": 3,
        "plan": [4, False, None, 0],
        "epoch": 0,
        "order": "seed",
        "drops_rows": False,
        "loader_processes": 0,
        "generators": {},
    }


class OwnState(DataLoader):
    """A class of loaders that saves the position itself, as StatefulDataLoader does."""

    def state_dict(self) -> dict[str, int]:
        return {"own": 5}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def test_loader_class_with_a_state_keeps_it():
    loader = prepared(OwnState(Augmented()))
    loader.load_state_dict({"own": 6})
    assert (loader.state_dict(), loader.loaded) == ({"own": 5}, {"own": 6})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("own order", {"world_size": 2}, r"a custom sampler on 1 workers.*got a custom sampler on 2 workers"),
        ("own order", {"batch_size": 2}, r"batch_size=4.*batch_size=2.*same options, restart the epoch"),
        ("iterable", {"world_size": 2}, r"an iterable dataset on 1 workers.*use a dataset with a length"),
        ("iterable", {"num_workers": 1}, r"an iterable dataset on 1 workers.*and 1 loader processes"),
        ("generator", {"given": "shuffled"}, "a loader with a generator, got a loader without one"),
        ("in order", {"rows": 12}, "a dataset with 12 rows, got a dataset with 53 rows"),
    ],
)
def test_position_that_cannot_be_continued_is_an_error(kind: str, changes: dict[str, Any], message: str):
    *_, state = read([prepared(KINDS[kind](batch_size=4))], 2)
    options = {"batch_size": changes.get("batch_size", 4), "num_workers": changes.get("num_workers", 0)}
    given = DataLoader(Augmented(12)) if "rows" in changes else KINDS[changes.get("given", kind)](**options)
    loader = prepared(given, 0, changes.get("world_size", 1))
    with pytest.raises(ConfigurationError, match=r"(?s)\[DT-728\].*" + message):
        loader.load_state_dict(state)


def test_other_states_are_refused():
    loader = prepared(DataLoader(Augmented()))
    for state in ({}, {"total": ROWS}, None, 3):
        with pytest.raises(ConfigurationError, match=r"\[DT-728\].*expected the return value of state_dict"):
            loader.load_state_dict(state)  # type: ignore[arg-type]


def test_loader_that_yields_batches_out_of_order_has_no_position():
    if not hasattr(DataLoader(Augmented()), "in_order"):
        pytest.skip("this version of torch has no argument in_order")
    loader = prepared(DataLoader(Augmented(), num_workers=1, in_order=False))
    with pytest.raises(ConfigurationError, match=r"\[DT-728\].*in_order=True"):
        loader.state_dict()


def read_with_failures(config: dict[str, Any]) -> Any:
    """Read two epochs, and save the position of each step. The second worker fails within the first epoch.

    Return the rows and random numbers of all steps and ranks.
    """
    seed_all(5)
    rank = get_context().get_world_rank()
    loader = prepare_data_loader(DataLoader(Augmented(), batch_size=4, shuffle=True, **config["loader"]))
    steps: list[Any] = []
    epoch = 0
    if (checkpoint := get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(f"{directory}/state.pt")
        steps, epoch = state["steps"], state["loader"]["epoch"]
        loader.load_state_dict(state["loader"])
        set_random_states(state["random"])
    for number in range(epoch, 2):
        loader.set_epoch(number)
        for batch in loader:
            torch.rand(1)
            own = len(rows_of(batch)) - loader.repeated_rows
            steps.append(gather([column[:own] for column in values_of(batch)]))
            if len(steps) in config["fail_at"][get_context().attempt :][:1]:
                raise RuntimeError("a failure within an epoch")
            random_states = get_random_states()
            with tempfile.TemporaryDirectory() as directory:
                state = {"steps": steps, "loader": loader.state_dict(), "random": random_states}
                torch.save(state, f"{directory}/state.pt")
                report({"step": len(steps)}, Checkpoint.from_directory(directory) if rank == 0 else None)
    return steps


@pytest.mark.parametrize("processes", ["main process", "1 process"])
def test_run_that_fails_within_an_epoch_equals_an_undisturbed_run(fit: Callable[..., Result], processes: str):
    config = {"loader": PROCESSES[processes]}
    undisturbed = fit(read_with_failures, {**config, "fail_at": []}).return_value
    failed = fit(read_with_failures, {**config, "fail_at": [3, 9]}, max_failures=2).return_value
    assert failed == undisturbed
    epoch = [row for step in undisturbed[: len(undisturbed) // 2] for rank in step for row in rank[0]]
    assert sorted(epoch) == list(range(ROWS))


def read_part(config: dict[str, Any]) -> list[int]:
    """Read some batches from the position in a file on, write the new position, and return the rows of all ranks."""
    seed_all(5)
    loader = prepare_data_loader(DataLoader(Augmented(), batch_size=4, shuffle=True, **config["loader"]))
    path = config["path"]
    if path.exists():
        loader.load_state_dict(json.loads(path.read_text()))
    loader.set_epoch(1)
    rows = []
    for batch in itertools.islice(loader, config["batches"]):
        own = len(rows_of(batch)) - loader.repeated_rows
        rows += rows_of(batch)[:own]
    parts = gather(rows) if get_context().get_world_size() > 1 else [rows]
    if get_context().get_world_rank() == 0:
        path.write_text(json.dumps(loader.state_dict()))
    return [row for part in parts for row in part]


def test_runs_on_three_two_and_one_workers_read_each_row_of_an_epoch_once(fit: Callable[..., Result], tmp_path: Path):
    rows = []
    for workers, batches, processes in ((3, 2, "1 process"), (2, 2, "main process"), (0, None, "1 process")):
        config = {"path": tmp_path / "position.json", "batches": batches, "loader": PROCESSES[processes]}
        rows += fit(read_part, config, workers=workers).return_value
    assert sorted(rows) == list(range(ROWS))
