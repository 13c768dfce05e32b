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
EACH_EPOCH = [STEPS * epoch for epoch in range(1, EPOCHS + 1)]


@pytest.fixture(scope="module")
def undisturbed(fit: Callable[..., Result]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The parameters in the end, and the metrics of each epoch."""
    told = Collector()
    parameters = fit(train, {"epochs": EPOCHS}, callbacks=(told,)).return_value
    assert [metrics["step"] for metrics in told.metrics_of(0)] == EACH_EPOCH
    return parameters, told.metrics_of(0)


def losses(metrics: list[dict[str, Any]]) -> dict[int, float]:
    """The mean loss of each epoch, as it was reported last."""
    return {epoch["epoch"]: epoch["loss"] for epoch in metrics}


@pytest.mark.parametrize(
    ("config", "reported", "tolerance"),
    [
        pytest.param({}, EACH_EPOCH, 0, id="each epoch"),
        pytest.param({"report": {"every": "validation"}}, EACH_EPOCH, 0, id="each validation"),
        pytest.param(
            {"report": {"every": 8, "checkpoint_upload_mode": "async"}, "resumable": True},
            list(range(8, EPOCHS * STEPS + 1, 8)),
            0,
            id="every 8 steps",
        ),
        pytest.param({"strategy": "fsdp"}, EACH_EPOCH, 1e-4, id="fsdp"),
        pytest.param({"strategy": "deepspeed"}, EACH_EPOCH, 1e-4, id="deepspeed"),
    ],
)
def test_killed_run_goes_on_to_the_losses_and_parameters_of_an_undisturbed_one(
    fit: Callable[..., Result], undisturbed: Any, config: dict[str, Any], reported: list[int], tolerance: float
):
    if config.get("strategy") == "deepspeed":
        pytest.importorskip("deepspeed")
    told = Collector()
    config = {"epochs": EPOCHS, "at_step": STEPS + 12, "send": signal.SIGKILL, **config}
    disturbed = fit(train, config, callbacks=(told,), max_failures=1)

    assert told.attempts == 2
    for rank in range(2):
        assert [metrics["step"] for metrics in told.metrics_of(rank)] == reported, "nothing again, nothing left out"
    parameters, metrics = undisturbed
    if "report" not in config:
        assert losses(told.metrics_of(0)) == pytest.approx(losses(metrics), abs=tolerance, rel=0)
    for name, value in parameters.items():
        torch.testing.assert_close(disturbed.return_value[name], value, atol=tolerance, rtol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_checkpoint_of_two_workers_goes_on_with_one_to_the_same_losses(
    fit: Callable[..., Result], undisturbed: Any, strategy: str
):
    told = Collector()
    saved = fit(train, {"epochs": 1, "strategy": strategy}).checkpoint
    config = {"epochs": EPOCHS, "strategy": strategy}
    fit(train, config, workers=1, callbacks=(told,), resume_from=saved)

    wanted = losses(undisturbed[1])
    del wanted[0]
    assert losses(told.metrics_of(0)) == pytest.approx(wanted, abs=1e-4)


def test_preempted_run_saves_at_the_same_step_on_all_ranks_and_goes_on(fit: Callable[..., Result], undisturbed: Any):
    told = Collector()
    config = {"at_step": 9, "send": signal.SIGTERM, "resumable": True, "callbacks": [EarlyStopping("accuracy")]}
    preempted = fit(train, {"epochs": EPOCHS, **config}, callbacks=(told,))

    assert [failure.kind for failure in told.failures] == [FailureKind.PREEMPTION]
    saved, *others = [metrics["step"] for metrics in told.metrics_of(0)]
    assert 9 <= saved < STEPS, "long before the end of the epoch"
    assert others == EACH_EPOCH, "and without a report of an epoch that had not ended"
    assert [metrics["step"] for metrics in told.metrics_of(1)] == [saved, *others]
    for name, value in undisturbed[0].items():
        torch.testing.assert_close(preempted.return_value[name], value, atol=0, rtol=0)
