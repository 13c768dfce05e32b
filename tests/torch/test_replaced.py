"""Optimizers that were created before a strategy replaced the parameters of the model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drivetrain import Result, TrainingFailedError
from drivetrain_torch import ParallelStrategy, prepare_model
from tests.torch.conftest import gather


class Copies(ParallelStrategy):
    """A strategy of another package: it trains a copy of the model."""

    def wrap(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def make_before(config: dict[str, Any]) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.1)
    model = prepare_model(inner, parallel_strategy=config["strategy"], parallel_strategy_kwargs=config.get("options"))
    before = [value.clone() for value in model.state_dict().values()]
    train_step(model, optimizer)
    changed = [not torch.equal(old, new) for old, new in zip(before, model.state_dict().values(), strict=True)]
    assert all(gather(any(changed)))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", Copies()])
def test_optimizer_of_replaced_parameters_is_refused(fit: Callable[..., Result], strategy: Any):
    with pytest.raises(TrainingFailedError, match=r"\[DT-721\] Adam: .*Call prepare_model first, and create"):
        fit(make_before, {"strategy": strategy})


@pytest.mark.parametrize(("strategy", "options"), [("ddp", {}), ("fsdp", {"use_orig_params": True})])
def test_optimizer_of_kept_parameters_trains_the_model(
    fit: Callable[..., Result], strategy: str, options: dict[str, Any]
):
    fit(make_before, {"strategy": strategy, "options": options})


def test_original_of_a_copied_model_and_optimizers_made_afterwards_can_be_trained(fit: Callable[..., Result]):
    def train() -> None:
        inner = torch.nn.Linear(4, 1)
        model = prepare_model(inner, parallel_strategy=Copies())
        for each in (inner, model):
            train_step(each, torch.optim.SGD(each.parameters(), lr=0.1))

    fit(train)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_module_without_parameters_is_not_wrapped(fit: Callable[..., Result], strategy: str):
    def train(config: dict[str, Any]) -> None:
        loss = torch.nn.MSELoss()
        assert prepare_model(loss, parallel_strategy=config["strategy"]) is loss

    fit(train, {"strategy": strategy})


def test_names_of_the_wrapper_exist_on_one_worker_and_change_nothing_else(fit: Callable[..., Result]):
    class Owner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(4, 1)

    def train() -> None:
        model = prepare_model(torch.nn.Linear(4, 1))
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert each.module is each
            assert list(each.modules()) == [each]
            assert list(each.state_dict()) == ["weight", "bias"]
            with each.no_sync():
                each(torch.ones(1, 4)).sum().backward()
        assert prepare_model(Owner()).module.in_features == 4
        assert not hasattr(prepare_model(torch.nn.Linear(4, 1), parallel_strategy=None), "module")

    fit(train, workers=0)


def test_frozen_model_is_not_wrapped_by_ddp(fit: Callable[..., Result]):
    def train() -> None:
        teacher = torch.nn.Linear(4, 1).requires_grad_(False)
        assert prepare_model(teacher) is teacher
        assert prepare_model(teacher, exact=True) is teacher

    fit(train)
