"""Predict the progression of diabetes with Keras 2 and `Model.fit`, with two workers.

Each worker reads a shard of the data.

python examples/tensorflow_regression.py --runtime local --num-workers 2
"""

import argparse
import os
import sys

from sklearn.datasets import load_diabetes

from drivetrain import FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_dataset_shard
from drivetrain_tf import TensorflowTrainer, prepare_dataset_shard
from drivetrain_tf.keras import ReportCheckpointCallback

BATCH_SIZE = 44  # the global batch size, which is split among the workers


def make_arrays():
    frame = load_diabetes(as_frame=True, scaled=True).frame.sample(frac=1, random_state=0)
    target = frame.pop("target")
    features = (frame / frame.std()).to_numpy("float32")
    return {"features": features, "target": ((target - target.mean()) / target.std()).to_numpy("float32")}


def make_model():
    import tensorflow as tf

    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((10,)), layers.Dense(16, "relu"), layers.Dense(1)])
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def train_func(config):
    import tensorflow as tf

    tf.keras.utils.set_random_seed(0)
    checkpoint, epochs_done = get_checkpoint(), 0
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = make_model()
        if checkpoint:  # after a retry, or with RunConfig(resume=...)
            with checkpoint.as_directory() as directory:
                model = tf.keras.models.load_model(f"{directory}/model.keras")
            epochs_done = int(model.optimizer.iterations.numpy()) // config["steps"]
    rows = get_dataset_shard("train").to_tf("features", "target", batch_size=BATCH_SIZE, drop_last=True)
    model.fit(
        prepare_dataset_shard(rows.repeat()),
        steps_per_epoch=config["steps"],
        epochs=config["epochs"],
        initial_epoch=epochs_done,
        callbacks=[ReportCheckpointCallback(metrics={"loss": "loss", "error": "mae"})],
        verbose=0,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", choices=["local", "ray", "inprocess"], default="local")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage-path", help="the parent of the run directory (default: ~/drivetrain_results)")
    options = parser.parse_args()
    # Keras 3 has no Model.fit for several workers. Keras 2 requires the package tf-keras, here and on every node.
    os.environ["TF_USE_LEGACY_KERAS"] = "1"

    train = make_arrays()
    result = TensorflowTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs, "steps": len(train["target"]) // BATCH_SIZE},
        datasets={"train": train},
        scaling_config=ScalingConfig(
            num_workers=0 if options.runtime == "inprocess" else options.num_workers,
            runtime=options.runtime,
        ),
        run_config=RunConfig(storage_path=options.storage_path, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    explained = 1 - result.metrics["loss"]  # the variance of the target is 1
    print(f"The model explains {explained:.0%} of the variance.")
    print(f"The run directory is {result.path}")
    return 0 if explained >= 0.45 else 1


if __name__ == "__main__":
    sys.exit(main())
