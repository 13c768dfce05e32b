"""Training of a real model: accuracy, checkpoints saved collectively with Orbax, kills, restore, and the data."""

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import drivetrain
from drivetrain import CheckpointConfig, FailureKind, Result, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain_interactive import Trainer
from drivetrain_jax import JaxConfig, JaxTrainer, prepare_dataset_shard
from tests.s3 import FaultProxy, S3Server
from tests.support import PROCESS_LIMIT_S, ROOT

Fit = Callable[..., Result]
EPOCHS = 4
PRELOAD = ("orbax.checkpoint", "sklearn.datasets")


def load_example() -> ModuleType:
    """Import the example without its folder on the module path, in the driver and on workers."""
    spec = importlib.util.spec_from_file_location("jax_digits", ROOT / "examples" / "jax_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(config: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Train as in the example. In the first attempt, kill a rank while it saves the third checkpoint."""
    import orbax.checkpoint as ocp

    context = drivetrain.get_context()
    if context.attempt == 0 and context.get_world_rank() == config.get("killed_rank"):
        save, calls = ocp.StandardCheckpointer.save, itertools.count(1)

        def save_and_die(self: Any, *arguments: Any) -> None:
            save(self, *arguments)  # returns before the files are complete
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        ocp.StandardCheckpointer.save = save_and_die
    return load_example().train_func(config)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example()


@pytest.fixture
def options(example: ModuleType) -> dict[str, Any]:
    return {"datasets": {"train": example.make_arrays()[0]}}


@pytest.fixture(scope="module")
def undisturbed(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result of a run that is never interrupted."""
    return JaxTrainer(
        train,
        train_loop_config={"epochs": EPOCHS},
        datasets={"train": example.make_arrays()[0]},
        scaling_config=ScalingConfig(num_workers=2, runtime="local"),
        run_config=RunConfig(
            storage_path=tmp_path_factory.mktemp("undisturbed"), verbose=0, worker_output="none", preload=PRELOAD
        ),
    ).fit()


@pytest.fixture
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Arguments of ``RunConfig`` for the storage of the run."""
    if request.param == "directory":
        yield {"storage_path": tmp_path}
        return
    from pyarrow.fs import S3FileSystem

    with S3Server(tmp_path) as server, FaultProxy(server, markers=True) as proxy:
        server.make_bucket("bucket")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        filesystem = S3FileSystem(
            access_key=server.access_key,
            secret_key=server.secret_key,
            endpoint_override=proxy.endpoint,
            region="us-east-1",
            allow_delayed_open=True,
        )
        yield {"storage_path": "bucket", "name": "run", "storage_filesystem": filesystem}


def assert_same(result: Result, expected: Result) -> None:
    """Check that losses and weights are the same bit for bit."""
    columns = ["loss", "accuracy", "_training_iteration"]
    assert result.metrics_dataframe[columns].equals(expected.metrics_dataframe[columns])
    for layer, other in zip(result.return_value, expected.return_value, strict=True):
        for name in layer:
            np.testing.assert_array_equal(layer[name], other[name], strict=True)


@pytest.mark.parametrize(
    ("storage", "killed_rank"), [("directory", 0), ("directory", 1), ("bucket", 1)], indirect=["storage"]
)
def test_rank_killed_while_orbax_saves_is_the_root_cause_and_the_run_resumes_to_the_same_numbers(
    fit: Fit, options: dict, storage: dict, undisturbed: Result, killed_rank: int
) -> None:
    """JAX ends the other processes when the coordinator, rank 0, is lost. They must not hide the cause."""
    failures = []

    class Failures(drivetrain.Callback):
        def on_failure(self, run: Any, failure: Any, retrying: bool) -> None:
            failures.append(failure)

    result = fit(
        train,
        {"epochs": EPOCHS, "killed_rank": killed_rank},
        max_failures=1,
        run={
            **storage,
            "preload": PRELOAD,
            "callbacks": [Failures()],
            "checkpoint_config": CheckpointConfig(num_to_keep=2),
        },
        **options,
    )

    assert_same(result, undisturbed)
    (failure,) = failures
    assert failure.rank == killed_rank
    assert "SIGKILL" in failure.summary
    assert failure.kind is FailureKind.INFRASTRUCTURE
    assert result.checkpoint is not None
    result.checkpoint.verify()
    assert len(result.best_checkpoints) == 2


def test_failed_run_is_restored_by_the_name_of_its_trainer_to_the_same_numbers(
    fit: Fit, options: dict, undisturbed: Result, tmp_path: Path
) -> None:
    run = {"name": "run", "storage_path": tmp_path, "preload": PRELOAD}
    with pytest.raises(TrainingFailedError, match="SIGKILL"):
        fit(train, {"epochs": EPOCHS, "killed_rank": 1}, run=run, **options)
    assert JaxTrainer.can_restore(tmp_path / "run")

    trainer = drivetrain.restore(tmp_path / "run", **options)

    assert isinstance(trainer, JaxTrainer)
    assert_same(trainer.fit(), undisturbed)


@pytest.mark.slow
def test_example_reaches_its_accuracy(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "examples/jax_digits.py", "--storage-path", tmp_path],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
    )
    assert completed.returncode == 0, completed.stderr
    (directory,) = tmp_path.iterdir()
    (accuracy,) = {float(line.split()[1]) for line in completed.stdout.splitlines() if line.startswith("accuracy")}
    assert accuracy >= 0.95
    assert len((directory / "result.json").read_text().splitlines()) == 10
    assert len(list(directory.glob("checkpoint_*"))) == 2


def test_batches_are_global_arrays_of_the_rows_of_all_workers(fit: Fit) -> None:
    def train() -> dict[str, Any]:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        shard = drivetrain.get_dataset_shard("train")
        total = jax.jit(lambda value: value.sum())
        batches = prepare_dataset_shard(shard, batch_size=4)
        epochs = [[(batch["x"].shape, int(total(batch["x"]))) for batch in batches] for _ in range(2)]
        mesh = Mesh(np.array(jax.devices()).reshape(2, 1), ("rows", "columns"))
        sharding = NamedSharding(mesh, PartitionSpec("rows", "columns"))
        given = prepare_dataset_shard(shard, sharding=sharding, batch_size=5)
        return {
            "epochs": epochs,
            "devices": len(next(iter(batches))["x"].sharding.device_set),
            "given": [batch["x"].sharding == sharding for batch in given],
            "shapes": [batch["x"].shape for batch in given],
        }

    found = fit(train, datasets={"train": {"x": np.arange(26).reshape(26, 1)}}).return_value

    for epoch in found["epochs"]:
        assert [shape for shape, _ in epoch] == [(8, 1)] * 3, "4 rows of each of the 2 workers"
    assert found["epochs"][0] == found["epochs"][1]
    assert found["devices"] == 2
    assert found["given"] == [True, True]
    assert found["shapes"] == [(10, 1), (10, 1)]


def test_batches_that_could_differ_in_size_between_workers_are_refused(fit: Fit) -> None:
    def train() -> None:
        shard = drivetrain.get_dataset_shard("train")
        for options in ({"batch_size": 2, "drop_last": False}, {"batch_size": None}):
            with pytest.raises(drivetrain.ConfigurationError, match="so that the batches of all workers have the same"):
                prepare_dataset_shard(shard, **options)

    fit(train, datasets={"train": {"x": np.arange(7)}})


def test_data_that_jax_cannot_use_is_an_error_that_names_it(fit: Fit) -> None:
    def train() -> list[str]:
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
        shard = drivetrain.get_dataset_shard("train")
        errors = []
        for make in (
            lambda: prepare_dataset_shard({"x": 1}),
            lambda: list(prepare_dataset_shard(shard, batch_size=2)),
            lambda: prepare_dataset_shard(shard, batch_size=3),
        ):
            try:
                make()
            except drivetrain.ConfigurationError as error:
                errors.append(str(error))
        return errors

    found = fit(train, workers=1, datasets={"train": {"word": ["a", "b"]}}).return_value

    not_a_shard, not_numeric, not_divisible = found

    assert "expected a shard from drivetrain.get_dataset_shard(), got {'x': 1}" in not_a_shard
    assert "expected numeric columns, got 'word' of type" in not_numeric
    assert "expected a multiple of the number of this worker's devices, 2, got 3" in not_divisible


def test_processes_that_are_kept_for_several_runs_are_connected_in_each_of_them(tmp_path: Path) -> None:
    def train() -> tuple[int, float]:
        import jax
        import jax.numpy as jnp
        from jax.experimental import multihost_utils

        assert jax.distributed.is_initialized()
        rank = drivetrain.get_context().get_world_rank()
        return os.getpid(), float(multihost_utils.process_allgather(jnp.float32(rank + 1)).sum())

    trainer = Trainer(JaxConfig(), 2, runtime="local", logdir=tmp_path)
    try:
        first, second = trainer.run(train), trainer.run(train)
    finally:
        trainer.shutdown()
    assert first == second, "the same processes compute the same sum"
    assert {total for _, total in first} == {3.0}
