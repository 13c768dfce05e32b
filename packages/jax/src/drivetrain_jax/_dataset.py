"""Turns a dataset shard into batches of global arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError

if TYPE_CHECKING:
    import jax

__all__ = ["prepare_dataset_shard"]


def prepare_dataset_shard(
    shard: Any, *, sharding: jax.sharding.Sharding | None = None, drop_last: bool = True, **options: Any
) -> Iterable[dict[str, jax.Array]]:
    """Return the rows of a dataset shard in batches of global arrays, each made of the rows of all workers.

    Args:
        shard: a shard from :func:`drivetrain.get_dataset_shard`.
        sharding: how the devices of all workers hold the arrays. None divides the rows evenly among the devices.
        drop_last: drop the last batch if it is not full. Only a single worker can keep it: the last batches of several
            workers can differ in size, and JAX would compute wrong results from them without an error.
        **options: see ``iter_batches`` of the shard. ``batch_size`` is the number of rows of this worker in a batch, so
            a batch has as many rows as all workers have together.

    Returns:
        The batches. Each iteration over the returned object reads one epoch.

    Raises:
        ConfigurationError: the shard has no ``iter_batches``, the workers' batches could differ in size, a worker's
            rows cannot be divided among its devices, or a column is not numeric.

    Example:
        In a train function::

            for batch in prepare_dataset_shard(drivetrain.get_dataset_shard("train"), batch_size=64):
                state, loss = step(state, batch["pixels"], batch["label"])
    """
    import jax

    if not hasattr(shard, "iter_batches"):
        raise ConfigurationError(
            f"prepare_dataset_shard: expected a shard from drivetrain.get_dataset_shard(), got {shard!r}"
        )
    rows = options.get("batch_size")
    if jax.process_count() > 1 and (not drop_last or options.get("batch_size", 1) is None):
        raise ConfigurationError(
            "prepare_dataset_shard: expected drop_last=True and a batch_size, so that the batches of all workers have "
            f"the same size, got drop_last={drop_last}, batch_size={rows}. To use all rows, choose a batch_size that "
            "divides the number of rows of each worker"
        )
    if sharding is None and rows is not None and rows % jax.local_device_count():
        raise ConfigurationError(
            "prepare_dataset_shard(batch_size=...): expected a multiple of the number of this worker's devices, "
            f"{jax.local_device_count()}, got {rows}"
        )
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    batches = shard.iter_batches(batch_format="numpy", drop_last=drop_last, **options)
    return _GlobalBatches(batches, sharding or jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))


@dataclass(frozen=True)
class _GlobalBatches:
    batches: Iterable[dict[str, Any]]
    sharding: jax.sharding.Sharding

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        import jax

        for batch in self.batches:
            for name, column in batch.items():
                if column.dtype.kind not in "biufcV":  # V: the small floats of ml_dtypes
                    raise ConfigurationError(
                        f"prepare_dataset_shard: expected numeric columns, got {name!r} of type {column.dtype}. "
                        "Convert the column, or leave it out of the dataset"
                    )
            yield {
                name: jax.make_array_from_process_local_data(self.sharding, column) for name, column in batch.items()
            }
