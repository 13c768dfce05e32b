"""A dataset without rows is refused before the start, with its name, instead of a metric of 0."""

import sys
from typing import Any

import numpy as np
import pandas as pd

from drivetrain import ConfigurationError, RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer
from drivetrain_gbdt.xgboost import XGBoostTrainer

random = np.random.default_rng(0)
frame = pd.DataFrame({"a": random.random(50), "y": random.random(50)})


def is_refused(trainer: Any, empty: str) -> bool:
    try:
        trainer(
            params={},
            label_column="y",
            datasets={"train": frame, "valid": frame, empty: frame[:0]},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(verbose=0),
        ).fit()
    except ConfigurationError as error:
        return f"dataset {empty!r}: expected at least one row" in str(error)
    return False


if __name__ == "__main__":
    refused = [is_refused(kind, empty) for kind in (XGBoostTrainer, LightGBMTrainer) for empty in ("train", "valid")]
    print("refused:", refused)
    sys.exit(not all(refused))
