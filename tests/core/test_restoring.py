"""``drivetrain.restore``, ``drivetrain runs resume`` and ``drivetrain run --trainer`` find the class of a trainer."""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import (
    ConfigurationError,
    DataParallelTrainer,
    PluginError,
    PluginNotFoundError,
    RunConfig,
    ScalingConfig,
    SerializationError,
    StorageError,
    TrainContext,
    TrainingFailedError,
)
from drivetrain.plugin import Backend, BackendConfig
from drivetrain.plugin.backends import temporary_environment
from drivetrain_console import main
from tests.core.conftest import Install

TRAINER = """
from drivetrain import DataParallelTrainer

class CountingTrainer(DataParallelTrainer):
    def __init__(self, counts, **arguments):
        super().__init__(counts, **arguments)

    @classmethod
    def restore(cls, path, train_loop_per_worker=None, **arguments):
        function = train_loop_per_worker or (lambda: "counted again")
        return cls(function, run_config=DataParallelTrainer.restore(path).given["run_config"])
"""

SCRIPT = """
import drivetrain

def train(config):
    drivetrain.report({"lr": config["lr"]})
"""


def count(config: dict[str, int]) -> int:
    """Fail after the first step, unless the run was resumed."""
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text("1")
            drivetrain.report({"step": 1}, checkpoint=drivetrain.Checkpoint(directory))
        raise ArithmeticError("after the first step")
    with checkpoint.as_directory() as directory:
        step = int(Path(directory, "step").read_text()) + config["more"]
    drivetrain.report({"step": step})
    return step


def fail(directory: Path, kind: type[DataParallelTrainer] = DataParallelTrainer) -> Path:
    """Return the directory of a run that has failed after its first checkpoint."""
    trainer = kind(
        count,
        train_loop_config={"more": 4},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=directory, verbose=0),
    )
    with pytest.raises(TrainingFailedError):
        trainer.fit()
    return directory / "run"


def test_restored_run_continues_with_the_stored_arguments(tmp_path: Path) -> None:
    trainer = drivetrain.restore(fail(tmp_path))

    assert type(trainer) is DataParallelTrainer
    assert trainer.fit().return_value == 5


def test_stored_arguments_can_be_replaced(tmp_path: Path) -> None:
    path = fail(tmp_path)
    assert drivetrain.restore(path, train_loop_config={"more": 9}).fit().return_value == 10
    assert drivetrain.restore(path, lambda: "another function", train_loop_config=None).fit().return_value == (
        "another function"
    )


def test_class_of_another_distribution_is_found(tmp_path: Path, install: Install) -> None:
    entry_points = {"drivetrain.trainers": {"counting": "counting_plugin:CountingTrainer"}}
    install("counting-plugin", "counting_plugin", TRAINER, entry_points)
    path = fail(tmp_path)
    facts = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**facts, "trainer": "CountingTrainer"}))

    assert drivetrain.restore(path).fit().return_value == "counted again"

    install("other-plugin", "other_plugin", TRAINER, {"drivetrain.trainers": {"o": "other_plugin:CountingTrainer"}})
    with pytest.raises(PluginError, match=r"several .* CountingTrainer: counting-plugin 1\.2 and other-plugin 1\.2"):
        drivetrain.restore(path)


def test_class_without_an_entry_point_is_named(tmp_path: Path) -> None:
    class MyTrainer(DataParallelTrainer):
        pass

    with pytest.raises(ConfigurationError, match=r"started by MyTrainer, .* Call MyTrainer\.restore\(path\)"):
        drivetrain.restore(fail(tmp_path, MyTrainer))


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"expected a run directory with run\.json"):
        drivetrain.restore(tmp_path)


