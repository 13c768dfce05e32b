"""What a run is asked to do: frozen, keyword-only, validated when they are made."""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from drivetrain._base.notebook import ShowsFields
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure

__all__ = ["CheckpointConfig", "CheckpointUploadMode", "FailureConfig", "RunConfig", "ScalingConfig", "SyncConfig"]

StopCondition = Mapping[str, float] | Callable[[str, Mapping[str, Any]], bool]

_RUN_NAME = re.compile(r"[^/\\\x00-\x1f]+")


class CallbackLike(Protocol):
    """What a configuration requires of a callback: see :class:`drivetrain.Callback`."""

    def on_report(self, run: Any, report: Any) -> None:
        """A rank reported."""
        ...


class PolicyLike(Protocol):
    """What a configuration requires of a policy: see :class:`drivetrain.FailurePolicy`."""

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool:
        """Whether to start another attempt."""
        ...


class RuntimeLike(Protocol):
    """What a configuration requires of a runtime: see :class:`drivetrain.plugin.Runtime`."""

    name: str

    def launch(self, spec: Any) -> Any:
        """Starts a worker group."""
        ...


Check = Callable[[str, object], None]
"""Refuses a wrong value; the first argument is how the error calls it, such as ``ScalingConfig(use_gpu=...)``."""


def _check_fields(config: object, checks: Mapping[str, Check]) -> None:
    """Checks the fields of a configuration that have a check of their own."""
    for name, check in checks.items():
        check(f"{type(config).__name__}({name}=...)", getattr(config, name))


def _or_none(check: Check) -> Check:
    def check_unless_none(what: str, value: object) -> None:
        if value is not None:
            check(what, value)

    return check_unless_none


