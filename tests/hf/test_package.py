"""The package's public names, and its imports."""

import json
import subprocess
import sys

import pytest

import drivetrain_hf
import drivetrain_hf.accelerate
import drivetrain_hf.deepspeed
import drivetrain_hf.transformers

MODULES = ("drivetrain_hf", "drivetrain_hf.transformers", "drivetrain_hf.accelerate", "drivetrain_hf.deepspeed")
FRAMEWORKS = ("torch", "transformers", "accelerate", "deepspeed", "numpy", "ray")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_public_names_are_pinned():
    assert drivetrain_hf.__all__ == []
    assert drivetrain_hf.transformers.__all__ == ["RayTrainReportCallback", "TransformersTrainer", "prepare_trainer"]
    assert drivetrain_hf.accelerate.__all__ == ["AccelerateTrainer", "make_resumable"]
    assert drivetrain_hf.deepspeed.__all__ == ["check_config"]
    assert drivetrain_hf.transformers.RayTrainReportCallback.CHECKPOINT_NAME == "checkpoint"


def test_importing_the_modules_and_creating_trainers_does_not_import_a_framework():
    code = (
        "import json, sys\n"
        "from drivetrain_hf.accelerate import AccelerateTrainer\n"
        "from drivetrain_hf.deepspeed import check_config\n"
        "from drivetrain_hf.transformers import TransformersTrainer, prepare_trainer\n"
        "TransformersTrainer(print); AccelerateTrainer(print, accelerate_config={'distributed_type': 'NO'})\n"
        f"print(json.dumps([name for name in sys.modules if name.partition('.')[0] in {FRAMEWORKS}]))"
    )
    assert json.loads(run(code)) == []


@pytest.mark.parametrize(
    ("framework", "use"),
    [
        ("transformers", "from drivetrain_hf.transformers import RayTrainReportCallback"),
        ("transformers", "from drivetrain_hf.transformers import prepare_trainer; prepare_trainer(None)"),
        ("accelerate", "from drivetrain_hf.accelerate import AccelerateTrainer; AccelerateTrainer(print)"),
    ],
)
def test_missing_framework_is_reported_with_the_command_to_install_it(framework: str, use: str):
    code = (
        f"import sys; sys.modules[{framework!r}] = None\nimport drivetrain\n"
        f"try:\n    {use}\nexcept drivetrain.PluginError as error:\n    print(error)"
    )
    expected = f'requires {framework}, which is not installed. Run: pip install "drivetrain[{framework}]"'
    assert expected in run(code)


def test_importing_the_modules_takes_at_most_50_ms_in_addition_to_the_core():
    code = f"import drivetrain, drivetrain_torch, time; t = time.perf_counter(); import {', '.join(MODULES)}\n"
    code += "print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(8)) < 0.05
