"""Train an autoencoder with 8 latent numbers on images of digits with Keras 2, with two workers.

Each worker generates its own batches.

python examples/tensorflow_autoencoder.py --runtime local --num-workers 2
"""

import argparse
import os
import sys
import tempfile

from sklearn.datasets import load_digits

import drivetrain
from drivetrain import Checkpoint, RunConfig, ScalingConfig, get_context, get_dataset_shard
from drivetrain_tf import TensorflowTrainer, prepare_dataset_shard

BATCH_SIZE = 64  # the global batch size, which is split among the workers


def make_model():
    import tensorflow as tf

    layers = tf.keras.layers
    encoder = [layers.Dense(48, "relu"), layers.Dense(8)]
    decoder = [layers.Dense(48, "relu"), layers.Dense(64, "sigmoid")]
    model = tf.keras.Sequential([layers.Input((64,)), *encoder, *decoder])
    model.compile(optimizer=tf.keras.optimizers.Adam(0.005), loss="mse")
    return model


def make_dataset(shard):
    """Return pairs of a noisy and the original image, with new noise in each epoch."""
    import tensorflow as tf

    def make_pairs():
        for batch in shard.iter_tf_batches(batch_size=BATCH_SIZE, dtypes=tf.float32, local_shuffle_buffer_size=500):
            noise = tf.random.normal(tf.shape(batch["image"]), stddev=0.1)
            yield tf.clip_by_value(batch["image"] + noise, 0, 1), batch["image"]

    images = tf.TensorSpec((None, 64), tf.float32)
    return prepare_dataset_shard(tf.data.Dataset.from_generator(make_pairs, output_signature=(images, images)))


def train_func(config):
    import tensorflow as tf

    tf.keras.utils.set_random_seed(get_context().get_world_rank())
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = make_model()
    dataset = make_dataset(get_dataset_shard("train"))
    for epoch in range(1, config["epochs"] + 1):
        metrics = {"epoch": epoch, "loss": model.fit(dataset, verbose=0).history["loss"][0]}
        if epoch < config["epochs"]:
            drivetrain.report(metrics)
    with tempfile.TemporaryDirectory() as directory:
        model.save(os.path.join(directory, "autoencoder"))  # a SavedModel; all ranks have to call this
        is_rank_0 = get_context().get_world_rank() == 0
        drivetrain.report(metrics, Checkpoint.from_directory(directory) if is_rank_0 else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=["local", "ray", "inprocess"], default="local")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--storage-path", help="the parent of the run directory (default: ~/drivetrain_results)")
    options = parser.parse_args()
    # Keras 3 has no Model.fit for several workers. Keras 2 requires the package tf-keras, here and on every node.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"

    images = (load_digits().data / 16).astype("float32")
    result = TensorflowTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs},
        datasets={"train": {"image": images}},
        scaling_config=ScalingConfig(
            num_workers=0 if options.runtime == "inprocess" else options.num_workers,
            runtime=options.runtime,
        ),
        run_config=RunConfig(storage_path=options.storage_path),
    ).fit()
    unexplained = result.metrics["loss"] / images.var(axis=0).mean()
    print(f"The 8 numbers explain {1 - unexplained:.0%} of the variance of the images.")
    print(f"The run directory is {result.path}")
    return 0 if unexplained < 0.6 else 1


if __name__ == "__main__":
    sys.exit(main())
