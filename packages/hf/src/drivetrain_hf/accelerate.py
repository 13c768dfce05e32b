"""Accelerate in a drivetrain run.

``Accelerator()`` works unchanged in the train function of a :class:`~drivetrain_torch.TorchTrainer`. Use this module if
you have a configuration written by ``accelerate config``. Importing this module does not import accelerate.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import Checkpoint, ConfigurationError, DataConfig, RunConfig, ScalingConfig
from drivetrain_hf._accelerate import AccelerateConfig
from drivetrain_hf._frameworks import require
from drivetrain_torch import TorchConfig, TorchTrainer

if TYPE_CHECKING:
    from drivetrain.plugin.trainers import ConfigT, TrainFunction
    from drivetrain_hf._loading import ResumableLoader

__all__ = ["AccelerateTrainer", "make_resumable"]


def make_resumable(accelerator: Any, data_loader: Any) -> ResumableLoader:
    """Make the position of a data loader a part of the checkpoints of an ``Accelerator``.

    Afterwards, ``accelerator.save_state`` saves the position and the random states of this rank, and
    ``accelerator.load_state`` restores them: the next iteration continues after the last batch that was trained on,
    with the same random numbers as without an interruption, also in augmentations. ``skip_first_batches`` is not
    necessary. Call this function on every rank, before ``load_state``.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        data_loader: a loader that ``accelerator.prepare`` has returned, of a dataset with a length.

    Returns:
        A loader with the same batches in the same order. ``iteration`` is the number of the current epoch, and of the
        next one between two epochs: the epoch to continue with after ``load_state``.

    Raises:
        ConfigurationError: the loader was not prepared, reads an iterable dataset, or is one with its own position
            (``dispatch_batches=True`` or ``use_stateful_dataloader=True``).

    Example:
        In a train function::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            loader = make_resumable(accelerator, loader)
            if (checkpoint := drivetrain.get_checkpoint()) is not None:
                with checkpoint.as_directory() as directory:
                    accelerator.load_state(directory)
            for epoch in range(loader.iteration, 10):
                for batch in loader:
                    ...
    """
    require("accelerate")
    from drivetrain_hf._loading import ResumableLoader, is_resumable
    from drivetrain_hf._saving import save_with

    if not is_resumable(data_loader):
        raise ConfigurationError(
            "make_resumable: expected a data loader that Accelerator.prepare returned, which reads a dataset with a "
            f"length on every rank, got {type(data_loader).__name__}. Prepare the loader first, or continue with "
            "accelerator.skip_first_batches"
        )
    loader = ResumableLoader(data_loader)
    save_with(accelerator, loader)
    return loader


class AccelerateTrainer(TorchTrainer):
    """Run a train function on every worker, with a configuration written by ``accelerate config``.

    The run decides the number of processes and machines, their devices, and how they connect to each other. All other
    settings of the configuration apply. If your code sets these other settings itself, use a
    :class:`~drivetrain_torch.TorchTrainer` instead.

    Args:
        train_loop_per_worker: the train function. It takes no argument, or the config. It calls ``Accelerator()``.
        train_loop_config: the config to pass to the train function.
        accelerate_config: the content of a configuration file, or the path of the file, or None for the default file of
            ``accelerate config``, if it exists. The driver reads this file. If the configuration contains the path of a
            DeepSpeed configuration file, the driver reads that file as well.
        torch_config: settings of the process group.
        scaling_config: the number of workers and their resources.
        run_config: where results are stored, how the run is monitored, and when it stops.
        datasets: see :class:`~drivetrain.DataParallelTrainer`.
        dataset_config: see :class:`~drivetrain.DataParallelTrainer`.
        metadata: values returned by ``get_context().get_metadata()`` and by every checkpoint's ``get_metadata()``.
        resume_from_checkpoint: the checkpoint that ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument has the wrong type, or the file was not written by ``accelerate config``.
            Keys that the workers' version of accelerate does not know are reported when the run starts.
        PluginError: accelerate is not installed in the driver's environment. It is required there if the configuration
            file is YAML or the default file.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction[ConfigT],
        *,
        train_loop_config: ConfigT | None = None,
        accelerate_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        accelerate = _read_config(accelerate_config)
        self._keep(accelerate_config=accelerate)  # the file may have changed when the run is restored
        if torch_config is None or isinstance(torch_config, TorchConfig):  # the parent refuses any other type
            torch_config = AccelerateConfig(torch=torch_config or TorchConfig(), accelerate=accelerate)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )


def _read_config(given: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return a configuration in which the content of a DeepSpeed configuration file replaces the path of that file."""
    path = None
    if isinstance(given, Mapping):
        config: Any = dict(given)
    else:
        path = _default_file() if given is None else Path(given)
        config = {} if path is None else _parse(path)
    if not isinstance(config, dict) or (config and "distributed_type" not in config):
        raise ConfigurationError(
            "AccelerateTrainer(accelerate_config=...): expected a configuration written by `accelerate config`, got "
            f"{path or given!r} without a distributed_type. Run `accelerate config`, or add a distributed_type"
        )
    inner = dict(config.get("deepspeed_config") or {})
    if (file := inner.get("deepspeed_config_file")) not in (None, "none"):
        content = json.dumps(_parse(Path(file) if path is None else path.parent / file)).encode()
        # Accelerate also accepts the encoded content of the file instead of a path.
        inner["deepspeed_config_file"] = base64.urlsafe_b64encode(content).decode()
        config["deepspeed_config"] = inner
    return config


def _default_file() -> Path | None:
    require("accelerate")
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file) if os.path.isfile(default_config_file) else None


def _parse(path: Path) -> Any:
    try:
        text = path.read_text()
        if path.suffix == ".json":
            return json.loads(text)
        require("accelerate")
        import yaml  # a dependency of accelerate

        return yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"AccelerateTrainer(accelerate_config=...): expected a readable file, got {path}: {error}"
        ) from error