def test_command_resumes_a_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(tmp_path)
    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path))

    assert main(["runs", "resume", "run", "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert (shown["status"], shown["metrics"]["step"]) == ("finished", 5)
    assert main(["runs", "resume", "missing"]) != 0


def test_command_runs_an_installed_trainer(
    tmp_path: Path, install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TRAINER.replace("Counting", "Commanded")
    entry_points = {"drivetrain.trainers": {"c": "commanded_plugin:CommandedTrainer"}}
    install("commanded-plugin", "commanded_plugin", source, entry_points)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["run", f"{tmp_path}/script.py:train", "--num-workers", "0", "--config", "lr=0.5", "--json"]
    command += ["--storage-path", str(tmp_path), "--name", "run", "--trainer"]

    assert main([*command, "c"]) == 0

    assert json.loads(capsys.readouterr().out)["metrics"]["lr"] == 0.5
    assert json.loads((tmp_path / "run" / "run.json").read_text())["trainer"] == "CommandedTrainer"
    assert main([*command, "c", "--backend", "torch"]) != 0
    assert "expected one of them" in capsys.readouterr().err
    assert main([*command, "unknown"]) != 0
    assert PluginNotFoundError.__name__ in capsys.readouterr().err


class HoldsALock(drivetrain.Callback):
    """A callback that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_configuration_that_could_not_be_stored_must_be_passed_again(tmp_path: Path) -> None:
    run_config = RunConfig(name="run", storage_path=tmp_path, verbose=0, callbacks=[HoldsALock()])
    DataParallelTrainer(lambda: "trained", scaling_config=ScalingConfig(num_workers=0), run_config=run_config).fit()
    with pytest.raises(SerializationError, match=r"expected the stored run_config.*restore\(path, run_config=\.\.\.\)"):
        drivetrain.restore(tmp_path / "run")
    assert drivetrain.restore(tmp_path / "run", run_config=run_config).fit().return_value == "trained"


class LimitBackend(Backend):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        with temporary_environment({"LIMIT": str(self.limit)}):
            yield


@dataclass(frozen=True, kw_only=True)
class LimitConfig(BackendConfig):
    limit: int = 1
    lock: object = None

    def create(self) -> Backend:
        return LimitBackend(self.limit)


class LimitTrainer(DataParallelTrainer):
    """A trainer whose backend has a limit."""

    def __init__(self, fn: Any, *, limit_config: LimitConfig | None = None, **options: Any) -> None:
        super().__init__(fn, backend_config=limit_config or LimitConfig(), **options)


@pytest.mark.parametrize("kind", [DataParallelTrainer, LimitTrainer])
def test_backend_that_could_not_be_stored_must_be_passed_again(kind: type[DataParallelTrainer], tmp_path: Path) -> None:
    argument = "backend_config" if kind is DataParallelTrainer else "limit_config"
    backend: dict[str, Any] = {argument: LimitConfig(limit=7, lock=threading.Lock())}
    run_config = RunConfig(name="run", storage_path=tmp_path, verbose=0)
    scaling_config = ScalingConfig(num_workers=0)
    kind(lambda: os.environ["LIMIT"], scaling_config=scaling_config, run_config=run_config, **backend).fit()
    with pytest.raises(SerializationError, match=rf"expected the stored {argument}.*restore\(path, {argument}="):
        kind.restore(tmp_path / "run")
    assert kind.restore(tmp_path / "run", **backend).fit().return_value == "7"


class FixedBackendTrainer(DataParallelTrainer):
    """Passes its own configuration of the backend, and has other names for its arguments."""

    def __init__(self, fn: Any, **options: Any) -> None:
        super().__init__(fn, backend_config=BackendConfig(), **options)


def test_constructor_that_passes_its_own_backend_can_be_restored(tmp_path: Path) -> None:
    assert FixedBackendTrainer.restore(fail(tmp_path, FixedBackendTrainer)).fit().return_value == 5


class FixedRunTrainer(DataParallelTrainer):
    """Passes its own configuration of the run."""

    def __init__(self, fn: Any, **options: Any) -> None:
        super().__init__(fn, run_config=RunConfig(verbose=0), **options)


def test_constructor_that_passes_its_own_run_config_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\[DT-620\].*setdefault\('run_config', \.\.\.\)"):
        FixedRunTrainer.restore(fail(tmp_path), print)
