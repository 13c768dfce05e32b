"""The conformance kit for parallel strategies, as tests that a plugin inherits.

A plugin author writes a class with one attribute, and pytest collects the tests::

    from drivetrain_torch.testing import StrategyConformance

    class TestMyStrategy(StrategyConformance):
        name = "my_strategy"  # its entry point in drivetrain.strategies

A test that cannot pass for a strategy must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error. Requires pytest: run ``pip install "drivetrain[testing]"``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from drivetrain import RunConfig, ScalingConfig, TrainingFailedError, get_context
from drivetrain.plugin import load_plugin
from drivetrain_testing.kits import check_overrides
from drivetrain_torch._config import TorchConfig
from drivetrain_torch._prepare import prepare_model
from drivetrain_torch._strategies import ParallelStrategy
from drivetrain_torch._trainer import TorchTrainer

if TYPE_CHECKING:
    import torch

__all__ = ["StrategyConformance"]

_STEPS = 2


class StrategyConformance:
    """Tests of a strategy on two workers with Gloo. Derive a class from it, and set :attr:`name`.

    Attributes:
        name: the name of its entry point in ``drivetrain.strategies``.
        options: the arguments of the strategy, as in ``prepare_model(parallel_strategy_kwargs=...)``.
        invalid_options: arguments that the strategy must reject.
        tolerance: the accepted relative difference between the parameters after training on two workers and on one.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    invalid_options: ClassVar[Mapping[str, Any]] = {"no_such_option": 1}
    tolerance: ClassVar[float] = 1e-5

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not getattr(cls, "name", ""):
            raise TypeError(f"{cls.__name__}: expected an attribute `name` with the name of the entry point")
        check_overrides(cls, StrategyConformance)

    def test_is_a_strategy_class(self) -> None:
        kind = load_plugin("strategy", self.name)
        assert issubclass(kind, ParallelStrategy), (
            f"the strategy {self.name!r}: expected a class that derives from drivetrain_torch.ParallelStrategy, got "
            f"{kind!r}"
        )
        kind(**self.options)

    def test_trains_like_one_worker_with_all_of_the_data(self, tmp_path: Path) -> None:
        self._run(_train_and_compare, tmp_path)

    def test_checkpoint_restores_the_model_and_the_optimizer(self, tmp_path: Path) -> None:
        self._run(_save_and_load, tmp_path)

    def test_invalid_options_are_rejected(self, tmp_path: Path) -> None:
        if not self.invalid_options:
            pytest.skip(f"{type(self).__name__} declares no invalid options")
        names = ", ".join(self.invalid_options)
        try:
            self._run(_prepare, tmp_path, options=dict(self.invalid_options))
        except Exception as error:  # of the plugin
            message = str(error)
        else:
            message = "no error"
        assert any(name in message for name in self.invalid_options), (
            f"expected an error that names the invalid options {names}, got: {message}"
        )

    def _run(self, function: Callable[[dict[str, Any]], object], directory: Path, **changes: Any) -> None:
        config = {
            "name": self.name,
            "options": dict(self.options),
            "tolerance": self.tolerance,
            "directory": str(directory / "checkpoint"),
            **changes,
        }
        trainer = TorchTrainer(
            function,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, runtime="local"),
            run_config=RunConfig(storage_path=directory, verbose=0, worker_output="none", start_timeout_s=120),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise error.__cause__ or error from None


def _train_and_compare(config: dict[str, Any]) -> None:
    import torch

    model = _prepare(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        _train_step(model, optimizer, step)
    found = _parameters(model)
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, found)
    assert all(map(torch.equal, *everywhere)), (
        "expected equal parameters on all ranks after a step with different data on each rank, got other values on "
        "rank 1. Average the gradients over the ranks"
    )
    alone = _make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(_STEPS):
        _train_step(alone, optimizer, step, alone=True)
    for name, one, expected in zip(alone.state_dict(), found, _parameters(alone), strict=True):
        assert torch.allclose(one, expected, rtol=config["tolerance"], atol=config["tolerance"]), (
            f"{name}: expected the values of a training on one worker with all of the data, got a difference of up to "
            f"{(one - expected).abs().max():.2g}. Average the gradients over the ranks"
        )


def _save_and_load(config: dict[str, Any]) -> None:
    import torch

    from drivetrain_torch._statefiles import Parts, TorchFiles

    model = _prepare(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _train_step(model, optimizer, 0)
    files = TorchFiles(Parts.of({"model": model, "optimizer": optimizer}))
    if files.is_written_by_all_ranks or get_context().get_world_rank() == 0:
        os.makedirs(config["directory"], exist_ok=True)
        files.write(config["directory"], {"format": 1}, verify=True)
    torch.distributed.barrier()
    _train_step(model, optimizer, 1)
    expected = [value.clone() for value in _parameters(model)]
    files.read(config["directory"], only_parameters=False, strict=True)
    _train_step(model, optimizer, 1)
    for name, one, other in zip(_make_model().state_dict(), _parameters(model), expected, strict=True):
        assert torch.equal(one, other), (
            f"{name}: expected the same values when a step is repeated from a checkpoint of a TrainState, got a "
            f"difference of up to {(one - other).abs().max():.2g}"
        )


def _prepare(config: dict[str, Any]) -> torch.nn.Module:
    return prepare_model(_make_model(), parallel_strategy=config["name"], parallel_strategy_kwargs=config["options"])


def _make_model() -> torch.nn.Module:
    import torch

    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def _train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, *, alone: bool = False) -> None:
    """Train on this rank's half of a batch of eight rows, or on the whole batch."""
    import torch

    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    rows = batch if alone else batch[get_context().get_world_rank() :: get_context().get_world_size()]
    optimizer.zero_grad()
    loss: torch.Tensor = (model(rows) - 1).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the whole parameters, in the order of the model. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [value.detach() for value in state.values()]
