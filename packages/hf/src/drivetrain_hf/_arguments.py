"""Checks that ``TrainingArguments`` are consistent with the run in which they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain import ConfigurationError, get_context

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["check_arguments", "check_logged"]


def check_arguments(arguments: TrainingArguments) -> None:
    """Check that ``TrainingArguments`` fit the run in which they are used.

    If they did not fit, this worker would train alone, requested DeepSpeed or FSDP settings would be ignored, or
    checkpoints would be saved without the metric by which the run ranks them.

    Raises:
        ConfigurationError: the arguments do not fit the run. The message says what to change.
        SessionError: called outside a train function.
    """
    context = get_context()
    if arguments.world_size != context.get_world_size():
        raise ConfigurationError(
            f"TrainingArguments: expected a world size of {context.get_world_size()}, the number of workers, got "
            f"{arguments.world_size}, with which each worker would train alone. Create them in the train function of a "
            "TorchTrainer, and do not change ACCELERATE_USE_CPU there"
        )
    requested = [name for name in ("deepspeed", "fsdp") if getattr(arguments, name)]
    kind = str(getattr(arguments.distributed_state.distributed_type, "value", ""))
    if requested and arguments.device.type == "cpu" and kind != "DEEPSPEED":
        raise ConfigurationError(
            f"TrainingArguments({requested[0]}=...): expected a worker with GPUs, got one without, on which this would "
            "be silently ignored. Set ScalingConfig(use_gpu=True). DeepSpeed also runs on CPUs under an "
            "AccelerateTrainer with distributed_type DEEPSPEED and "
            'TrainingArguments(accelerator_config={"use_configured_state": True})'
        )
    score = context.checkpoint_config.checkpoint_score_attribute
    if score is None or not score.startswith("eval_"):
        return
    evaluation = _strategy(arguments, "eval_strategy", "evaluation_strategy")
    saving = _strategy(arguments, "save_strategy")
    if saving == "no" or (saving == "best" and evaluation != "no"):
        return
    eval_steps, save_steps = arguments.eval_steps, arguments.save_steps
    if evaluation == saving == "epoch" or (
        evaluation == saving == "steps" and eval_steps and _saves_only_after_evaluation(eval_steps, save_steps)
    ):
        return
    actual = f"eval_strategy={evaluation!r}" + (f" every {eval_steps}" if evaluation == "steps" else "")
    actual += f" and save_strategy={saving!r}" + (f" every {save_steps}" if saving == "steps" else "")
    raise ConfigurationError(
        f"CheckpointConfig(checkpoint_score_attribute={score!r}): expected an evaluation at every step that saves, got "
        f'{actual}. Use "epoch" for both strategies, or "steps" for both with save_steps a multiple of eval_steps'
    )


def check_logged(metrics: dict[str, Any], logged: set[str]) -> None:
    """Check that the metric by which the run ranks checkpoints has been logged.

    Args:
        metrics: the metrics that will be reported with the checkpoint.
        logged: the names of all metrics logged so far.

    Raises:
        ConfigurationError: the metric has not been logged. The message lists the logged metrics.
    """
    score = get_context().checkpoint_config.checkpoint_score_attribute
    if score is not None and score not in metrics and score not in logged:
        raise ConfigurationError(
            "CheckpointConfig(checkpoint_score_attribute=...): expected a metric that the Trainer logs before it saves "
            f"({', '.join(sorted(logged | metrics.keys()))}), got {score!r}. Use one of these, or return it from "
            "compute_metrics"
        )


def _strategy(arguments: TrainingArguments, *names: str) -> str:
    """Return the value of the first of several arguments that exists, as a string.

    ``eval_strategy`` was called ``evaluation_strategy`` before transformers 4.41.
    """
    strategy = next(getattr(arguments, name) for name in names if hasattr(arguments, name))
    return str(getattr(strategy, "value", strategy))


def _saves_only_after_evaluation(eval_steps: float, save_steps: float) -> bool:
    """Return True if every step that saves a checkpoint also evaluates.

    A value below 1 is a fraction of the total number of steps. Only the ``Trainer`` knows this total, so a fraction
    cannot be compared with a number of steps. If only one of the values is a fraction, the result is True.

    Args:
        eval_steps: the number of steps from one evaluation to the next, or a fraction.
        save_steps: the number of steps from one checkpoint to the next, or a fraction.
    """
    if (eval_steps < 1) != (save_steps < 1):
        return True
    quotient = save_steps / eval_steps
    return abs(quotient - round(quotient)) < 1e-6 and quotient >= 1
