"""`drivetrain[transformers]` in an empty environment: its import does not load it, two workers train a small model."""

import os
import tempfile

from check_core import check_dependencies_are_complete, check_import_is_light, loaded_modules


def check_trainer_does_not_import_a_framework() -> None:
    loaded = loaded_modules(
        "import drivetrain_hf.accelerate, drivetrain_hf.deepspeed, drivetrain_hf.transformers as t; "
        "t.TransformersTrainer(print)"
    )
    assert not loaded & {"torch", "transformers", "accelerate"}, loaded


def train_func() -> int:
    import inspect
    import json

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import drivetrain
    from drivetrain_hf.transformers import RayTrainReportCallback, prepare_trainer

    text = inspect.getdoc(json).encode()
    pieces = [list(text[start : start + 32]) for start in range(0, 512, 32)]
    arguments = TrainingArguments(
        output_dir=os.path.join(drivetrain.get_context().get_trial_dir(), "gpt2"),
        max_steps=2,
        per_device_train_batch_size=4,
        save_strategy="epoch",
        report_to="none",
    )
    config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
    )
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train()
    return trainer.args.world_size


def check_two_workers_train(storage_path: str) -> None:
    from drivetrain import RunConfig, ScalingConfig
    from drivetrain_torch import TorchTrainer

    result = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="isolation", storage_path=storage_path),
    ).fit()
    assert result.return_value == 2, result.return_value
    assert result.metrics["step"] == 2, result.metrics
    with result.checkpoint.as_directory() as directory:
        files = os.listdir(os.path.join(directory, "checkpoint"))
    assert {"model.safetensors", "rng_state_0.pth", "rng_state_1.pth"} <= set(files), files


if __name__ == "__main__":
    check_dependencies_are_complete()
    check_import_is_light()
    check_trainer_does_not_import_a_framework()
    with tempfile.TemporaryDirectory() as directory:
        check_two_workers_train(directory)
    print("ok: drivetrain[transformers]")
