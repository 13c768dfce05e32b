"""``TrainState`` of TensorFlow: a disturbed run equals the undisturbed one, with Keras 3 and Keras 2."""

import importlib
import json
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import drivetrain
from drivetrain import Checkpoint, CheckpointError, ConfigurationError, Result, get_context
from drivetrain_testing import prove
from drivetrain_tf import TensorflowTrainer, TrainState
from drivetrain_tf.keras import ReportCheckpointCallback

Fit = Callable[..., Result]
EPOCHS = 3
ROWS = {"x": np.arange(48, dtype="float32").reshape(24, 2) / 48, "y": np.arange(24, dtype="float32") / 24}


def disturb(config: Mapping[str, Any], at: int) -> None:
    """Send a signal to the last rank, in the first attempt."""
    context = get_context()
    is_last = context.get_world_rank() == context.get_world_size() - 1
    if context.attempt == 0 and is_last and at == config.get("at"):
        os.kill(os.getpid(), config["signal"])


def make_model(keras: Any, *, dropout: bool) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((2,)),
            *(layers.Dense(8, "tanh"), layers.Dropout(0.5 if dropout else 0.0)),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def train_in_loop(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train with two kinds of random numbers, and a learning rate that the loop changes."""
    import tensorflow as tf

    keras = importlib.import_module(config["keras"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model(keras, dropout=config["keras"] == "keras")
    generator = tf.random.Generator.from_seed(1)
    state = TrainState(model, generator=generator)

    @tf.function
    def train_step(rows: Any, noise: Any) -> Any:
        def step(rows: Any, noise: Any) -> Any:
            with tf.GradientTape() as tape:
                difference = model(rows, training=True)[:, 0] - tf.reduce_sum(rows, axis=1) - noise
                loss = tf.reduce_mean(difference**2) / 2
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("sum", strategy.run(step, args=(rows, noise)), axis=None)

    first, shard = state.steps, drivetrain.get_dataset_shard("train")
    for epoch in state.epochs(EPOCHS):
        options = {"local_shuffle_buffer_size": 8, "local_shuffle_seed": epoch}
        for batch in shard.iter_tf_batches(batch_size=2, **options):
            loss = train_step(batch["x"], generator.uniform([]) + random.random())
            disturb(config, state.steps + 1)
            state.step()
            if config.get("every") and state.steps % config["every"] == 0:
                state.save({"step": state.steps})
        model.optimizer.learning_rate.assign(model.optimizer.learning_rate * 0.5)
        state.save({"loss": float(loss), "epoch": epoch})
    return {"weights": [weight.tolist() for weight in model.get_weights()], "steps": (first, state.steps)}


def assert_same(resumed: Result, undisturbed: Result) -> None:
    """Check the final weights, and the metrics of each epoch, bit for bit."""
    assert resumed.return_value["weights"] == undisturbed.return_value["weights"]
    losses = [result.metrics_dataframe.dropna(subset="loss")["loss"].tolist() for result in (resumed, undisturbed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == EPOCHS


@pytest.mark.parametrize("keras", ["keras", pytest.param("tf_keras", marks=pytest.mark.campaign)])
def test_disturbed_loop_equals_the_undisturbed_loop(fit: Fit, keras: str) -> None:
    options = {"datasets": {"train": ROWS}}
    undisturbed = fit(train_in_loop, {"keras": keras}, **options)
    for every in (None, 4) if keras == "keras" else (4,):
        killed = {"keras": keras, "at": 9, "signal": signal.SIGKILL, "every": every}
        result = fit(train_in_loop, killed, max_failures=1, **options)
        assert result.return_value["steps"] == (8 if every else 6, 18)
        assert_same(result, undisturbed)
    for at in (4, 6) if keras == "keras" else (4,):  # 6 is the last step of an epoch
        result = fit(train_in_loop, {"keras": keras, "at": at, "signal": signal.SIGTERM}, **options)
        assert at <= result.return_value["steps"][0] < 18
        assert_same(result, undisturbed)


def train_with_fit(config: Mapping[str, Any]) -> dict[str, Any]:
    keras = importlib.import_module(config["keras"])

    model = make_model(keras, dropout=config["keras"] == "keras")
    state = TrainState(model)
    first, steps_before = state.epoch, state.steps
    disturbs = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: disturb(config, epoch))
    dataset = drivetrain.get_dataset_shard("train").to_tf("x", "y", batch_size=4)
    model.fit(
        dataset,
        epochs=EPOCHS,
        initial_epoch=state.epoch,
        callbacks=[disturbs, ReportCheckpointCallback(metrics=["loss"], state=state)],
        verbose=0,
    )
    weights = [weight.tolist() for weight in model.get_weights()]
    return {"weights": weights, "first": first, "steps": state.steps, "new steps": state.steps - steps_before}


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_killed_fit_equals_the_undisturbed_fit(fit: Fit, keras: str) -> None:
    options = {"workers": 1, "datasets": {"train": ROWS}}
    undisturbed = fit(train_with_fit, {"keras": keras}, **options)
    result = fit(train_with_fit, {"keras": keras, "at": 2, "signal": signal.SIGKILL}, max_failures=1, **options)
    assert (result.return_value["first"], result.return_value["steps"]) == (2, 18)
    assert_same(result, undisturbed)


@pytest.mark.slow
@pytest.mark.campaign
def test_killed_fit_is_proven_to_be_equal(tmp_path: Path) -> None:
    proof = prove(
        TensorflowTrainer(
            train_with_fit,
            train_loop_config={"keras": "keras"},
            datasets={"train": ROWS},
            scaling_config=drivetrain.ScalingConfig(num_workers=1, runtime="local"),
            run_config=drivetrain.RunConfig(storage_path=tmp_path, start_timeout_s=180),
        )
    )
    assert proof.equal, proof


def test_preempted_fit_continues_with_the_epoch_in_which_it_was_saved(fit: Fit) -> None:
    config = {"keras": "keras", "at": 1, "signal": signal.SIGTERM}
    result = fit(train_with_fit, config, workers=1, datasets={"train": ROWS})
    first = result.return_value["first"]
    assert first >= 1
    assert result.return_value["new steps"] == (EPOCHS - first) * 6  # no batch is left out, although Keras reads ahead


def test_file_is_read_with_numpy_alone_and_loaded_without_a_run(fit: Fit, tmp_path: Path) -> None:
    import keras

    def train() -> list[Any]:
        model = make_model(keras, dropout=True)
        TrainState(model, best=Best(0.5)).save({"loss": 1.0})
        return [weight.tolist() for weight in model.get_weights()]

    result = fit(train, workers=1)
    assert result.checkpoint is not None
    with np.load(Path(result.checkpoint.path, "state.npz"), allow_pickle=False) as arrays:
        assert arrays["model/0/kernel"].tolist() == result.return_value[0]
    keras.layers.Dense(1)  # the names of later layers contain another number
    model = make_model(keras, dropout=True)
    model.set_weights([weight * 0 for weight in model.get_weights()])
    TrainState(model, best=Best(0)).load(result.checkpoint)
    assert [weight.tolist() for weight in model.get_weights()] == result.return_value

    other = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(9)])
    with pytest.raises(CheckpointError, match=r"\[DT-814\].*with model/0/kernel: float32\[2, 8\], not float32\[2, 9\]"):
        TrainState(other).load(result.checkpoint)
    content = json.loads(Path(result.checkpoint.path, "state.json").read_text())
    for name in ("state.npz", "rank_0.json"):
        (tmp_path / name).write_bytes(Path(result.checkpoint.path, name).read_bytes())
    content["arrays"]["model/0/kernel"]["dtype"] = "O"
    (tmp_path / "state.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"\[DT-814\].*invalid type"):
        TrainState(model).load(Checkpoint(tmp_path))


class Best:
    """An object with a state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def test_part_without_variables_is_refused() -> None:
    import keras

    for make in (
        lambda: TrainState(keras.Sequential([keras.layers.Dense(1)])),
        lambda: TrainState(other=3),
    ):
        with pytest.raises(ConfigurationError, match=r"\[DT-812\] .* expected a model that is built"):
            make()
