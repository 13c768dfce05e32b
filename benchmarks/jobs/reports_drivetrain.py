"""Workers without a framework that report in a loop, on drivetrain."""

from reporting import reports
from stamps import options, stamp

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def train_func(config):
    reports(config, drivetrain.report, drivetrain.get_context().get_world_rank())


if __name__ == "__main__":
    config = options(workers=2, cpus=1.0, reports=100, spin_us=0, fail=0, runtime="local")
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=config["workers"], resources_per_worker={"CPU": config["cpus"]}, runtime=config["runtime"]
        ),
        run_config=RunConfig(storage_path=config["storage"]),
    )
    stamp(config, "fit_called")
    try:
        result = trainer.fit()
    finally:
        stamp(config, "fit_ended")
    with open(f"{result.path}/result.json") as lines:
        assert sum(1 for _ in lines) == config["reports"]
