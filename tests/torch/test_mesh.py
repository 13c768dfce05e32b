"""Trainings on four workers of a device mesh: FSDP2 with tensor parallelism, and the other dimensions of a mesh."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import drivetrain
from drivetrain import (
    Checkpoint,
    ConfigurationError,
    DataConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from drivetrain_torch import ParallelStrategy, TorchTrainer, TrainState, prepare_data_loader, prepare_model
from tests.torch.conftest import gather

ROWS = 1472  # of the 1797 digits, 23 batches of 64 rows; the others are for the test
TOTAL_BATCH = 64
EPOCHS = 4
SAVED = 30  # the step of a checkpoint within the second epoch
KILLED = 34


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.relu(self.up(inputs)))


class Network(torch.nn.Module):
    """A residual network, of which a stage of a pipeline lacks some layers. Its width cannot be divided by four."""

    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.embed: torch.nn.Module | None = torch.nn.Linear(64, width)
        self.blocks = torch.nn.ModuleDict({str(number): Block(width) for number in range(2)})
        self.head: torch.nn.Module | None = torch.nn.Linear(width, 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in (self.embed, *self.blocks.values(), self.head):
            hidden = hidden if layer is None else layer(hidden)
        return hidden


def make_network(mesh: DeviceMesh | None = None, seed: int = 3) -> torch.nn.Module:
    """Return the network, whose blocks are parallelized along the dimension ``tp`` of a mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    network = Network()
    if mesh is not None:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(network, mesh["tp"], plan)
    return network


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the rows for the training, with their numbers, and those for the test."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    numbers = torch.arange(ROWS)
    return TensorDataset(numbers, inputs[:ROWS], targets[:ROWS]), TensorDataset(inputs[ROWS:], targets[ROWS:])


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the unsharded tensors of a model and of its optimizer by name. Every rank must call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, training = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    states = {f"{name} {key}": value for name, each in training["state"].items() for key, value in each.items()}
    return {name: value.clone() for name, value in {**weights, **states}.items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def noisy(inputs: torch.Tensor) -> torch.Tensor:
    """Draw from the global generator, like augmentation and dropout."""
    return inputs + 0.05 * torch.randn(inputs.shape)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train with FSDP2 and tensor parallelism on a mesh, from a checkpoint if there is one."""
    context, mesh = drivetrain.get_context(), make_mesh(config["shape"])
    torch.manual_seed(0)
    rows, test = digits()
    loader = prepare_data_loader(
        DataLoader(rows, TOTAL_BATCH // mesh["dp"].size(), shuffle=True), mesh=mesh, move_to_device=False
    )
    options = {"modules": [Block]}
    model = prepare_model(make_network(mesh), True, "fsdp2", options, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    torch.manual_seed(1)
    state = TrainState(model=model, optimizer=optimizer, loader=loader)
    outcome: dict[str, Any] = {"start": state.steps, "losses": [], "rows": []}
    if state.is_restored:  # before its first step, torch would count a step to create the state of the optimizer
        outcome["restored"] = whole_state(model, optimizer)
    for epoch in state.epochs(config.get("epochs", EPOCHS)):
        for numbers, inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(noisy(inputs)), targets)
            loss.backward()
            optimizer.step()
            outcome["losses"].append(loss.item())
            outcome["rows"].append(numbers.tolist())
            state.step()
            if state.steps == SAVED:
                outcome["saved"] = whole_state(model, optimizer)
                state.save({"epoch": epoch})
            if (state.steps, context.get_world_rank(), context.attempt) == (config.get("killed"), 1, 0):
                os.kill(os.getpid(), signal.SIGKILL)
    inputs, targets = test[:]
    outcome["accuracy"] = (model(inputs).argmax(1) == targets).float().mean().item()
    outcome["final"] = whole_state(model, optimizer)
    outcome["random"] = torch.rand(1).item()
    shared = {name: outcome.pop(name, None) for name in ("restored", "saved", "final")}
    return {**shared, "ranks": gather(outcome)}


def run(directory: Path, function: Callable[..., Any], config: Any = None, workers: int = 4, **options: Any) -> Result:
    """Run a train function on local workers."""
    failures = options.pop("max_failures", 0)
    return TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, runtime="local"),
        run_config=RunConfig(
            storage_path=directory,
            verbose=0,
            failure_config=FailureConfig(max_failures=failures),
            start_timeout_s=180,
        ),
        **options,
    ).fit()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A training of four workers on a mesh of two by two."""
    return run(tmp_path_factory.mktemp("undisturbed"), train, {"shape": (2, 2)})


@pytest.fixture(scope="module")
def checkpoint(undisturbed: Result) -> Checkpoint:
    """The checkpoint of that training within its second epoch."""
    return Checkpoint(min(Path(undisturbed.path).glob("checkpoint_*")))


def test_tensor_parallel_training_learns_the_digits(undisturbed: Result):
    ranks = undisturbed.return_value["ranks"]
    assert min(rank["accuracy"] for rank in ranks) >= 0.9
    assert len({rank["accuracy"] for rank in ranks}) == 1


def test_ranks_of_one_position_read_the_same_rows_and_draw_the_same_numbers(undisturbed: Result):
    ranks = undisturbed.return_value["ranks"]
    assert ranks[0]["rows"] == ranks[1]["rows"]
    assert ranks[2]["rows"] == ranks[3]["rows"]
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["random"] == ranks[1]["random"]
    batches = ROWS // TOTAL_BATCH
    for epoch in range(EPOCHS):
        read = [
            number for rank in (0, 2) for batch in ranks[rank]["rows"][epoch * batches :][:batches] for number in batch
        ]
        assert sorted(read) == list(range(ROWS))


def test_losses_are_those_of_one_process_with_the_same_rows(undisturbed: Result):
    ranks = undisturbed.return_value["ranks"]
    rows, _ = digits()
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    torch.manual_seed(1)
    for step in range(SAVED):
        if step % (ROWS // TOTAL_BATCH) == 0:
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does at the start of an epoch
        batches = [rows[ranks[rank]["rows"][step]] for rank in (0, 2)]
        noise = 0.05 * torch.randn(batches[0][1].shape)  # both positions draw the same numbers
        optimizer.zero_grad()
        for rank, (_, inputs, targets) in zip((0, 2), batches, strict=True):
            loss = torch.nn.functional.cross_entropy(model(inputs + noise), targets)
            (loss / 2).backward()
            assert loss.item() == pytest.approx(ranks[rank]["losses"][step], abs=1e-4)
        optimizer.step()


@pytest.mark.slow
def test_killed_training_resumes_bit_for_bit(undisturbed: Result, tmp_path: Path):
    resumed = run(tmp_path, train, {"shape": (2, 2), "killed": KILLED}, max_failures=1).return_value
    assert_equal(resumed["final"], undisturbed.return_value["final"])
    for after, before in zip(resumed["ranks"], undisturbed.return_value["ranks"], strict=True):
        assert after["start"] == SAVED
        assert after["losses"] == before["losses"][SAVED:]
        assert after["rows"] == before["rows"][SAVED:]
        assert (after["accuracy"], after["random"]) == (before["accuracy"], before["random"])


@pytest.mark.parametrize(
    "shape",
    [(1, 4), (1, 1), *(pytest.param(shape, marks=pytest.mark.campaign) for shape in ((4, 1), (2, 1), (1, 2)))],
    ids=str,
)
def test_checkpoint_loads_on_another_mesh(
    undisturbed: Result, checkpoint: Checkpoint, tmp_path: Path, shape: tuple[int, int]
):
    """The state is that which was saved, and the steps of the rest of the epoch read the same rows."""
    config, workers = {"shape": shape, "epochs": 2}, shape[0] * shape[1]
    other = run(tmp_path, train, config, workers, resume_from_checkpoint=checkpoint).return_value
    assert_equal(other["restored"], undisturbed.return_value["saved"])
    positions, before = other["ranks"][:: shape[1]], undisturbed.return_value["ranks"][::2]
    assert len(positions) == shape[0]
    for step in range(2 * ROWS // TOTAL_BATCH - SAVED):
        rows = [number for rank in positions for number in rank["rows"][step]]
        assert sorted(rows) == sorted(number for rank in before for number in rank["rows"][SAVED + step])
    if shape[0] == 2:  # as many positions in the data, which continue with their random states
        for now, then in zip(positions, before, strict=True):
            assert now["losses"] == pytest.approx(then["losses"][SAVED : len(now["losses"]) + SAVED], abs=1e-4)


def test_ranks_of_one_position_continue_with_the_same_random_states(tmp_path: Path):
    def train() -> list[Any]:
        torch.manual_seed(drivetrain.get_context().get_world_rank())
        mesh = make_mesh((2, 2, 1), ("tp", "dp_shard", "pp"))
        loader = prepare_data_loader(DataLoader(range(12), batch_size=2, num_workers=1), mesh=mesh)
        drawn = torch.rand(1).item()
        torch.manual_seed(drivetrain.get_context().get_world_rank())
        prepare_model(torch.nn.Linear(1, 1), parallel_strategy=None, mesh=mesh)
        return gather((drawn, torch.rand(1).item(), torch.cat(list(loader)).tolist()))

    ranks = run(tmp_path, train).return_value
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert not {*ranks[0][:2]} & {*ranks[1][:2]}
    assert sorted(ranks[0][2] + ranks[1][2]) == list(range(12))


def refusals() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that are refused, with a part of the message."""
    mesh, rows = make_mesh((2, 2)), TensorDataset(torch.arange(8))
    plain = torch.nn.Linear(2, 2)
    with_names: Callable[..., DeviceMesh] = lambda *names: make_mesh((2, 2), names)  # noqa: E731
    parallel = make_network(mesh)
    yield (
        "expected a mesh of all 4 workers, got one of 2 with the dimensions dp",
        lambda: prepare_model(plain, mesh=mesh["dp"]),
    )
    yield (
        "expected a mesh with names, got one without",
        lambda: prepare_model(plain, mesh=init_device_mesh("cpu", (2, 2))),
    )
    yield "with a known name, got 'ep'", lambda: prepare_model(plain, mesh=with_names("dp", "ep"))
    yield "got the data dimensions 'dp' and 'data'", lambda: prepare_model(plain, mesh=with_names("dp", "data"))
    yield (
        "[DT-727] prepare_data_loader(mesh=...): expected a torch.distributed",
        lambda: prepare_data_loader(DataLoader(rows), mesh={"dp": 2}),
    )
    yield (
        "expected either a mesh or num_replicas and rank",
        lambda: prepare_data_loader(DataLoader(rows), mesh=mesh, num_replicas=2, rank=0),
    )
    own = DataLoader(rows, sampler=DistributedSampler(rows))
    yield "expected a loader of part", lambda: prepare_data_loader(own, mesh=mesh)
    unaware = prepare_data_loader(DataLoader(rows))
    yield "[DT-727] TrainState(loader=...): expected a loader of part", lambda: TrainState(loader=unaware, mesh=mesh)
    for strategy in ("ddp", "fsdp", "fsdp2"):
        yield (
            f"[DT-729] prepare_model(parallel_strategy='{strategy}'): expected a model of plain parameters, got 8",
            (lambda strategy=strategy: prepare_model(parallel, parallel_strategy=strategy)),
        )
    yield (
        "[DT-729] prepare_model(parallel_strategy='ddp'): expected a model of plain",
        lambda: prepare_model(parallel, mesh=mesh),
    )
    yield (
        "expected a mesh without a shard dimension, because every worker has the whole model, got 'fsdp' of",
        lambda: prepare_model(plain, mesh=with_names("fsdp", "tp")),
    )
    for names in (("tp", "replicate"), ("fsdp", "replicate"), ("fsdp", "cp")):
        yield (
            "[DT-729] prepare_model(mesh=...): expected a dimension to shard the parameters along",
            (lambda names=names: prepare_model(plain, True, "fsdp2", mesh=with_names(*names))),
        )
    yield (
        "[DT-729] prepare_model(mesh=...): expected a strategy that supports device meshes",
        lambda: prepare_model(plain, parallel_strategy=Unwrapped(), mesh=mesh),
    )


class Unwrapped(ParallelStrategy):
    """A strategy of another author, which knows no meshes."""

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        return model


def test_meshes_and_models_that_cannot_work_are_refused(tmp_path: Path):
    def train() -> list[tuple[str, str]]:
        found = []
        for expected, call in refusals():
            with pytest.raises(ConfigurationError) as caught:
                call()
            found.append((expected, str(caught.value)))
        return found

    found = run(tmp_path, train).return_value
    assert len(found) == 17
    for expected, message in found:
        assert expected in message


def average_of(model: torch.nn.Module, inputs: float) -> torch.Tensor:
    """Return the gradient of a weight of one element, whose value on each rank alone would be ``inputs``."""
    model(torch.tensor([[inputs]])).sum().backward()
    (gradient,) = [parameter.grad for parameter in model.parameters()]
    if gradient is None:  # FSDP1, if this rank has no part of the weight
        return torch.zeros(1)
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def test_gradients_are_averaged_over_the_right_ranks(tmp_path: Path):
    """On rank r, the gradient alone would be 10 to the power of r."""

    def train() -> dict[str, Any]:
        found = {}
        for strategy, *names in (
            ("ddp", "dp", "tp"),
            ("ddp", "tp", "data"),
            ("ddp", "pp", "cp"),
            ("ddp", "dp", "cp"),
            ("ddp", "tp", "pp"),
            ("fsdp", "dp", "tp"),
            ("fsdp", "cp", "fsdp"),
            ("fsdp2", "pp", "data"),
            ("fsdp2", "dp_replicate", "dp_shard"),
            ("fsdp2", "cp", "dp"),
        ):
            model = torch.nn.Linear(1, 1, bias=False)
            kwargs = {"use_orig_params": True} if strategy == "fsdp" else {}
            model = prepare_model(model, True, strategy, kwargs, mesh=make_mesh((2, 2), tuple(names)))
            gradient = average_of(model, 10.0 ** drivetrain.get_context().get_world_rank())
            found[" ".join([strategy, *names])] = gather(gradient.sum().item())
        return found

    all_four = 1111 / 4
    rows, columns = [101 / 2, 1010 / 2] * 2, [11 / 2] * 2 + [1100 / 2] * 2
    expected = {
        "ddp dp tp": rows,
        "ddp tp data": columns,
        "ddp pp cp": columns,
        "ddp dp cp": [all_four] * 4,
        "ddp tp pp": [1, 10, 100, 1000],
        "fsdp2 pp data": columns,
        "fsdp2 dp_replicate dp_shard": [all_four] * 4,
        "fsdp2 cp dp": [all_four] * 4,
    }
    found = run(tmp_path, train).return_value
    sharded = {name: found.pop(name) for name in [*found] if name.startswith("fsdp ")}
    assert found == expected
    assert {name: {*values} for name, values in sharded.items()} == {
        "fsdp dp tp": {*rows, 0.0},
        "fsdp cp fsdp": {all_four, 0.0},
    }


def read_rows(config: dict[str, Any]) -> list[Any]:
    """Read batches of a dataset shard, save the position after some of them, and read the rest."""
    mesh = make_mesh(config["shape"])
    model = prepare_model(torch.nn.Linear(1, 1), True, "fsdp2", mesh=mesh)
    state = TrainState(model=model)
    shard = drivetrain.get_dataset_shard("train")
    rows = []
    for _ in state.epochs(1):
        for batch in shard.iter_torch_batches(batch_size=8 // mesh["dp"].size()):
            rows.append(batch["number"].tolist())
            state.step()
            if state.steps == 3:
                state.save()
    return gather(rows)


def fit_on_rows(directory: Path, config: dict[str, Any], mesh: dict[str, int] | None, **options: Any) -> Result:
    return run(
        directory,
        config.get("function", read_rows),
        config,
        datasets={"train": {"number": torch.arange(48).numpy()}},
        dataset_config=DataConfig(mesh=mesh, **config.get("data", {})),
        **options,
    )


@pytest.mark.slow
def test_dataset_is_split_among_the_positions_of_a_mesh(tmp_path: Path):
    shuffled = {"data": {"shuffle": {"train": 5}, "shuffle_rows": 16}}
    whole = fit_on_rows(tmp_path, {"shape": (2, 2), **shuffled}, {"dp": -1, "tp": 2})
    ranks = whole.return_value
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert sorted(number for rank in ranks[::2] for batch in rank for number in batch) == list(range(48))
    for shape in ((2, 2), (4, 1), (1, 4)):
        config = {"shape": shape, **shuffled}
        mesh = dict(zip(("dp", "tp"), shape, strict=True))
        resumed = fit_on_rows(tmp_path, config, mesh, resume_from_checkpoint=whole.checkpoint).return_value
        positions = resumed[:: shape[1]]
        rest = [number for rank in positions for batch in rank for number in batch]
        assert sorted(rest) == sorted(number for rank in ranks[::2] for batch in rank[3:] for number in batch)
        if shape == (2, 2):
            assert resumed == [rank[3:] for rank in ranks]


@pytest.mark.campaign
def test_dataset_that_is_not_split_for_the_mesh_is_refused(tmp_path: Path):
    message = (
        r"\[DT-117\] TrainState: expected part \d of 2 of dataset 'train', .* got part \d of 4\. Describe the mesh"
    )
    with pytest.raises(TrainingFailedError, match=message):
        fit_on_rows(tmp_path, {"shape": (2, 2)}, None)
    with pytest.raises(TrainingFailedError, match=r"expected part [01] of 2 of dataset 'train'.* got part [01] of 2"):
        fit_on_rows(tmp_path, {"shape": (2, 2)}, {"tp": 2, "dp": 2})
    with pytest.raises(ConfigurationError, match=r"\[DT-117\] DataConfig\(mesh=...\): .* all 4 workers, got"):
        fit_on_rows(tmp_path, {"shape": (2, 2)}, {"dp": 4, "tp": 2})


def test_shuffle_buffer_of_shared_rows_requires_a_seed(tmp_path: Path):
    def train(config: dict[str, Any]) -> None:
        drivetrain.get_dataset_shard().iter_batches(local_shuffle_buffer_size=4)

    with pytest.raises(TrainingFailedError, match=r"\[DT-748\] dataset 'train': expected a local_shuffle_seed"):
        fit_on_rows(tmp_path, {"function": train}, {"dp": 2, "tp": 2})


def make_stage(number: int, seed: int = 3) -> torch.nn.Module:
    """Return one of two stages of the network: the layers have the names of the whole network."""
    stage: Any = make_network(seed=seed)
    del stage.blocks[str(1 - number)]
    if number:
        stage.embed = None
    else:
        stage.head = None
    return stage


def train_pipeline(config: dict[str, Any]) -> dict[str, Any]:
    """Train two stages with FSDP2, from a checkpoint if there is one, and save after half of the steps."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = make_mesh((2, 2), ("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    model = prepare_model(make_stage(number, config["seed"]), True, "fsdp2", mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    state = TrainState(model=model, optimizer=optimizer)
    rows, _ = digits()
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.cross_entropy)
    losses: list[float] = []
    for step in range(state.steps, 6):
        _, inputs, targets = rows[64 * step + mesh["dp"].get_local_rank() : 64 * step + 64 : 2]
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        if number:
            schedule.step(target=targets, losses=found)
        else:
            schedule.step(inputs)
        optimizer.step()
        losses += [torch.stack(found).mean().item()] if found else []
        state.step()
        if state.steps == 3:
            state.save()
    return {"losses": gather(losses), "weights": gather(whole_state(model, optimizer))}


@pytest.mark.slow
@pytest.mark.campaign
def test_stages_of_a_pipeline_are_saved_as_one_model_and_resumed(tmp_path: Path):
    undisturbed = run(tmp_path, train_pipeline, {"seed": 3})
    resumed = run(tmp_path, train_pipeline, {"seed": 4}, resume_from_checkpoint=undisturbed.checkpoint).return_value
    for after, before in zip(resumed["weights"], undisturbed.return_value["weights"], strict=True):
        assert_equal(after, before)
    assert [losses[-3:] for losses in undisturbed.return_value["losses"]] == resumed["losses"]
    model = make_network(seed=5)
    TrainState(model=model).load(undisturbed.checkpoint)
    rows, _ = digits()
    _, inputs, targets = rows[192:256:2]
    loss = torch.nn.functional.cross_entropy(model(inputs), targets).item()
    assert loss == pytest.approx(resumed["losses"][2][0], abs=1e-5)


def test_stages_with_the_same_names_are_refused(tmp_path: Path):
    def train() -> None:
        mesh = make_mesh((2, 2), ("pp", "dp"))
        TrainState(model=prepare_model(torch.nn.Linear(1, 1), mesh=mesh)).save()

    message = (
        r"\[DT-729\] TrainState: expected stages of a pipeline with different names .* got 'model\..*' in the stages"
    )
    with pytest.raises(TrainingFailedError, match=message):
        run(tmp_path, train)
