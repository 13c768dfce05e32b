"""JAX: the gradients are means over all workers, and rank 0 saves the arrays with NumPy."""

import os
import tempfile

import numpy as np

import drivetrain
from drivetrain import Checkpoint, RunConfig, ScalingConfig
from drivetrain_jax import JaxTrainer, prepare_dataset_shard


def make_rows():
    rows = np.random.default_rng(0).normal(size=(160, 16)).astype("float32")
    return {"inputs": rows, "targets": rows.sum(axis=1)}


def train_func():
    import jax
    import jax.numpy as jnp

    def loss_of(model, batch, key):
        kept = jax.random.bernoulli(key, 0.9, (32,))
        hidden = jnp.tanh(batch["inputs"] @ model["first"]) * kept
        return jnp.square(hidden @ model["last"] - batch["targets"]).mean()

    @jax.jit
    def train_step(model, batch, key):
        loss, gradients = jax.value_and_grad(loss_of)(model, batch, key)
        return jax.tree.map(lambda value, gradient: value - 0.01 * gradient, model, gradients), loss

    rng = np.random.default_rng(0)
    model = {"first": rng.normal(0, 0.2, (16, 32)).astype("float32"), "last": np.zeros(32, "float32")}
    first = 0
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory, np.load(os.path.join(directory, "state.npz")) as saved:
            model, first = {name: saved[name] for name in model}, int(saved["epoch"]) + 1
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    model = jax.device_put(model, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    shard = drivetrain.get_dataset_shard("train")
    for epoch in range(first, 8):
        options = {"local_shuffle_buffer_size": 80, "local_shuffle_seed": epoch}
        for number, batch in enumerate(prepare_dataset_shard(shard, batch_size=10, **options)):
            model, loss = train_step(model, batch, jax.random.key(100 * epoch + number))
        metrics = {"loss": float(loss)}
        if drivetrain.get_context().get_world_rank():
            drivetrain.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as directory:
            np.savez(os.path.join(directory, "state.npz"), epoch=epoch, **jax.device_get(model))
            drivetrain.report(metrics, Checkpoint.from_directory(directory), checkpoint_ranks=[0])


def make_trainer(scaling_config, **options):
    return JaxTrainer(
        train_func,
        datasets={"train": make_rows()},
        scaling_config=scaling_config,
        run_config=RunConfig(worker_output="none", **options),
    )


if __name__ == "__main__":
    make_trainer(ScalingConfig(num_workers=2)).fit()
