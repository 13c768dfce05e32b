"""The file with the driver's token: only its owner can read it, and it exists only while workers start."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, DataParallelTrainer, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain_launch import CommandRuntime, _token
from drivetrain_launch._token import TokenFile, read_token

TOKEN = b"canary-of-the-token-of-32-bytes!"
# Writes the mode of the file with the token and the environment, and starts the worker without the environment.
LAUNCHER = """
stat -c %a {directory}/.drivetrain-token-* > {directory}/mode
env > {directory}/environment
exec env -i "$@"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


@pytest.fixture
def fit(tmp_path: Path, directory: Path) -> Callable[..., Any]:
    """Train with a template, and a directory for the token."""

    def fit(template: str, function: Callable[..., Any] = print) -> Any:
        return DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(runtime=CommandRuntime(template, token_directory=directory)),
            run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0, start_timeout_s=180),
        ).fit()

    return fit


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_can_read_the_file_whatever_the_umask(directory: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        file = TokenFile(directory, TOKEN)
    finally:
        os.umask(before)

    assert stat.S_IMODE(file.path.stat().st_mode) & 0o177 == 0
    assert list(directory.iterdir()) == [file.path]


@pytest.mark.parametrize("other", ["file", "link"])
def test_existing_file_of_someone_else_is_not_used(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(_token.secrets, "token_hex", lambda _: "guessed")
    target = tmp_path / "target"
    if other == "file":
        (directory / ".drivetrain-token-guessed").touch()
    else:
        (directory / ".drivetrain-token-guessed").symlink_to(target)

    with pytest.raises(ConfigurationError, match="token_directory: expected a writable directory"):
        TokenFile(directory, TOKEN)

    assert not target.exists()


def test_file_is_deleted_before_the_train_function_runs_and_is_not_readable_by_others(
    fit: Callable[..., Any], tmp_path: Path, directory: Path
) -> None:
    script = tmp_path / "launcher.sh"
    script.write_text(LAUNCHER.replace("{directory}", str(directory)))

    result = fit(f"sh {script} {{worker}}", lambda: os.listdir(directory))

    assert sorted(result.return_value) == ["environment", "mode"]
    assert (directory / "mode").read_text() == "600\n"
    assert _token.TOKEN_VARIABLE not in (directory / "environment").read_text()


def test_file_is_deleted_if_the_workers_do_not_start(fit: Callable[..., Any], directory: Path) -> None:
    with pytest.raises(TrainingFailedError, match="exited with code 1"):
        fit("false {worker}")

    assert list(directory.iterdir()) == []


def test_missing_directory_is_an_error(fit: Callable[..., Any], directory: Path) -> None:
    directory.rmdir()
    with pytest.raises(ConfigurationError, match="token_directory: expected a writable directory"):
        fit("{worker}")


def test_token_leaves_the_environment_of_the_worker(tmp_path: Path) -> None:
    def train() -> str | None:
        return os.environ.get(_token.TOKEN_VARIABLE)

    result = DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(runtime=CommandRuntime("{worker}")),
        run_config=RunConfig(name="run", storage_path=tmp_path, verbose=0),
    ).fit()

    assert result.return_value is None


@pytest.mark.parametrize("kind", ["a pipe", "a link", "nothing"])
def test_supervisor_reads_only_a_regular_file_and_never_blocks(directory: Path, kind: str) -> None:
    path = directory / "token"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link":
        (directory / "target").write_text(TOKEN.hex())
        path.symlink_to(directory / "target")

    with pytest.raises(ConfigurationError, match=r"\[DT-311\]"):
        read_token(str(path))


def test_supervisor_without_a_token_prints_one_line() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "drivetrain_launch", "127.0.0.1", "1", "0"],
        env={name: value for name, value in os.environ.items() if name != _token.TOKEN_VARIABLE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith("drivetrain: [DT-311] expected the token of the driver")
    assert finished.stderr.count("\n") == 1
