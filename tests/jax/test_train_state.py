"""``TrainState`` of JAX: a disturbed run equals the undisturbed one, and what is in its files."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drivetrain
from drivetrain import Checkpoint, CheckpointError, ConfigurationError, Result, TrainingFailedError
from drivetrain_jax import JaxTrainer, TrainState, prepare_dataset_shard
from drivetrain_testing import prove

Fit = Callable[..., Result]
EPOCHS = 3
ROWS = {"x": np.arange(48, dtype="float32").reshape(24, 2) / 48}


def whole(value: Any) -> Any:
    """Return a global array as lists, on every rank."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value, tiled=True)).tolist()


def disturb(config: Mapping[str, Any], steps: int) -> None:
    """Send a signal to rank 1, in the first attempt."""
    context = drivetrain.get_context()
    if context.attempt == 0 and context.get_world_rank() == 1 and steps == config.get("at"):
        os.kill(os.getpid(), config["signal"])


def train(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train with dropout and noise on parameters, some of which are divided among the workers."""
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec("data"))

    @jax.jit
    def update(params: Any, moments: Any, key: Any, batch: Any, noise: Any) -> Any:
        key, own = jax.random.split(key)

        def loss_of(params: Any) -> Any:
            hidden = jnp.tanh(batch @ params["inner"])
            hidden = hidden * jax.random.bernoulli(own, 0.5, hidden.shape)
            return ((hidden @ params["outer"]).sum(1) - batch.sum(1) + noise).__pow__(2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        moments = jax.tree.map(lambda moment, gradient: 0.9 * moment + gradient, moments, gradients)
        return jax.tree.map(lambda value, moment: value - 0.01 * moment, params, moments), moments, key, loss

    params = {
        "inner": jax.device_put(np.linspace(-1, 1, 12, dtype="float32").reshape(2, 6), everywhere),
        "outer": jax.device_put(np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2), divided),
    }
    np.random.seed(drivetrain.get_context().attempt)
    state = TrainState(
        params=params,
        moments=jax.tree.map(jnp.zeros_like, params),
        key=jax.random.key(0),
    )
    if drivetrain.get_checkpoint() is None:
        np.random.seed(0)
    first = state.steps
    if config.get("forgets"):
        state.moments = jax.tree.map(jnp.zeros_like, state.moments)
    for epoch in state.epochs(EPOCHS):
        shard = drivetrain.get_dataset_shard("train")
        options = {"local_shuffle_buffer_size": 8, "local_shuffle_seed": epoch}
        for batch in prepare_dataset_shard(shard, batch_size=2, **options):
            noise = np.random.rand()
            state.params, state.moments, state.key, loss = update(
                state.params, state.moments, state.key, batch["x"], np.float32(noise)
            )
            jax.block_until_ready(loss)
            disturb(config, state.steps + 1)
            state.step()
            if config.get("every") and state.steps % config["every"] == 0:
                state.save({"step": state.steps})
        state.save({"loss": float(loss), "epoch": epoch})
    return {
        "params": jax.tree.map(whole, state.params),
        "key": whole(jax.random.key_data(state.key)),
        "noise": np.random.rand(),
        "steps": (first, state.steps),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The result of a run that is never interrupted."""
    return JaxTrainer(
        train,
        train_loop_config={},
        datasets={"train": ROWS},
        scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime="local"),
        run_config=drivetrain.RunConfig(
            storage_path=tmp_path_factory.mktemp("undisturbed"), verbose=0, worker_output="none", start_timeout_s=180
        ),
    ).fit()


def assert_same(resumed: Result, undisturbed: Result) -> None:
    """Check the final state, and the metrics of each epoch, bit for bit."""
    for name in ("params", "key", "noise"):
        assert resumed.return_value[name] == undisturbed.return_value[name], name
    losses = [result.metrics_dataframe.dropna(subset="loss") for result in (resumed, undisturbed)]
    assert losses[0]["epoch"].tolist() == list(range(EPOCHS))
    assert losses[0]["loss"].tolist() == losses[1]["loss"].tolist()


