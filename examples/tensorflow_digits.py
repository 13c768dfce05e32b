"""Train a small convolutional network on handwritten digits with TensorFlow and Keras 3, with two workers.

The script has a custom training loop.

python examples/tensorflow_digits.py --runtime local --num-workers 2
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.datasets import load_digits

import drivetrain
from drivetrain import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_tf import TensorflowTrainer, prepare_dataset_shard

BATCH_SIZE = 60  # the global batch size


def make_arrays():
    """Return 1,797 scans of 8 x 8 pixels with their labels, in random order: 1,440 for training and 357 for testing."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 16).astype("float32").reshape(-1, 8, 8, 1)
    return (images[:1440], digits[order][:1440]), (images[1440:], digits[order][1440:])


def make_model():
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            *(layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D()),
            *(layers.Conv2D(64, 3, padding="same", activation="relu"), layers.Flatten(), layers.Dense(10)),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(2e-3))
    return model


def accuracy(model, images, digits):
    return float(np.mean(np.argmax(model(images), axis=1) == digits))


def train_func(config):
    import keras
    import tensorflow as tf

    context = drivetrain.get_context()
    (images, digits), test_set = make_arrays()
    own = slice(context.get_world_rank(), None, context.get_world_size())
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    epochs_done = 0
    with strategy.scope():
        if checkpoint := drivetrain.get_checkpoint():  # after a retry, or with RunConfig(resume=...)
            with checkpoint.as_directory() as directory:
                model = keras.models.load_model(Path(directory, "model.keras"))
            epochs_done = checkpoint.get_metadata()["epoch"]
        else:
            model = make_model()
    rows = tf.data.Dataset.from_tensor_slices((images[own], digits[own])).shuffle(1000, seed=0)
    batches = strategy.experimental_distribute_dataset(prepare_dataset_shard(rows.batch(BATCH_SIZE)))

    def step(images, digits):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(digits, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(images, digits):
        return strategy.reduce("sum", strategy.run(step, args=(images, digits)), axis=None)

    for epoch in range(epochs_done + 1, config["epochs"] + 1):
        losses = [train_step(images, digits) for images, digits in batches]
        metrics = {"epoch": epoch, "loss": np.mean(losses), "accuracy": accuracy(model, *test_set)}
        with TemporaryDirectory() as directory:
            model.save(Path(directory, "model.keras"))  # on every rank: some variables are split among ranks
            checkpoint = Checkpoint.from_directory(directory)
            checkpoint.set_metadata({"epoch": epoch})
            drivetrain.report(metrics, checkpoint if context.get_world_rank() == 0 else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=["local", "ray", "inprocess"], default="local")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage-path", help="the parent of the run directory (default: ~/drivetrain_results)")
    options = parser.parse_args()

    trainer = TensorflowTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(
            num_workers=0 if options.runtime == "inprocess" else options.num_workers,
            runtime=options.runtime,
        ),
        run_config=RunConfig(
            storage_path=options.storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy"),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    result = trainer.fit()

    import keras

    with result.get_best_checkpoint("accuracy").as_directory() as directory:
        model = keras.models.load_model(Path(directory, "model.keras"))
    test_accuracy = accuracy(model, *make_arrays()[1])
    print(f"The best checkpoint classifies {test_accuracy:.1%} of the test digits correctly.")
    print(f"The run directory is {result.path}")
    return 0 if test_accuracy >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
