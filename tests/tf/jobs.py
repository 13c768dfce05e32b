"""Train functions for the tests; only workers import TensorFlow."""

import functools
import importlib
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

BATCH, STEPS = 150, 10  # rows per global batch, steps per epoch
ROWS = BATCH * STEPS

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def all_sum(value: float) -> float:
    """Return the sum of the values of all ranks."""
    import tensorflow as tf

    return float(_make_adder(get_context().run_id)(tf.constant(value)))


@functools.cache
def _make_adder(run_id: str) -> Any:
    """Return a function that adds the tensors of all ranks. A second strategy of a run would disturb the first one."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function(autograph=False)
    def add(mine: Any) -> Any:
        return strategy.reduce("sum", strategy.run(lambda: mine), axis=None)

    return add


def load_digits() -> tuple[Arrays, Arrays]:
    """Return 1,500 scans of 8 x 8 pixels with their labels, and 297 held-out ones."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))  # the last scans are by different writers
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    return (images[:ROWS], labels[:ROWS]), (images[ROWS:], labels[ROWS:])


def own_rows(arrays: Arrays) -> Arrays:
    context = get_context()
    images, labels = (array[context.get_world_rank() :: context.get_world_size()] for array in arrays)
    return images, labels


def make_model(keras: Any) -> Any:
    """Return a compiled perceptron with batch normalization, whose moving averages depend on all ranks."""
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
    """Run ``Model.fit`` of Keras 2 from the latest checkpoint; the first attempt dies in ``die_in_epoch``."""
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


