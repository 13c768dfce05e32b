"""The loop of the jobs that train with TensorFlow: a small perceptron under MultiWorkerMirroredStrategy."""

import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from stamps import stamp

BATCH, FEATURES, CLASSES = 256, 64, 10  # of one worker
WARMUP_STEPS = 200  # longer than the background work of either side after a start


def train(config: dict[str, Any], report: Callable[[dict[str, Any]], None] = lambda metrics: None) -> None:
    """Train the configured number of steps, report each, and stamp the steps per second."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    with strategy.scope():
        hidden = [layers.Dense(512, "relu"), layers.Dense(512, "relu")]
        model = tf.keras.Sequential([layers.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])
        optimizer = tf.keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    features = tf.random.normal((BATCH, FEATURES))
    labels = tf.random.uniform((BATCH,), maxval=CLASSES, dtype=tf.int32)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=2 * BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    train_step = tf.function(lambda: strategy.run(step))
    for number in range(-WARMUP_STEPS, config["steps"]):
        if number == 0:
            started = time.perf_counter()
        loss = train_step()
        report({"loss": float(loss), "step": number})
    stamp(config, "trained", steps_per_second=config["steps"] / (time.perf_counter() - started))
