"""XGBoost or LightGBM on a table, under drivetrain."""

from gbdt import LIGHTGBM, PARAMS, ROUNDS, LightGBMEnd, LightGBMStamps, MemoryMeter, Stamps
from stamps import options, stamp

from drivetrain import Callback, RunConfig, ScalingConfig
from drivetrain_gbdt.lightgbm import LightGBMTrainer
from drivetrain_gbdt.xgboost import XGBoostTrainer


class Weigher(Callback):
    def on_group_start(self, run, attempt, workers):
        stamp(config, "started")
        self.scales = MemoryMeter([worker.pid for worker in workers])

    def on_group_stop(self, run, attempt):
        stamp(config, "weighed", shards=self.scales.grown() / config["shard_bytes"])


if __name__ == "__main__":
    config = options(data="", workers=1, shard_bytes=1, library="xgboost")
    shared = {
        "label_column": "label",
        "num_boost_round": ROUNDS,
        "datasets": {"train": config["data"]},
        "scaling_config": ScalingConfig(
            num_workers=config["workers"], runtime="local", resources_per_worker={"CPU": 1}
        ),
        "run_config": RunConfig(storage_path=config["storage"], callbacks=[Weigher()], verbose=0),
    }
    if config["library"] == "xgboost":
        XGBoostTrainer(params=PARAMS, callbacks=[Stamps(config)], **shared).fit()
    else:
        LightGBMTrainer(params=LIGHTGBM, callbacks=[LightGBMStamps(config), LightGBMEnd(config)], **shared).fit()
