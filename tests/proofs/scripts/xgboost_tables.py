"""XGBoost on tables, with random parameters and a checkpoint after each round."""

import numpy as np
import pandas as pd

from drivetrain import CheckpointConfig, RunConfig, ScalingConfig
from drivetrain_gbdt.xgboost import XGBoostTrainer


def make_trainer(scaling_config, **options):
    rows = np.random.default_rng(0).normal(size=(400, 4))
    table = pd.DataFrame(rows, columns=list("abcd")).assign(target=rows.sum(axis=1))
    return XGBoostTrainer(
        params={"objective": "reg:squarederror", "max_depth": 3, "subsample": 0.8, "colsample_bytree": 0.7, "seed": 1},
        label_column="target",
        num_boost_round=8,
        datasets={"train": table},
        scaling_config=scaling_config,
        run_config=RunConfig(
            worker_output="none", checkpoint_config=CheckpointConfig(checkpoint_frequency=1), **options
        ),
    )


if __name__ == "__main__":
    make_trainer(ScalingConfig(num_workers=2)).fit()
