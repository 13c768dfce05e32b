"""Training of one model by two processes that Horovod connects."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from sklearn.datasets import load_digits

import drivetrain
from drivetrain import Checkpoint, FailureKind, Result, TrainingFailedError
from tests.support import Collector

STEPS = 6


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def make_batch(step: int, rank: int | None, world_size: int = 2) -> torch.Tensor:
    """Return one rank's part of the batch of a step, or the whole batch if ``rank`` is None."""
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return batch if rank is None else batch[rank::world_size]


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def distribute(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    """The parameters after training with one process on the whole batches."""
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        train_step(model, optimizer, make_batch(step, rank=None))
    return model.state_dict()


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor)


def test_averaged_gradients_are_those_of_the_whole_batch(fit: Callable[..., Result]):
    def train() -> tuple[torch.Tensor, torch.Tensor]:
        hvd.init()
        model = make_model()
        optimizer = distribute(model, make_optimizer(model))
        model(make_batch(0, hvd.rank())).square().mean().backward()
        optimizer.synchronize()
        own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return own, hvd.allgather(own.unsqueeze(0))

    gradients, of_all_ranks = fit(train).return_value
    model = make_model()
    model(make_batch(0, rank=None)).square().mean().backward()
    torch.testing.assert_close(gradients, torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(of_all_ranks[0], of_all_ranks[1])


def test_parameters_and_optimizer_state_are_broadcast(fit: Callable[..., Result]):
    def train() -> tuple[int, int]:
        hvd.init()
        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.9)
        train_step(model, optimizer, torch.randn(4, 3))  # different data on each rank, which creates momentum
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        momenta = [optimizer.state[parameter]["momentum_buffer"].flatten() for parameter in model.parameters()]
        mine = torch.cat([*(value.flatten() for value in model.state_dict().values()), *momenta])
        of_all_ranks = hvd.allgather(mine.unsqueeze(0))
        assert torch.equal(of_all_ranks[0], of_all_ranks[1])
        rates = hvd.allgather_object(optimizer.param_groups[0]["lr"])
        assert rates == [0.1, 0.1]
        return tuple(of_all_ranks.shape)

    assert fit(train).return_value == (2, 2 * (6 + 2))


def test_rank_with_fewer_batches_joins(fit: Callable[..., Result]):
    def train() -> tuple[int, list[float]]:
        hvd.init()
        total = torch.zeros(1)
        for step in range(3 if hvd.rank() == 0 else 1):
            total += hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"step {step}")
        last = hvd.join()
        return last, hvd.allgather(total, name="totals").tolist()

    assert fit(train).return_value == (0, [4.0, 2.0])


def test_process_sets_work_if_created_at_init_and_later(fit: Callable[..., Result]):
    def train() -> list[float]:
        mine = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        hvd.init(process_sets=mine)
        value = torch.full((1,), hvd.rank() + 1.0)
        alone = hvd.allreduce(value, op=hvd.Sum, process_set=mine[hvd.rank()], name="alone")
        hvd.remove_process_set(mine[1])
        later = hvd.add_process_set([1])
        together = hvd.allreduce(value, op=hvd.Sum, name="together")
        again = torch.zeros(1)
        if hvd.rank() == 1:
            again = hvd.allreduce(value, op=hvd.Sum, process_set=later, name="again")
        return [together.item(), *hvd.allgather(torch.cat([alone, again]), name="all").tolist()]

    assert fit(train).return_value == [3.0, 1.0, 0.0, 2.0, 2.0]


def train_with_checkpoints(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with checkpoints, and kill one rank in the first attempt if the config says so."""
    hvd.init()
    model = make_model()
    optimizer = distribute(model, make_optimizer(model))  # before loading its state, which would be lost
    first = 0
    if (checkpoint := drivetrain.get_checkpoint()) and hvd.rank() == 0:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    first = hvd.broadcast_object(first, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(first, STEPS):
        if drivetrain.get_context().attempt == 0 and (hvd.rank(), step) == (1, config.get("die_at")):
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(model, optimizer, make_batch(step, hvd.rank()))
        with TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, Path(directory, "state.pt"))
            drivetrain.report({"step": step}, Checkpoint.from_directory(directory) if hvd.rank() == 0 else None)
    return model.state_dict()


def test_two_processes_reach_the_parameters_of_one_process_with_the_whole_batch(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    assert_same(fit(train_with_checkpoints, {}).return_value, alone)


def test_killed_rank_is_reported_as_the_cause_although_the_other_raised_first(fit: Callable[..., Result]):
    with pytest.raises(TrainingFailedError, match="rank 1: the worker process was killed by SIGKILL") as caught:
        fit(train_with_checkpoints, {"die_at": 2})
    assert caught.value.kind is FailureKind.INFRASTRUCTURE
    assert caught.value.rank == 1


def test_run_with_a_killed_rank_resumes_and_reaches_the_same_parameters(
    fit: Callable[..., Result], alone: dict[str, torch.Tensor]
):
    collector = Collector()
    result = fit(train_with_checkpoints, {"die_at": 4}, max_failures=1, callbacks=(collector,))
    assert_same(result.return_value, alone)
    assert [failure.rank for failure in collector.failures] == [1]
    assert collector.attempts == 2
    steps = [metrics["step"] for metrics in collector.metrics_of(0)]
    assert steps[:4] == [0, 1, 2, 3]
    assert steps[-1] == 5
    assert len(steps) <= STEPS + 1, "only steps after the last checkpoint are repeated"


def test_rank_that_returns_early_causes_an_error_on_the_peer_that_waits_for_it(fit: Callable[..., Result]):
    def train() -> None:
        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            hvd.allreduce(torch.ones(1), name="only rank 1")

    with pytest.raises(TrainingFailedError, match=r"rank 1 failed .* shut down") as caught:
        fit(train)
    assert type(caught.value.__cause__).__name__ == "HorovodInternalError"


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.campaign])])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "ray":
        request.getfixturevalue("ray_address")
    return request.param


def test_model_recognizes_95_percent_of_the_digits(fit: Callable[..., Result], runtime: str):
    def train() -> None:
        hvd.init()
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005 * hvd.size())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = distribute(model, optimizer)
        mine = torch.arange(hvd.rank(), 1400, hvd.size())
        for epoch in range(8):
            shuffled = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
            for batch in shuffled.split(50):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
            drivetrain.report({"accuracy": hvd.allreduce(accuracy).item(), "workers": hvd.size()})

    metrics = fit(train, runtime=runtime).metrics
    assert metrics["accuracy"] > 0.95, metrics
    assert metrics["workers"] == 2
