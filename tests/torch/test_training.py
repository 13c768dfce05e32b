"""Training of one model by two processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import Checkpoint, ConfigurationError, FailureKind, Result, TrainingFailedError
from drivetrain_torch import ParallelStrategy, enable_reproducibility, prepare_data_loader, prepare_model
from tests.torch.conftest import gather

STEPS = 6


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def make_batch(step: int, rank: int | None, world_size: int = 2) -> torch.Tensor:
    """Return one rank's part of the batch of a step, or the whole batch if ``rank`` is None."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return batch if rank is None else batch[rank::world_size]


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    """The parameters after training with one process on the whole batches."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        train_step(model, optimizer, make_batch(step, rank=None))
    return model.state_dict()


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor)


@pytest.mark.parametrize(
    ("strategy", "wrapper"),
    [("ddp", DistributedDataParallel), ("fsdp", FullyShardedDataParallel), ("fsdp2", FSDPModule)],
)
def test_two_processes_reach_the_parameters_of_one_process_with_the_whole_batch(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor], strategy: str, wrapper: type
):
    def train(config: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = prepare_model(make_model(), parallel_strategy=config["strategy"])
        assert isinstance(model, config["wrapper"])
        optimizer = make_optimizer(model)
        for step in range(STEPS):
            train_step(model, optimizer, make_batch(step, drivetrain.get_context().get_world_rank()))
        if config["strategy"] == "ddp":
            return model.module.state_dict()
        if config["strategy"] == "fsdp2":
            return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert_same(fit(train, {"strategy": strategy, "wrapper": wrapper}).return_value, alone)


def test_workers_start_with_the_parameters_of_rank_0(fit: Callable[..., Result]):
    def train() -> list[float]:
        torch.manual_seed(drivetrain.get_context().get_world_rank())
        return gather(prepare_model(torch.nn.Linear(1, 1)).module.weight.item())

    assert len(set(fit(train).return_value)) == 1


@pytest.mark.parametrize(("workers", "strategy"), [(2, None), (0, "ddp"), (1, "ddp"), (1, "fsdp")])
def test_model_is_not_wrapped_if_it_needs_no_wrapper(fit: Callable[..., Result], workers: int, strategy: str | None):
    def train(config: dict[str, Any]) -> bool:
        model = make_model()
        return prepare_model(model, parallel_strategy=config["strategy"]) is model

    assert fit(train, {"strategy": strategy}, workers=workers).return_value


def test_arguments_for_the_wrapper_and_the_device_are_passed_on(fit: Callable[..., Result]):
    def train() -> None:
        model = prepare_model(make_model(), parallel_strategy_kwargs={"bucket_cap_mb": 3, "static_graph": True})
        assert model.bucket_bytes_cap == 3 << 20
        assert model.static_graph
        moved = prepare_model(make_model(), move_to_device=torch.device("meta"), parallel_strategy=None)
        assert next(moved.parameters()).device.type == "meta"
        unmoved = prepare_model(make_model().to("meta"), move_to_device=False, parallel_strategy=None)
        assert next(unmoved.parameters()).device.type == "meta"

    fit(train)


def test_unknown_strategy_is_refused(fit: Callable[..., Result]):
    def train() -> None:
        prepare_model(make_model(), parallel_strategy="pipeline")

    with pytest.raises(TrainingFailedError, match="no strategy 'pipeline' is installed") as caught:
        fit(train)
    assert isinstance(caught.value.__cause__, ConfigurationError)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("fsdp2", {"modul": ()}, None),
        (3, {}, "expected the name of a strategy, a ParallelStrategy or None, got 3"),
    ],
)
def test_wrong_arguments_of_a_strategy_are_refused(
    fit: Callable[..., Result], strategy: Any, options: dict[str, Any], message: str | None
):
    def train() -> None:
        prepare_model(make_model(), parallel_strategy=strategy, parallel_strategy_kwargs=options)

    with pytest.raises(TrainingFailedError, match=message or "modul"):
        fit(train)


class Doubled(ParallelStrategy):
    """A strategy of another package: it marks the model."""

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        return torch.nn.Sequential(model, torch.nn.Identity())


def test_strategy_can_be_an_object(fit: Callable[..., Result]):
    def train() -> int:
        return len(prepare_model(make_model(), parallel_strategy=Doubled()))

    assert fit(train).return_value == 2


def test_fsdp2_shards_the_named_modules_as_units(fit: Callable[..., Result]):
    def train() -> list[str]:
        model = prepare_model(
            make_model(), parallel_strategy="fsdp2", parallel_strategy_kwargs={"modules": (torch.nn.Linear,)}
        )
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    assert fit(train).return_value == ["", "0", "2"]


def train_with_checkpoints(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with checkpoints, and kill one rank in the first attempt if the config says so."""
    context = drivetrain.get_context()
    inner = make_model()
    model = prepare_model(inner, exact=True)
    optimizer = make_optimizer(model)
    done = 0
    if checkpoint := drivetrain.get_checkpoint():
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
        assert 0 < done < STEPS
    for step in range(done, STEPS):
        train_step(model, optimizer, make_batch(step, context.get_world_rank(), context.get_world_size()))
        if config.get("kill") == context.get_world_rank() and step == STEPS - 2 and context.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with TemporaryDirectory() as directory:
            checkpoint = None
            if context.get_world_rank() == 0:
                state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
                torch.save(state, Path(directory, "state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            drivetrain.report({"step": step, "attempt": context.attempt}, checkpoint)
    return inner.state_dict()


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (3, 2)])
def test_killed_worker_is_replaced_and_the_run_reaches_the_same_parameters(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor], workers: int, rank: int
):
    undisturbed = fit(train_with_checkpoints, {}, workers=workers).return_value
    disturbed = fit(train_with_checkpoints, {"kill": rank}, workers=workers, max_failures=1)
    assert disturbed.metrics["attempt"] == 1
    assert all(torch.equal(disturbed.return_value[name], tensor) for name, tensor in undisturbed.items())
    if workers == 2:  # three workers have batches of different sizes, so the mean of their gradients is another one
        assert_same(disturbed.return_value, alone)


