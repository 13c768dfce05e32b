"""Files that others can read, and command lines, contain no token and no environment variable."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain
from drivetrain import Checkpoint, DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from drivetrain._wire import handshake
from drivetrain_launch import CommandRuntime

VARIABLE = "CANARY_OF_THE_ENVIRONMENT"
TOKEN = b"canary-of-the-token-of-32-bytes!"
CANARIES = (VARIABLE.encode(), b"value-of-the-canary", TOKEN, TOKEN.hex().encode())


def command_lines() -> Iterator[bytes]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()


def train(config: dict[str, str]) -> list[bytes]:
    """Fails once, reports a checkpoint, and returns the command lines that contain a canary."""
    assert any(b"python" in line for line in command_lines())
    assert config["runtime"] == "ray" or os.environ[VARIABLE] == "value-of-the-canary"
    context = drivetrain.get_context()
    rank = context.get_world_rank()
    if context.attempt == 0:
        raise ValueError("the first attempt fails")
    place = Path(config["directory"], f"reported_by_{rank}")
    place.mkdir(exist_ok=True)
    (place / f"weights_{rank}.txt").write_text("1")
    drivetrain.report({"loss": 1.0}, checkpoint=Checkpoint(place))
    return [line for line in command_lines() if any(canary in line for canary in CANARIES)]


def fit(name: str, directory: Path) -> Result:
    commands = {
        "command": CommandRuntime("{worker}"),
        "command with a file": CommandRuntime("{worker}", token_directory=directory),
    }
    return DataParallelTrainer(
        train,
        train_loop_config={"directory": str(directory), "runtime": name},
        scaling_config=ScalingConfig(num_workers=2, runtime=commands.get(name, name)),
        run_config=RunConfig(
            name="run", storage_path=str(directory), verbose=0, failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()


@pytest.mark.parametrize(
    "name", ["local", "command", "command with a file", pytest.param("ray", marks=pytest.mark.ray)]
)
def test_no_file_of_a_run_and_no_command_line_has_a_token_or_a_variable(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name == "ray":  # its workers have the variables that the cluster was started with
        request.getfixturevalue("ray_address")
    monkeypatch.setenv(VARIABLE, "value-of-the-canary")
    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda size: TOKEN[:size])

    result = fit(name, tmp_path)

    assert result.return_value == []
    files = [path for path in Path(result.path).rglob("*") if path.is_file()]
    assert {"run.json", "timeline.jsonl", "manifest.json", "trainer.pkl"} <= {file.name for file in files}
    logs_of_ray = (
        [path for path in Path(os.environ["RAY_TMPDIR"]).rglob("*") if path.is_file()] if name == "ray" else []
    )
    assert name != "ray" or logs_of_ray
    for file in files + logs_of_ray:
        assert not [canary for canary in CANARIES if canary in file.read_bytes()], file
    printed = capfd.readouterr()
    assert not [canary for canary in CANARIES if canary.decode() in printed.out + printed.err]


def test_launcher_that_prints_its_environment_shows_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda size: TOKEN[:size])
    launcher = tmp_path / "launcher.sh"
    launcher.write_text("env | grep DRIVETRAIN_WORKER_TOKEN; env | grep TOKEN | cut -d= -f2; exit 3\n")

    result = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=1, runtime=CommandRuntime(f"sh {launcher} {{worker}}")),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_node_failures=1)),
    ).fit(raise_on_failure=False)

    printed = capfd.readouterr().err
    assert "DRIVETRAIN_WORKER_TOKEN=***" in str(result.error)
    for text in [printed, str(result.error), *(file.read_text() for file in Path(result.path).glob("error.*"))]:
        assert TOKEN.hex() not in text
