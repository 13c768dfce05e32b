"""`drivetrain[tensorflow]` in an empty environment: its import does not load TensorFlow, two workers compute a sum."""

import os
import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_config_does_not_import_tensorflow() -> None:
    loaded = loaded_modules("import drivetrain_tf.keras; drivetrain_tf.TensorflowConfig()")
    assert not loaded & {"tensorflow", "keras", "numpy"}, loaded


def train_func() -> None:
    import tensorflow as tf

    import drivetrain

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank_from_one = tf.constant(drivetrain.get_context().get_world_rank() + 1.0)
    total = strategy.reduce("sum", strategy.run(lambda: rank_from_one), axis=None)
    drivetrain.report({"sum": total})


def check_two_workers_compute_a_sum(storage_path: str) -> None:
    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    result = DataParallelTrainer(
        train_func,
        backend_config="tensorflow",
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage_path, verbose=0, worker_output="none"),
    ).fit()
    assert result.metrics["sum"] == 3.0, result.metrics


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    check_dependencies_are_complete()
    check_import_is_light()
    check_config_does_not_import_tensorflow()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_compute_a_sum(directory)
    print("ok: drivetrain[tensorflow]")
