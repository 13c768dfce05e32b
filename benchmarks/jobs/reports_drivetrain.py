"""Workers without a framework that report in a loop, on drivetrain."""

import time

from reporting import reports
from stamps import options, stamp

import drivetrain
from drivetrain import Callback, DataParallelTrainer, RunConfig, ScalingConfig


def train_func(config):
    reports(config, drivetrain.report, drivetrain.get_context().get_world_rank())


class DriverTime(Callback):
    """Stamps the CPU time of the driver while the ranks report."""

    def on_group_start(self, run, attempt, workers):
        self.began = time.process_time()

    def on_group_stop(self, run, attempt):
        seconds = time.process_time() - self.began
        stamp(config, "driver", us=1e6 * seconds / (config["workers"] * config["reports"]))


if __name__ == "__main__":
    config = options(workers=2, cpus=1.0, reports=100, spin_us=0, metrics=3, fail=0, runtime="local")
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=config["workers"], resources_per_worker={"CPU": config["cpus"]}, runtime=config["runtime"]
        ),
        run_config=RunConfig(storage_path=config["storage"], callbacks=[DriverTime()]),
    )
    stamp(config, "fit_called")
    try:
        result = trainer.fit()
    finally:
        stamp(config, "fit_ended")
    with open(f"{result.path}/result.json") as lines:
        assert sum(1 for _ in lines) == config["reports"]
