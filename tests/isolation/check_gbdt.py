"""`drivetrain[lightgbm,data]` in an empty environment: its import does not load LightGBM, two workers train a model."""

import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_configs_do_not_import_a_library() -> None:
    loaded = loaded_modules(
        "import drivetrain_gbdt.xgboost as x, drivetrain_gbdt.lightgbm as l; x.XGBoostConfig(); l.LightGBMConfig()"
    )
    assert not loaded & {"xgboost", "lightgbm", "numpy", "pyarrow"}, loaded


def check_two_workers_train(storage_path: str) -> None:
    from drivetrain import RunConfig, ScalingConfig
    from drivetrain_gbdt.lightgbm import LightGBMTrainer

    result = LightGBMTrainer(
        params={"objective": "binary", "metric": "binary_error", "verbosity": -1},
        label_column="label",
        num_boost_round=5,
        datasets={"train": {"x": list(map(float, range(200))), "label": [int(n % 50 > 20) for n in range(200)]}},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage_path, verbose=0),
    ).fit()
    assert result.metrics["train-binary_error"] < 0.3, result.metrics


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_configs_do_not_import_a_library()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_train(directory)
    print("ok: drivetrain[lightgbm,data]")
