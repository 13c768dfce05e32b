"""The conformance kit for both backends."""

from drivetrain.testing import BackendConformance
from drivetrain_gbdt.lightgbm import LightGBMConfig
from drivetrain_gbdt.xgboost import XGBoostConfig


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
