"""Training continues from a model of the user, and a worker is killed: the rounds of that model are not counted.

10 rounds are added to 10 rounds, on tables and in a train function, with LightGBM and with XGBoost.
"""

# campaign:

import os
import signal
import sys
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import xgboost

import drivetrain
from drivetrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer
from drivetrain_gbdt.xgboost import RayTrainReportCallback, XGBoostTrainer

features = pd.DataFrame(np.random.default_rng(0).random((600, 3)), columns=list("abc"))
frame = features.assign(y=features.sum(axis=1))


def die_after_round_6(round_of_attempt: int) -> None:
    if drivetrain.get_context().attempt == 0 and round_of_attempt == 6:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_lightgbm(env: lightgbm.callback.CallbackEnv) -> None:
    die_after_round_6(env.iteration - env.begin_iteration)


class DieInXGBoost(xgboost.callback.TrainingCallback):
    calls = 0

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        die_after_round_6(self.calls)
        self.calls += 1
        return False


def train_func(config: dict[str, Any]) -> None:
    rows = drivetrain.get_dataset_shard("train").to_pandas()
    matrix = xgboost.DMatrix(rows[list("abc")], rows["y"])
    model, rounds = config["base"], 10
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        model = RayTrainReportCallback.get_model(checkpoint)
        rounds -= RayTrainReportCallback.get_rounds(checkpoint)
    callbacks = [RayTrainReportCallback(frequency=1), DieInXGBoost()]
    xgboost.train({}, matrix, rounds, xgb_model=model, callbacks=callbacks)


def fit(trainer: Any, *arguments: Any, **options: Any) -> Any:
    on_tables = {} if arguments else {"label_column": "y", "params": {"verbosity": 0}, "num_boost_round": 10}
    checkpoints = CheckpointConfig(checkpoint_frequency=0 if arguments else 1)
    result = trainer(
        *arguments,
        datasets={"train": frame},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=checkpoints,
            verbose=0,
            worker_output="none",
        ),
        **on_tables,
        **options,
    ).fit()
    return trainer.get_model(result.checkpoint)


if __name__ == "__main__":
    first = lightgbm.train({"verbosity": -1}, lightgbm.Dataset(features, frame["y"]), 10)
    base = xgboost.train({}, xgboost.DMatrix(features, frame["y"]), 10)
    rounds = {
        "LightGBM": fit(LightGBMTrainer, init_model=first, callbacks=[die_in_lightgbm]).num_trees(),
        "XGBoost": fit(XGBoostTrainer, xgb_model=base, callbacks=[DieInXGBoost()]).num_boosted_rounds(),
        "function": fit(XGBoostTrainer, train_func, train_loop_config={"base": base}).num_boosted_rounds(),
    }
    print("rounds:", rounds)
    sys.exit(any(number != 20 for number in rounds.values()))
