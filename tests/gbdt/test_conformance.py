"""The conformance kits for both backends and their trainers."""

from typing import Any

import numpy as np

import drivetrain
from drivetrain import CheckpointConfig, RunConfig
from drivetrain_gbdt.lightgbm import LightGBMConfig, LightGBMTrainer
from drivetrain_gbdt.xgboost import XGBoostConfig, XGBoostTrainer
from drivetrain_testing import BackendConformance, TrainerConformance


class TestXGBoost(BackendConformance):
    config = XGBoostConfig(timeout_s=30)
    framework = "xgboost"

    @staticmethod
    def all_sum(value: float) -> float:
        import numpy as np
        from xgboost import collective

        return float(collective.allreduce(np.array([value]), collective.Op.SUM)[0])


class TestLightGBM(BackendConformance):
    config = LightGBMConfig()
    framework = "lightgbm"


def table() -> dict[str, Any]:
    """Return the arguments for a training on a table, with a checkpoint in every round."""
    return {
        "label_column": "y",
        "num_boost_round": 3,
        "datasets": {"train": {"x": np.arange(64.0), "y": np.arange(64) % 2}},
        "run_config": RunConfig(verbose=0, checkpoint_config=CheckpointConfig(checkpoint_frequency=1)),
    }


class TestXGBoostTrainer(TrainerConformance):
    trainer = XGBoostTrainer
    name = "xgboost"
    forwards_keywords = True  # to xgboost.train

    def arguments(self) -> dict[str, Any]:
        return {**table(), "params": {"objective": "binary:logistic"}, "xgboost_config": XGBoostConfig(timeout_s=30)}


class TestLightGBMTrainer(TrainerConformance):
    trainer = LightGBMTrainer
    name = "lightgbm"
    forwards_keywords = True  # to lightgbm.train

    def arguments(self) -> dict[str, Any]:
        return {**table(), "params": {"objective": "binary", "verbosity": -1}}


def train(config: dict[str, Any]) -> None:
    drivetrain.report({"loss": config["loss"]})


class TestXGBoostTrainerWithFunction(TrainerConformance):
    trainer = XGBoostTrainer
    name = "xgboost"

    def arguments(self) -> dict[str, Any]:
        return {"train_loop_per_worker": train, "train_loop_config": {"loss": 0.5}}
