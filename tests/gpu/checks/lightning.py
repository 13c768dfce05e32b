"""Lightning's trainer on a GPU."""

from pathlib import Path
from typing import Any

import drivetrain
from tests.gpu.check import Figures, Run, check, equal

EPOCHS = 3


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train for an epoch, or resume and train for two more."""
    from lightning.pytorch import Callback
    from torch.utils.data import DataLoader, TensorDataset

    from drivetrain_lightning import RayFSDPStrategy, RayTrainReportCallback, prepare_trainer
    from tests.gpu.training import make_data
    from tests.lightning.jobs import Digits, make_strategy, make_trainer

    devices = set()

    class Watch(Callback):  # after fit(), Lightning has moved the parameters to the CPU
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            devices.update(value.device.type for value in (*module.parameters(), *batch))

    full = config["strategy"] == "fsdp, full"
    trainer = make_trainer(
        max_epochs=EPOCHS if drivetrain.get_checkpoint() else 1,
        strategy=RayFSDPStrategy(state_dict_type="full") if full else make_strategy(config["strategy"]),
        precision=config["precision"],
        callbacks=[RayTrainReportCallback(), Watch()],
    )
    prepare_trainer(trainer)
    module = Digits()
    loader = DataLoader(TensorDataset(*make_data()), batch_size=32, shuffle=True)
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        trainer.fit(module, loader, loader)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(module, loader, loader, ckpt_path=Path(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    return {
        "strategy": type(trainer.strategy).__name__,
        "device": trainer.strategy.root_device.type,
        "devices": devices,
        "world size": trainer.world_size,
        "epochs": trainer.current_epoch,
        "accuracy": float(trainer.callback_metrics["accuracy"]),
    }


def expect_training(run: Run, strategy: str, precision: str) -> Figures:
    config, workers = {"strategy": strategy, "precision": precision}, run.workers()
    result = run.fit(train, config, workers=workers)
    resumed = run.fit(train, config, workers=workers, resume_from_checkpoint=result.checkpoint).return_value
    for got, epochs in ((result.return_value, 1), (resumed, EPOCHS)):
        equal("device of the strategy", got["device"], run.device)
        equal("devices of parameters and batches", got["devices"], {run.device})
        equal("world size", got["world size"], workers)
        equal("epochs", got["epochs"], epochs)
    assert resumed["accuracy"] > 0.6, f"accuracy: expected more than 0.6, got {resumed['accuracy']}"
    return {"strategy": resumed["strategy"], "workers": workers, "accuracy": resumed["accuracy"]}


@check(packages=("lightning",))
def ddp(run: Run) -> Figures:
    """RayDDPStrategy trains in bf16-mixed and resumes"""
    return expect_training(run, "ddp", "bf16-mixed")


@check(packages=("lightning",), on_cpu=False)
def ddp_in_fp16(run: Run) -> Figures:
    """RayDDPStrategy trains in 16-mixed, with Lightning's gradient scaler, and resumes"""
    return expect_training(run, "ddp", "16-mixed")


@check(packages=("lightning",))
def fsdp(run: Run) -> Figures:
    """RayFSDPStrategy with sharded checkpoints trains and resumes"""
    return expect_training(run, "fsdp", "32-true")


@check(packages=("lightning",), on_cpu=False)
def fsdp_with_full_checkpoints(run: Run) -> Figures:
    """RayFSDPStrategy with full checkpoints trains in bf16-mixed and resumes"""
    return expect_training(run, "fsdp, full", "bf16-mixed")


@check(packages=("lightning", "deepspeed"), limit_s=150)
def deepspeed(run: Run) -> Figures:
    """RayDeepSpeedStrategy (ZeRO stage 2) trains and resumes"""
    return expect_training(run, "deepspeed", "32-true")
