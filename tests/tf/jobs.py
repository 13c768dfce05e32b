"""The train functions of these tests; only workers import TensorFlow."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import drivetrain
from drivetrain import Checkpoint, get_checkpoint, get_context
from drivetrain_tf import prepare_dataset_shard
from drivetrain_tf.keras import ReportCheckpointCallback

BATCH, STEPS = 150, 10  # on all workers together
ROWS = BATCH * STEPS

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def load_digits() -> tuple[Arrays, Arrays]:
    """1,500 scans of 8 x 8 pixels and what they show, and 297 that are held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))  # the last are of other writers
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    return (images[:ROWS], labels[:ROWS]), (images[ROWS:], labels[ROWS:])


def own_rows(arrays: Arrays) -> Arrays:
    context = get_context()
    images, labels = (array[context.get_world_rank() :: context.get_world_size()] for array in arrays)
    return images, labels


def make_model(keras: Any) -> Any:
    """A perceptron whose moving averages every rank has its part of."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((64,)), layers.Dense(64, "relu"), layers.BatchNormalization(momentum=0.8), layers.Dense(10)]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def die_once(after: bool) -> None:
    context = get_context()
    if after and context.attempt == 0 and context.get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fit_digits(config: dict[str, Any]) -> float:
    """``Model.fit`` of Keras 2, from the latest checkpoint; dies in ``die_in_epoch``, the first time."""
    import tensorflow as tf
    import tf_keras as keras

    class Dies(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            die_once(epoch == config.get("die_in_epoch"))

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        if (checkpoint := get_checkpoint()) is None:
            model = make_model(keras)
        else:
            with checkpoint.as_directory() as directory:
                model = keras.models.load_model(Path(directory, "model.keras"))
    train, held_out = load_digits()
    rows = tf.data.Dataset.from_tensor_slices(own_rows(train)).batch(BATCH).repeat()
    model.fit(
        prepare_dataset_shard(rows),
        steps_per_epoch=STEPS,
        epochs=config["epochs"],
        initial_epoch=int(model.optimizer.iterations.numpy()) // STEPS,
        callbacks=[Dies(), ReportCheckpointCallback(metrics=["loss"])],
        verbose=0,
    )
    return float(model.evaluate(*held_out, verbose=0)[1])
