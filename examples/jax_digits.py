"""Train a small network on handwritten digits with JAX, on two workers, and save checkpoints with Orbax.

python examples/jax_digits.py --runtime local --num-workers 2
"""

import argparse
import itertools
import os
import sys

import numpy as np
from sklearn.datasets import load_digits

import drivetrain
from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_jax import JaxTrainer, prepare_dataset_shard

BATCH_SIZE = 60  # of each worker
LEARNING_RATE = 0.5
GOAL = 0.95  # the accuracy on the test set


def make_arrays():
    """Return 1,797 scans of 8 x 8 pixels with their labels, in random order: 1,440 for training and 357 for testing."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    rows = {"pixels": (images[order] / 16).astype("float32"), "digit": digits[order].astype("int32")}
    return {name: row[:1440] for name, row in rows.items()}, {name: row[1440:] for name, row in rows.items()}


def make_model(sizes=(64, 64, 10)):
    """Return the weights and biases of each layer. All workers create the same ones."""
    rng = np.random.default_rng(0)
    return [
        {"w": rng.normal(0, inputs**-0.5, (inputs, outputs)).astype("float32"), "b": np.zeros(outputs, "float32")}
        for inputs, outputs in itertools.pairwise(sizes)
    ]


def predict(model, pixels):
    import jax.numpy as jnp

    for layer in model[:-1]:
        pixels = jnp.tanh(pixels @ layer["w"] + layer["b"])
    return pixels @ model[-1]["w"] + model[-1]["b"]


def train_func(config):
    import jax
    import orbax.checkpoint as ocp

    def loss_of(model, batch):
        scores = jax.nn.log_softmax(predict(model, batch["pixels"]))
        return -scores[np.arange(len(batch["digit"])), batch["digit"]].mean()

    @jax.jit
    def train_step(model, batch):
        # The batch has the rows of all workers, so this is the mean over all of them, and so are the gradients.
        loss, gradients = jax.value_and_grad(loss_of)(model, batch)
        return jax.tree.map(lambda value, gradient: value - LEARNING_RATE * gradient, model, gradients), loss

    # Every device holds the whole model.
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.device_put({"model": make_model(), "epoch": 0}, everywhere)
    with ocp.StandardCheckpointer() as checkpointer:
        if checkpoint := drivetrain.get_checkpoint():  # after a retry, or with RunConfig(resume=...)
            with checkpoint.as_directory() as directory:
                state = checkpointer.restore(os.path.join(directory, "state"), state)
        shard = drivetrain.get_dataset_shard("train")
        for epoch in range(int(state["epoch"]), config["epochs"]):
            losses = []
            options = {"local_shuffle_buffer_size": 720, "local_shuffle_seed": epoch}
            for batch in prepare_dataset_shard(shard, batch_size=BATCH_SIZE, **options):
                state["model"], loss = train_step(state["model"], batch)
                losses.append(loss)
            state["epoch"] = jax.device_put(epoch + 1, everywhere)
            _, test = make_arrays()
            accuracy = float((predict(state["model"], test["pixels"]).argmax(axis=1) == test["digit"]).mean())
            with drivetrain.shared_checkpoint() as checkpoint:
                checkpointer.save(os.path.join(checkpoint.path, "state"), state)
                checkpointer.wait_until_finished()
                drivetrain.report({"loss": float(np.mean(losses)), "accuracy": accuracy}, checkpoint=checkpoint)
    return jax.device_get(state["model"])


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", default=None)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage-path", default=None)
    options = parser.parse_args(arguments)
    trainer = JaxTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs},
        datasets={"train": make_arrays()[0]},
        scaling_config=ScalingConfig(num_workers=options.num_workers, runtime=options.runtime),
        run_config=RunConfig(
            storage_path=options.storage_path,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            preload=("orbax.checkpoint",),
        ),
    )
    result = trainer.fit()
    print(f"accuracy {result.metrics['accuracy']:.3f} after {result.metrics['_training_iteration']} epochs")
    return 0 if result.metrics["accuracy"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
