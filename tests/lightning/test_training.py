"""Trainings of one and of several processes, and what users do with Lightning beside."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import Result
from drivetrain_lightning import RayTrainReportCallback
from tests.lightning.jobs import (
    STEPS,
    Digits,
    fit_wrongly,
    load,
    train_and_test,
    train_in_many_ways,
    train_on_shards,
    train_without_drivetrain,
)
from tests.support import Collector

ACCURACY = 0.93


def test_lightning_alone_reaches_that_accuracy_too(fit: Callable[..., Result]):
    assert fit(train_without_drivetrain, workers=1).return_value >= ACCURACY


def test_every_kind_of_training_learns_on_two_workers(fit: Callable[..., Result]):
    found = fit(train_in_many_ways).return_value
    assert min(accuracy for accuracy, _ in found.values()) > 0.8, found
    steps = dict.fromkeys(found, 2 * STEPS) | {"accumulated": STEPS}
    assert {name: step for name, (_, step) in found.items()} == steps


def test_dataset_shards_are_loaders(fit: Callable[..., Result]):
    datasets = {
        name: {"image": data.tensors[0].numpy(), "label": data.tensors[1].numpy()}
        for name, data in zip(("train", "valid"), load(), strict=True)
    }
    assert fit(train_on_shards, datasets=datasets).return_value >= ACCURACY


def test_trainer_that_does_not_fit_its_worker_is_told_what_to_change(fit: Callable[..., Result]):
    said = fit(fit_wrongly).return_value
    wanted = {
        "no trainer": ["a Trainer of Lightning, got 'ddp'"],
        "strategy": ["got DDPStrategy", "pass Trainer(strategy=RayDDPStrategy())"],
        "environment": ["got LightningEnvironment", "pass Trainer(plugins=[RayLightningEnvironment()])"],
        "devices": ["trains on cpu, got cpu, cpu", "devices='auto'", "ScalingConfig(num_workers=...)"],
        "accelerator": ["this worker's CPU, got cuda:0", "accelerator='cpu'", "ScalingConfig(use_gpu=True)"],
        "strategy, in fit": ["got another: pass Trainer(strategy=RayDDPStrategy())"],
        "no strategy, in fit": ["got SingleDeviceStrategy", "pass Trainer(strategy=RayDDPStrategy())"],
        "environment, in fit": ["pass Trainer(plugins=[RayLightningEnvironment()])"],
        "full state of fsdp": ["RayFSDPStrategy(state_dict_type='sharded')"],
        "metric": ["'auc', which was never logged", "'loss'", "call self.log('auc', ...)"],
    }
    assert said.keys() == wanted.keys()
    for name, parts in wanted.items():
        assert all(part in said[name] for part in parts), said[name]


@pytest.mark.parametrize(
    ("workers", "runtime"),
    [(0, "inprocess"), (1, "local"), (2, "local"), pytest.param(2, "ray", marks=pytest.mark.ray)],
)
def test_any_number_of_workers_reaches_the_accuracy_of_one_process(
    fit: Callable[..., Result], workers: int, runtime: str, tmp_path: Path, request: pytest.FixtureRequest
):
    if runtime == "ray":
        request.getfixturevalue("ray_address")
    told = Collector()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # of its own code, where that runs in this process
        result = fit(train_and_test, {"logs": tmp_path}, workers=workers, runtime=runtime, callbacks=(told,))

    assert result.return_value["test_accuracy"] >= ACCURACY
    for rank in range(workers or 1):
        metrics = told.metrics_of(rank)
        assert [report["step"] for report in metrics] == [STEPS * epoch for epoch in range(1, 7)]
        assert (
            [report["epoch"] for report in metrics] == [report["logged_last"] for report in metrics] == list(range(6))
        )
        assert metrics[-1]["accuracy"] == pytest.approx(result.return_value["test_accuracy"])
        assert metrics[-1]["loss"] < metrics[0]["loss"] / 4
    assert len(told.checkpoints) == 6
    with result.checkpoint.as_directory() as directory:
        module = Digits.load_from_checkpoint(Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    assert float(module.accuracy(load()[1].tensors)) == pytest.approx(result.metrics["accuracy"], abs=0.01)
    assert [logs.name for logs in tmp_path.iterdir()] == ["rank_0"], "Lightning's own loggers write on rank 0 alone"
