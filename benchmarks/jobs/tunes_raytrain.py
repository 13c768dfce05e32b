"""Twenty trials of Ray Train inside Ray Tune, following its documentation: a trial's function fits a trainer."""

import os

import ray
import ray.train
from ray import tune
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from searching import AT_A_TIME, TRIALS, train
from stamps import options, stamp


def train_func(config):
    train(config, ray.train.report)


def trial(config):
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config={"x": config["x"]},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            storage_path=config["storage"], name=tune.get_context().get_trial_id(), callbacks=[TuneReportCallback()]
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    config = options(trials=TRIALS)
    ray.init(num_cpus=AT_A_TIME + 1)
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.5}),  # each of its workers also has one
        param_space={"x": tune.uniform(0, 1), "storage": os.path.abspath(config["storage"])},
        tune_config=tune.TuneConfig(
            metric="score", mode="max", num_samples=config["trials"], max_concurrent_trials=AT_A_TIME
        ),
        run_config=tune.RunConfig(storage_path=os.path.abspath(config["storage"]), verbose=0),
    )
    stamp(config, "search_starts")
    results = tuner.fit()
    stamp(config, "search_ended")
    assert len(results) == config["trials"]
    assert not results.errors
