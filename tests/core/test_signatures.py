"""Methods with other parameters than those of the interface are refused before anything is started or written."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain import (
    Callback,
    ConfigurationError,
    DataParallelTrainer,
    FailureConfig,
    PluginBrokenError,
    RunConfig,
    ScalingConfig,
)
from drivetrain._plugins.signatures import find_wrong_method
from drivetrain.plugin import Backend


class Forgets:
    def decide(self, failure: Any) -> bool:
        return True


async def decide_later(failure: Any, history: Any) -> bool:
    return True


class ReportsTwice(Callback):
    def on_report(self, run: Any, report: Any, again: Any) -> None:  # type: ignore[override]
        pass


class WithoutRendezvous(Backend):
    def session(self, context: Any) -> Any:  # type: ignore[override]
        return contextlib.nullcontext()


def fit(directory: Path, *, backend: Any = "none", policy: Any = None, callbacks: Any = ()) -> Any:
    failure_config = FailureConfig(policy=policy)
    return DataParallelTrainer(
        lambda: None,
        backend_config=backend,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            storage_path=directory / "runs", verbose=0, failure_config=failure_config, callbacks=list(callbacks)
        ),
    ).fit()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"policy": Forgets()},
            PluginBrokenError,
            r"Forgets.decide: expected .* \(failure, history\), got \(failure\)",
        ),
        ({"policy": lambda failure: True}, PluginBrokenError, r"expected .* \(failure, history\), got \(failure\)"),
        ({"policy": decide_later}, PluginBrokenError, "expected a normal function, got one with `async def`"),
        ({"callbacks": [ReportsTwice()]}, PluginBrokenError, r"ReportsTwice.on_report: .* got \(run, report, again\)"),
        ({"backend": WithoutRendezvous()}, ConfigurationError, r"session: .* \(context, rendezvous\), got \(context\)"),
    ],
)
def test_wrong_parameters_are_refused_before_the_run(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(tmp_path, **arguments)
    assert not (tmp_path / "runs").exists()


class Renames(Callback):
    def on_report(self, *args: Any) -> None:
        pass

    def on_run_end(self, run: Any, error: Any, extra: int = 0) -> None:
        pass


class IsGenerator(Backend):
    @contextlib.contextmanager
    def session(self, context: Any, rendezvous: Any) -> Iterator[None]:
        yield


class WithoutSelf(Callback):
    @staticmethod
    def on_report(run: Any, report: Any) -> None:  # type: ignore[override]
        pass

    @classmethod
    def on_checkpoint(cls, run: Any, checkpoint: Any) -> None:
        pass

    def on_run_start(*everything: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("plugin", "interface"),
    [(Renames(), Callback), (Renames, Callback), (IsGenerator(), Backend), (WithoutSelf, Callback)],
)
def test_other_ways_to_accept_the_same_arguments_are_fine(plugin: Any, interface: type) -> None:
    assert find_wrong_method(plugin, interface) is None


def test_policy_may_be_a_callable_object(tmp_path: Path) -> None:
    class Stops:
        def __call__(self, failure: Any, history: Any) -> bool:
            return False

    stop: Callable[[Any, Any], bool] = Stops()
    assert fit(tmp_path, policy=stop).error is None
