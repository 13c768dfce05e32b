"""``drivetrain.prepare`` with objects of PyTorch, on two processes."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import ConfigurationError, DataParallelTrainer, Result, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain_torch import ParallelStrategy, prepare_model


class Net(torch.nn.Linear):
    """A user's own class: its module is not torch, but that of its base class is."""


def make_loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1)), batch_size=2)


def test_model_loader_optimizer_and_scheduler_are_prepared_together(fit: Callable[..., Result]):
    def train() -> tuple[int, float]:
        model = Net(1, 1)
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        loader, wrapped, optimizer, scheduler = drivetrain.prepare(
            make_loader(), model, given, torch.optim.lr_scheduler.StepLR(given, 1)
        )
        assert isinstance(wrapped, DistributedDataParallel)
        assert wrapped.module is model
        assert optimizer is given
        before = model.weight.item()
        for (rows,) in loader:
            optimizer.zero_grad()
            wrapped(rows).square().mean().backward()
            optimizer.step()
        scheduler.step()
        assert model.weight.item() != before, "the optimizer trains the wrapped model"
        return len(loader), optimizer.param_groups[0]["lr"]

    batches, rate = fit(train).return_value
    assert batches == 2, "4 batches on 2 workers"
    assert rate == pytest.approx(0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_prepared_objects_are_returned_unchanged(fit: Callable[..., Result], strategy: str):
    def train() -> None:
        model = prepare_model(Net(2, 2), parallel_strategy=strategy)
        loader = drivetrain.prepare(make_loader())
        assert drivetrain.prepare(model) is model
        assert drivetrain.prepare(loader) is loader

    fit(train)


def test_models_in_unknown_wrappers_are_returned_unchanged(fit: Callable[..., Result]):
    class Wrapper(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

    class OtherStrategy(ParallelStrategy):
        def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
            return Wrapper(model)

    def train() -> None:
        of_other_strategy = prepare_model(Net(2, 2), parallel_strategy=OtherStrategy())
        around_ddp = Wrapper(prepare_model(Net(2, 2)))  # like a compiled model
        for model in (of_other_strategy, around_ddp):
            assert drivetrain.prepare(model) is model

    fit(train)


def test_state_of_an_optimizer_follows_its_parameters(fit: Callable[..., Result]):
    def train() -> int:
        model = Net(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        # This machine may have no other device, so one without memory stands for it, and nothing is copied.
        moments = optimizer.state[model.weight]
        moments["exp_avg"] = moments["exp_avg"].to("meta")
        moved: list[object] = []
        optimizer.load_state_dict = moved.append
        drivetrain.prepare(optimizer)
        return len(moved)

    assert fit(train, workers=0).return_value == 1


def test_single_worker_needs_no_process_group(tmp_path):
    def train() -> bool:
        model = Net(1, 1)
        return drivetrain.prepare(model) is model

    run = RunConfig(storage_path=tmp_path, verbose=0)
    assert DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=0), run_config=run).fit().return_value


def test_several_workers_without_a_process_group_are_refused(tmp_path):
    def train() -> None:
        drivetrain.prepare(Net(1, 1))

    run = RunConfig(storage_path=tmp_path, verbose=0)
    with pytest.raises(TrainingFailedError, match="expected a process group of all workers for a Net, got none"):
        DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=2, runtime="local"), run_config=run).fit()


def test_tensor_is_refused(fit: Callable[..., Result]):
    def train() -> None:
        drivetrain.prepare(torch.zeros(1))

    with pytest.raises(TrainingFailedError, match=r"DT-809.*got torch.Tensor. Leave it out") as failed:
        fit(train, workers=0)
    assert isinstance(failed.value.__cause__, ConfigurationError)
