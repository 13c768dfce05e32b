"""Workers without a framework that report in a loop, with all file loggers or none."""

from pathlib import Path

from reporting import reports
from stamps import options, stamp

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig
from drivetrain.loggers import CSVLoggerCallback, JsonLoggerCallback
from drivetrain_track import TBXLoggerCallback


class NoJson(JsonLoggerCallback):
    """Replaces the default logger."""

    def on_report(self, run, report):
        pass


class NoCSV(CSVLoggerCallback):
    """Likewise."""

    def on_report(self, run, report):
        pass


def train_func(config):
    reports(config, drivetrain.report, drivetrain.get_context().get_world_rank())


if __name__ == "__main__":
    config = options(workers=2, cpus=1.0, reports=100, spin_us=0, fail=0, loggers=1)
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=config["workers"], resources_per_worker={"CPU": config["cpus"]}, runtime="local"
        ),
        run_config=RunConfig(
            storage_path=config["storage"],
            callbacks=[TBXLoggerCallback()] if config["loggers"] else [NoJson(), NoCSV()],
        ),
    )
    stamp(config, "fit_called")
    result = trainer.fit()
    stamp(config, "fit_ended")
    run = Path(result.path)
    if config["loggers"]:
        with (run / "result.json").open() as lines:
            assert sum(1 for _ in lines) == config["reports"]
    else:
        assert not (run / "result.json").exists()
    assert bool(list(run.glob("events.out.tfevents.*"))) == bool(config["loggers"])
