"""The conformance kit for parallel strategies: those of the package pass; broken ones are rejected by name."""

import pytest

from drivetrain_torch.testing import StrategyConformance
from tests.core.conftest import Install, install
from tests.kits.rejecting import rejection

__all__ = ["install"]


class TestDDP(StrategyConformance):
    name = "ddp"


class TestFSDP(StrategyConformance):
    name = "fsdp"


class TestFSDP2(StrategyConformance):
    name = "fsdp2"


STRATEGY = """
import torch
import torch.distributed as dist
from drivetrain_torch import ParallelStrategy

class Averages(ParallelStrategy):
    def __init__(self): ...

    def wrap(self, model, device):
        for parameter in model.parameters():
            parameter.register_hook(self.reduce)
        return model

    def reduce(self, gradient):
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()
"""

TRAINS = "test_trains_like_one_worker_with_all_of_the_data"
BROKEN = {
    "no synchronization": (
        TRAINS,
        STRATEGY.replace("dist.all_reduce(gradient)", "return gradient"),
        "got other values on rank 1. Average the gradients over the ranks",
    ),
    "a sum instead of a mean": (
        TRAINS,
        STRATEGY.replace("gradient / dist.get_world_size()", "gradient"),
        "0.weight: expected the values of a training on one worker with all of the data",
    ),
    "any options": (
        "test_invalid_options_are_rejected",
        STRATEGY.replace("def __init__(self)", "def __init__(self, **options)"),
        "expected an error that names the invalid options no_such_option, got: no error",
    ),
    "an unrelated class": (
        "test_is_a_strategy_class",
        STRATEGY.replace("(ParallelStrategy)", ""),
        "expected a class that derives from drivetrain_torch.ParallelStrategy",
    ),
    "state that a checkpoint does not restore": (
        "test_checkpoint_restores_the_model_and_the_optimizer",
        STRATEGY.replace("init__(self): ...", "init__(self): self.calls = 0").replace(
            "        dist.all", "        self.calls += 1\n        gradient = gradient / self.calls\n        dist.all"
        ),
        "0.weight: expected the same values when a step is repeated from a checkpoint of a TrainState",
    ),
}


@pytest.mark.parametrize("test", [name for name in vars(StrategyConformance) if name.startswith("test_")])
def test_small_strategy_passes(install: Install, test: str, request: pytest.FixtureRequest) -> None:
    install("averages-dist", "averages", STRATEGY, {"drivetrain.strategies": {"averages": "averages:Averages"}})
    kit = type("TestAverages", (StrategyConformance,), {"name": "averages"})
    arguments = {} if test == "test_is_a_strategy_class" else {"tmp_path": request.getfixturevalue("tmp_path")}
    getattr(kit(), test)(**arguments)


@pytest.mark.parametrize(
    ("number", "test", "source", "message"),
    [(number, *case) for number, case in enumerate(BROKEN.values())],
    ids=BROKEN,
)
def test_broken_strategy_is_rejected(
    install: Install,
    request: pytest.FixtureRequest,
    number: int,
    test: str,
    source: str,
    message: str,
) -> None:
    name = f"broken_{number}"
    install(f"{name}-dist", name, source, {"drivetrain.strategies": {name: f"{name}:Averages"}})
    assert message in rejection(request, StrategyConformance, test, name=name)
