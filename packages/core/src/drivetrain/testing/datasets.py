"""The conformance kit for dataset providers, as tests that a plugin inherits.

A plugin author writes a class with one attribute and one method, and pytest collects the tests::

    from drivetrain.testing import DatasetConformance

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain._base.pickling import dumps
from drivetrain._hooks.dataset import DatasetProvider, DatasetShard, SplitRequest
from drivetrain.errors import ConfigurationError
from drivetrain.testing.conformance import check_overrides

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
        assert provider.accepts(self.make_dataset(tmp_path, _ROWS)) is True
        for other in (object(), None, 3):
            assert provider.accepts(other) is False, f"accepts({other!r})"

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
            ids = sorted(itertools.chain.from_iterable(read))
            assert len(set(ids)) == len(ids), "a row is in two shards"
            assert set(ids) <= set(range(_ROWS))
            assert _ROWS - len(ids) <= self.rows_left_out * world_size, "rows are missing"

    def test_every_rank_gets_all_rows_of_a_dataset_that_is_not_split(self, tmp_path: Path) -> None:
        for ids in self._read(self._split(self._open(tmp_path), 2, whole=True)):
            assert sorted(ids) == list(range(_ROWS))

    def test_all_ranks_get_the_same_number_of_batches(self, tmp_path: Path) -> None:
        if not self.even_batches:
            pytest.skip(f"{type(self).__name__} declares even_batches = False")
        opened = self._open(tmp_path)
        for world_size in (2, 3):
            counts = _in_threads(_count_batches, self._split(opened, world_size))
            assert len(set(counts)) == 1, f"batches per rank: {counts}"

    def test_each_iteration_is_an_epoch(self, tmp_path: Path) -> None:
        shards = self._split(self._open(tmp_path), 2)
        first, second = (sum(map(len, self._read(shards))) for _ in range(2))
        assert first == second

    def test_rows_that_are_kept_together_are_on_one_rank(self, tmp_path: Path) -> None:
        provider = self.provider()
        try:
            opened = provider.open("train", self.make_dataset(tmp_path, _ROWS), keep_together="group")
        except ConfigurationError as error:
            pytest.skip(f"open() does not support keep_together: {error}")
        groups = [set(values) for values in self._read(self._split(opened, 3), "group")]
        assert sum(map(len, groups)) == len(set().union(*groups)), f"groups by rank: {groups}"

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_epoch_continues_at_a_position(self, tmp_path: Path, world_size: int) -> None:
        """Test that an epoch continues at a saved position, with as many workers as before and with another number."""
        opened = self._open(tmp_path)
        before = self._resumable(self._split(opened, 2))
        iterators = [iter(shard.iter_batches(batch_size=_BATCH_ROWS)) for shard in before]
        batches = [batch for iterator in iterators for batch in itertools.islice(iterator, 3)]
        states = [shard.state_dict() for shard in before]
        assert states[0] == states[1], "the position is the same on all ranks"
        assert before[0].take_state() == states[0]
        assert before[0].take_state() is None, "a state is taken once"
        position = json.loads(json.dumps(states[0]))
        after = self._resumable(self._split(opened, world_size, position=position))
        for shard in after:
            shard.load_state_dict(position)
        seen = [row for batch in batches for row in self.values(batch, "id")]
        unseen = itertools.chain.from_iterable(self._read(after))
        assert sorted([*seen, *unseen]) == list(range(_ROWS))
        assert len(list(itertools.chain.from_iterable(self._read(after)))) == _ROWS, "the next epoch has all rows"

    def _open(self, directory: Path) -> Any:
        return self.provider().open("train", self.make_dataset(directory, _ROWS))

    def _split(self, opened: Any, world_size: int, **options: Any) -> list[Any]:
        """Return the shards as the workers receive them, after pickling."""
        request = SplitRequest(name="train", world_size=world_size, **options)
        shards = self.provider().split(opened, request)
        assert len(shards) == world_size, f"expected one shard per rank, got {len(shards)} for {world_size} ranks"
        return [pickle.loads(dumps(shard)) for shard in shards]

    def _read(self, shards: Sequence[Any], column: str = "id") -> list[list[int]]:
        def read(shard: Any) -> list[int]:
            return [value for batch in _batches(shard) for value in self.values(batch, column)]

        return _in_threads(read, shards)

    def _resumable(self, shards: Sequence[Any]) -> list[DatasetShard]:
        if not all(isinstance(shard, DatasetShard) for shard in shards):
            pytest.skip("the shards have no position: no state_dict(), load_state_dict() and take_state()")
        return list(shards)


def _batches(shard: Any) -> Iterator[Any]:
    return iter(shard.iter_batches(batch_size=_BATCH_ROWS))


def _count_batches(shard: Any) -> int:
    return sum(1 for _ in _batches(shard))


def _in_threads(function: Any, shards: Sequence[Any]) -> list[Any]:
    """Read all shards at the same time, like workers, because the shards of some datasets wait for each other."""
    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(function, shards))
