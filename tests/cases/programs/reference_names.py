"""Names and settings of Ray Train work, or say once what replaces them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    SyncConfig,
)


def train_func(config: dict[str, Any]) -> None:
    for step in range(10):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = Checkpoint.from_directory(directory) if config["empty"] else None
            drivetrain.report({"loss": 1 / (step + 1)}, checkpoint=checkpoint)
    if "artifact" in config:
        Path(config["artifact"]).write_text("written to the working directory")


def fit(config: dict[str, Any] | None = None, metadata: Any = None, scaling: Any = None, **run_config: Any) -> Result:
    return DataParallelTrainer(
        train_func,
        train_loop_config={"empty": False, **(config or {})},
        scaling_config=scaling or ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(verbose=0, **run_config),
        metadata=metadata,
    ).fit()


def main() -> None:
    steps = [
        fit(stop={"training_iteration": 3}).metrics["_training_iteration"],
        fit(stop=lambda trial_id, metrics: metrics["training_iteration"] >= 4).metrics["_training_iteration"],
        fit(stop={"time_total_s": 0}).metrics["_training_iteration"],
        fit(stop={"los": 2}).metrics["_training_iteration"],
    ]
    assert steps == [3, 4, 1, 10], steps

    assert FailureConfig(3) == FailureConfig(max_failures=3)
    assert CheckpointConfig(2, "loss", "min").checkpoint_score_order == "min"
    assert RunConfig("name", "path") == RunConfig(name="name", storage_path="path")
    assert ScalingConfig(None, 2, True) == ScalingConfig(num_workers=2, use_gpu=True)

    result = fit({"empty": True}, metadata={"trained on": "digits"})
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"trained on": "digits"}
    assert result.log_dir == Path(result.path)

    fit({"artifact": "artifact.txt"}, sync_config=SyncConfig(sync_artifacts=True))
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1000, "magic": 1}, accelerator_type="A100")
    for _ in range(2):
        fit(scaling=scaling)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
        sys.exit()
    environment = {**os.environ, "RAY_CHDIR_TO_TRIAL_DIR": "1", "RAY_STORAGE": "/nowhere"}
    done = subprocess.run(
        [sys.executable, __file__, "main"], env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    expected = {
        "RunConfig(stop=...): the first report has no 'los'. Did you mean 'loss'?": 1,
        "RAY_CHDIR_TO_TRIAL_DIR has no effect; set RunConfig(chdir_to_trial_dir=True)": 1,
        "'artifact.txt' in the working directory": 1,
        "the local runtime ignores resources_per_worker['magic'], accelerator_type": 1,
        "the workers request 2000 CPUs, but share": 1,
        "RAY_STORAGE": 0,  # DRIVETRAIN_STORAGE_PATH is set
    }
    output = done.stdout + done.stderr
    wrong = {text: count for text, count in expected.items() if output.count(text) != count}
    print("wrong:", wrong)
    sys.exit(done.returncode or bool(wrong))
