"""Runs of Transformers and Accelerate that are killed, and resume with the same rows and random numbers."""

import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Checkpoint, CheckpointError, ConfigurationError, Result
from tests.noisy import (
    ROWS,
    STEPS,
    NoisyNetwork,
    NoisyRows,
    batch_size,
    gathered,
    numbers_of,
    parameters_of,
    seed_each_rank,
)

EPOCHS = 3
Trained = tuple[list[list[float]], list[list[int]]]


def kill_last_rank(step: int, kill_at: int | None) -> None:
    context = drivetrain.get_context()
    is_last = context.get_world_rank() == context.get_world_size() - 1
    if step == kill_at and context.attempt == 0 and is_last:
        os.kill(os.getpid(), signal.SIGKILL)


class RecordingNetwork(NoisyNetwork):
    """Remembers the rows of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.rows.append(numbers_of({"labels": labels}))
        return super().forward(x, labels)


def train_with_transformers(config: dict[str, Any]) -> Trained:
    """Train, and return the parameters, and the rows of each batch of this attempt."""
    import transformers

    from drivetrain_hf.transformers import RayTrainReportCallback, prepare_trainer

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kill_last_rank(state.global_step, config.get("kill_at"))

    accumulated = config.get("accumulated", 1)
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(drivetrain.get_context().get_trial_dir(), "out")),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=batch_size() // accumulated,
        gradient_accumulation_steps=accumulated,
        dataloader_num_workers=config.get("processes", 0),
        learning_rate=0.01,
        data_seed=7,  # the order, although the ranks have different seeds
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=True,
        **config["save"],
    )
    network = RecordingNetwork()
    trainer = transformers.Trainer(model=network, args=arguments, train_dataset=NoisyRows())
    seed_each_rank()
    for callback in (RayTrainReportCallback(), Kill()):
        trainer.add_callback(callback)
    trainer = prepare_trainer(trainer)
    assert trainer.num_examples(trainer.get_train_dataloader()) == ROWS
    if (checkpoint := drivetrain.get_checkpoint()) is None:
        trainer.train(resume_from_checkpoint=config.get("directory"))
    else:
        with checkpoint.as_directory() as directory:
            trainer.train(resume_from_checkpoint=str(Path(directory, RayTrainReportCallback.CHECKPOINT_NAME)))
    return parameters_of(network), gathered(network.rows)


def train_with_accelerate(config: dict[str, Any]) -> Trained:
    """Train, and return the parameters, and the rows of each step of this attempt."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DistributedDataParallelKwargs, set_seed

    from drivetrain_hf.accelerate import make_resumable

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=config.get("seedable", True)),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        gradient_accumulation_steps=2,
    )
    set_seed(7)
    network = NoisyNetwork()
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    loader = DataLoader(NoisyRows(), batch_size(), shuffle=True, num_workers=config.get("processes", 0))
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    loader = make_resumable(accelerator, loader)
    assert len(loader) == STEPS
    seed_each_rank()
    if (checkpoint := drivetrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            accelerator.load_state(directory)
    rows, step = [], 0 if checkpoint is None else checkpoint.get_metadata()["step"]
    for _ in range(loader.iteration, EPOCHS):
        for batch in loader:
            kill_last_rank(step, config.get("kill_at"))
            rows.append(numbers_of(batch))
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % 2 == 0:
                with tempfile.TemporaryDirectory() as directory:
                    accelerator.save_state(directory)
                    saved = Checkpoint.from_directory(directory)
                    saved.set_metadata({"step": step})
                    drivetrain.report({"step": step}, saved, checkpoint_ranks="all")
    return parameters_of(network), gathered(rows)


EVERY_2 = {"save_strategy": "steps", "save_steps": 2}
WITHIN = {"save": EVERY_2, "kill_at": STEPS + 3}


@pytest.mark.parametrize(
    ("function", "workers", "config"),
    [
        pytest.param(train_with_transformers, 2, WITHIN, id="transformers"),
        pytest.param(train_with_transformers, 2, {**WITHIN, "processes": 2}, id="transformers-processes"),
        pytest.param(train_with_transformers, 2, {**WITHIN, "accumulated": 2}, id="transformers-accumulated"),
        pytest.param(train_with_transformers, 1, WITHIN, id="transformers-single"),
        pytest.param(
            train_with_transformers,
            2,
            {"save": {"save_strategy": "epoch"}, "kill_at": STEPS + 3, "processes": 2},
            id="transformers-epoch",
        ),
        pytest.param(train_with_accelerate, 2, WITHIN, id="accelerate"),
        pytest.param(train_with_accelerate, 2, {**WITHIN, "processes": 2}, id="accelerate-processes"),
        pytest.param(train_with_accelerate, 2, {**WITHIN, "kill_at": STEPS}, id="accelerate-last-batch"),
        pytest.param(train_with_accelerate, 2, {**WITHIN, "seedable": False}, id="accelerate-random-sampler"),
        pytest.param(train_with_accelerate, 1, WITHIN, id="accelerate-single"),
    ],
)
def test_killed_run_ends_with_the_parameters_of_an_undisturbed_one(
    fit: Callable[..., Result], function: Callable[..., Trained], workers: int, config: dict[str, Any]
):
    parameters, rows = fit(function, {**config, "kill_at": None}, workers=workers).return_value
    resumed_parameters, resumed_rows = fit(function, config, workers=workers, max_failures=1).return_value
    assert 0 < len(resumed_rows) < len(rows)
    assert resumed_rows == rows[-len(resumed_rows) :]
    assert resumed_parameters == parameters


@pytest.mark.parametrize("function", [train_with_transformers, train_with_accelerate])
@pytest.mark.parametrize(("before", "after", "repeated"), [(2, 1, 0), (1, 2, 2)])
def test_another_number_of_workers_reads_the_rows_that_were_not_read(
    fit: Callable[..., Result], function: Any, before: int, after: int, repeated: int
):
    config = {"save": EVERY_2}
    undisturbed = fit(function, config, workers=before)
    by_step = {metrics["step"]: checkpoint for checkpoint, metrics in undisturbed.best_checkpoints}
    first = undisturbed.return_value[1][STEPS : STEPS + 2]
    start = by_step[STEPS + 2]
    resumed = fit(function, config, workers=after, resume_from_checkpoint=start).return_value[1]
    read = list(chain(*first, *resumed[: STEPS - 2]))
    assert set(read) == set(range(ROWS))
    assert len(read) == ROWS + repeated, "only two workers repeat rows, for batches of the same size"
    assert len(resumed) == STEPS - 2 + STEPS


def test_trainer_continues_from_a_directory_of_its_own_in_the_order_of_the_epoch(
    fit: Callable[..., Result], tmp_path: Path
):
    undisturbed = fit(train_with_transformers, {"save": EVERY_2})
    by_step = {metrics["step"]: checkpoint for checkpoint, metrics in undisturbed.best_checkpoints}
    by_step[STEPS + 2].to_directory(tmp_path)
    config = {"save": EVERY_2, "directory": str(tmp_path / "checkpoint")}
    # The run does not know this checkpoint, so the Trainer reads and skips two batches itself.
    skipped, rows = STEPS + 2, fit(train_with_transformers, config).return_value[1]
    assert rows == undisturbed.return_value[1][skipped:]


def read_damaged() -> None:
    from drivetrain_hf._states import read_state

    with tempfile.TemporaryDirectory() as directory:
        assert read_state(directory, "state", ["step"]) == (None, False)
        for content in (b"", b"damaged", pickle.dumps(Path("code"))):
            Path(directory, "state_0.pt").write_bytes(content)
            with pytest.raises(CheckpointError, match="damaged file"):
                read_state(directory, "state", ["step"])
        torch.save({"ranks": 1}, Path(directory, "state_0.pt"))
        with pytest.raises(CheckpointError, match="damaged file: 'step'"):
            read_state(directory, "state", ["step"])


def test_damaged_state_is_refused_and_nothing_is_unpickled(fit: Callable[..., Result]):
    fit(read_damaged, workers=1)


def refuse_other_loaders() -> str:
    from accelerate import Accelerator

    from drivetrain_hf.accelerate import make_resumable

    with pytest.raises(ConfigurationError) as error:
        make_resumable(Accelerator(), DataLoader(NoisyRows()))
    return str(error.value)


def test_loader_that_was_not_prepared_is_refused(fit: Callable[..., Result]):
    assert "Prepare the loader first" in fit(refuse_other_loaders).return_value
