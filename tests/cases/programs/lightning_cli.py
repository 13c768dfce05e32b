"""`LightningCLI` trains on two workers and resumes, in a train function and in a script for `drivetrain run`."""

# campaign: ; ray

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import drivetrain
from drivetrain import FailureConfig, RunConfig, ScalingConfig
from drivetrain_lightning import RayTrainReportCallback
from drivetrain_torch import TorchTrainer

SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
cli = LightningCLI(BoringModel, BoringDataModule, trainer_defaults=quiet, save_config_callback=None)
print("size", cli.trainer.world_size, "steps", cli.trainer.global_step)
"""


class Model(BoringModel):
    """Fails in the second epoch of the first attempt."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.save_hyperparameters()

    def on_train_epoch_start(self):
        if self.current_epoch == 1 and drivetrain.get_context().attempt == 0:
            raise ConnectionError("this worker lost its network")


def train():
    arguments = ["fit", "--model.width=5", "--trainer.max_epochs=2"]
    checkpoint = drivetrain.get_checkpoint()
    with contextlib.ExitStack() as stack:
        if checkpoint is not None:
            directory = stack.enter_context(checkpoint.as_directory())
            arguments.append(f"--ckpt_path={os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME)}")
        cli = LightningCLI(
            Model,
            BoringDataModule,
            args=arguments,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "strategy": {"class_path": "drivetrain_lightning.RayDDPStrategy"},
                "plugins": [{"class_path": "drivetrain_lightning.RayLightningEnvironment"}],
                "callbacks": [RayTrainReportCallback()],
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "limit_train_batches": 2,
                "logger": False,
            },
        )
    return cli.trainer.world_size, cli.trainer.global_step, cli.model.hparams.width, checkpoint is not None


if __name__ == "__main__":
    runtime = sys.argv[1] if sys.argv[1:] else "local"
    retry = FailureConfig(max_failures=1)
    seen = (
        TorchTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=2, runtime=runtime),
            run_config=RunConfig(verbose=0, failure_config=retry),
        )
        .fit()
        .return_value
    )
    print(seen)
    wrong = seen != (2, 4, 5, True)
    if runtime == "local":
        Path("script.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "drivetrain", "run", "script.py", "--num-workers", "2", "--output-of", "all"]
        arguments = ["fit", "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_steps=3"]
        done = subprocess.run([*command, "--", *arguments], capture_output=True, text=True, timeout=200, check=False)
        print(done.stdout, done.stderr)
        wrong |= not all(f"[rank {rank}] size 2 steps 3" in done.stdout for rank in range(2))
    sys.exit(wrong)
