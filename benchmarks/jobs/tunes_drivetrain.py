"""Twenty trials on drivetrain: with Optuna on this machine, or as trainables of Ray Tune."""

from searching import AT_A_TIME, TRIALS, train
from stamps import options, stamp

import drivetrain
from drivetrain import DataParallelTrainer, RunConfig, ScalingConfig


def train_func(config):
    train(config, drivetrain.report)


if __name__ == "__main__":
    config = options(search="optuna", runtime="local", trials=TRIALS)
    actors = config["runtime"] == "ray"
    scaling = ScalingConfig(
        num_workers=1, resources_per_worker={"CPU": 1}, runtime=None if actors else config["runtime"]
    )
    trainer = DataParallelTrainer(train_func, scaling_config=scaling)
    if config["search"] == "optuna":
        import drivetrain_tune as tune

        tuner = tune.Tuner(
            trainer,
            param_space={"train_loop_config": {"x": tune.uniform(0, 1)}},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", num_samples=config["trials"], max_concurrent_trials=AT_A_TIME
            ),
            run_config=RunConfig(storage_path=config["storage"]),
        )
    else:
        import ray
        from ray import tune

        ray.init(num_cpus=AT_A_TIME, include_dashboard=False)
        tuner = tune.Tuner(
            trainer.as_trainable(),
            param_space={"train_loop_config": {"x": tune.uniform(0, 1)}},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", num_samples=config["trials"], reuse_actors=not actors
            ),
            run_config=tune.RunConfig(storage_path=config["storage"], verbose=0),
        )
    stamp(config, "search_starts")
    results = tuner.fit()
    stamp(config, "search_ended")
    assert len(results) == config["trials"]
    assert not results.errors
