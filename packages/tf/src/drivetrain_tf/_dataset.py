"""Prepares datasets for training with several workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, get_context

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["prepare", "prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """Mark a dataset as this worker's part of the data, so that TensorFlow does not shard it again.

    Under a strategy with several replicas, TensorFlow still splits each batch into one piece per replica, and each
    replica processes one piece per step. The batch size must therefore be that of a *global* batch: the number of rows
    that one replica processes in a step, times the number of replicas.

    Args:
        tf_dataset_shard: this worker's data, in batches.

    Returns:
        The dataset with automatic sharding turned off; the same object if it is prepared already. Unless the dataset is
        infinite, its number of batches is now unknown to TensorFlow.

    Raises:
        ConfigurationError: the argument is not a ``tf.data.Dataset``, or the batch size is known and not divisible by
            the number of workers.
        SessionError: called outside a train function.
    """
    import tensorflow as tf

    dataset: object = tf_dataset_shard
    if not isinstance(dataset, tf.data.Dataset):
        raise ConfigurationError(f"prepare_dataset_shard: expected a tf.data.Dataset, got {dataset!r}")
    workers = get_context().get_world_size()
    for spec in tf.nest.flatten(tf_dataset_shard.element_spec):
        rows = spec.shape[0] if spec.shape.rank else None
        if rows is not None and rows % workers:
            raise ConfigurationError(
                f"prepare_dataset_shard: expected a batch size that is divisible by the number of workers, {workers}, "
                f"got {rows} rows. A batch holds the rows of all workers in a step, so set batch_size to a multiple of "
                "get_context().get_world_size()"
            )
    off = tf.data.experimental.AutoShardPolicy.OFF
    is_prepared = tf_dataset_shard.options().experimental_distribute.auto_shard_policy == off
    if is_prepared and tf_dataset_shard.cardinality() < 0:
        return tf_dataset_shard
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = off
    if tf_dataset_shard.cardinality() >= 0:
        # The filter makes the number of batches unknown. Otherwise, Keras 2 would use it as the number of steps. Each
        # step uses only one piece of a batch per replica, so Keras 2 would skip the remaining pieces.
        tf_dataset_shard = tf_dataset_shard.filter(lambda *batch: True)
    return tf_dataset_shard.with_options(options)


def prepare(value: Any) -> Any:
    """Prepare a dataset for :func:`drivetrain.prepare`."""
    tf: Any = sys.modules.get("tensorflow")
    if tf is None or not isinstance(value, tf.data.Dataset):
        return NotImplemented
    return prepare_dataset_shard(value)
