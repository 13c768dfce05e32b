"""A resumed run computes the same values, bit by bit, as an undisturbed one, with any number of workers."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from drivetrain import Result, TrainingFailedError, get_context
from drivetrain_torch import enable_reproducibility, prepare_model
from tests.torch.sharded import load, save

WHOLE = StateDictOptions(full_state_dict=True)


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    widths = (32, 128, 128, 10)
    layers = [torch.nn.Linear(before, after) for before, after in itertools.pairwise(widths)]
    return torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.Tanh())))


def train_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
    """Train with other data on each rank, and return the whole parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + get_context().get_world_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(get_model_state_dict(model, options=WHOLE))


def train_twice(config: dict[str, Any]) -> bool:
    """Return True if three steps from a checkpoint give the same parameters as without the interruption.

    As in a new process, the model that loads the checkpoint is wrapped again.
    """
    if config.get("reproducible"):
        enable_reproducibility()

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = prepare_model(make_model(config["seed"]), parallel_strategy=config["strategy"], **config["options"])
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    train_steps(model, optimizer, range(4))
    save(config["directory"], model, optimizer)
    undisturbed = train_steps(model, optimizer, range(4, 8))
    model, optimizer = make()
    load(config["directory"], model, optimizer)
    resumed = train_steps(model, optimizer, range(4, 8))
    return all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


EXACT = {"exact": True}


@pytest.mark.parametrize(
    ("workers", "strategy", "options", "reproducible"),
    [
        (2, "ddp", {}, False),
        (3, "ddp", EXACT, False),
        (4, "ddp", EXACT, False),
        (3, "ddp", {}, True),
        (3, "fsdp", EXACT, False),
        (3, "fsdp2", EXACT, False),
    ],
)
def test_steps_from_a_checkpoint_equal_the_undisturbed_steps(
    fit: Callable[..., Result], tmp_path, workers: int, strategy: str, options: dict[str, Any], reproducible: bool
):
    config = {"strategy": strategy, "options": options, "reproducible": reproducible, "seed": workers}
    assert fit(train_twice, {**config, "directory": str(tmp_path / "state")}, workers=workers).return_value


def test_only_exact_models_on_three_or_more_workers_look_for_unused_parameters(fit: Callable[..., Result]):
    def train() -> tuple[bool, ...]:
        implied = prepare_model(torch.nn.Linear(1, 1))
        enable_reproducibility()
        models = prepare_model(torch.nn.Linear(1, 1)), prepare_model(torch.nn.Linear(1, 1), exact=False)
        return tuple(each.find_unused_parameters for each in (implied, *models))

    assert fit(train, workers=2).return_value == (False, False, False)
    assert fit(train, workers=3).return_value == (False, True, False)


def test_static_graph_is_refused_for_an_exact_model(fit: Callable[..., Result]):
    def train() -> None:
        static = {"static_graph": True}
        assert isinstance(
            prepare_model(torch.nn.Linear(1, 1), parallel_strategy_kwargs=static), DistributedDataParallel
        )
        prepare_model(torch.nn.Linear(1, 1), parallel_strategy_kwargs=static, exact=True)

    with pytest.raises(TrainingFailedError, match=r"\[DT-722\].*Remove it, or pass exact=False"):
        fit(train)
