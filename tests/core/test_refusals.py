"""Arguments that a trainer refuses before it starts a process or overwrites anything."""

import importlib.metadata
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain import (
    Checkpoint,
    CheckpointConfig,
    ConfigurationError,
    DataParallelTrainer,
    DrivetrainError,
    PluginNotFoundError,
    ResourceError,
    RunConfig,
    ScalingConfig,
    SerializationError,
    StorageError,
)
from drivetrain._driver.captured import used_objects
from tests.support import Collector, snapshot

held_lock = threading.Lock()


def train() -> None:
    raise AssertionError("no worker should have been started")


@pytest.fixture
def storage_path(tmp_path: Path) -> Iterator[Path]:
    """Storage that a refusal must not change, in a process that must not start a child."""
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "precious.txt").write_text("not to be touched")
    before = snapshot(tmp_path)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    yield storage
    assert snapshot(tmp_path) == before
    assert {entry.name for entry in storage.iterdir()} == {"precious.txt"}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children


def refuse(
    kind: type[DrivetrainError],
    words: str,
    storage_path: Path,
    *,
    function: Callable[..., Any] = train,
    scaling: ScalingConfig | None = None,
    run: dict[str, Any] | None = None,
    **options: Any,
) -> DrivetrainError:
    collector = Collector()
    with pytest.raises(kind, match=words) as refused:
        DataParallelTrainer(
            function,
            scaling_config=scaling or ScalingConfig(num_workers=2, runtime="local"),
            run_config=RunConfig(
                **{"name": "run", "storage_path": storage_path, "verbose": 0, "callbacks": [collector], **(run or {})}
            ),
            **options,
        ).fit()
    assert collector.attempts == 0
    return refused.value


def test_function_with_two_required_arguments_is_refused_by_name(storage_path: Path) -> None:
    def two(config: dict, other: int) -> None: ...

    refuse(ConfigurationError, r"two\(config: dict, other: int\)", storage_path, function=two)


def test_function_with_a_required_keyword_is_refused(storage_path: Path) -> None:
    def keyword(*, other: int) -> None: ...

    refuse(ConfigurationError, "with no argument, or with the config", storage_path, function=keyword)


def test_object_that_is_not_a_function_is_refused(storage_path: Path) -> None:
    refuse(ConfigurationError, "expected a function, got 'train'", storage_path, function="train")  # type: ignore[arg-type]


def test_unpicklable_captured_variable_is_named(storage_path: Path) -> None:
    lock = threading.Lock()

    def captures() -> None:
        lock.acquire()

    refuse(SerializationError, r"'lock', which the train function captures \(a lock\)", storage_path, function=captures)


def test_unpicklable_global_of_a_function_within_the_function_is_named(storage_path: Path) -> None:
    def outer() -> None:
        def inner() -> None:
            held_lock.acquire()

        inner()

    words = r"the global 'held_lock', which the train function uses \(a lock\)"
    refuse(SerializationError, words, storage_path, function=outer)


def test_attribute_with_the_name_of_a_global_is_not_an_object_that_the_function_uses() -> None:
    def reads_attribute() -> object:
        return threading.current_thread().held_lock  # type: ignore[attr-defined]

    assert [used.name for used in used_objects(reads_attribute, None)] == [
        "the global 'threading', which the train function uses"
    ]


def test_unpicklable_entry_of_the_config_is_named(storage_path: Path) -> None:
    with socket.socket() as open_socket:
        config = {"fine": 1, "connection": open_socket}
        words = r"train_loop_config\['connection'\] \(a socket\)"
        refuse(SerializationError, words, storage_path, function=lambda config: None, train_loop_config=config)


def test_unknown_runtime_is_refused_with_a_list_of_the_installed_ones(storage_path: Path) -> None:
    scaling = ScalingConfig(runtime="slurm")
    refuse(
        ConfigurationError,
        "'slurm' is installed. Installed: 'command', 'inprocess', 'local', 'ray'",
        storage_path,
        scaling=scaling,
    )


def test_unknown_backend_is_refused(storage_path: Path) -> None:
    refuse(PluginNotFoundError, "no backend 'mxnet' is installed", storage_path, backend_config="mxnet")