def make_perceptron(keras: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10)])
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def make_step(model: Any, rows: int) -> Any:
    """Return a training step on one part of a global batch of ``rows`` rows."""
    import tensorflow as tf

    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def loop_digits(config: dict[str, Any]) -> float:
    """Run a custom training loop with either Keras version, from the latest checkpoint."""
    import tensorflow as tf

    keras = importlib.import_module(config["keras"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    first, checkpoint = 0, get_checkpoint()
    with strategy.scope():
        if checkpoint is None:
            model = make_perceptron(keras, keras.optimizers.Adam(0.01))
        else:
            with checkpoint.as_directory() as directory:
                model = keras.models.load_model(Path(directory, "model.keras"))
            first = checkpoint.get_metadata()["epoch"] + 1
    train, held_out = load_digits()
    batches = strategy.experimental_distribute_dataset(
        drivetrain.prepare(tf.data.Dataset.from_tensor_slices(own_rows(train)).batch(BATCH))
    )
    step = make_step(model, BATCH)

    @tf.function
    def train_step(images: Any, labels: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(images, labels)), axis=None)

    for epoch in range(first, config["epochs"]):
        die_once(epoch == config.get("die_in_epoch"))
        loss = sum(train_step(images, labels) for images, labels in batches) / STEPS
        with tempfile.TemporaryDirectory() as directory:
            model.save(Path(directory, "model.keras"))
            saved = Checkpoint.from_directory(directory)
            saved.set_metadata({"epoch": epoch})
            drivetrain.report({"loss": loss}, saved if get_context().get_world_rank() == 0 else None)
    images, labels = held_out
    return float(np.mean(np.argmax(model(images), axis=1) == labels))


def difference_to_one_process(config: dict[str, Any]) -> float:
    """Return the largest difference of weights, after some steps, from training in a single process."""
    import tensorflow as tf

    keras = importlib.import_module(config["keras"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        distributed = make_perceptron(keras, keras.optimizers.SGD(0.5))
    single = make_perceptron(keras, keras.optimizers.SGD(0.5))
    before = [weight.copy() for weight in single.get_weights()]
    train, _ = load_digits()
    step = tf.function(make_step(single, BATCH))
    for images, labels in tf.data.Dataset.from_tensor_slices(train).batch(BATCH):
        step(images, labels)

    distributed_step = make_step(distributed, BATCH)
    context = get_context()
    share = BATCH // context.get_world_size()
    own = slice(context.get_world_rank() * share, (context.get_world_rank() + 1) * share)
    run = tf.function(lambda images, labels: strategy.run(distributed_step, args=(images, labels)))
    for images, labels in tf.data.Dataset.from_tensor_slices(train).batch(BATCH):
        run(images[own], labels[own])

    change = max(np.abs(new - old).max() for new, old in zip(single.get_weights(), before, strict=True))
    assert change > 0.1
    pairs = zip(distributed.get_weights(), single.get_weights(), strict=True)
    return float(max(np.abs(mine - other).max() for mine, other in pairs))


def losses_after_each_format() -> dict[str, list[float]]:
    """Return the losses of a model that continues training, and of copies loaded from each of Keras 2's formats."""
    import tensorflow as tf
    import tf_keras as keras

    images, labels = load_digits()[0]

    def train(model: Any) -> list[float]:
        losses: list[float] = model.fit(images, labels, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history[
            "loss"
        ]
        return losses

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with tempfile.TemporaryDirectory() as directory, strategy.scope():
        paths = {name: os.path.join(directory, name) for name in ("model.keras", "model.weights.h5", "saved_model")}
        model = make_perceptron(keras, keras.optimizers.SGD(0.5))
        train(model)
        model.save(paths["model.keras"])
        model.save(paths["saved_model"])
        model.save_weights(paths["model.weights.h5"])
        losses = {"undisturbed": train(model)}
        for name, path in paths.items():
            if name.endswith(".h5"):
                loaded = make_perceptron(keras, keras.optimizers.SGD(0.5))
                loaded.load_weights(path)
            else:
                loaded = keras.models.load_model(path)
            losses[name] = train(loaded)
    return losses


def fit_with_callback(config: dict[str, Any]) -> int:
    """Run ``Model.fit`` of either Keras version on one worker, with the callback that ``make`` returns."""
    import tensorflow as tf

    keras = importlib.import_module(config["keras"])
    if config.get("replicas"):
        devices = [tf.config.LogicalDeviceConfiguration()] * config["replicas"]
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(len(devices))])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(keras)
    images, labels = load_digits()[0]
    model.fit(images, labels, batch_size=BATCH, epochs=2, callbacks=[config["make"]()], verbose=0)
    return strategy.num_replicas_in_sync


def fit_until_preempted() -> list[int]:
    """Run ``Model.fit`` of Keras 2; rank 1 is preempted in step 13. Return the step count at the start and the end."""
    import tensorflow as tf
    import tf_keras as keras

    class Preempts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step, context = int(self.model.optimizer.iterations.numpy()), get_context()
            if step == 13 and context.attempt == 0 and context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    checkpoint = get_checkpoint()
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        if checkpoint is None:
            model = make_perceptron(keras, keras.optimizers.SGD(0.1))
        else:
            with checkpoint.as_directory() as directory:
                model = keras.models.load_model(Path(directory, "model.keras"))
    first = int(model.optimizer.iterations.numpy())
    rows = tf.data.Dataset.from_tensor_slices(own_rows(load_digits()[0])).batch(BATCH).repeat()
    # The first attempt would run for minutes without the preemption.
    model.fit(
        prepare_dataset_shard(rows),
        steps_per_epoch=STEPS,
        epochs=1 if checkpoint else 1000,
        callbacks=[Preempts(), ReportCheckpointCallback(checkpoint_on="train_end", report_metrics_on=[])],
        verbose=0,
    )
    return [first, int(model.optimizer.iterations.numpy())]


def count_rows(config: dict[str, Any]) -> list[int]:
    """Return the rows per epoch of a trainer's dataset in two kinds of loop, and the steps of ``Model.fit``."""
    import tensorflow as tf
    import tf_keras as keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    shard = drivetrain.get_dataset_shard("train")

    def make_generator() -> Any:
        for batch in shard.iter_tf_batches(batch_size=config["batch_size"], dtypes=tf.float32):
            yield batch["image"], batch["label"]

    counts = []
    spec = (tf.TensorSpec((None, 64), tf.float32), tf.TensorSpec((None,), tf.float32))
    for dataset in (
        shard.to_tf("image", "label", batch_size=config["batch_size"]),
        tf.data.Dataset.from_generator(make_generator, output_signature=spec),
    ):
        batches = strategy.experimental_distribute_dataset(prepare_dataset_shard(dataset))
        total = tf.function(lambda image: strategy.reduce("sum", strategy.run(tf.shape, (image,)), axis=None)[0])
        counts.append(sum(int(total(image)) for image, _ in batches))
    with strategy.scope():
        model = make_perceptron(keras, keras.optimizers.SGD(0.1))
    rows = tf.data.Dataset.from_tensor_slices(shard.to_tf("image", "label", batch_size=10_000).get_single_element())
    history = model.fit(prepare_dataset_shard(rows.batch(config["batch_size"])), epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    return [*counts, int(model.optimizer.iterations.numpy())]
