"""The model and data of the jobs with a ``transformers.Trainer``: a small GPT-2 on bytes of its own documentation."""

import inspect
import time
from typing import Any

from stamps import stamp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LENGTH, WARMUP_STEPS = 64, 30


class Clock(TrainerCallback):
    """Stamps the steps per second of a training after its first steps."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARMUP_STEPS:
            self._started = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._started
        stamp(self._config, "trained", steps_per_second=(state.global_step - WARMUP_STEPS) / seconds)


def make_trainer(config: dict[str, Any]) -> Trainer:
    text = (inspect.getdoc(TrainingArguments) or "").encode()[: 100 * LENGTH]
    pieces = [list(text[start : start + LENGTH]) for start in range(0, len(text) - LENGTH, LENGTH)]
    arguments = TrainingArguments(
        output_dir=config["storage"],
        max_steps=WARMUP_STEPS + config["steps"],
        per_device_train_batch_size=8,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    assert arguments.world_size == 2
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)),
        args=arguments,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
    )
    trainer.add_callback(Clock(config))
    return trainer
