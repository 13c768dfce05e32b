"""Accelerate in a drivetrain run.

``Accelerator()`` works unchanged in the train function of a :class:`~drivetrain_torch.TorchTrainer`. This module is
for a configuration that ``accelerate config`` has made. Importing it does not import accelerate.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drivetrain import Checkpoint, ConfigurationError, RunConfig, ScalingConfig
from drivetrain_hf._accelerate import AccelerateConfig
from drivetrain_hf._frameworks import require
from drivetrain_torch import TorchConfig, TorchTrainer

__all__ = ["AccelerateTrainer"]


class AccelerateTrainer(TorchTrainer):
    """Runs a train function on every worker under a configuration of ``accelerate config``.

    Everything in it holds but what the run decides: how many processes and machines there are, which devices they
    have, and how they find each other. Where a config says nothing that your code could not say itself, a
    :class:`~drivetrain_torch.TorchTrainer` does the same.

    Args:
        train_loop_per_worker: the train function; it takes no argument, or the config. It calls ``Accelerator()``.
        train_loop_config: what to pass to it.
        accelerate_config: what such a file says, or its path, read here; None for the file where ``accelerate config``
            puts it, if it is there. A DeepSpeed configuration that it names is read here as well.
        torch_config: how the process group is set up.
        scaling_config: how many workers, with what.
        run_config: where results are kept, how the run is watched, and when it ends.
        metadata: what ``get_context().get_metadata()`` and every checkpoint's ``get_metadata()`` give back.
        resume_from_checkpoint: what ``get_checkpoint()`` returns at the start of a new run.

    Raises:
        ConfigurationError: an argument is of the wrong type, or the file is none of ``accelerate config``. Keys that
            the workers' version of accelerate does not know are told when the run starts.
        PluginError: the file is YAML, or to be looked for, and accelerate is not installed here.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        accelerate_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        torch_config: TorchConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if not isinstance(torch_config, AccelerateConfig) or accelerate_config is not None:
            if isinstance(torch_config, AccelerateConfig):  # of a run that is restored
                torch_config = torch_config.torch
            accelerate = _read_config(accelerate_config)
            # Anything else than a TorchConfig is refused by the constructor of the parent.
            if torch_config is None or isinstance(torch_config, TorchConfig):
                torch_config = AccelerateConfig(torch=torch_config or TorchConfig(), accelerate=accelerate)
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=run_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )


def _read_config(given: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """What a config says, with the DeepSpeed configuration in it in place of that one's path."""
    path = None
    if isinstance(given, Mapping):
        config: Any = dict(given)
    else:
        path = _default_file() if given is None else Path(given)
        config = {} if path is None else _parse(path)
    if not isinstance(config, dict) or (config and "distributed_type" not in config):
        raise ConfigurationError(
            "AccelerateTrainer(accelerate_config=...): expected what accelerate config writes, found no "
            "distributed_type "
            f"in {path or given!r}: run accelerate config, or add a distributed_type"
        )
    inner = dict(config.get("deepspeed_config") or {})
    if (file := inner.get("deepspeed_config_file")) not in (None, "none"):
        content = json.dumps(_parse(Path(file) if path is None else path.parent / file)).encode()
        inner["deepspeed_config_file"] = base64.urlsafe_b64encode(content).decode()  # which Accelerate takes as well
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
        import yaml  # which accelerate depends on

        return yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"AccelerateTrainer(accelerate_config=...): expected a file that can be read, got {path}: {error}"
        ) from error
