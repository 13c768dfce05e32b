"""Runs that are killed or preempted, and go on."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from drivetrain import FailureKind, Result
from tests.lightning.jobs import STEPS, train
from tests.support import Collector

EPOCHS = 3


@pytest.fixture(scope="module")
def undisturbed(fit: Callable[..., Result]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The parameters in the end, and the metrics of each epoch."""
    told = Collector()
    parameters = fit(train, {"epochs": EPOCHS}, callbacks=(told,)).return_value
    assert [metrics["step"] for metrics in told.metrics_of(0)] == [STEPS, 2 * STEPS, 3 * STEPS]
    return parameters, told.metrics_of(0)


def losses(metrics: list[dict[str, Any]]) -> dict[int, float]:
    """The mean loss of each epoch, as it was reported last."""
    return {epoch["epoch"]: epoch["loss"] for epoch in metrics}


@pytest.mark.parametrize(
    ("config", "resumed_at", "tolerance"),
    [
        pytest.param({}, STEPS, 0, id="each epoch"),
        pytest.param({"report": {"every": "validation"}}, STEPS, 0, id="each validation"),
        pytest.param(
            {"report": {"every": 8, "checkpoint_upload_mode": "async"}, "resumable": True}, 32, 0, id="every 8 steps"
        ),
        pytest.param({"strategy": "fsdp"}, STEPS, 1e-4, id="fsdp"),
        pytest.param({"strategy": "deepspeed"}, STEPS, 1e-4, id="deepspeed"),
    ],
)
def test_killed_run_goes_on_to_the_losses_and_parameters_of_an_undisturbed_one(
    fit: Callable[..., Result], undisturbed: Any, config: dict[str, Any], resumed_at: int, tolerance: float
):
    if config.get("strategy") == "deepspeed":
        pytest.importorskip("deepspeed")
    told = Collector()
    config = {"epochs": EPOCHS, "at_step": STEPS + 12, "send": signal.SIGKILL, **config}
    disturbed = fit(train, config, callbacks=(told,), max_failures=1)

    assert told.attempts == 2
    parameters, metrics = undisturbed
    if "report" not in config:
        assert losses(told.metrics_of(0)) == pytest.approx(losses(metrics), abs=tolerance, rel=0)
    for name, value in parameters.items():
        torch.testing.assert_close(disturbed.return_value[name], value, atol=tolerance, rtol=0)


def test_preempted_run_saves_at_the_same_step_on_all_ranks_and_goes_on(fit: Callable[..., Result], undisturbed: Any):
    told = Collector()
    config = {"at_step": 9, "send": signal.SIGTERM, "resumable": True, "callbacks": [EarlyStopping("accuracy")]}
    preempted = fit(train, {"epochs": EPOCHS, **config}, callbacks=(told,))

    assert [failure.kind for failure in told.failures] == [FailureKind.PREEMPTION]
    print([(m["step"], m.get("loss"), m.get("accuracy"), m.get("learning_rate")) for m in told.metrics_of(0)])
    print([(m["step"], m.get("loss"), m.get("accuracy"), m.get("learning_rate")) for m in told.metrics_of(1)])
    for name, value in undisturbed[0].items():
        torch.testing.assert_close(preempted.return_value[name], value, atol=0, rtol=0)
