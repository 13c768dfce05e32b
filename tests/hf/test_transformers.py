"""``transformers.Trainer`` in runs of two processes."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import drivetrain
from drivetrain import CheckpointConfig, ConfigurationError, Result, TrainingFailedError
from drivetrain_hf.transformers import TransformersTrainer, prepare_trainer
from drivetrain_torch import TorchTrainer
from tests.hf.texts import dataset
from tests.hf.trainers import losses, make_trainer, saved_history, train
from tests.support import read_lines

STEPS = 12
KEEP_BEST = {"run": {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="eval_accuracy")}}


def config_of(**arguments: Any) -> dict[str, Any]:
    examples, vocabulary = dataset()
    return {"examples": examples, "vocabulary": vocabulary, "arguments": arguments}


def train_and_return_history(config: dict[str, Any]) -> list[dict[str, Any]]:
    return train(config).state.log_history


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_together_learn_what_one_process_learns(fit: Callable[..., Result], workers: int):
    epochs = {"num_train_epochs": 5, "eval_strategy": "epoch"}
    alone = fit(train_and_return_history, config_of(per_device_train_batch_size=16, **epochs), workers=0)
    found = fit(
        train_and_return_history, config_of(per_device_train_batch_size=16 // workers, **epochs), workers=workers
    )
    assert alone.metrics["eval_accuracy"] > 0.65
    assert found.metrics["eval_accuracy"] == pytest.approx(alone.metrics["eval_accuracy"], abs=0.1)
    wanted, got = losses(alone.return_value), losses(found.return_value)
    assert wanted.keys() == got.keys()
    assert [got[step] for step in range(1, 13)] == pytest.approx([wanted[step] for step in range(1, 13)], abs=2e-3)


class KillAt:
    """Ends the process of a rank when it has made a step, in the first attempt."""


def train_until_killed(config: dict[str, Any]) -> list[dict[str, Any]]:
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context = drivetrain.get_context()
            if (context.attempt, context.get_world_rank(), state.global_step) == (0, 1, config["kill_at"]):
                os.kill(os.getpid(), signal.SIGKILL)

    return train(config, Kill()).state.log_history


def test_killed_run_goes_on_with_the_losses_of_an_undisturbed_one(fit: Callable[..., Result]):
    arguments = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "dropout": 0.3}
    config = config_of(lr_scheduler_type="linear", **arguments)
    undisturbed = fit(train_until_killed, {**config, "kill_at": None})
    disturbed = fit(train_until_killed, {**config, "kill_at": 8}, max_failures=1)
    assert losses(disturbed.return_value) == losses(undisturbed.return_value)
    assert len(losses(disturbed.return_value)) == STEPS
    # The second attempt has made only the steps after the checkpoint itself.
    steps = [line["step"] for line in read_lines(Path(disturbed.path, "result.json"))]
    assert steps == [3, 6, 9, 12, 12]
