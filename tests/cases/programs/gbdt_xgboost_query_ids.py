"""Query ids are only compared: they need not increase, may be text, and give the same trees as numbers in order."""
# campaign:

import sys

import numpy as np
import pandas as pd
import xgboost

from drivetrain import RunConfig, ScalingConfig
from drivetrain_gbdt.xgboost import XGBoostTrainer

PARAMS = {"objective": "rank:ndcg", "nthread": 1}
random = np.random.default_rng(0)
frame = pd.DataFrame({"x": random.random(400), "y": random.integers(0, 3, 400)})
ids = {
    "decreasing": np.repeat(np.arange(40)[::-1], 10),
    "negative": np.repeat(random.permutation(40) - 20, 10),
    "text": np.repeat([f"query {number}" for number in random.permutation(40)], 10),
}


def fit(queries: np.ndarray, workers: int) -> xgboost.Booster:
    result = XGBoostTrainer(
        params=PARAMS,
        label_column="y",
        num_boost_round=3,
        datasets={"train": frame.assign(query=queries)},
        dmatrix_params={"train": {"qid": "query"}},
        scaling_config=ScalingConfig(num_workers=workers, runtime="local" if workers else "inprocess"),
        run_config=RunConfig(verbose=0, worker_output="none"),
    ).fit()
    assert result.checkpoint is not None
    return XGBoostTrainer.get_model(result.checkpoint)


if __name__ == "__main__":
    matrix = xgboost.QuantileDMatrix(frame[["x"]], frame["y"], qid=np.repeat(np.arange(40), 10))
    expected = xgboost.train(PARAMS, matrix, 3).get_dump()
    wrong = [name for name, queries in ids.items() if fit(queries, workers=0).get_dump() != expected]
    if fit(ids["text"], workers=2).num_boosted_rounds() != 3:
        wrong.append("two workers")
    print("differ:", wrong)
    sys.exit(bool(wrong))