@pytest.mark.parametrize(
    ("disturbance", "first"),
    [
        ({"signal": signal.SIGKILL, "at": 9}, 6),
        ({"signal": signal.SIGKILL, "at": 9, "every": 4}, 8),
        ({"signal": signal.SIGTERM, "at": 4}, None),
        ({"signal": signal.SIGTERM, "at": 6}, None),  # the last step of an epoch
    ],
)
def test_disturbed_run_equals_the_undisturbed_run(
    fit: Fit, undisturbed: Result, disturbance: dict[str, Any], first: int | None
) -> None:
    is_killed = disturbance["signal"] == signal.SIGKILL
    result = fit(train, disturbance, max_failures=int(is_killed), datasets={"train": ROWS})
    resumed_at, last = result.return_value["steps"]
    assert last == 18
    assert resumed_at == first if is_killed else disturbance["at"] <= resumed_at < 18
    assert_same(result, undisturbed)


def test_another_number_of_workers_reads_arrays_that_were_divided(fit: Fit, undisturbed: Result) -> None:
    checkpoint = undisturbed.checkpoint
    assert checkpoint is not None
    names = {name for name in os.listdir(checkpoint.path) if not name.startswith(".")}
    assert names == {"state.json", "state.npz", "state_1.npz", "rank_0.json", "rank_1.json"}
    alone = fit(train, {}, workers=1, datasets={"train": ROWS}, resume_from_checkpoint=checkpoint)
    assert alone.return_value["params"] == undisturbed.return_value["params"]
    assert alone.return_value["steps"] == (18, 18)


@pytest.mark.slow
@pytest.mark.campaign
def test_killed_run_is_proven_to_be_equal_and_forgotten_state_is_found(tmp_path: Path) -> None:
    def prove_with(config: dict[str, Any]) -> Any:
        return prove(
            JaxTrainer(
                train,
                train_loop_config=config,
                datasets={"train": ROWS},
                scaling_config=drivetrain.ScalingConfig(num_workers=2, runtime="local"),
                run_config=drivetrain.RunConfig(storage_path=tmp_path, start_timeout_s=180),
            )
        )

    proof = prove_with({"every": 4})
    assert proof.equal, proof
    assert any("random.python" in note for note in proof.notes), "no test seeds it, and no training uses it"
    proof = prove_with({"every": 4, "forgets": True})
    assert not proof.equal
    assert any("state.npz: moments/inner" in each.name for each in proof.differences), proof


def save_in_run(fit: Fit, make: Callable[[], dict[str, Any]]) -> Checkpoint:
    checkpoint = fit(lambda: TrainState(**make()).save({"loss": 1.0}), workers=1).checkpoint
    assert checkpoint is not None
    return checkpoint


def make_leaves() -> dict[str, Any]:
    return {
        "params": {"layers": [{"w": jnp.arange(6.0).reshape(2, 3)}], "small": jnp.ones(3, jnp.bfloat16)},
        "opt_state": (jnp.asarray(3), jnp.full(2, 0.5), None, jnp.int8(4)),
        "key": {"typed": jax.random.split(jax.random.key(7, impl="rbg"), 2), "raw": jax.random.PRNGKey(1)},
        "numbers": [3, 0.5, True, 2j],
        "numpy": (np.arange(3, dtype=">i2"), np.float64(0.1)),
    }


