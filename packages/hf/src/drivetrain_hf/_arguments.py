"""What ``TrainingArguments`` have to agree about with the run they are used in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, get_context

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["check_arguments", "check_logged"]


def check_arguments(arguments: TrainingArguments) -> None:
    """Refuses arguments with which this worker trains alone, or with which checkpoints never have their score.

    Raises:
        ConfigurationError: the message says what to change.
        SessionError: called outside a train function.
    """
    context = get_context()
    if arguments.world_size != context.get_world_size():
        raise ConfigurationError(
            f"a Trainer in this run: expected to train on {context.get_world_size()} workers, got "
            "TrainingArguments that "
            f"count {arguments.world_size}, so that each would train alone: make them in the train function of a "
            "TorchTrainer, and leave ACCELERATE_USE_CPU as it is there"
        )
    asked = [name for name in ("deepspeed", "fsdp") if getattr(arguments, name)]
    kind = str(getattr(arguments.distributed_state.distributed_type, "value", ""))
    if asked and arguments.device.type == "cpu" and kind != "DEEPSPEED":
        raise ConfigurationError(
            f"TrainingArguments({asked[0]}=...): expected GPUs, got a worker without, where it would be passed over in "
            "silence: set ScalingConfig(use_gpu=True); DeepSpeed also runs on CPUs under an AccelerateTrainer of "
            'distributed_type DEEPSPEED, with TrainingArguments(accelerator_config={"use_configured_state": True})'
        )
    score = context.checkpoint_config.checkpoint_score_attribute
    if score is None or not score.startswith("eval_"):
        return
    evaluation = _strategy(arguments, "eval_strategy", "evaluation_strategy")
    saving = _strategy(arguments, "save_strategy")
    if saving == "no" or (saving == "best" and evaluation != "no"):
        return
    every, each = arguments.eval_steps, arguments.save_steps
    if evaluation == saving == "epoch" or (evaluation == saving == "steps" and every and _divides(every, each)):
        return
    found = f"eval_strategy={evaluation!r}" + (f" every {every}" if evaluation == "steps" else "")
    found += f" and save_strategy={saving!r}" + (f" every {each}" if saving == "steps" else "")
    raise ConfigurationError(
        f"CheckpointConfig(checkpoint_score_attribute={score!r}): expected an evaluation at every step that saves, got "
        f'{found}: use "epoch" for both strategies, or "steps" for both with save_steps a multiple of eval_steps'
    )


def check_logged(metrics: dict[str, Any], logged: set[str]) -> None:
    """Refuses a checkpoint whose score was never logged.

    Raises:
        ConfigurationError: the message says what was.
    """
    score = get_context().checkpoint_config.checkpoint_score_attribute
    if score is not None and score not in metrics and score not in logged:
        raise ConfigurationError(
            f"CheckpointConfig(checkpoint_score_attribute={score!r}): expected a metric that the Trainer logs "
            "before it "
            f"saves, got {', '.join(sorted(logged | metrics.keys()))}: name one of these, or have compute_metrics "
            "return it"
        )


def _strategy(arguments: TrainingArguments, *names: str) -> str:
    """A strategy as its word; ``eval_strategy`` was called otherwise before transformers 4.41."""
    found = next(getattr(arguments, name) for name in names if hasattr(arguments, name))
    return str(getattr(found, "value", found))


def _divides(every: float, each: float) -> bool:
    """Whether each saving step is an evaluating one; below 1 both are shares of what only the Trainer knows."""
    if (every < 1) != (each < 1):
        return True
    quotient = each / every
    return abs(quotient - round(quotient)) < 1e-6 and quotient >= 1
