"""The package's public names and imports, and the choice between the two distributions of Lightning."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import drivetrain_lightning
from drivetrain import ConfigurationError
from tests.support import PROCESS_LIMIT_S

NAMES = [
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayTrainReportCallback",
    "prepare_trainer",
]


def run_python(code: str, *arguments: object) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
    ).stdout


def test_public_names_are_pinned():
    assert sorted(drivetrain_lightning.__all__) == dir(drivetrain_lightning) == NAMES
    assert all(getattr(drivetrain_lightning, name).__name__ == name for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'RayStrategy'"):
        drivetrain_lightning.RayStrategy  # noqa: B018


def test_importing_the_package_does_not_import_a_framework():
    code = "import json, sys, drivetrain_lightning; print(json.dumps(sorted(sys.modules)))"
    loaded = {name.partition(".")[0] for name in json.loads(run_python(code))}
    assert not loaded & {"lightning", "pytorch_lightning", "torch", "numpy", "ray"}


def test_classes_are_for_lightning_by_default_and_for_pytorch_lightning_if_imported_from_its_module():
    code = (
        "import pickle, drivetrain_lightning as d, drivetrain_lightning.lightning as ours\n"
        "import pytorch_lightning as pl, drivetrain_lightning.pytorch_lightning as other\n"
        "assert d.RayDDPStrategy is ours.RayDDPStrategy and other.prepare_trainer is d.prepare_trainer\n"
        "assert issubclass(other.RayDDPStrategy, pl.strategies.DDPStrategy)\n"
        "for strategy in d.RayDDPStrategy, other.RayDDPStrategy:\n"
        "    assert pickle.loads(pickle.dumps(strategy)) is strategy\n"
        "print('passed')"
    )
    assert run_python(code) == "passed\n"


def test_missing_distribution_is_reported_with_the_command_to_install_it():
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "import drivetrain, drivetrain_lightning\n"
        "try: drivetrain_lightning.RayDDPStrategy\n"
        "except drivetrain.PluginError as error: print(error)"
    )
    assert "which are not installed. Run on every node: pip install lightning" in run_python(code)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": 0}, "every=.*got 0"),
        ({"every": True}, "every=.*got True"),
        ({"every": "batch"}, "every=.*'epoch', 'validation' or a positive number of steps, got 'batch'"),
        ({"metrics": "loss"}, "metrics=.*a list of names of metrics, got 'loss'"),
        ({"metrics": [1]}, r"metrics=.*got \[1\]"),
        ({"checkpoint_upload_mode": "none"}, "checkpoint_upload_mode=.*'sync' or 'async', got 'none'"),
    ],
)
def test_invalid_argument_of_the_callback_is_refused_when_it_is_created(values: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=f"RayTrainReportCallback.{message}"):
        drivetrain_lightning.RayTrainReportCallback(**values)


PROGRAM = """
import sys, drivetrain, pytorch_lightning as pl
from drivetrain_lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from drivetrain_torch import TorchTrainer
from pytorch_lightning.demos.boring_classes import BoringModel


def train():
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=1,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    prepare_trainer(trainer).fit(BoringModel())
    return "lightning" in sys.modules


workers = drivetrain.ScalingConfig(num_workers=2, runtime="local")
once = ["pytorch_lightning"]
run = drivetrain.RunConfig(storage_path=sys.argv[1], verbose=0, worker_output="none", preload=once)
result = TorchTrainer(train, scaling_config=workers, run_config=run).fit()
with result.checkpoint.as_directory() as directory:
    BoringModel.load_from_checkpoint(directory + "/" + RayTrainReportCallback.CHECKPOINT_NAME)
print(result.return_value, result.metrics["step"])
"""


@pytest.mark.campaign
def test_program_that_imports_pytorch_lightning_trains_with_it(tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PROCESS_LIMIT_S)
    assert ended.stdout == "False 8\n"
