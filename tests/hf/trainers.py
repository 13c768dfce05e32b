"""A ``transformers.Trainer`` for a tiny model on real texts, and train functions that use it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drivetrain

NEW_NAMES = {"eval_strategy": "evaluation_strategy"}  # since transformers 4.41


def make_trainer(examples: list[dict[str, Any]], vocabulary: int, *, dropout: float = 0.0, **values: Any) -> Any:
    """Return a trainer for an untrained classifier. Three quarters of the examples are its training data."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    values = {
        "output_dir": str(Path(drivetrain.get_context().get_trial_dir(), "out")),
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "report_to": "none",
        "dataloader_pin_memory": False,
        # In transformers 5.23 a loss that does not count its items is otherwise multiplied by the number of processes.
        "average_tokens_across_devices": False,
        **values,
    }
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    named = {name if name in known else NEW_NAMES.get(name, name): value for name, value in values.items()}
    arguments = TrainingArguments(**{name: value for name, value in named.items() if name in known})
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    training = len(examples) * 3 // 4
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=examples[:training],
        eval_dataset=examples[training:],
        compute_metrics=accuracy,
    )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(config: dict[str, Any], *callbacks: Any, prepare: Callable[[Any], Any] = drivetrain.prepare) -> Any:
    """Train on the examples of the config, from the latest checkpoint if there is one, and return the trainer."""
    from drivetrain_hf.transformers import RayTrainReportCallback

    trainer = make_trainer(config["examples"], config["vocabulary"], **config["arguments"])
    assert trainer.args.world_size == drivetrain.get_context().get_world_size()
    for callback in (RayTrainReportCallback(), *callbacks):
        trainer.add_callback(callback)
    trainer = prepare(trainer)
    checkpoint = drivetrain.get_checkpoint()
    if checkpoint is None:
        trainer.train()
    else:
        with checkpoint.as_directory() as directory:
            trainer.train(resume_from_checkpoint=str(Path(directory, RayTrainReportCallback.CHECKPOINT_NAME)))
    return trainer


def losses(history: list[dict[str, Any]]) -> dict[int, float]:
    """Return the logged loss of each step."""
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def saved_history(checkpoint: drivetrain.Checkpoint) -> list[dict[str, Any]]:
    """Return the values that the trainer had logged when it saved a checkpoint."""
    with checkpoint.as_directory() as directory:
        return json.loads(Path(directory, "checkpoint", "trainer_state.json").read_text())["log_history"]