def describe(state: TrainState) -> Any:
    """Return everything that decides about later computations: kinds, types, and values."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), jax.random.key_data(leaf).tolist()
        is_jax = isinstance(leaf, jax.Array)
        kind = "jax" if is_jax else "numpy" if isinstance(leaf, (np.ndarray, np.generic)) else type(leaf).__name__
        details = (str(jax.typeof(leaf)), jax.typeof(leaf).weak_type, leaf.committed) if is_jax else ()
        return kind, np.asarray(leaf).dtype.name, details, np.asarray(leaf).tolist()

    trees = [state.params, state.opt_state, state.key, state.numbers, state.numpy]
    return [one(leaf) for leaf in jax.tree.leaves(trees)]


def test_leaves_of_all_kinds_are_restored_with_their_types(fit: Fit) -> None:
    def make_zeros() -> dict[str, Any]:
        made = make_leaves()
        key, numbers = made.pop("key"), made.pop("numbers")
        zeros = jax.tree.map(lambda leaf: leaf * 0, made)
        typed = jax.random.split(jax.random.key(0, impl="rbg"), 2)
        return {**zeros, "key": {"typed": typed, "raw": key["raw"] * 0}, "numbers": [type(each)() for each in numbers]}

    def restore() -> Any:
        state = TrainState(**make_zeros())
        assert state.is_restored
        return describe(state)

    expected = fit(lambda: describe(TrainState(**make_leaves())), workers=1).return_value
    checkpoint = save_in_run(fit, make_leaves)
    assert fit(restore, workers=1, resume_from_checkpoint=checkpoint).return_value == expected
    assert [each[0] for each in expected].count("jax") == 6


def test_number_that_a_compiled_function_has_turned_into_an_array_is_restored_as_this_array(fit: Fit) -> None:
    def count() -> tuple[str, bool, int]:
        state = TrainState(count=0)
        if not state.is_restored:
            state.count = jax.jit(lambda value: value + 1)(state.count)
            state.save()
        return type(state.count).__name__, jax.typeof(state.count).weak_type, int(state.count)

    saved = fit(count, workers=1)
    resumed = fit(count, workers=1, resume_from_checkpoint=saved.checkpoint)
    assert saved.return_value == resumed.return_value == ("ArrayImpl", True, 1)


def test_file_is_read_with_numpy_alone(fit: Fit) -> None:
    path = Path(save_in_run(fit, make_leaves).path)
    with np.load(path / "state.npz", allow_pickle=False) as arrays:
        assert arrays["params/layers/0/w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert arrays["params/small"].dtype == np.uint16
        assert arrays["params/small"].view(jnp.bfloat16).tolist() == [1, 1, 1]
    described = json.loads((path / "state.json").read_text())
    assert described["arrays"]["params/small"]["dtype"] == "bfloat16"


def test_parameters_are_loaded_without_a_run(fit: Fit) -> None:
    checkpoint = save_in_run(fit, make_leaves)
    made = make_leaves()
    made["params"]["small"] = jnp.zeros(4)
    state = TrainState(**{**made, "opt_state": (jnp.asarray(0),), "extra": jnp.ones(1)})
    with pytest.raises(CheckpointError, match=r"\[DT-814\].*without extra; with params/small: bfloat16"):
        state.load(checkpoint)
    differences = state.load(checkpoint, strict=False)
    assert differences.missing == ["extra"]
    assert state.params["layers"][0]["w"].sum() == 15
    assert int(state.opt_state[0]) == 0, "the state of the optimizer is not loaded"
    assert not state.is_restored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"params": {"w": jnp.ones(3), "b": jnp.ones(1)}}, "without params/b"),
        (lambda: {"params": {}}, "with params/w"),
        (lambda: {"params": {"w": jnp.ones((3, 1))}}, r"with params/w: float32\[3\], not float32\[3, 1\]"),
        (lambda: {"params": {"w": jnp.ones(3, jnp.int32)}}, r"with params/w: float32\[3\], not int32\[3\]"),
        (lambda: {"key": jax.random.key(0, impl="unsafe_rbg")}, "with key"),
        (lambda: {"count": 1.0}, r"with count: int64\[\], not float64\[\]"),
    ],
)
def test_other_leaves_are_one_error(fit: Fit, change: Callable[[], dict[str, Any]], message: str) -> None:
    def train(config: dict[str, Any]) -> None:
        made = {"params": {"w": jnp.ones(3)}, "key": jax.random.key(0, impl="rbg"), "count": 1}
        TrainState(**{**made, **config["change"]()}).save()

    saved = fit(train, {"change": dict}, workers=1)
    with pytest.raises(TrainingFailedError, match=rf"\[DT-814\] .* a checkpoint of this state, got .*{message}"):
        fit(train, {"change": change}, workers=1, resume_from_checkpoint=saved.checkpoint)


class Counter:
    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def test_object_with_a_state_is_restored_and_one_that_cannot_be_saved_is_an_error(fit: Fit) -> None:
    def count(config: dict[str, Any]) -> Any:
        counter = Counter()
        state = TrainState(params=jnp.ones(2), counter=counter)
        if state.is_restored:
            return [counter.value[0], counter.value[1].tolist()]
        counter.value = config["value"]
        return state.save()

    saved = fit(count, {"value": [0.1, np.arange(3)]}, workers=1)
    resumed = fit(count, {"value": None}, workers=1, resume_from_checkpoint=saved.checkpoint)
    assert resumed.return_value == [0.1, [0, 1, 2]]
    with pytest.raises(TrainingFailedError, match=r"\[DT-813\].*PosixPath.*in counter\['value'\]\[0\]"):
        fit(count, {"value": [Path("x")]}, workers=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainState(params={"activation": jnp.tanh}), r"in params/activation\. Leave out other leaves"),
        (lambda: TrainState(params={"word": "text"}), "got 'text' of type str in params/word"),
        (lambda: TrainState(params={"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}), "two with the name 'params/a/b'"),
        (lambda: TrainState(save=jnp.ones(1)), "expected another name, because the state uses 'save' itself"),
        (lambda: TrainState(format=jnp.ones(1)), "expected another name"),
        (lambda: setattr(TrainState(params=1), "parmas", 2), r"its pytrees \(params\), got 'parmas'"),
    ],
)
def test_what_cannot_be_saved_is_refused_when_it_is_passed(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"\[DT-812\].*{message}"):
        make()


def change_state(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((directory / "state.json").read_text())
    change(content)
    (directory / "state.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text("{"),
        lambda path: (path / "state.json").write_text("[" * 100_000),
        lambda path: (path / "rank_0.json").unlink(),
        lambda path: (path / "rank_0.json").write_text('{"random": 3}'),
        lambda path: (path / "state.npz").unlink(),
        lambda path: (path / "state.npz").write_bytes(b"x"),
        lambda path: np.savez(path / "state.npz", **{"params": np.array([print], dtype=object)}),
        lambda path: np.savez(path / "state.npz", **{"params": np.ones(2)}),
        lambda path: np.savez(path / "state.npz", **{"params[0:2]": np.ones(2, "float32")}),
        lambda path: change_state(path, lambda state: state.update(ranks=10**9)),
        lambda path: change_state(path, lambda state: state.update(ranks="1")),
        lambda path: change_state(path, lambda state: state.update(step=-1)),
        lambda path: change_state(path, lambda state: state.update(arrays=3)),
        lambda path: change_state(path, lambda state: state["arrays"]["params"].update(dtype="O")),
        lambda path: change_state(path, lambda state: state["arrays"]["params"].update(shape=[-1])),
        lambda path: change_state(path, lambda state: state.update(format=99)),
    ],
)
def test_damaged_or_hostile_files_are_refused(
    fit: Fit, checkpoint_files: dict[str, bytes], damage: Any, tmp_path: Path
) -> None:
    for name, content in checkpoint_files.items():
        (tmp_path / name).write_bytes(content)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=r"\[DT-814\]"):
        TrainState(params=jnp.zeros(3)).load(Checkpoint(tmp_path))


@pytest.fixture(scope="module")
def checkpoint_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint, by name."""
    result = JaxTrainer(
        lambda: TrainState(params=jnp.ones(3)).save(),
        scaling_config=drivetrain.ScalingConfig(num_workers=1, runtime="local"),
        run_config=drivetrain.RunConfig(
            storage_path=tmp_path_factory.mktemp("runs"), verbose=0, worker_output="none", start_timeout_s=180
        ),
    ).fit()
    assert result.checkpoint is not None
    return {file.name: file.read_bytes() for file in Path(result.checkpoint.path).iterdir() if file.name[0] != "."}
