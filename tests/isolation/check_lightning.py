"""`drivetrain[lightning]` in an empty environment: its import does not load Lightning, two workers train and save."""

import os
import tempfile
from typing import Any

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_import_does_not_import_lightning() -> None:
    assert not loaded_modules("import drivetrain_lightning") & {"torch", "lightning", "pytorch_lightning"}


def train_func() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    options: dict[str, Any] = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=1,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        **options,
    )
    prepare_trainer(trainer).fit(BoringModel())


def check_two_workers_train(storage_path: str) -> None:
    from drivetrain import RunConfig, ScalingConfig
    from drivetrain_torch import TorchTrainer

    result = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="isolation", storage_path=storage_path),
    ).fit()
    assert result.error is None, result.error
    assert result.metrics["step"] == 3, result.metrics
    assert "checkpoint.ckpt" in os.listdir(result.checkpoint.path)


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_import_does_not_import_lightning()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_train(directory)
    print("ok: drivetrain[lightning]")
