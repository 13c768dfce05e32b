"""A dataset without rows is an error before the start, which names the dataset: nothing is trained on no rows."""

import sys
import tempfile

import numpy as np
import pandas as pd

import drivetrain
from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain_gbdt.xgboost import XGBoostTrainer

SETTINGS = {"scaling_config": ScalingConfig(num_workers=2), "run_config": RunConfig(verbose=0)}


def loop():
    return sum(1 for _ in drivetrain.get_dataset_shard("train").iter_batches())


def error_of(trainer):
    try:
        trainer.fit()
    except ConfigurationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.random(50), "y": rng.random(50)})
    with tempfile.TemporaryDirectory() as directory:
        errors = {
            "train": error_of(DataParallelTrainer(loop, datasets={"train": directory}, **SETTINGS)),
            "valid": error_of(
                XGBoostTrainer(
                    params={},
                    label_column="y",
                    num_boost_round=3,
                    datasets={"train": frame, "valid": frame[frame.a > 2]},
                    **SETTINGS,
                )
            ),
        }
    print(*errors.values(), sep="\n")
    sys.exit(0 if all(f"dataset {name!r}" in error for name, error in errors.items()) else 1)