def test_error_for_a_known_plugin_shows_its_install_command(
    storage_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ("drivetrain.backends", "drivetrain.runtimes", "drivetrain.frameworks")
    installed = [point for group in groups for point in importlib.metadata.entry_points(group=group)]
    others = importlib.metadata.EntryPoints(point for point in installed if point.name != "horovod")
    monkeypatch.setattr(importlib.metadata, "entry_points", others.select)
    monkeypatch.syspath_prepend(storage_path)  # plugins are looked up again for another module path
    words = r'pip install "drivetrain\[horovod\]"'
    refuse(PluginNotFoundError, words, storage_path, backend_config="horovod")


def test_unknown_callback_is_refused(storage_path: Path) -> None:
    refuse(PluginNotFoundError, "no callback 'fax' is installed", storage_path, run={"callbacks": ["fax"]})


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("backend_config", 3, "a BackendConfig, a Backend or the name of an installed backend, got 3"),
        ("train_loop_config", [1], r"train_loop_config: expected a dict or a dataclass, got \[1\]$"),
        ("metadata", {"x": object()}, "metadata: expected JSON values or bytes"),
        ("resume_from_checkpoint", "somewhere", "resume_from_checkpoint: expected a Checkpoint"),
        ("resume_from_checkpoint", Checkpoint("/nowhere/at/all"), "the missing directory /nowhere/at/all"),
    ],
)
def test_argument_of_the_wrong_type_is_refused(storage_path: Path, option: str, value: object, words: str) -> None:
    refuse(ConfigurationError, words, storage_path, **{option: value})


def test_config_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="scaling_config: expected a ScalingConfig"):
        DataParallelTrainer(train, scaling_config=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="run_config: expected a RunConfig"):
        DataParallelTrainer(train, run_config={"name": "run"})  # type: ignore[arg-type]


def test_checkpoint_options_of_trainers_that_own_the_loop_are_refused(storage_path: Path) -> None:
    run = {"checkpoint_config": CheckpointConfig(checkpoint_at_end=True)}
    refuse(ConfigurationError, "the train function owns the training loop", storage_path, run=run)


def test_storage_path_that_is_a_file_is_refused(storage_path: Path) -> None:
    run = {"storage_path": storage_path / "precious.txt"}
    refuse(
        StorageError,
        "precious.txt/run: expected directories above the run directory, got a file",
        storage_path,
        run=run,
    )


def test_storage_path_that_cannot_be_written_is_refused(storage_path: Path) -> None:
    refuse(
        StorageError,
        "Choose another storage_path, or correct its permissions",
        storage_path,
        run={"storage_path": "/proc/1"},
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nosuch://bucket/runs", "Protocol not known"),
        ("s3://", "a bucket or directory after s3://"),
        ("memory://runs", "in the memory of this process"),
        ("box://runs", "Install it with pip"),
    ],
)
def test_storage_that_cannot_be_used_is_refused(storage_path: Path, path: str, words: str) -> None:
    refuse(ConfigurationError, words, storage_path, run={"storage_path": path})


def test_object_that_is_not_a_filesystem_is_refused(storage_path: Path) -> None:
    words = "storage_filesystem: expected a pyarrow.fs.FileSystem or an fsspec filesystem"
    refuse(ConfigurationError, words, storage_path, run={"storage_filesystem": object()})


def test_requesting_more_gpus_than_available_is_refused(storage_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 2}, runtime="local")
    error = refuse(
        ResourceError, "2 workers with 2 GPUs each require 4 GPUs on this machine", storage_path, scaling=scaling
    )
    assert "which has 2 (3, 5)" in str(error)


def test_several_workers_in_one_process_are_refused(storage_path: Path) -> None:
    scaling = ScalingConfig(num_workers=2, runtime="inprocess")
    refuse(ConfigurationError, 'expected 0 or 1 with runtime="inprocess", got 2', storage_path, scaling=scaling)


def test_other_systems_than_linux_are_refused(storage_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    refuse(ConfigurationError, r"\[DT-115\] fit\(\): expected Linux, got darwin", storage_path)
