"""Accelerate in runs of two processes."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Checkpoint, ConfigurationError, DataConfig, Result, TrainingFailedError
from drivetrain_hf.accelerate import AccelerateTrainer
from drivetrain_torch import prepare_data_loader, prepare_model

EPOCHS = 4


def digits(first: int, last: int) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[first:last] / 16, dtype=torch.float32), torch.tensor(labels[first:last]))


def train_digits(config: dict[str, Any]) -> dict[str, Any]:
    """Train with an unchanged ``Accelerator()``, from the latest checkpoint if there is one."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    context = drivetrain.get_context()
    # The order of the data must depend only on the epoch, and not on random numbers drawn before.
    seeded = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)} if "kill" in config else {}
    accelerator = Accelerator(**seeded, **config.get("accelerator", {}))
    assert accelerator.num_processes == context.get_world_size() == torch.distributed.get_world_size()
    assert accelerator.process_index == context.get_world_rank()
    set_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = DataLoader(digits(0, 1280), batch_size=64 // accelerator.num_processes, shuffle=True)
    held_out = DataLoader(digits(1280, 1797), batch_size=50)
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)
    torch.manual_seed(context.get_world_rank())  # for dropout, so that the random states of the ranks differ
    first, losses = 0, []
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            accelerator.load_state(directory)
        first = checkpoint.get_metadata()["epoch"] + 1
    for epoch in range(first, config["epochs"]):
        training.set_epoch(epoch)
        model.train()
        for number, (images, labels) in enumerate(training):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if (context.attempt, context.get_world_rank(), epoch, number) == (0, 1, *config.get("kill", ())):
                os.kill(os.getpid(), signal.SIGKILL)
        model.eval()
        outputs = [accelerator.gather_for_metrics((model(images).argmax(-1), labels)) for images, labels in held_out]
        predicted, labels = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        assert len(labels) == 517  # each held-out example once, although their number does not divide evenly
        with TemporaryDirectory() as directory:
            accelerator.save_state(directory)
            checkpoint = Checkpoint.from_directory(directory)
            checkpoint.set_metadata({"epoch": epoch})
            drivetrain.report({"accuracy": (predicted == labels).float().mean(), "epoch": epoch}, checkpoint)
    return {
        "losses": losses,
        "type": str(accelerator.distributed_type.value),
        "precision": accelerator.mixed_precision,
        "accumulation": accelerator.gradient_accumulation_steps,
        "device": accelerator.device.type,
        "wrapped": type(model).__name__,
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_reach_the_accuracy_of_a_single_process(fit: Callable[..., Result], workers: int):
    alone = fit(train_digits, {"epochs": EPOCHS}, workers=0)
    together = fit(train_digits, {"epochs": EPOCHS}, workers=workers)
    assert together.return_value["type"] == "MULTI_CPU"
    assert alone.metrics["accuracy"] > 0.85
    assert together.metrics["accuracy"] == pytest.approx(alone.metrics["accuracy"], abs=0.03)


def test_killed_run_resumes_with_the_losses_of_an_undisturbed_one(fit: Callable[..., Result]):
    undisturbed = fit(train_digits, {"epochs": EPOCHS, "kill": (None, None)}).return_value["losses"]
    disturbed = fit(train_digits, {"epochs": EPOCHS, "kill": (2, 5)}, max_failures=1).return_value["losses"]
    assert disturbed == undisturbed[-len(disturbed) :]
    assert len(disturbed) == len(undisturbed) // 2


def test_precision_and_accumulation_of_the_accelerator_apply(fit: Callable[..., Result]):
    settings = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}
    outcome = fit(train_digits, {"epochs": 1, "accelerator": settings}).return_value
    del outcome["losses"]
    assert outcome == {
        **{"type": "MULTI_CPU", "precision": "bf16", "accumulation": 2, "device": "cpu"},
        "wrapped": "DistributedDataParallel",
    }


def prepare_twice(config: dict[str, str]) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    order = config["order"]
    loading = DataLoaderConfiguration(dispatch_batches="dispatching" in order)
    accelerator = Accelerator(dataloader_config=loading)
    model, loader = torch.nn.Linear(64, 10), DataLoader(digits(0, 64), batch_size=4)
    if order == "model, Accelerate last":
        accelerator.prepare(prepare_model(model))
    elif order == "model, Accelerate first":
        prepare_model(accelerator.prepare(model))
    elif order == "loader, Accelerate first":
        prepare_data_loader(accelerator.prepare(loader))
    else:
        list(accelerator.prepare(prepare_data_loader(loader)))


@pytest.mark.parametrize(
    ("order", "where"),
    [
        ("model, Accelerate first", "prepare_model: expected a model that is not wrapped"),
        ("model, Accelerate last", "DistributedDataParallel: expected a model that is not wrapped"),
        ("loader, Accelerate first", "prepare_data_loader: expected a data loader that loads all"),
        ("loader, Accelerate last", "Accelerator.prepare: expected a data loader that loads all"),
        ("loader, Accelerate last, dispatching", "Accelerator.prepare: expected a data loader that loads all"),
    ],
)
def test_objects_that_are_prepared_twice_are_refused(fit: Callable[..., Result], order: str, where: str):
    with pytest.raises(TrainingFailedError, match=rf"\[DT-763\] {where}"):
        fit(prepare_twice, {"order": order})


