"""LightGBM on tables, with random parameters and a checkpoint after each round."""

import numpy as np
import pandas as pd

from drivetrain import CheckpointConfig, RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer


def make_trainer(scaling_config, **options):
    rows = np.random.default_rng(0).normal(size=(400, 4))
    table = pd.DataFrame(rows, columns=list("abcd")).assign(target=rows.sum(axis=1))
    return LightGBMTrainer(
        params={
            "objective": "regression",
            "num_leaves": 7,
            "bagging_fraction": 0.8,
            "bagging_freq": 1,
            "feature_fraction": 0.7,
            "seed": 1,
            "verbosity": -1,
        },
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
