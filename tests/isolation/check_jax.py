"""`drivetrain[jax]` in an empty environment: its import does not load JAX, two workers compute a sum."""

import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_config_does_not_import_jax() -> None:
    loaded = loaded_modules("import drivetrain_jax; drivetrain_jax.JaxConfig().create()")
    assert not loaded & {"jax", "jaxlib", "numpy"}, loaded


def train_func() -> None:
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    import drivetrain

    rank_from_one = jnp.float32(drivetrain.get_context().get_world_rank() + 1)
    drivetrain.report({"sum": float(multihost_utils.process_allgather(rank_from_one).sum())})


def check_two_workers_compute_a_sum(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    result = DataParallelTrainer(
        train_func,
        backend_config="jax",
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage_path, verbose=0, worker_output="none"),
    ).fit()
    assert result.metrics["sum"] == 3.0, result.metrics


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_config_does_not_import_jax()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_compute_a_sum(directory)
    print("ok: drivetrain[jax]")