def _int_from(minimum: int) -> Check:
    def check(what: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigurationError(f"{what}: expected an integer of at least {minimum}, got {value!r}")

    return check


def _one_of(*choices: object) -> Check:
    def check(what: str, value: object) -> None:
        if value not in choices:
            raise ConfigurationError(f"{what}: expected one of {', '.join(map(repr, choices))}, got {value!r}")

    return check


def _instance_of(kind: type[object]) -> Check:
    def check(what: str, value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigurationError(f"{what}: expected a {kind.__name__}, got {value!r}")

    return check


def _object_with(method: str, description: str) -> Check:
    def check(what: str, value: object) -> None:
        if not callable(getattr(value, method, None)):
            raise ConfigurationError(f"{what}: expected {description}, got {value!r}")

    return check


def _seconds(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{what}: expected a positive number of seconds, got {value!r}")


def _bool(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{what}: expected True or False, got {value!r}")


def _resources(what: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f'{what}: expected a mapping such as {{"CPU": 2}}, got {value!r}')
    for key, amount in value.items():
        good = isinstance(key, str) and isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not good or not 0 <= amount < math.inf:
            raise ConfigurationError(
                f"{what}: expected resource names with amounts of at least 0, got {key!r}: {amount!r}"
            )


def _number_of_workers(what: str, value: object) -> None:
    if not isinstance(value, (tuple, list)):
        _int_from(0)(what, value)
        return
    if len(value) != 2:
        raise ConfigurationError(f"{what}: expected a number or a pair (min, max), got {value!r}")
    for bound in value:
        _int_from(1)(what, bound)
    if value[0] > value[1]:
        raise ConfigurationError(f"{what.replace('...', '(min, max)')}: expected min to be at most max, got {value!r}")


def _name_or_runtime(what: str, value: object) -> None:
    if not isinstance(value, str):
        _object_with("launch", "a runtime's name or a Runtime")(what, value)


def _run_name(what: str, value: object) -> None:
    _instance_of(str)(what, value)
    if not _RUN_NAME.fullmatch(str(value)) or value in (".", ".."):
        raise ConfigurationError(
            f"{what}: expected a plain directory name without slashes, got {value!r}: put the directories before "
            "it into "
            "storage_path"
        )


def _path(what: str, value: object) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"{what}: expected a path or URI, got {value!r}")


def _callbacks(what: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigurationError(f"{what}: expected a list of callbacks or names, got {value!r}")
    for callback in value:
        if not isinstance(callback, str):
            _object_with("on_report", "Callback objects or names")(what, callback)


def _module_names(what: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{what}: expected a list of module names, got {value!r}")


def _stop_condition(what: str, value: object) -> None:
    if callable(value):
        return
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{what}: expected a mapping or a function, got {value!r}")
    for key, bound in value.items():
        if not isinstance(bound, (int, float)):
            raise ConfigurationError(f"{what}: expected a number for {key!r}, got {bound!r}")


def _resume(what: str, value: object) -> None:
    modes = ("never", "auto", "must")
    if value not in modes and not isinstance(value, os.PathLike) and "/" not in str(value):
        raise ConfigurationError(
            f"{what}: expected one of {', '.join(map(repr, modes))} or the path of a run directory, got {value!r}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig(ShowsFields):
    """How many workers, with what resources, on which runtime.

    Attributes:
        num_workers: worker processes to run the train function on. 0 runs it in this process, on this thread,
            so that ``breakpoint()`` works as usual. A pair ``(min, max)`` makes the run elastic: each attempt takes as
            many workers as there is room for, within the bounds.
        use_gpu: give each worker a GPU (or as many as ``resources_per_worker["GPU"]`` says).
        resources_per_worker: resources of one worker, such as ``{"CPU": 4, "GPU": 2}``. On Ray they are
            requested from the cluster; CPU defaults to 1. On this machine CPU sets how many threads a worker
            starts with, and defaults to an even share of the machine's.
        trainer_resources: resources to set aside for the driver on Ray; nothing by default.
        placement_strategy: how Ray spreads the workers over nodes: ``"PACK"``, ``"SPREAD"``,
            ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        accelerator_type: the GPU model that each worker must have, such as ``"A100"`` (Ray only).
        runtime: ``"inprocess"``, ``"local"``, ``"ray"``, the name of another installed runtime, or a
            :class:`~drivetrain.plugin.Runtime`. None picks: ``inprocess`` for no workers, ``ray`` where a
            Ray cluster is connected or ``RAY_ADDRESS`` is set, and ``local`` otherwise.
        elastic_resize_monitor_interval_s: seconds between two looks for room for more workers, while an elastic run
            has fewer than its maximum. It grows right after a commit; a train function that asks for preemptions
            saves first, any other repeats what it has done since.
        spare_workers: processes to keep ready beside the workers, with the framework imported, so that those of the
            next attempt need not be started: as many as ``num_workers`` replace a whole group. They take memory and
            no CPUs or GPUs, and are spread over the nodes as the workers are. Of use on Ray; the ``local`` runtime
            starts workers in milliseconds without.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.

    Example:
        >>> ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker={"CPU": 8}).num_gpus_per_worker
        1.0
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    trainer_resources: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    accelerator_type: str | None = None
    runtime: str | RuntimeLike | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    spare_workers: int = 0

    def __post_init__(self) -> None:
        _check_fields(
            self,
            {
                "num_workers": _number_of_workers,
                "use_gpu": _bool,
                "resources_per_worker": _or_none(_resources),
                "trainer_resources": _or_none(_resources),
                "placement_strategy": _one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
                "accelerator_type": _or_none(_instance_of(str)),
                "runtime": _or_none(_name_or_runtime),
                "elastic_resize_monitor_interval_s": _seconds,
                "spare_workers": _int_from(0),
            },
        )
        if isinstance(self.num_workers, (tuple, list)):
            object.__setattr__(self, "num_workers", tuple(self.num_workers))
        for name in ("resources_per_worker", "trainer_resources"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, dict(getattr(self, name)))
        gpus = (self.resources_per_worker or {}).get("GPU")
        if gpus and not self.use_gpu:
            raise ConfigurationError(
                f"ScalingConfig(resources_per_worker=...) asks for {gpus} GPUs a worker and use_gpu is False: "
                "add use_gpu=True, or take GPU out"
            )
        if self.use_gpu and gpus == 0:
            raise ConfigurationError(
                "ScalingConfig(use_gpu=True) with 0 GPUs a worker: take GPU out of resources_per_worker, or use_gpu"
            )
        if self.num_workers == 0 and isinstance(self.runtime, str) and self.runtime != "inprocess":
            raise ConfigurationError(
                f"ScalingConfig(num_workers=0) runs in this process, and runtime={self.runtime!r} starts workers: "
                "ask for at least 1 worker, or take runtime out"
            )

    @property
    def min_workers(self) -> int:
        """The least number of workers that an attempt starts with."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The greatest number of workers that an attempt starts with."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def num_cpus_per_worker(self) -> float | None:
        """CPUs asked for each worker, or None where the runtime's default holds."""
        cpus = (self.resources_per_worker or {}).get("CPU")
        return None if cpus is None else float(cpus)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of each worker; 0.0 without ``use_gpu``."""
        return float((self.resources_per_worker or {}).get("GPU", 1)) if self.use_gpu else 0.0

    @property
    def total_resources(self) -> dict[str, float]:
        """Everything that the run asks a cluster to provide: the workers' resources and the trainer's."""
        total = dict(self.trainer_resources or {})
        worker = {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpu else {}), **(self.resources_per_worker or {})}
        for name, amount in worker.items():
            total[name] = total.get(name, 0) + amount * self.max_workers
        return total


class CheckpointUploadMode(str, enum.Enum):
    """When ``report`` stores a checkpoint's files; each mode also goes by its value."""

    SYNC = "sync"
    """Before it returns."""
    ASYNC = "async"
    """In the background; ``report`` returns once nothing that happens to the directory can harm the files."""
    NO_UPLOAD = "none"
    """Not at all: they are in the run directory already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(ShowsFields):
    """Which checkpoints are kept, and how they are stored.

    The rules add up: a checkpoint is kept if one of them keeps it. The latest is always kept, and so are those that
    are pinned (:meth:`Checkpoint.pin() <drivetrain.Checkpoint.pin>`) or being read on this machine.

    Attributes:
        num_to_keep: how many committed checkpoints to keep, the best ones; None keeps all.
        checkpoint_score_attribute: the reported metric that ranks checkpoints, of a nested one its name as
            ``outer/inner``; None ranks by recency.
        checkpoint_score_order: ``"max"`` or ``"min"``: which end of that metric is better.
        keep_last: how many of the latest to keep on top of those.
        keep_every: keep every so many-th checkpoint of the run as well; None for no such rule.
        max_uploads_in_flight: how many checkpoints of a worker may be uploading in the background; ``report`` waits
            for one to finish where there are as many.
        checksums: take checksums also of files that are stored locally. Elsewhere they are always taken.
        checkpoint_frequency: for trainers that own the training loop: checkpoint every so many iterations; 0 for never.
        checkpoint_at_end: for trainers that own the training loop: also checkpoint when training ends.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: str = "max"
    keep_last: int = 1
    keep_every: int | None = None
    max_uploads_in_flight: int = 2
    checksums: bool = False
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool | None = None

    def __post_init__(self) -> None:
        _check_fields(
            self,
            {
                "num_to_keep": _or_none(_int_from(1)),
                "checkpoint_score_attribute": _or_none(_instance_of(str)),
                "checkpoint_score_order": _one_of("max", "min"),
                "keep_last": _int_from(1),
                "keep_every": _or_none(_int_from(1)),
                "max_uploads_in_flight": _int_from(1),
                "checksums": _bool,
                "checkpoint_frequency": _int_from(0),
                "checkpoint_at_end": _or_none(_bool),
            },
        )
        if self.num_to_keep is None and (self.keep_last != 1 or self.keep_every is not None):
            raise ConfigurationError(
                "CheckpointConfig(keep_last=..., keep_every=...) add to what num_to_keep keeps, and num_to_keep=None "
                "keeps everything: set num_to_keep"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig(ShowsFields):
    """What happens after a failure.

    Attributes:
        max_failures: how many times to start again from the latest committed checkpoint; -1 for without limit.
        fail_fast: True gives up at the first failure whatever ``max_failures`` says; ``"raise"`` also lets
            ``fit()`` raise the root cause itself instead of a :class:`~drivetrain.TrainingFailedError`.
        max_node_failures: how many attempts may fail by the loss of a process on one Ray node, before further ones
            avoid the node, as long as there are others; None for no limit.
        max_preemptions: how many times to start again after a preemption, which ``max_failures`` does not count; -1
            for without limit.
        preemption_grace_s: seconds that the train function has to save and return once it is told of a preemption.
        policy: decides instead of the fields above.
    """

    max_failures: int = 0
    fail_fast: bool | Literal["raise"] = False
    max_node_failures: int | None = 3
    max_preemptions: int = -1
    preemption_grace_s: float = 30.0
    policy: PolicyLike | None = None

    def __post_init__(self) -> None:
        _check_fields(
            self,
            {
                "max_failures": _int_from(-1),
                "max_node_failures": _or_none(_int_from(1)),
                "max_preemptions": _int_from(-1),
                "preemption_grace_s": _seconds,
                "policy": _or_none(_object_with("decide", "an object with decide(failure, history)")),
            },
        )
        if self.fail_fast != "raise":
            _bool("FailureConfig(fail_fast=...)", self.fail_fast)
        if self.fail_fast and self.max_failures != 0:
            raise ConfigurationError(
                f"FailureConfig(fail_fast={self.fail_fast!r}) never retries, and max_failures={self.max_failures} "
                "asks for retries: set one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(ShowsFields):
    """How files reach a storage that is not local: metrics, logs, and the artifacts that workers write.

    Artifacts are what a train function writes to ``get_context().get_trial_dir()``. On local storage that directory
    is in the run directory, so nothing has to be copied.

    Attributes:
        sync_period: seconds between two uploads of metrics, logs and artifacts that have changed. Metrics are uploaded
            with each checkpoint as well.
        sync_timeout: seconds that one transfer may take, be it of artifacts or of a checkpoint, up or down.
        sync_artifacts: upload artifacts at all.
        sync_artifacts_on_checkpoint: upload them with each checkpoint as well.
        transfer_threads: how many files, or parts of big ones, a process transfers at a time.
    """

    sync_period: float = 300.0
    sync_timeout: float = 1800.0
    sync_artifacts: bool = False
    sync_artifacts_on_checkpoint: bool = True
    transfer_threads: int = 8

    def __post_init__(self) -> None:
        _check_fields(
            self,
            {
                "sync_period": _seconds,
                "sync_timeout": _seconds,
                "sync_artifacts": _bool,
                "sync_artifacts_on_checkpoint": _bool,
                "transfer_threads": _int_from(1),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(ShowsFields):
    """Where a run keeps its results, how it is watched, and when it ends.

    Attributes:
        name: the run's directory under ``storage_path``; None makes one from the trainer's name and the time.
        storage_path: where runs are kept: a path, or a URI such as ``s3://bucket/path``, with options after a ``?``;
            None takes the ``DRIVETRAIN_STORAGE_PATH`` variable, and without it ``~/drivetrain_results``.
        storage_filesystem: the ``pyarrow.fs`` or fsspec filesystem that ``storage_path`` is a path on, then without
            a protocol; None for the one that ``storage_path`` names.
        failure_config: what happens after a failure.
        checkpoint_config: which checkpoints are kept.
        sync_config: how artifacts reach the storage.
        callbacks: callbacks, or names of installed ones, on top of the JSON, CSV and progress ones; one of their class
            takes the place of the usual one.
        stop: ends the run without an error when a report of rank 0 meets it: a mapping from metric to the
            value it has to reach, or a function of the trial id and the metrics that returns True. The metric in
            ``{"eval": {"accuracy": 0.9}}`` is named ``eval/accuracy``.
        verbose: 0 prints nothing, 1 shows how the run is doing, 2 also prints a line per report of rank 0.
        log_to_file: write each worker's output to ``logs/rank_N.log`` in the run directory.
        worker_output: whose output is also shown here, with the rank in front: ``"rank0"``, ``"all"`` or ``"none"``.
            Progress bars are shown of rank 0 only.
        resume: ``"never"`` refuses a name that exists; ``"auto"`` continues it from its latest committed
            checkpoint if there is one and starts it otherwise; ``"must"`` continues it or fails; the path or URI of a
            run directory continues that run.
        chdir_to_trial_dir: run the train function with ``get_context().get_trial_dir()`` as its working directory;
            by default that is the one that the driver was started in.
        detailed_metrics: also fill in ``_date``, ``_hostname``, ``_node_ip``, ``_pid`` and ``_time_total_s``.
        preload: names of modules that the train function imports. The process that local workers are forked from
            imports them once for all of them, and for later runs. They must touch no GPU; one that starts a
            thread is left out.
        start_timeout_s: seconds until every worker must be running the train function.
        hang_timeout_s: seconds without a report of any rank after which the run counts as hung, and ends with every
            rank's stacks or starts again; None for never.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync_config: SyncConfig = field(default_factory=SyncConfig)
    callbacks: Sequence[CallbackLike | str] = ()
    stop: StopCondition | None = None
    verbose: int = 1
    log_to_file: bool = True
    worker_output: Literal["rank0", "all", "none"] = "rank0"
    resume: Literal["never", "auto", "must"] | str | os.PathLike[str] = "never"
    chdir_to_trial_dir: bool = False
    detailed_metrics: bool = False
    preload: Sequence[str] = ()
    start_timeout_s: float = 600.0
    hang_timeout_s: float | None = None

    def __post_init__(self) -> None:
        defaults = {
            "failure_config": FailureConfig,
            "checkpoint_config": CheckpointConfig,
            "sync_config": SyncConfig,
            "callbacks": tuple,
        }
        for name, make in defaults.items():  # None stands for the default, as in Ray Train
            if getattr(self, name) is None:
                object.__setattr__(self, name, make())
        _check_fields(
            self,
            {
                "name": _or_none(_run_name),
                "storage_path": _or_none(_path),
                "failure_config": _instance_of(FailureConfig),
                "checkpoint_config": _instance_of(CheckpointConfig),
                "sync_config": _instance_of(SyncConfig),
                "callbacks": _callbacks,
                "stop": _or_none(_stop_condition),
                "verbose": _one_of(0, 1, 2),
                "log_to_file": _bool,
                "worker_output": _one_of("rank0", "all", "none"),
                "resume": _resume,
                "chdir_to_trial_dir": _bool,
                "detailed_metrics": _bool,
                "preload": _module_names,
                "start_timeout_s": _seconds,
                "hang_timeout_s": _or_none(_seconds),
            },
        )
        object.__setattr__(self, "callbacks", tuple(self.callbacks))
        object.__setattr__(self, "preload", tuple(self.preload))
        if self.resume == "must" and self.name is None:
            raise ConfigurationError('RunConfig(resume="must") needs the name of the run to resume: set name')
        is_path = self.resume not in ("never", "auto", "must")
        if is_path and (self.name is not None or self.storage_path is not None):
            raise ConfigurationError(
                "RunConfig(resume=<path>) names the run already: take name and storage_path out, or use "
                'resume="must" with them'
            )
