"""A single-process run refuses to start as one of many unconnected copies."""

from pathlib import Path

import pytest

from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}),
        ("srun", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}),
        ("mpirun", {"OMPI_COMM_WORLD_SIZE": "4"}),
        ("mpiexec", {"PMI_SIZE": "4"}),
    ],
)
@pytest.mark.parametrize("scaling", [ScalingConfig(num_workers=0), ScalingConfig(num_workers=1, runtime="inprocess")])
def test_single_process_run_under_a_launcher_is_refused(
    scaling: ScalingConfig,
    launcher: str,
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = DataParallelTrainer(
        print, scaling_config=scaling, run_config=RunConfig(storage_path=tmp_path / "runs", verbose=0)
    )

    with pytest.raises(ConfigurationError, match=rf"one of 4 processes of {launcher} \(.*num_workers=4"):
        trainer.fit()

    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "variables",
    [
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4", "RANK": "1"},
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
        {"OMPI_COMM_WORLD_SIZE": "many"},
    ],
    ids=["torchrun with one process", "a worker of drivetrain", "a batch script of Slurm", "not a number"],
)
def test_single_process_run_is_accepted_without_other_processes(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    result = DataParallelTrainer(
        lambda: 5,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, verbose=0),
    ).fit()

    assert result.return_value == 5