CONFIG_OF_ANOTHER_CLUSTER = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "gpu_ids": "6,7",
    "machine_rank": 3,
    "main_process_ip": "10.11.12.13",
    "main_process_port": 29501,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 8,
    "num_processes": 64,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


@pytest.mark.parametrize("form", ["file.yaml", "file.json"])
def test_config_applies_except_for_topology_and_networking(fit: Callable[..., Result], tmp_path: Path, form: str):
    import yaml

    config = tmp_path / form
    config.write_text((yaml.safe_dump if form.endswith("yaml") else json.dumps)(CONFIG_OF_ANOTHER_CLUSTER))
    workers = 2 if form == "file.yaml" else 1
    options = {"trainer": AccelerateTrainer, "accelerate_config": config, "workers": workers}
    outcome = fit(train_digits, {"epochs": 1}, **options).return_value
    assert (outcome["type"], outcome["precision"], outcome["device"]) == ("MULTI_CPU", "bf16", "cpu")


def test_in_process_run_restores_the_environment_of_the_driver(fit: Callable[..., Result]):
    before = dict(os.environ)
    config = {**CONFIG_OF_ANOTHER_CLUSTER, "mixed_precision": "no"}
    fit(train_digits, {"epochs": 1}, workers=0, trainer=AccelerateTrainer, accelerate_config=config)
    assert dict(os.environ) == before
    with pytest.raises(TrainingFailedError, match=r"one configuration for the lifetime of a process.*num_workers=1"):
        fit(print, workers=0, trainer=AccelerateTrainer, accelerate_config=CONFIG_OF_ANOTHER_CLUSTER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compile_mode": "fast"}, r"keys that accelerate \S+ knows, got compile_mode\. Remove them, rerun"),
        ({"deepspeed_config": {"zero_level": 2}}, "got deepspeed_config: zero_level"),
        ({"mixed_precision": "fp7"}, "values that Accelerate accepts, got: Unknown mixed_precision mode: fp7"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "expected compute_environment: LOCAL_MACHINE, got AMAZON"),
    ],
)
def test_config_that_this_version_does_not_support_is_refused(fit: Callable[..., Result], change: dict, message: str):
    config = {**CONFIG_OF_ANOTHER_CLUSTER, **change}
    with pytest.raises(TrainingFailedError, match=message) as caught:
        fit(print, trainer=AccelerateTrainer, accelerate_config=config, workers=0)
    assert isinstance(caught.value.__cause__, ConfigurationError)


def test_config_that_requires_gpus_is_refused_before_the_run_starts(fit: Callable[..., Result], tmp_path: Path):
    config = {**CONFIG_OF_ANOTHER_CLUSTER, "distributed_type": "FSDP"}
    with pytest.raises(ConfigurationError, match=r"expected GPUs for distributed_type: FSDP.* ScalingConfig\(use_gpu="):
        fit(print, trainer=AccelerateTrainer, accelerate_config=config, workers=0)


def test_config_that_cannot_be_read_is_refused_before_the_run_starts(tmp_path: Path):
    broken = tmp_path / "config.json"
    broken.write_text("{")
    for given, message in [
        (tmp_path / "missing.yaml", "expected a readable file, got .*missing.yaml"),
        (broken, "expected a readable file, got .*config.json"),
        ({"num_processes": 2}, r"got \{'num_processes': 2\} without a distributed_type\. Run `accelerate config`"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            AccelerateTrainer(print, accelerate_config=given)


def count_rows() -> None:
    rows = {
        name: sum(len(batch["x"]) for batch in drivetrain.get_dataset_shard(name).iter_batches())
        for name in ("train", "test")
    }
    drivetrain.report(rows)


def test_datasets_are_split_as_configured(fit: Callable[..., Result]):
    result = fit(
        count_rows,
        trainer=AccelerateTrainer,
        accelerate_config={"distributed_type": "NO"},
        datasets={name: {"x": np.arange(8)} for name in ("train", "test")},
        dataset_config=DataConfig(datasets_to_split=["train"]),
    )
    assert (result.metrics["train"], result.metrics["test"]) == (4, 8)


def test_run_is_restored_with_its_config(fit: Callable[..., Result]):
    options = {"trainer": AccelerateTrainer, "accelerate_config": CONFIG_OF_ANOTHER_CLUSTER, "workers": 1}
    result = fit(train_digits, {"epochs": 1}, **options)
    restored = AccelerateTrainer.restore(result.path, train_loop_config={"epochs": 2}).fit()
    assert restored.metrics["epoch"] == 1
    assert restored.return_value["precision"] == "bf16"
