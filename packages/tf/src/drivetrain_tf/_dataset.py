"""What a train function calls to make its data fit for several workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import ConfigurationError, get_context

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["prepare_dataset_shard"]


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """Has TensorFlow take a dataset as this worker's own part of the data, instead of a whole to take a part of.

    Under a strategy of several replicas each batch is still cut into as many pieces, one for each step, so its rows are
    those of a *global* batch: what one worker takes in a step, times the number of replicas.

    Args:
        tf_dataset_shard: this worker's data, in batches.

    Returns:
        The dataset with automatic sharding turned off, and without a known number of batches, unless that is infinite.

    Raises:
        ConfigurationError: it is no ``tf.data.Dataset``, or the rows of its batches, where they are known, do not
            divide by the number of workers.
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
                f"prepare_dataset_shard: expected batches that divide by the number of workers, {workers}, got {rows} "
                "rows: a batch is what all workers take in a step, so let batch_size be a multiple of "
                "get_context().get_world_size()"
            )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if tf_dataset_shard.cardinality() >= 0:
        # Keras 2 would take the number of batches for that of steps, and leave out the rest of the pieces.
        tf_dataset_shard = tf_dataset_shard.filter(lambda *batch: True)
    return tf_dataset_shard.with_options(options)
