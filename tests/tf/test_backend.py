"""The environment of a worker (``TF_CONFIG``, threads, GPUs), and the errors for unsupported setups."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drivetrain
import drivetrain_interactive
from drivetrain import ConfigurationError, FailureKind, ResourceError, Result, ScalingConfig, TrainingFailedError
from drivetrain_tf import TensorflowConfig, TensorflowTrainer, prepare_dataset_shard
from tests.support import Collector

Fit = Callable[..., Result]
NO_PROXY = "no_grpc_proxy"


def test_tf_config_lists_the_workers_by_rank_with_different_ports(fit: Fit):
    def train() -> None:
        drivetrain.report({**json.loads(os.environ["TF_CONFIG"]), "direct": os.environ[NO_PROXY]})

    collector = Collector()
    fit(train, run={"callbacks": [collector]})
    reports = [collector.metrics_of(rank)[0] for rank in (0, 1)]
    assert [metrics["task"] for metrics in reports] == [{"type": "worker", "index": rank} for rank in (0, 1)]
    addresses = reports[0]["cluster"]["worker"]
    assert reports[0]["cluster"] == reports[1]["cluster"] == {"worker": addresses}
    assert len(set(addresses)) == len(addresses) == 2
    assert all(address.rpartition(":")[0] in reports[0]["direct"].split(",") for address in addresses)


def test_threads_default_to_the_workers_cpus(fit: Fit):
    def train() -> list[Any]:
        import tensorflow as tf

        threading = tf.config.threading

        def threads() -> tuple[int, int]:
            return threading.get_intra_op_parallelism_threads(), threading.get_inter_op_parallelism_threads()

        cpus = int(os.environ["OMP_NUM_THREADS"])
        assert threads() == (cpus, cpus)
        threading.set_intra_op_parallelism_threads(7)
        threading.set_inter_op_parallelism_threads(0)
        os.environ["TF_NUM_INTEROP_THREADS"] = "5"
        counts = []
        for config in (TensorflowConfig(), TensorflowConfig(intra_op_threads=3, inter_op_threads=2)):
            with config.create().session(drivetrain.get_context(), {}):
                counts.append(threads())
        return counts

    assert fit(train, workers=1).return_value == [(7, 0), (3, 2)]


def test_single_worker_gets_no_tf_config(fit: Fit):
    assert fit(lambda: "TF_CONFIG" in os.environ, workers=1).return_value is False


def test_preset_tf_config_is_rejected_before_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(
        ConfigurationError, match=r"expected an environment without TF_CONFIG, .* got TF_CONFIG='{}'\. Unset it"
    ):
        TensorflowTrainer(print)


def test_preset_tf_config_on_a_worker_is_rejected(fit: Fit):
    def train() -> None:
        config = TensorflowConfig().create()
        os.environ["TF_CONFIG"] = "{}"
        with config.session(drivetrain.get_context(), {}):
            pass

    with pytest.raises(TrainingFailedError, match=r"got TF_CONFIG='{}'"):
        fit(train, workers=1)


def test_gpu_that_tensorflow_does_not_find_is_an_error(fit: Fit):
    def train() -> None:
        context = drivetrain.get_context()
        with_gpu = dataclasses.replace(context, worker=dataclasses.replace(context.worker, accelerator_ids=("0",)))
        with TensorflowConfig().create().session(with_gpu, {}):
            pass

    with pytest.raises(TrainingFailedError, match=r"expected TensorFlow 2.* GPUs \(0\), got none\. .*: pip install"):
        fit(train, workers=1)


def test_missing_gpus_are_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    scaling = ScalingConfig(num_workers=2, use_gpu=True, runtime="local")
    with pytest.raises(ResourceError, match="GPU"):
        TensorflowTrainer(print, scaling_config=scaling).fit()


class CreatesStrategyWhenUnpickled:
    """Stands for a module of the train function that runs TensorFlow operations on import."""

    def __reduce__(self) -> tuple[Any, ...]:
        return make_strategy, ()


def make_strategy() -> Any:
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def test_strategy_created_before_the_workers_are_connected_is_rejected(fit: Fit):
    with pytest.raises(TrainingFailedError, match=r"setting up tensorflow: .* Create it in the train function"):
        fit(lambda config: None, {"strategy": CreatesStrategyWhenUnpickled()})


def test_reused_workers_train_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def train() -> float:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        total = tf.function(lambda: strategy.reduce("sum", strategy.run(lambda: tf.constant(1.0)), axis=None))
        return float(total())

    monkeypatch.setenv("DRIVETRAIN_STORAGE_PATH", str(tmp_path))
    with drivetrain_interactive.Trainer(backend=TensorflowConfig(), num_workers=2) as trainer:
        assert [trainer.run(train) for _ in range(2)] == [[2, 2], [2, 2]]


def test_error_for_keras_3_fit_on_several_workers_names_the_alternatives(fit: Fit):
    def train() -> None:
        import keras
        import tensorflow as tf

        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(tf.ones((8, 4)), tf.ones((8, 1)), verbose=0)

    with pytest.raises(TrainingFailedError, match=r"Keras 3 do not work .* TF_USE_LEGACY_KERAS=1 before") as caught:
        fit(train)
    assert isinstance(caught.value.__cause__, ConfigurationError)


def test_other_errors_are_raised_unchanged(fit: Fit):
    def train() -> None:
        raise ValueError("the user's own")

    with pytest.raises(TrainingFailedError, match="the user's own") as caught:
        fit(train)
    assert type(caught.value.__cause__) is ValueError


def test_rank_that_finishes_first_does_not_disturb_the_others(fit: Fit):
    def train() -> float:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        total = strategy.reduce("sum", strategy.run(lambda: tf.constant(1.0)), axis=None)
        if drivetrain.get_context().get_world_rank() == 1:
            time.sleep(1)  # keeps running after rank 0, which hosts TensorFlow's coordination service, has finished
        return float(total)

    assert fit(train).return_value == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tf: tf.ones(3), "expected a tf.data.Dataset, got"),
        (
            lambda tf: tf.data.Dataset.range(10).batch(5, drop_remainder=True),
            "divisible by the number of workers, 2, got 5 rows",
        ),
    ],
)
def test_datasets_that_cannot_be_sharded_are_rejected(fit: Fit, make: Callable[[Any], Any], message: str):
    def train(config: dict[str, Any]) -> None:
        import tensorflow as tf

        prepare_dataset_shard(config["make"](tf))

    with pytest.raises(TrainingFailedError, match=message):
        fit(train, {"make": make})


def test_memory_that_runs_out_is_recognized(fit: Callable[..., Result]) -> None:
    def train() -> None:
        import tensorflow as tf

        raise tf.errors.ResourceExhaustedError(None, None, "failed to allocate memory")

    with pytest.raises(TrainingFailedError, match="failed to allocate memory") as failed:
        fit(train, workers=1)
    assert failed.value.kind is FailureKind.OUT_OF_MEMORY
