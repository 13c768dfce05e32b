"""A worker is killed in round 6: schedules by round and random parameters give the model of an undisturbed run."""

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
from drivetrain_gbdt.xgboost import XGBoostTrainer

features = pd.DataFrame(np.random.default_rng(0).random((600, 6)), columns=list("abcdef"))
frame = features.assign(y=features.sum(axis=1))
RATES = [0.3 * 0.7**number for number in range(10)]


def rate(number: int) -> float:
    return RATES[number]


def die(number: int) -> None:
    if drivetrain.get_context().attempt == 0 and number == 6:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_lightgbm(env: lightgbm.callback.CallbackEnv) -> None:
    die(env.iteration)


class DieInXGBoost(xgboost.callback.TrainingCallback):
    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        die(epoch)
        return False


def trees(trainer: Any, params: dict[str, Any], callbacks: list[Any]) -> str:
    result = trainer(
        params={"verbosity": -1 if trainer is LightGBMTrainer else 0, **params},
        label_column="y",
        num_boost_round=10,
        datasets={"train": frame},
        callbacks=callbacks,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
            verbose=0,
            worker_output="none",
        ),
    ).fit()
    model = trainer.get_model(result.checkpoint)
    if trainer is XGBoostTrainer:
        return "".join(model.get_dump(dump_format="json"))
    text: str = model.model_to_string()
    return text[text.index("Tree=0") : text.index("end of trees")]


if __name__ == "__main__":
    random = {"bagging_fraction": 0.5, "bagging_freq": 3, "feature_fraction": 0.5, "extra_trees": True}
    cases: list[tuple[str, Any, dict[str, Any], list[Any]]] = [
        ("function", LightGBMTrainer, {}, [lightgbm.reset_parameter(learning_rate=rate)]),
        ("list and random", LightGBMTrainer, random, [lightgbm.reset_parameter(learning_rate=RATES)]),
        ("random forest", LightGBMTrainer, {"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}, []),
        ("schedule", XGBoostTrainer, {}, [xgboost.callback.LearningRateScheduler(RATES)]),
        ("random", XGBoostTrainer, {"subsample": 0.5, "colsample_bynode": 0.5}, []),
        ("dart", XGBoostTrainer, {"booster": "dart", "rate_drop": 0.5}, []),
    ]
    wrong = []
    for name, trainer, params, callbacks in cases:
        killer = die_in_lightgbm if trainer is LightGBMTrainer else DieInXGBoost()
        if trees(trainer, params, callbacks) != trees(trainer, params, [*callbacks, killer]):
            wrong.append(f"{trainer.__name__} {name}")
    print("differ:", wrong)
    sys.exit(bool(wrong))
