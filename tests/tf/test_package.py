"""The package's public names and imports."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import drivetrain_tf
import drivetrain_tf.keras
from drivetrain import ConfigurationError
from drivetrain_tf import TensorflowConfig, TensorflowTrainer


def test_public_names():
    assert drivetrain_tf.__all__ == ["TensorflowConfig", "TensorflowTrainer", "TrainState", "prepare_dataset_shard"]
    assert drivetrain_tf.keras.__all__ == ["ReportCheckpointCallback"]


def test_importing_the_package_and_creating_a_trainer_does_not_import_tensorflow():
    code = (
        "import json, sys, drivetrain_tf as d, drivetrain_tf.keras; d.TensorflowTrainer(print); "
        "names = {name.partition('.')[0] for name in sys.modules}; "
        "print(json.dumps(sorted(names & {'tensorflow', 'keras', 'tf_keras', 'numpy', 'ray'})))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == []


@pytest.mark.parametrize("name", ["intra_op_threads", "inter_op_threads"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_wrong_number_of_threads_is_rejected_when_the_config_is_created(name: str, value: Any):
    with pytest.raises(ConfigurationError, match=rf"TensorflowConfig\({name}=...\): expected .* got {value!r}"):
        TensorflowConfig(**{name: value})


def test_config_of_another_type_is_rejected():
    with pytest.raises(ConfigurationError, match=r"tensorflow_config=.* expected TensorflowConfig, got 'nccl'"):
        TensorflowTrainer(print, tensorflow_config="nccl")  # type: ignore[arg-type]


def test_preloaded_modules_start_no_thread_and_no_tensorflow_runtime():
    code = (
        "import importlib, json, os, sys\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "if (pid := os.fork()) == 0:\n"  # libraries with fork handlers stop their threads here
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(len(os.listdir('/proc/self/task')), 'keras' in sys.modules)\n"
        "sys.modules['tensorflow'].config.threading.set_intra_op_parallelism_threads(1)\n"  # raises after an operation
    )
    output = subprocess.run(
        [sys.executable, "-c", code, json.dumps([*TensorflowConfig().create().preload, "tf_keras"])],
        env={**os.environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.split() == ["1", "True"]
