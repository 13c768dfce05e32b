"""`drivetrain[ray]` in an empty environment: it is selected without importing Ray, two workers train on a cluster."""

import os
import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules, train_func


def check_selection_does_not_import_ray() -> None:
    assert "ray" not in loaded_modules("import drivetrain_ray; drivetrain_ray.RayRuntime.detect()")
    assert "ray" not in loaded_modules("import drivetrain_ray; drivetrain_ray.RayDatasets().accepts(object())")


def check_two_workers_report(storage_path: str) -> None:
    import ray

    from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

    result = DataParallelTrainer(
        train_func,
        train_loop_config={"steps": 3},
        scaling_config=ScalingConfig(num_workers=2, runtime="ray"),
        run_config=RunConfig(name="isolation", storage_path=storage_path),
    ).fit()
    ray.shutdown()
    assert (result.return_value, result.metrics["step"]) == (2, 2), result.metrics


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_selection_does_not_import_ray()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["RAY_TMPDIR"] = directory  # the directory where Ray searches for a running cluster
        check_two_workers_report(directory)
    print("ok: drivetrain[ray]")
