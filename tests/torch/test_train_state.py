"""``TrainState``: a run that was killed or preempted at any step equals the undisturbed run."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import drivetrain
from drivetrain import Result, RunCancelledError, RunConfig, ScalingConfig
from drivetrain._runtimes.local import LocalRuntime
from drivetrain.plugin import WorkerInfo
from drivetrain_torch import TorchTrainer, TrainState, enable_reproducibility, prepare_data_loader, prepare_model
from tests.torch.conftest import gather

EPOCHS = 3
ROWS = 24
BATCH = 2


class Batches:
    """A loader whose position can be saved. Its order depends on the epoch, and not on the number of workers."""

    def __init__(self) -> None:
        self.epoch, self.position, self.yielded = 0, 0, []
        context = drivetrain.get_context()
        self.rank, self.size = context.get_world_rank(), context.get_world_size()

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < ROWS:
            rows = order[self.position :][: BATCH * self.size]
            self.position += len(rows)
            if self.position == ROWS:
                self.position, self.epoch, done = 0, self.epoch + 1, True
            else:
                done = False
            own = rows[self.rank :: self.size]
            self.yielded.append((self.epoch - done, own))
            yield torch.tensor(own, dtype=torch.float32).unsqueeze(1) / ROWS
            if done:
                return

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.position // BATCH, "rows": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["rows"]


def make_prepared_loader() -> Any:
    rows = torch.arange(float(ROWS)).unsqueeze(1) / ROWS
    return prepare_data_loader(torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True))


def make_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


def whole(model: torch.nn.Module) -> dict[str, Any]:
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.tolist() for name, value in weights.items()}


def disturb(config: Mapping[str, Any], steps: int) -> None:
    """Send a signal to the last rank, in the first attempt."""
    context = drivetrain.get_context()
    is_last = context.get_world_rank() == context.get_world_size() - 1
    if context.attempt == 0 and is_last and steps == config.get("at"):
        os.kill(os.getpid(), config["signal"])


def train(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train with dropout, and return everything that a resumed run must reproduce."""
    enable_reproducibility(0)
    model = prepare_model(make_model(), parallel_strategy=config.get("strategy", "ddp"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = make_prepared_loader() if config.get("prepared") else Batches()
    state = TrainState(model, optimizer, scheduler, loader=loader)
    torch.rand(3)  # code after the creation must not change the random numbers of the training
    first = state.steps
    for epoch in state.epochs(EPOCHS):
        for batch in loader:
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            disturb(config, state.steps + 1)
            state.step()
            if state.steps == config.get("until"):
                state.save({"step": state.steps})
                return {"rows": gather(loader.yielded)}
            if config.get("every") and state.steps % config["every"] == 0:
                state.save({"step": state.steps})
        scheduler.step()
        state.save({"loss": loss, "epoch": epoch, "stopping": state.stopping}, reduce={"loss": "mean"})
    return {
        "weights": whole(model),
        "rate": optimizer.param_groups[0]["lr"],
        "random": gather(torch.rand(1).item()),
        "rows": gather(getattr(loader, "yielded", None)),
        "steps": (first, state.steps),
    }


def assert_same(resumed: Result, undisturbed: Result) -> None:
    """Check the final state, and the metrics of each epoch."""
    for name in ("weights", "rate", "random"):
        assert resumed.return_value[name] == undisturbed.return_value[name], name
    losses = [result.metrics_dataframe.dropna(subset="loss") for result in (resumed, undisturbed)]
    assert losses[0]["epoch"].tolist() == list(range(EPOCHS))
    assert losses[0]["loss"].tolist() == losses[1]["loss"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_disturbed_run_equals_the_undisturbed_run(fit: Callable[..., Result], strategy: str):
    undisturbed = fit(train, {"strategy": strategy})
    killed = {"strategy": strategy, "at": 9, "signal": signal.SIGKILL}
    for every in (None, 4) if strategy == "ddp" else (4,):
        result = fit(train, {**killed, "every": every}, max_failures=1)
        assert result.return_value["steps"] == (8 if every else 6, 18)
        assert_same(result, undisturbed)
    for at in (4, 6) if strategy == "ddp" else (4,):  # 6 is the last step of an epoch
        result = fit(train, {"strategy": strategy, "at": at, "signal": signal.SIGTERM})
        assert_same(result, undisturbed)
        first = result.return_value["steps"][0]
        assert at <= first < 18, "the second attempt continues where the first one has saved"


@pytest.mark.slow
def test_disturbed_run_with_a_prepared_loader_equals_the_undisturbed_run(fit: Callable[..., Result]):
    prepared = {"prepared": True}
    undisturbed = fit(train, prepared)
    for at in (4, 6):  # 6 is the last step of an epoch
        assert_same(fit(train, {**prepared, "at": at, "signal": signal.SIGTERM}), undisturbed)
    for every in (None, 4):  # None: the second attempt begins with an epoch
        killed = {**prepared, "at": 9, "every": every, "signal": signal.SIGKILL}
        resumed = fit(train, killed, max_failures=1)
        assert resumed.return_value["steps"][0] == (8 if every else 6)
        assert_same(resumed, undisturbed)


@pytest.mark.slow
def test_interrupted_epoch_is_read_once_by_another_number_of_workers(fit: Callable[..., Result]):
    stopped = fit(train, {"until": 7}, workers=3)
    resumed = fit(train, {}, workers=2, resume_from_checkpoint=stopped.checkpoint)
    assert resumed.return_value["steps"][0] == 7
    assert_each_row_was_read_once_per_epoch(stopped, resumed)


def assert_each_row_was_read_once_per_epoch(*results: Result) -> None:
    rows: dict[int, list[int]] = {}
    for epoch, own in (each for result in results for of_rank in result.return_value["rows"] for each in of_rank):
        rows.setdefault(epoch, []).extend(own)
    assert {epoch: sorted(found) for epoch, found in rows.items()} == {
        epoch: list(range(ROWS)) for epoch in range(EPOCHS)
    }


def train_on_dataset(config: Mapping[str, Any]) -> dict[str, Any]:
    """Train on a dataset of the run, in steps of two rows on each rank."""
    model = prepare_model(torch.nn.Linear(1, 1))
    shard, seen = drivetrain.get_dataset_shard("train"), []
    state = TrainState(model)
    first = state.steps
    for epoch in state.epochs(EPOCHS):
        for batch in shard.iter_torch_batches(batch_size=BATCH):
            model(batch["x"].float().unsqueeze(1)).sum().backward()
            seen.append((epoch, [int(value) for value in batch["x"]]))
            if state.steps + 1 == config.get("until"):
                state.steps += 1
                state.save({"step": state.steps})
                return {"rows": gather(seen), "first": first}
            state.step()
        state.save({"epoch": epoch})
    return {"rows": gather(seen), "first": first}


@pytest.mark.slow
def test_position_in_a_dataset_is_restored_also_by_another_number_of_workers(fit: Callable[..., Result]):
    datasets = {"train": {"x": list(range(ROWS))}}
    stopped = fit(train_on_dataset, {"until": 8}, datasets=datasets)
    for workers in (2, 3):
        again = {"workers": workers, "datasets": datasets, "resume_from_checkpoint": stopped.checkpoint}
        resumed = fit(train_on_dataset, {}, **again)
        assert resumed.return_value["first"] == 8
        assert_each_row_was_read_once_per_epoch(stopped, resumed)


def test_dataset_knows_that_the_last_batch_was_read(fit: Callable[..., Result]):
    def read() -> list[bool]:
        shard = drivetrain.get_dataset_shard("train")
        return [*(shard.is_epoch_read for _ in shard.iter_batches(batch_size=10)), shard.is_epoch_read]

    result = fit(read, workers=0, datasets={"train": {"x": list(range(ROWS))}})
    assert result.return_value == [False, False, True, False]


class Machine(LocalRuntime):
    """This machine, with room for one worker and, after the first report, for two."""

    space = 1

    def room(self, scaling: ScalingConfig, running: Sequence[WorkerInfo], avoided: frozenset[str]) -> int:
        return self.space


class OnReport(drivetrain.Callback):
    """Calls a function at each report."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_report(self, run: Any, report: Any) -> None:
        self._act()


def train_until_stopped(config: Mapping[str, Any]) -> str:
    """Save once, and train until the run ends or continues with more workers."""
    state = TrainState(prepare_model(torch.nn.Linear(1, 1)))
    state.step()  # a run that has made a step is asked to save before it grows
    state.save({"first": state.steps, "size": drivetrain.get_context().get_world_size()})
    try:
        while not state.is_restored:
            state.step()
        return "resumed"
    finally:
        drivetrain.report({"finally": state.stopping})


@pytest.mark.slow
def test_growing_run_saves_before_it_continues_with_more_workers(tmp_path: Path):
    machine = Machine()
    grow = OnReport(lambda: setattr(machine, "space", 2))
    result = TorchTrainer(
        train_until_stopped,
        scaling_config=ScalingConfig(num_workers=(1, 2), runtime=machine, elastic_resize_monitor_interval_s=0.01),
        run_config=RunConfig(storage_path=tmp_path, verbose=0, callbacks=[grow], start_timeout_s=180),
    ).fit()
    assert result.return_value == "resumed"
    sizes = result.metrics_dataframe.dropna(subset="size")
    assert sizes["size"].tolist() == [1, 2]
    assert sizes["first"].iloc[1] > 2


@pytest.mark.parametrize("workers", [0, 2])
def test_cancelled_run_saves_at_the_step_and_runs_only_finally_blocks(tmp_path: Path, workers: int):
    reported = threading.Event()
    options = RunConfig(
        name="run", storage_path=tmp_path, verbose=0, callbacks=[OnReport(reported.set)], start_timeout_s=180
    )
    scaling = ScalingConfig(num_workers=workers, runtime="local" if workers else "inprocess")
    trainer = TorchTrainer(train_until_stopped, scaling_config=scaling, run_config=options)
    if workers:
        run = trainer.start()
        assert reported.wait(180)
        run.cancel()
        with pytest.raises(RunCancelledError):
            run.result(180)
    else:  # Ctrl-C reaches the process, because the train function runs in it
        threading.Thread(target=lambda: reported.wait(180) and os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    stopped = Result.from_path(tmp_path / "run")
    assert stopped.metrics["finally"] is True
    assert stopped.checkpoint is not None
    saved = torch.load(Path(stopped.checkpoint.path, "state.pt"), weights_only=True)
    assert saved["step"] > 0
    assert len(saved["ranks"]) == max(workers, 1)
