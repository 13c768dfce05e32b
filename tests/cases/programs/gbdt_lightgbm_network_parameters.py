"""Parameters of the network in the user's parameters, as in those of a saved model, never make a worker train alone."""

import sys
import warnings
from typing import Any

import lightgbm
import numpy as np
import pandas as pd

from drivetrain import RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer

random = np.random.default_rng(0)
frame = pd.DataFrame({"a": random.random(2000), "y": random.random(2000)})


def rows_in_the_root(params: dict[str, Any]) -> int:
    result = LightGBMTrainer(
        params=params,
        label_column="y",
        datasets={"train": frame},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(verbose=0, worker_output="none"),
    ).fit()
    assert result.checkpoint is not None
    model = LightGBMTrainer.get_model(result.checkpoint)
    return int(model.dump_model()["tree_info"][0]["tree_structure"]["internal_count"])


if __name__ == "__main__":
    first = lightgbm.train({"verbosity": -1}, lightgbm.Dataset(frame[["a"]], frame["y"]), 2)
    text = first.model_to_string()
    saved = {name: value for name, value in lightgbm.Booster(model_str=text).params.items() if value is not None}
    given = {"tree_learner": "serial", "num_machine": 3, "nodes": "127.0.0.1:9", "port": 9, "num_iterations": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = [rows_in_the_root(saved), rows_in_the_root({"verbosity": -1, **given})]
    messages = [str(warning.message) for warning in caught if "parameters of the network" in str(warning.message)]
    print("rows in the root of the first tree:", counts, "of 2000; warnings:", messages)
    expected = [("num_machines=1",), ("num_machine=3", "nodes", "port")]  # one warning for each trainer
    named = [all(name in message for name in names) for message, names in zip(messages, expected, strict=True)]
    sys.exit(counts != [2000, 2000] or not all(named))
