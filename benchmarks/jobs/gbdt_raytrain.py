"""XGBoost on a table, on Ray Train, following its guide: a Ray dataset's shard as a data frame."""

import ray.data
import ray.train
import xgboost
from gbdt import PARAMS, ROUNDS, Stamps
from ray.train import RunConfig, ScalingConfig
from ray.train.xgboost import RayTrainReportCallback, XGBoostTrainer
from stamps import options, stamp


def train_func(config):
    stamp(config, "started")
    rows = ray.train.get_dataset_shard("train").materialize().to_pandas()
    matrix = xgboost.QuantileDMatrix(rows.drop(columns="label"), rows["label"])
    del rows
    callbacks = [Stamps(config), RayTrainReportCallback()]
    xgboost.train(PARAMS, matrix, ROUNDS, evals=[(matrix, "train")], verbose_eval=False, callbacks=callbacks)


if __name__ == "__main__":
    config = options(data="", workers=1, shard_bytes=1)
    XGBoostTrainer(
        train_func,
        train_loop_config=config,
        datasets={"train": ray.data.read_parquet(config["data"])},
        scaling_config=ScalingConfig(num_workers=config["workers"], resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=config["storage"]),
    ).fit()
