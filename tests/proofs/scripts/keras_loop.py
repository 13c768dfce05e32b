"""Keras 3 with TensorFlow: a custom loop whose state is in a ``tf.train.Checkpoint``."""

import os
import tempfile

import numpy as np

import drivetrain
from drivetrain import Checkpoint, RunConfig, ScalingConfig
from drivetrain_tf import TensorflowTrainer, prepare_dataset_shard

BATCH_SIZE = 20


def load_batches(strategy, epoch):
    import tensorflow as tf

    context = drivetrain.get_context()
    rows = np.random.default_rng(0).normal(size=(160, 16)).astype("float32")
    own = rows[context.get_world_rank() :: context.get_world_size()]
    data = tf.data.Dataset.from_tensor_slices((own, own.sum(axis=1, keepdims=True))).shuffle(len(own), seed=epoch)
    return strategy.experimental_distribute_dataset(prepare_dataset_shard(data.batch(BATCH_SIZE // 2)))


def make_train_step(strategy, model, optimizer):
    import tensorflow as tf

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            losses = tf.square(model(inputs, training=True) - targets)
            loss = tf.reduce_sum(losses) / BATCH_SIZE
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(inputs, targets):
        return strategy.reduce("sum", strategy.run(step, args=(inputs, targets)), axis=None)

    return train_step


def train_func():
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.1)
        layers = [keras.layers.Dense(32, "relu"), dropout, keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((16,)), *layers])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    train_step = make_train_step(strategy, model, optimizer)
    epoch = tf.Variable(0)
    state = tf.train.Checkpoint(
        model=model, optimizer=optimizer, epoch=epoch, random=dropout.seed_generator.state.value
    )
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state.read(os.path.join(directory, "state")).assert_consumed()
    is_first = drivetrain.get_context().get_world_rank() == 0
    for number in range(int(epoch), 8):
        losses = [float(train_step(*batch)) for batch in load_batches(strategy, number)]
        epoch.assign(number + 1)
        with tempfile.TemporaryDirectory() as directory:
            state.write(os.path.join(directory, "state"))
            checkpoint = Checkpoint.from_directory(directory)
            drivetrain.report({"loss": float(np.mean(losses))}, checkpoint if is_first else None)


def make_trainer(scaling_config, **options):
    return TensorflowTrainer(
        train_func, scaling_config=scaling_config, run_config=RunConfig(worker_output="none", **options)
    )


if __name__ == "__main__":
    make_trainer(ScalingConfig(num_workers=2)).fit()
