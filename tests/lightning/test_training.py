"""Training with one and with several processes, with the features of Lightning that scripts use."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain import Result
from drivetrain_lightning import RayTrainReportCallback
from tests.lightning.jobs import (
    STEPS,
    Digits,
    fit_misconfigured_trainers,
    load,
    train_and_test,
    train_in_many_ways,
    train_on_shards,
    train_without_drivetrain,
)
from tests.support import Collector

ACCURACY = 0.93


def test_lightning_alone_reaches_the_same_accuracy(fit: Callable[..., Result]):
    assert fit(train_without_drivetrain, workers=1).return_value >= ACCURACY


def test_every_kind_of_training_learns_on_two_workers(fit: Callable[..., Result]):
    outcomes = fit(train_in_many_ways).return_value
    assert min(accuracy for accuracy, _ in outcomes.values()) > 0.8, outcomes
    steps = dict.fromkeys(outcomes, 2 * STEPS) | {"accumulated": STEPS}
    assert {name: step for name, (_, step) in outcomes.items()} == steps


def test_dataset_shards_can_be_used_as_loaders(fit: Callable[..., Result]):
    datasets = {
        name: {"image": data.tensors[0].numpy(), "label": data.tensors[1].numpy()}
        for name, data in zip(("train", "valid"), load(), strict=True)
    }
    assert fit(train_on_shards, datasets=datasets).return_value >= ACCURACY


def test_misconfigured_trainer_is_refused_with_a_remedy(fit: Callable[..., Result]):
    messages = fit(fit_misconfigured_trainers).return_value
    expected = {
        "no trainer": ["a Lightning Trainer, got 'ddp'"],
        "module": ["expected a Lightning Trainer, got Digits", "Prepare the Trainer"],
        "strategy": ["got DDPStrategy", "Pass Trainer(strategy=RayDDPStrategy())"],
        "environment": ["got TorchElasticEnvironment", "Pass Trainer(plugins=[RayLightningEnvironment()])"],
        "devices": ["trains on cpu, got cpu, cpu", "devices='auto'", "ScalingConfig(num_workers=...)"],
        "accelerator": ["this worker's CPU, got cuda:0", "accelerator='cpu'", "ScalingConfig(use_gpu=True)"],
        "strategy, in fit": ["2 workers, got devices=1 and num_nodes=1. Pass Trainer(strategy=RayDDPStrategy())"],
        "alone, in fit": ["all 2 workers, got one for 1 process", "Pass Trainer(strategy=RayDDPStrategy(), plugins="],
        "no strategy, in fit": ["got SingleDeviceStrategy", "Pass Trainer(strategy=RayDDPStrategy())"],
        "environment, in fit": ["Pass Trainer(plugins=[RayLightningEnvironment()])"],
        "full state of fsdp": ["Pass RayFSDPStrategy(state_dict_type='sharded')"],
        "metric": ["got 'auc'. Logged: ", "'loss'", "Call self.log('auc', ...)"],
    }
    assert messages.keys() == expected.keys()
    for name, parts in expected.items():
        assert all(part in messages[name] for part in parts), messages[name]


@pytest.mark.parametrize(
    ("workers", "runtime"),
    [(0, "inprocess"), (1, "local"), (2, "local"), pytest.param(2, "ray", marks=pytest.mark.ray)],
)
def test_any_number_of_workers_reaches_the_accuracy_of_one_process(
    fit: Callable[..., Result], workers: int, runtime: str, tmp_path: Path, request: pytest.FixtureRequest
):
    if runtime == "ray":
        request.getfixturevalue("ray_address")
    collector = Collector()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")  # about its own code, which may run in this process
        result = fit(train_and_test, {"logs": tmp_path}, workers=workers, runtime=runtime, callbacks=(collector,))

    assert result.return_value["test_accuracy"] >= ACCURACY
    for rank in range(workers or 1):
        metrics = collector.metrics_of(rank)
        assert [report["step"] for report in metrics] == [STEPS * epoch for epoch in range(1, 7)]
        assert (
            [report["epoch"] for report in metrics] == [report["logged_last"] for report in metrics] == list(range(6))
        )
        assert metrics[-1]["accuracy"] == pytest.approx(result.return_value["test_accuracy"])
        assert metrics[-1]["loss"] < metrics[0]["loss"] / 4
    assert len(collector.checkpoints) == 6
    with result.checkpoint.as_directory() as directory:
        module = Digits.load_from_checkpoint(Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    assert float(module.accuracy(load()[1].tensors)) == pytest.approx(result.metrics["accuracy"], abs=0.01)
    assert [logs.name for logs in tmp_path.iterdir()] == ["rank_0"], "Lightning's loggers write on rank 0 only"
