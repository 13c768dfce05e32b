"""Sets Accelerate up on a worker, from what a file of ``accelerate config`` says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain import Backend, ConfigurationError, TrainContext, WorkerGroup
from drivetrain_hf._frameworks import require
from drivetrain_torch import TorchConfig, get_device

__all__ = ["AccelerateBackend", "AccelerateConfig"]

# What Accelerate's launcher tells its processes beside where they are and how they find each other.
_TOLD = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
# Keys whose values are the run's to decide.
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
# How the arguments of the launcher begin that a section's keys are.
_SECTIONS = {
    "deepspeed_config": "",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "fsdp_config": "fsdp_",
    "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_",
}


class AccelerateBackend(Backend):
    """A torch backend, with Accelerate's configuration in the environment of the train function.

    Args:
        inner: sets the process group up.
        config: what a file of ``accelerate config`` says.
    """

    name = "accelerate"

    def __init__(self, inner: Backend, config: Mapping[str, Any]) -> None:
        self._inner = inner
        self._config = config
        self.preload, self.warmup = inner.preload, inner.warmup
        self.preload_environment = inner.preload_environment

    def rendezvous(self, group: WorkerGroup) -> Sequence[Mapping[str, str]]:
        """That of the process group."""
        return self._inner.rendezvous(group)

    @contextlib.contextmanager
    def session(self, context: TrainContext, rendezvous: Mapping[str, str]) -> Iterator[None]:
        """Joins the process group, and has every ``Accelerator()`` find it together with the configuration."""
        require("accelerate")
        with self._inner.session(context, rendezvous):
            from accelerate import PartialState

            on_cpu = get_device().type == "cpu"
            variables = launch_environment(self._config, context.get_world_size(), on_cpu=on_cpu)
            _require_fresh(variables)
            before = dict(os.environ)
            os.environ.update(variables)
            try:
                if on_cpu and "ACCELERATE_USE_DEEPSPEED" in variables:
                    _go_without_compiler()
                # What is set up first is what every Accelerator() finds, with DeepSpeed on CPUs as well.
                group = {"backend": "gloo"} if on_cpu else {}
                state = PartialState(cpu=variables["ACCELERATE_USE_CPU"] == "true", **group)
                if state.num_processes != context.get_world_size():
                    raise ConfigurationError(
                        f"Accelerate: expected set up by the run, got {state.num_processes} processes in place of "
                        f"{context.get_world_size()}: make no Accelerator or PartialState before the train function"
                    )
                yield
            finally:
                for name in variables:
                    os.environ.pop(name, None)
                os.environ.update({name: before[name] for name in variables if name in before})

    def close(self) -> None:
        """Closes the process group's part."""
        self._inner.close()


@dataclass(frozen=True, kw_only=True)
class AccelerateConfig(TorchConfig):
    """The settings of a process group, and a configuration of Accelerate inside it.

    Attributes:
        torch: how the process group is set up; the other settings are those of the class, and count for nothing.
        accelerate: what a file of ``accelerate config`` says.
    """

    torch: TorchConfig
    accelerate: Mapping[str, Any]

    def create(self) -> Backend:
        """The backend that these settings describe."""
        return AccelerateBackend(self.torch.create(), dict(self.accelerate))


def _require_fresh(variables: Mapping[str, str]) -> None:
    """Refuses to go on where an earlier run in this process has set Accelerate up otherwise, which stays."""
    from accelerate.state import AcceleratorState, is_initialized

    if not is_initialized():
        return
    wanted = variables["ACCELERATE_MIXED_PRECISION"], "ACCELERATE_USE_DEEPSPEED" in variables
    state = AcceleratorState()
    if (state.mixed_precision, state.distributed_type == "DEEPSPEED") != wanted:
        raise ConfigurationError(
            "Accelerate: expected one configuration for the life of a process, got that another Accelerator was "
            "made in "
            "this one: use ScalingConfig(num_workers=1), which runs the function in a process of its own"
        )


def _go_without_compiler() -> None:
    """Keeps DeepSpeed from building an operation for CPUs when it starts, half a minute long; Gloo does its work."""
    require("deepspeed")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def launch_environment(config: Mapping[str, Any], world_size: int, *, on_cpu: bool) -> dict[str, str]:
    """The variables that ``accelerate launch`` would give its processes, but for topology and networking.

    Args:
        config: what a file of ``accelerate config`` says.
        world_size: how many processes there are.
        on_cpu: whether they have no accelerator.

    Raises:
        ConfigurationError: this version of accelerate does not know a key or a value, or would pass over it in silence.
    """
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import launch

    kind = str(config.get("distributed_type", "NO"))
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigurationError(
            "accelerate_config: expected compute_environment: LOCAL_MACHINE, got "
            f"{config['compute_environment']}: run accelerate config anew for this machine"
        )
    if on_cpu and kind in ("FSDP", "MEGATRON_LM", "TP"):
        raise ConfigurationError(
            f"accelerate_config: expected GPUs for distributed_type: {kind}, got workers without GPUs, where "
            "Accelerate would train plain data-parallel: set ScalingConfig(use_gpu=True), or another distributed_type"
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
            f"{', '.join(unknown)}: remove them, run accelerate config again, or install the file's version"
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
    stated = [*(config.get("deepspeed_config") or ()), *(["mixed_precision"] if config.get("mixed_precision") else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(stated)  # not to be said twice, in another file
    try:
        if arguments.use_deepspeed:
            _, told = launch.prepare_deepspeed_cmd_env(arguments)
        else:
            told = launch.prepare_multi_gpu_env(arguments)
    except (ValueError, RuntimeError) as error:
        raise ConfigurationError(f"accelerate_config: expected values that Accelerate accepts: {error}") from error
    variables = {name: value for name, value in told.items() if name.startswith(_TOLD)}
    # Told that it is on a CPU, Accelerate passes over DeepSpeed in silence.
    variables["ACCELERATE_USE_CPU"] = str(on_cpu and not arguments.use_deepspeed).lower()
    return variables
