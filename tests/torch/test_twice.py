"""Models that are wrapped twice, on two processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from drivetrain import Result, TrainingFailedError
from drivetrain_torch import prepare_model


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def contain(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(model)


@pytest.mark.parametrize(
    ("wrap", "first"),
    [
        pytest.param(lambda: prepare_model(prepare_model(make_model())), "prepare_model", id="prepare_model twice"),
        pytest.param(lambda: prepare_model(contain(DistributedDataParallel(make_model()))), "prepare_model", id="own"),
        pytest.param(
            lambda: DistributedDataParallel(prepare_model(make_model())),
            "DistributedDataParallel",
            id="another library",
        ),
        pytest.param(
            lambda: DistributedDataParallel(contain(prepare_model(make_model(), parallel_strategy="fsdp"))),
            "DistributedDataParallel",
            id="ddp around fsdp",
        ),
    ],
)
def test_model_in_two_wrappers_is_refused(fit: Callable[..., Result], wrap: Callable[[], Any], first: str):
    with pytest.raises(TrainingFailedError, match=rf"\[DT-763\] {first}: expected a model that is not wrapped yet"):
        fit(wrap)


def test_models_with_wrappers_in_them_can_be_trained(fit: Callable[..., Result]):
    def train() -> list[str]:
        parts = contain(prepare_model(make_model()))
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = {"auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear})}
        nested = prepare_model(make_model(), parallel_strategy="fsdp", parallel_strategy_kwargs=policy)
        for model in (parts, nested):
            model(torch.ones(1, 2)).sum().backward()
        return [type(each).__name__ for each in nested.modules()]

    assert fit(train).return_value.count("FullyShardedDataParallel") == 3
