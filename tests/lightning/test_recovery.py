"""Runs that are killed or preempted, and then resume."""

import importlib.util
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
    """The final parameters and the metrics of each epoch of a run without a failure."""
    collector = Collector()
    parameters = fit(train, {"epochs": EPOCHS}, callbacks=(collector,)).return_value
    assert [metrics["step"] for metrics in collector.metrics_of(0)] == EACH_EPOCH
    return parameters, collector.metrics_of(0)


def losses(metrics: list[dict[str, Any]]) -> dict[int, float]:
    """Return the mean loss of each epoch, from its last report."""
    return {epoch["epoch"]: epoch["loss"] for epoch in metrics}


def skip_without_deepspeed(config: dict[str, Any]) -> None:
    if config.get("strategy") == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")


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
def test_killed_run_resumes_and_reaches_the_losses_and_parameters_of_an_undisturbed_one(
    fit: Callable[..., Result], undisturbed: Any, config: dict[str, Any], reported: list[int], tolerance: float
):
    skip_without_deepspeed(config)
    collector = Collector()
    config = {"epochs": EPOCHS, "at_step": STEPS + 12, "send": signal.SIGKILL, **config}
    disturbed = fit(train, config, callbacks=(collector,), max_failures=1)

    assert collector.attempts == 2
    for rank in range(2):
        assert [metrics["step"] for metrics in collector.metrics_of(rank)] == reported, "no step is repeated or skipped"
    parameters, metrics = undisturbed
    if "report" not in config:
        assert losses(collector.metrics_of(0)) == pytest.approx(losses(metrics), abs=tolerance, rel=0)
    for name, value in parameters.items():
        torch.testing.assert_close(disturbed.return_value[name], value, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("workers", "config"),
    [
        pytest.param(1, {}, id="each epoch, in an order drawn at random"),
        pytest.param(2, {}, id="each epoch"),
        pytest.param(2, {"strategy": "fsdp"}, id="fsdp"),
        pytest.param(2, {"strategy": "deepspeed"}, id="deepspeed"),
        pytest.param(1, {"report": {"every": "validation"}}, id="each validation"),
        pytest.param(2, {"report": {"every": 8}, "resumable": True}, id="every 8 steps"),
    ],
)
def test_killed_run_with_dropout_ends_with_exactly_the_parameters_of_an_undisturbed_one(
    fit: Callable[..., Result], workers: int, config: dict[str, Any]
):
    skip_without_deepspeed(config)
    config = {"epochs": 3, "dropout": 0.3, **config}
    undisturbed = fit(train, config, workers=workers).return_value
    killed = {"at_step": STEPS + 12, "send": signal.SIGKILL}
    disturbed = fit(train, {**config, **killed}, workers=workers, max_failures=1).return_value
    for name, value in undisturbed.items():
        torch.testing.assert_close(disturbed[name], value, atol=0, rtol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_worker_resumes_from_the_checkpoint_of_two_and_reaches_the_same_losses(
    fit: Callable[..., Result], undisturbed: Any, strategy: str
):
    collector = Collector()
    saved = fit(train, {"epochs": 1, "strategy": strategy}).checkpoint
    config = {"epochs": EPOCHS, "strategy": strategy}
    fit(train, config, workers=1, callbacks=(collector,), resume_from=saved)

    expected = losses(undisturbed[1])
    del expected[0]
    assert losses(collector.metrics_of(0)) == pytest.approx(expected, abs=1e-4)


def test_preempted_run_saves_at_the_same_step_on_all_ranks_and_resumes(fit: Callable[..., Result], undisturbed: Any):
    collector = Collector()
    config = {"at_step": 9, "send": signal.SIGTERM, "resumable": True, "callbacks": [EarlyStopping("accuracy")]}
    preempted = fit(train, {"epochs": EPOCHS, **config}, callbacks=(collector,))

    assert [failure.kind for failure in collector.failures] == [FailureKind.PREEMPTION]
    saved, *others = [metrics["step"] for metrics in collector.metrics_of(0)]
    assert 9 <= saved < STEPS, "the report comes before the end of the epoch"
    assert others == EACH_EPOCH, "the interrupted epoch is reported only once it is complete"
    assert [metrics["step"] for metrics in collector.metrics_of(1)] == [saved, *others]
    for name, value in undisturbed[0].items():
        torch.testing.assert_close(preempted.return_value[name], value, atol=0, rtol=0)
