"""Runs of many short steps with a report each, in turn with and without hang detection; no framework."""

import time

from stamps import options, stamp

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig

HANG_TIMEOUT_S = 30
WARMUP_STEPS = 500


def train_func(config):
    for step in range(-WARMUP_STEPS, config["steps"]):
        if step == 0:
            started, cpu_started = time.perf_counter(), time.process_time()
        drivetrain.report({"loss": sum(range(config["work"])), "step": step})
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}


def fit(config, hang_timeout_s):
    """Return the steps per second of the clock, and of the CPU time of the driver and of one worker."""
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=config["storage"], hang_timeout_s=hang_timeout_s, verbose=0),
    )
    cpu_before = time.process_time()
    found = trainer.fit().return_value
    cpu_seconds = found["cpu_seconds"] + time.process_time() - cpu_before
    return {"per_second": config["steps"] / found["seconds"], "per_cpu_second": config["steps"] / cpu_seconds}


if __name__ == "__main__":
    config = options(fits=24, steps=4000, work=10_000)
    fit(config, None)  # the first run starts the fork server
    for number in range(config["fits"]):
        watched = number % 4 in (1, 2)  # so that neither side is always the first of a pair
        figures = fit(config, HANG_TIMEOUT_S if watched else None)
        stamp(config, "trained", watched=watched, **figures)
