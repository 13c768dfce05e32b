"""Rows in the order of a feature give the same model on several workers as in one process."""
# campaign: 2; 3

import sys

import lightgbm
import numpy as np
import pandas as pd

from drivetrain import RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer

PARAMS = {"verbosity": -1, "num_threads": 1}
random = np.random.default_rng(0)
day = np.sort(random.random(4000))
city = pd.Series(np.where(day < 0.5, random.choice(["a", "b"], 4000), random.choice(["c", "d"], 4000)))
features = pd.DataFrame({"day": day, "city": city.astype("category")})
frame = features.assign(y=np.sin(6 * day) + 0.2 * features["city"].cat.codes, weight=0.1 + random.random(4000))

if __name__ == "__main__":
    result = LightGBMTrainer(
        params=PARAMS,
        label_column="y",
        num_boost_round=50,
        datasets={"train": frame, "valid": frame},
        dataset_params={name: {"weight": "weight"} for name in ("train", "valid")},
        scaling_config=ScalingConfig(num_workers=int(sys.argv[1])),
        run_config=RunConfig(verbose=0, worker_output="none"),
    ).fit()
    assert result.checkpoint is not None
    plain = lightgbm.train(PARAMS, lightgbm.Dataset(features, frame["y"], weight=frame["weight"]), 50)
    errors = [
        float(((model.predict(features) - frame["y"]) ** 2).mean())
        for model in (plain, LightGBMTrainer.get_model(result.checkpoint))
    ]
    print("mean squared errors:", *errors)
    sys.exit(not errors[1] < 1.1 * errors[0])
