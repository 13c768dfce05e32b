"""XGBoost trains the same trees on tables as in one process: categories with a second dataset, and all numbers."""
# arguments: local
# campaign: ray

import decimal
import sys
from typing import Any

import numpy as np
import pandas as pd
import xgboost

from drivetrain import RunConfig, ScalingConfig
from drivetrain_gbdt.xgboost import XGBoostTrainer

ROWS = 300
random = np.random.default_rng(0)
label = random.random(ROWS)
columns: dict[str, Any] = {
    "category of text": pd.Series(random.choice(list("cab"), ROWS)).astype(pd.CategoricalDtype(list("cabd"))),
    "category of integers": pd.Series(random.choice([30, 2, 11], ROWS)).astype(pd.CategoricalDtype([30, 2, 11])),
    "16-bit floats": pd.Series(random.random(ROWS)).astype("float16"),
    "decimals": pd.Series([decimal.Decimal("1.5"), None, decimal.Decimal(7)] * (ROWS // 3)),
}


def fit(frame: pd.DataFrame, workers: int) -> xgboost.Booster:
    result = XGBoostTrainer(
        params={"nthread": 1},
        label_column="y",
        num_boost_round=3,
        datasets={"valid": frame[200:], "train": frame},
        dmatrix_params={"train": {"enable_categorical": True}},
        scaling_config=ScalingConfig(num_workers=workers, runtime=sys.argv[1] if workers else "inprocess"),
        run_config=RunConfig(verbose=0, worker_output="none"),
    ).fit()
    assert result.checkpoint is not None
    return XGBoostTrainer.get_model(result.checkpoint)


if __name__ == "__main__":
    wrong = []
    for name, column in columns.items():
        features = pd.DataFrame({"x": column.astype(float) if name == "decimals" else column})
        matrix = xgboost.QuantileDMatrix(features, label, enable_categorical=True)
        plain = xgboost.train({"nthread": 1}, matrix, 3)
        trained = fit(pd.DataFrame({"x": column, "y": label}), workers=0)
        if trained.get_dump() != plain.get_dump() or trained.feature_types != plain.feature_types:
            wrong.append(name)
    together = pd.DataFrame({**columns, "y": label})
    if fit(together, workers=2).num_boosted_rounds() != 3:
        wrong.append("two workers")
    print("differ:", wrong)
    sys.exit(bool(wrong))