def test_checkpoint_contains_the_saved_state(fit: Callable[..., Result]):
    result = fit(train_with_checkpoints, {})
    with result.checkpoint.as_directory() as directory:
        state = torch.load(Path(directory, "state.pt"), weights_only=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in result.return_value.items())
    assert state["done"] == STEPS


class NoisyDataset(torch.utils.data.Dataset):
    """A dataset whose items are drawn from every random number generator, in the process that reads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        import numpy

        return torch.tensor([index, random.random(), numpy.random.random(), torch.rand(1).item()])


def train_with_noise(config: dict[str, Any]) -> list[Any]:
    enable_reproducibility(config["seed"])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    loader = DataLoader(NoisyDataset(), batch_size=2, shuffle=True, num_workers=config["num_workers"])
    parallel_model = prepare_model(model)
    optimizer = make_optimizer(model)
    for batch in prepare_data_loader(loader):
        train_step(parallel_model, optimizer, batch)
    return gather({name: tensor.tolist() for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_runs_with_the_same_seed_are_identical(fit: Callable[..., Result], num_workers: int):
    first, second, other = (
        fit(train_with_noise, {"seed": seed, "num_workers": num_workers}).return_value for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


def test_function_pickled_by_value_may_use_torch_backends(fit: Callable[..., Result]):
    def train() -> bool:
        torch.backends.cudnn.benchmark = True
        return torch.backends.cudnn.benchmark

    assert fit(train).return_value


def test_enable_reproducibility_selects_deterministic_algorithms(fit: Callable[..., Result]):
    def train() -> tuple[Any, ...]:
        enable_reproducibility()
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
            torch.initial_seed(),
        )

    assert fit(train).return_value == (True, False, ":4096:8", 0)


def test_model_can_be_trained_with_a_prepared_loader(fit: Callable[..., Result]):
    def train() -> list[int]:
        dataset = TensorDataset(torch.arange(10.0).unsqueeze(1))
        model = prepare_model(torch.nn.Linear(1, 1))
        loader = prepare_data_loader(DataLoader(dataset, batch_size=2))
        for (batch,) in loader:
            model(batch).sum().backward()
        return gather(len(loader))

    assert fit(train).return_value == [3, 3]


def test_memory_of_a_device_that_runs_out_is_recognized(fit: Callable[..., Result]) -> None:
    def train() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(TrainingFailedError, match="CUDA out of memory") as failed:
        fit(train)
    assert failed.value.kind is FailureKind.OUT_OF_MEMORY
