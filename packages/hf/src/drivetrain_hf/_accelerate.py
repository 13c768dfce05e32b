"""Sets up Accelerate on a worker, with a configuration written by ``accelerate config``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain import ConfigurationError, ScalingConfig, TrainContext
from drivetrain.plugin import Backend
from drivetrain.plugin.backends import WrappedBackend, temporary_environment
from drivetrain_hf._frameworks import require
from drivetrain_torch import TorchConfig, get_device

__all__ = ["AccelerateBackend", "AccelerateConfig"]

# Prefixes of the environment variables that Accelerate's launcher sets, except variables for topology and networking.
_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
# The keys of a configuration whose values the run decides, with the values that replace them.
_TOPOLOGY = {
    **dict.fromkeys(("gpu_ids", "main_process_ip", "rdzv_backend", "same_network", "mpirun_config"), None),
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), None),
    **dict.fromkeys(
        ("commands", "command_file", "enable_cpu_affinity", "use_cpu", "num_cpu_threads_per_process"), None
    ),
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
}
# For each section of a configuration, the prefix of the launcher's arguments that correspond to its keys.
_SECTIONS = {
    "deepspeed_config": "",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "fsdp_config": "fsdp_",
    "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_",
}


class AccelerateBackend(WrappedBackend):
    """A torch backend that also passes a configuration to Accelerate, through environment variables.

    Args:
        inner: the backend that sets up the process group.
        config: the content of a configuration file written by ``accelerate config``.
    """

    def __init__(self, inner: Backend, config: Mapping[str, Any]) -> None:
        super().__init__(inner)
        self.name = "accelerate"
        self._config = config

    def validate(self, scaling: ScalingConfig) -> None:
        """Refuse a configuration that requires GPUs if the workers have none.

        Accelerate would silently use plain data parallelism.
        """
        kind = str(self._config.get("distributed_type", "NO"))
        if not scaling.use_gpu and kind in ("FSDP", "MEGATRON_LM", "TP"):
            raise ConfigurationError(
                f"accelerate_config: expected GPUs for distributed_type: {kind}, got workers without GPUs, where "
                "Accelerate uses plain data parallelism. Set ScalingConfig(use_gpu=True), or use another "
                "distributed_type"
            )
        super().validate(scaling)

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Join the process group, and make every ``Accelerator()`` use this group and the backend's configuration."""
        require("accelerate")
        with super().session(context, rendezvous):
            from accelerate import PartialState

            on_cpu = get_device().type == "cpu"
            variables = launch_environment(self._config, context.get_world_size(), on_cpu=on_cpu)
            _require_fresh(variables)
            with temporary_environment(variables):
                if on_cpu and "ACCELERATE_USE_DEEPSPEED" in variables:
                    _skip_compilation()
                # Every Accelerator() uses the first PartialState of the process, also with DeepSpeed on CPUs.
                group = {"backend": "gloo"} if on_cpu else {}
                state = PartialState(cpu=variables["ACCELERATE_USE_CPU"] == "true", **group)
                if state.num_processes != context.get_world_size():
                    raise ConfigurationError(
                        f"Accelerate: expected a state with {context.get_world_size()} processes, as set up by this "
                        f"run, got one with {state.num_processes}. Create no Accelerator or PartialState before the "
                        "train function is called"
                    )
                yield


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig(TorchConfig):
    """Settings of a process group, and a configuration of Accelerate.

    Attributes:
        torch: the settings of the process group. The attributes that this class inherits from
            :class:`~drivetrain_torch.TorchConfig` have no effect.
        accelerate: the content of a configuration file written by ``accelerate config``.
    """

    torch: TorchConfig
    accelerate: Mapping[str, Any]

    def create(self) -> Backend:
        """Create the backend with these settings."""
        return AccelerateBackend(self.torch.create(), dict(self.accelerate))


def _require_fresh(variables: Mapping[str, str]) -> None:
    """Check that Accelerate was not set up with other settings. It can be set up only once per process."""
    from accelerate.state import AcceleratorState, is_initialized

    if not is_initialized():
        return
    expected = variables["ACCELERATE_MIXED_PRECISION"], "ACCELERATE_USE_DEEPSPEED" in variables
    state = AcceleratorState()
    if (state.mixed_precision, state.distributed_type == "DEEPSPEED") != expected:
        raise ConfigurationError(
            "Accelerate: expected one configuration for the lifetime of a process, got a process in which an "
            "Accelerator with other settings was created. Use ScalingConfig(num_workers=1), which runs the train "
            "function in a separate process"
        )


def _skip_compilation() -> None:
    """Prevent DeepSpeed from compiling its communication for CPUs, which takes half a minute. Gloo is used instead."""
    require("deepspeed")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def launch_environment(config: Mapping[str, Any], world_size: int, *, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables that ``accelerate launch`` would set, but none for topology and networking.

    Args:
        config: the content of a configuration file written by ``accelerate config``.
        world_size: the number of processes.
        on_cpu: True if the processes have no accelerator.

    Raises:
        ConfigurationError: the installed version of accelerate does not know a key or a value, or would silently ignore
            it.
    """
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch

    kind = str(config.get("distributed_type", "NO"))
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigurationError(
            "accelerate_config: expected compute_environment: LOCAL_MACHINE, got "
            f"{config['compute_environment']}. Run `accelerate config` again, for this machine"
        )
    arguments = launch_command_parser().parse_args(["train"])
    known = {*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend"}
    unknown = [key for key in config if key not in known]
    for name, value in config.items():
        prefix = _SECTIONS.get(name)
        if prefix is None:
            setattr(arguments, name, value)
            continue
        for key, inner in (value or {}).items():
            argument = key if key.startswith(prefix) else prefix + key
            if not hasattr(arguments, argument):
                unknown.append(f"{name}: {key}")
            setattr(arguments, argument, inner)
    if unknown:
        import accelerate

        raise ConfigurationError(
            f"accelerate_config: expected keys that accelerate {accelerate.__version__} knows, got "
            f"{', '.join(unknown)}. Remove them, rerun `accelerate config`, or install the version that wrote the file"
        )
    for name, value in _TOPOLOGY.items():
        setattr(arguments, name, value)
    arguments.num_processes = world_size
    arguments.use_deepspeed = kind == "DEEPSPEED"
    arguments.use_fsdp = kind == "FSDP"
    arguments.use_megatron_lm = kind == "MEGATRON_LM"
    arguments.use_parallelism_config = bool(config.get("parallelism_config"))
    arguments.mixed_precision = config.get("mixed_precision") or ("fp16" if config.get("fp16") else "no")
    arguments.dynamo_backend = getattr(arguments, "dynamo_backend", None) or "no"
    arguments.debug = bool(config.get("debug"))
    fields = [*(config.get("deepspeed_config") or ()), *(["mixed_precision"] if config.get("mixed_precision") else [])]
    # Accelerate refuses a DeepSpeed configuration file that also sets one of these fields.
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    try:
        if arguments.use_deepspeed:
            _, environment = launch.prepare_deepspeed_cmd_env(arguments)
        else:
            environment = launch.prepare_multi_gpu_env(arguments)
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"accelerate_config: expected values that Accelerate accepts, got: {error}") from error
    variables = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    # If this variable is true, Accelerate silently ignores DeepSpeed.
    variables["ACCELERATE_USE_CPU"] = str(on_cpu and not arguments.use_deepspeed).lower()
    return variables
