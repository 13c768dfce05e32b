"""The conformance kit for dataset providers, as tests that a plugin inherits.

A plugin author writes a class with one attribute and one method, and pytest collects the tests::

    from drivetrain_testing import DatasetConformance

    class TestMyDatasets(DatasetConformance):
        provider = MyDatasets

        def make_dataset(self, directory, rows):
            return my_library.Dataset({"id": range(rows), "group": [n // 10 for n in range(rows)]})

A test that cannot pass for a provider must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain import ConfigurationError
from drivetrain.plugin import DatasetProvider
from drivetrain.plugin.datasets import DatasetShard, SplitRequest
from drivetrain.plugin.trainers import dumps
from drivetrain_testing._conformance import check_overrides

__all__ = ["DatasetConformance"]

_ROWS = 103
_BATCH_ROWS = 7
_IMPORTS = """
import json, sys
from drivetrain import *
from drivetrain.plugin import *
before = {name.partition(".")[0] for name in sys.modules}
import importlib
provider = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
assert not provider().accepts(object())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} - before)))
"""


class DatasetConformance:
    """Tests of a dataset provider. Derive a class from it, set :attr:`provider` and define :meth:`make_dataset`.

    Attributes:
        provider: the class to which the entry point in ``drivetrain.datasets`` refers.
        rows_left_out: maximum number of rows per worker that a split omits so that all workers get the same number of
            rows.
        even_batches: True if all ranks get the same number of batches.
    """

    provider: ClassVar[type[DatasetProvider]]
    rows_left_out: ClassVar[int] = 0
    even_batches: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        provider = getattr(cls, "provider", None)
        if not isinstance(provider, type) or not issubclass(provider, DatasetProvider):
            raise TypeError(f"{cls.__name__}: expected an attribute `provider` with a DatasetProvider class")
        check_overrides(cls, DatasetConformance)

    def make_dataset(self, directory: Path, rows: int) -> Any:
        """Create a dataset with two columns: ``id`` counts from 0, and ``group`` is ``id // 10``.

        Args:
            directory: an empty directory.
            rows: the number of rows.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method make_dataset()")

    def values(self, batch: Any, column: str) -> list[int]:
        """Return the values of a column of a batch. Override this method if a batch is not a mapping of columns."""
        return [int(value) for value in batch[column]]

    def test_accepts_its_own_datasets_only(self, tmp_path: Path) -> None:
        provider = self.provider()
        accepted = provider.accepts(self.make_dataset(tmp_path, _ROWS))
        assert accepted is True, f"accepts() of a dataset of its kind: expected True, got {accepted!r}"
        for other in (object(), None, 3):
            accepted = provider.accepts(other)
            assert accepted is False, f"accepts({other!r}): expected False, got {accepted!r}"

    def test_accepts_imports_nothing_else(self) -> None:
        module, name = self.provider.__module__, self.provider.__qualname__
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _IMPORTS, module, name]
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        loaded = set(json.loads(run.stdout)) - {module.partition(".")[0]} - sys.stdlib_module_names
        assert not loaded, f"importing {module} and calling accepts() imports {', '.join(sorted(loaded))}"

    def test_every_row_is_in_one_shard(self, tmp_path: Path) -> None:
        opened = self._open(tmp_path)
        for world_size in (1, 2, 3):
            read = self._read(self._split(opened, world_size))
            self._check_rows(read, world_size, when=f"split among {world_size} ranks")

    def test_every_rank_gets_all_rows_of_a_dataset_that_is_not_split(self, tmp_path: Path) -> None:
        for rank, ids in enumerate(self._read(self._split(self._open(tmp_path), 2, whole=True))):
            self._check_rows([ids], 0, when=f"SplitRequest(whole=True), rank {rank} of 2")

    def test_all_ranks_get_the_same_number_of_batches(self, tmp_path: Path) -> None:
        if not self.even_batches:
            pytest.skip(f"{type(self).__name__} declares even_batches = False")
        opened = self._open(tmp_path)
        for world_size in (2, 3):
            counts = _in_threads(_count_batches, self._split(opened, world_size))
            assert len(set(counts)) == 1, f"expected the same number of batches on all ranks, got {counts}"

    def test_each_iteration_is_an_epoch(self, tmp_path: Path) -> None:
        shards = self._split(self._open(tmp_path), 2)
        for number in ("first", "second"):
            self._check_rows(self._read(shards), 2, when=f"the {number} iteration on 2 ranks")

    def test_an_iteration_after_a_break_starts_a_new_epoch(self, tmp_path: Path) -> None:
        shards = self._split(self._open(tmp_path), 2)
        self._read(shards, batches=2)
        self._check_rows(self._read(shards), 2, when="the iteration after one that was left with `break`, on 2 ranks")

    def test_rows_that_are_kept_together_are_on_one_rank(self, tmp_path: Path) -> None:
        provider = self.provider()
        try:
            opened = provider.open("train", self.make_dataset(tmp_path, _ROWS), keep_together="group")
        except ConfigurationError as error:
            pytest.skip(f"open() does not support keep_together: {error}")
        groups = [set(values) for values in self._read(self._split(opened, 3), "group")]
        divided = len(set().union(*groups)) < sum(map(len, groups))
        assert not divided, f"keep_together='group': expected each group on one of 3 ranks, got {groups}"

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_epoch_continues_at_a_position(self, tmp_path: Path, world_size: int) -> None:
        """Test that an epoch continues at a saved position, with as many workers as before and with another number."""
        opened = self._open(tmp_path)
        before = self._resumable(self._split(opened, 2))
        seen, position = self._read_and_save(before, batches=3)
        after = self._resume(opened, world_size, position)
        loaded = f"after load_state_dict(...) on {world_size} ranks"
        self._check_rows([*seen, *self._read(after)], 2 + world_size, when=loaded)
        self._check_rows(self._read(after), world_size, when=f"{loaded}, in the next epoch")

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_epoch_continues_after_a_second_resume(self, tmp_path: Path, world_size: int) -> None:
        """Test the positions of an epoch that itself continued at a position."""
        opened = self._open(tmp_path)
        first = self._resumable(self._split(opened, 2))
        seen, position = self._read_and_save(first, batches=2)
        second = self._resume(opened, world_size, position)
        seen_later, position = self._read_and_save(second, batches=2)
        third = self._resume(opened, 2, position)
        when = f"after load_state_dict(...) on {world_size} ranks, and then with a later position on 2 ranks"
        self._check_rows([*seen, *seen_later, *self._read(third)], 4 + world_size, when=when)

    def test_only_load_state_dict_skips_rows(self, tmp_path: Path) -> None:
        """Test that a train function that does not load the position reads a whole epoch."""
        opened = self._open(tmp_path)
        before = self._resumable(self._split(opened, 2))
        _, position = self._read_and_save(before, batches=3)
        shards = self._split(opened, 2, position=position)
        self._check_rows(self._read(shards), 2, when="split() with a position, without load_state_dict(), on 2 ranks")

    def test_take_state_returns_the_saved_position_once(self, tmp_path: Path) -> None:
        shard = self._resumable(self._split(self._open(tmp_path), 2))[0]
        batches = _batches(shard)
        next(batches)
        taken = shard.take_state()
        assert taken is None, f"take_state() before state_dict(): expected None, got {taken}"
        saved = json.dumps(shard.state_dict())
        next(batches)
        taken = shard.take_state()
        assert json.dumps(taken) == saved, (
            f"take_state() after state_dict() and one more batch: expected the return value of state_dict(), {saved}, "
            f"got {json.dumps(taken)}"
        )
        taken = shard.take_state()
        assert taken is None, f"the second take_state() after one state_dict(): expected None, got {taken}"

    def _open(self, directory: Path) -> Any:
        return self.provider().open("train", self.make_dataset(directory, _ROWS))

    def _split(self, opened: Any, world_size: int, **options: Any) -> list[Any]:
        """Return the shards as the workers receive them, after pickling."""
        request = SplitRequest(name="train", world_size=world_size, **options)
        shards = self.provider().split(opened, request)
        assert len(shards) == world_size, f"expected one shard per rank, got {len(shards)} for {world_size} ranks"
        return [pickle.loads(dumps(shard)) for shard in shards]

    def _read(self, shards: Sequence[Any], column: str = "id", *, batches: int | None = None) -> list[list[int]]:
        """Return the values that each rank reads in one iteration, which ends after a number of batches if given."""

        def read(shard: Any) -> list[int]:
            part = itertools.islice(_batches(shard), batches)
            return [value for batch in part for value in self.values(batch, column)]

        return _in_threads(read, shards)

    def _check_rows(self, read: Iterable[Iterable[int]], splits: int, *, when: str) -> None:
        """Check that the ids are those of one epoch.

        Args:
            read: the ids, in any number of lists.
            splits: the number of shards of which each may omit ``rows_left_out`` rows.
            when: what was read, for the message.
        """
        expected, counts = set(range(_ROWS)), Counter(itertools.chain.from_iterable(read))
        missing, unknown = expected - counts.keys(), counts.keys() - expected
        twice = [row for row, count in counts.items() if count > 1]
        assert not unknown, f"{when}: expected ids from 0 to {_ROWS - 1}, got {_shorten(unknown)}"
        complete = not twice and len(missing) <= self.rows_left_out * splits
        assert complete, f"{when}: rows missing {_shorten(missing)}, rows read twice {_shorten(twice)}"

    def _resumable(self, shards: Sequence[Any]) -> list[DatasetShard]:
        if not all(isinstance(shard, DatasetShard) for shard in shards):
            pytest.skip("the shards have no position: no state_dict(), load_state_dict() and take_state()")
        return list(shards)

    def _read_and_save(self, shards: Sequence[DatasetShard], *, batches: int) -> tuple[list[list[int]], Any]:
        """Return the ids in the first batches of each rank, and the position in the loop, as stored in a checkpoint."""

        def read(shard: DatasetShard) -> tuple[list[int], Any]:
            iterator = _batches(shard)
            part = itertools.islice(iterator, batches)
            return [row for batch in part for row in self.values(batch, "id")], shard.state_dict()

        ids, states = zip(*_in_threads(read, shards), strict=True)
        different = any(state != states[0] for state in states)
        assert not different, f"state_dict(): expected the same position on all ranks, got {list(states)}"
        return list(ids), json.loads(json.dumps(states[0]))

    def _resume(self, opened: Any, world_size: int, position: Any) -> list[DatasetShard]:
        shards = self._resumable(self._split(opened, world_size, position=position))
        for shard in shards:
            shard.load_state_dict(position)
        return shards


def _shorten(rows: Iterable[int]) -> str:
    ordered = sorted(rows)
    return str(ordered) if len(ordered) <= 10 else f"{ordered[:10]} and {len(ordered) - 10} more"


def _batches(shard: Any) -> Iterator[Any]:
    return iter(shard.iter_batches(batch_size=_BATCH_ROWS))


def _count_batches(shard: Any) -> int:
    return sum(1 for _ in _batches(shard))


def _in_threads(function: Any, shards: Sequence[Any]) -> list[Any]:
    """Read all shards at the same time, like workers, because the shards of some datasets wait for each other."""
    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(function, shards))
