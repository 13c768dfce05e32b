"""The configuration classes of a run. Each is a frozen, keyword-only dataclass that validates its fields."""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from drivetrain._base.frozen import explains_assignment
from drivetrain._base.notebook import ShowsFields
from drivetrain._base.ports import parse_ports
from drivetrain._base.positional import accepts_positional
from drivetrain._base.redact import MaskedOptions
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._base.failure import Failure

__all__ = ["CheckpointConfig", "CheckpointUploadMode", "FailureConfig", "RunConfig", "ScalingConfig", "SyncConfig"]

StopCondition = Mapping[str, float] | Callable[[str, Mapping[str, Any]], bool]

_RUN_NAME = re.compile(r"[^/\\\x00-\x1f]+")


class CallbackLike(Protocol):
    """A structural type for :class:`drivetrain.Callback`. A configuration checks only that ``on_report`` exists."""

    def on_report(self, run: Any, report: Any) -> None:
        """Handle a report of a rank."""
        ...


class PolicyLike(Protocol):
    """A structural type for :class:`drivetrain.plugin.FailurePolicy`: a configuration checks only ``decide``."""

    def decide(self, failure: Failure, history: Sequence[Failure]) -> bool | float:
        """Return whether to start another attempt, or the seconds after which to start it."""
        ...


class RuntimeLike(Protocol):
    """A structural type for :class:`drivetrain.plugin.Runtime`. A configuration checks only that ``launch`` exists."""

    name: str

    def launch(self, spec: Any) -> Any:
        """Start a worker group."""
        ...


Check = Callable[[str, object], None]
"""Raises an error if a value is invalid.

The arguments are the beginning of the error message, such as ``ScalingConfig(use_gpu=...)``, and the value.
"""


def _check_fields(config: object, checks: Mapping[str, Check]) -> None:
    """Check fields of a configuration. ``checks`` maps the name of a field to the check for its value."""
    for name, check in checks.items():
        check(f"{type(config).__name__}({name}=...)", getattr(config, name))


def _or_none(check: Check) -> Check:
    def check_unless_none(subject: str, value: object) -> None:
        if value is not None:
            check(subject, value)

    return check_unless_none


def _int_from(minimum: int) -> Check:
    def check(subject: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigurationError(f"[DT-101] {subject}: expected an integer of at least {minimum}, got {value!r}")

    return check


def _one_of(*choices: object) -> Check:
    def check(subject: str, value: object) -> None:
        if value not in choices:
            raise ConfigurationError(
                f"[DT-101] {subject}: expected one of {', '.join(map(repr, choices))}, got {value!r}"
            )

    return check


def _instance_of(kind: type[object]) -> Check:
    def check(subject: str, value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigurationError(f"[DT-101] {subject}: expected a {kind.__name__}, got {value!r}")

    return check


def _object_with(method: str, description: str) -> Check:
    def check(subject: str, value: object) -> None:
        if not callable(getattr(value, method, None)):
            raise ConfigurationError(f"[DT-101] {subject}: expected {description}, got {value!r}")

    return check


def _policy(subject: str, value: object) -> None:
    if isinstance(value, str) or _is_name_with_options(subject, value):
        return
    is_class_of_policies = not isinstance(value, type) or callable(getattr(value, "decide", None))
    if not (callable(value) and is_class_of_policies):
        _object_with(
            "decide",
            "an object with decide(failure, history), its class, a function, a name, or a pair of a name and options",
        )(subject, value)


def _is_name_with_options(subject: str, value: object) -> bool:
    """Return True if a plugin is selected by a pair of its name and its options."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    if not isinstance(value[0], str) or not isinstance(value[1], Mapping):
        raise ConfigurationError(
            f"[DT-101] {subject}: expected a pair of a name and a mapping with options, got {value!r}"
        )
    return True


def _seconds(subject: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"[DT-101] {subject}: expected a positive number of seconds, got {value!r}")


def _hang_timeout(subject: str, value: object) -> None:
    if value == "auto":
        return
    if not isinstance(value, Mapping):
        if isinstance(value, str):
            raise ConfigurationError(f'[DT-101] {subject}: expected seconds, "auto" or a mapping, got {value!r}')
        return _seconds(subject, value)
    if not value or value.keys() - {"first", "next"}:
        expected = 'a mapping such as {"first": 600, "next": 60}'
        raise ConfigurationError(f"[DT-101] {subject}: expected {expected}, got {value!r}")
    for phase, seconds in value.items():
        if not (phase == "next" and seconds == "auto"):
            _seconds(f"{subject}[{phase!r}]", seconds)
    return None


def _bool(subject: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"[DT-101] {subject}: expected True or False, got {value!r}")


def _resources(subject: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f'[DT-101] {subject}: expected a mapping such as {{"CPU": 2}}, got {value!r}')
    for key, amount in value.items():
        good = isinstance(key, str) and isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not good or not 0 <= amount < math.inf:
            raise ConfigurationError(
                f"[DT-101] {subject}: expected resource names with amounts of at least 0, got {key!r}: {amount!r}"
            )


def _number_of_workers(subject: str, value: object) -> None:
    if not isinstance(value, (tuple, list)):
        _int_from(0)(subject, value)
        return
    if len(value) != 2:
        raise ConfigurationError(f"[DT-101] {subject}: expected a number or a pair (min, max), got {value!r}")
    for bound in value:
        _int_from(1)(subject, bound)
    if value[0] > value[1]:
        raise ConfigurationError(
            f"[DT-101] {subject.replace('...', '(min, max)')}: expected min to be at most max, got {value!r}"
        )


def _name_or_runtime(subject: str, value: object) -> None:
    if not isinstance(value, str):
        _object_with("launch", "a runtime's name or a Runtime")(subject, value)


def _run_name(subject: str, value: object) -> None:
    _instance_of(str)(subject, value)
    if not _RUN_NAME.fullmatch(str(value)) or value in (".", ".."):
        raise ConfigurationError(
            f"[DT-101] {subject}: expected a directory name without slashes, got {value!r}. Put parent directories "
            "into storage_path"
        )


def _ports(subject: str, value: object) -> None:
    _instance_of(str)(subject, value)
    parse_ports(str(value), subject)


def _path(subject: str, value: object) -> None:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigurationError(f"[DT-101] {subject}: expected a path or URI, got {value!r}")


def _callbacks(subject: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigurationError(f"[DT-101] {subject}: expected a list of callbacks or names, got {value!r}")
    for callback in value:
        if isinstance(callback, type):
            name = callback.__qualname__
            raise ConfigurationError(
                f"[DT-101] {subject}: expected an object or a name, got the class {name}. Write {name}()"
            )
        if not isinstance(callback, str) and not _is_name_with_options(subject, callback):
            _object_with("on_report", "Callback objects, names, or pairs of a name and options")(subject, callback)


def _with_masked_options(plugin: Any) -> Any:
    """Return a plugin whose options can be shown and written to the run directory, because secrets are masked."""
    return (plugin[0], MaskedOptions(plugin[1])) if isinstance(plugin, tuple) else plugin


def _module_names(subject: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"[DT-101] {subject}: expected a list of module names, got {value!r}")


def _stop_condition(subject: str, value: object) -> None:
    if callable(value):
        return
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"[DT-101] {subject}: expected a mapping or a function, got {value!r}")
    for key, bound in value.items():
        if not isinstance(bound, (int, float)):
            raise ConfigurationError(f"[DT-101] {subject}: expected a number for {key!r}, got {bound!r}")


def _resume(subject: str, value: object) -> None:
    modes = ("never", "auto", "must")
    if value not in modes and not isinstance(value, os.PathLike) and "/" not in str(value):
        raise ConfigurationError(
            f"[DT-101] {subject}: expected one of {', '.join(map(repr, modes))} or the path of a run directory, "
            f"got {value!r}"
        )


@accepts_positional(
    "trainer_resources", "num_workers", "use_gpu", "resources_per_worker", "placement_strategy", "accelerator_type"
)
@explains_assignment
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig(ShowsFields):
    """The number of workers, their resources, and the runtime that starts them.

    Attributes:
        num_workers: number of worker processes that run the train function. 0 runs the function in this process and
            thread, so that ``breakpoint()`` works as usual. A pair ``(min, max)`` makes the run elastic: each attempt
            starts as many workers as the available resources allow, within these bounds.
        use_gpu: True to give each worker one GPU, or ``resources_per_worker["GPU"]`` GPUs if that is set.
        resources_per_worker: resources of one worker, such as ``{"CPU": 4, "GPU": 2}``. On Ray, they are requested from
            the cluster, and CPU defaults to 1. On this machine, CPU sets the default number of threads of a worker's
            numeric libraries (``OMP_NUM_THREADS``), and defaults to an equal share of the machine's CPUs.
        trainer_resources: resources to reserve for the driver on Ray; none by default.
        placement_strategy: how Ray places the workers on nodes: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or
            ``"STRICT_SPREAD"``.
        accelerator_type: the GPU model that each worker must have, such as ``"A100"`` (Ray only).
        runtime: ``"inprocess"``, ``"local"``, ``"command"``, ``"ray"``, the name of another installed runtime, or a
            :class:`~drivetrain.plugin.Runtime` such as ``drivetrain_launch.CommandRuntime(...)``. None selects
            ``inprocess`` if ``num_workers`` is 0; ``ray`` if a dataset requires it, this process is connected to a Ray
            cluster, or ``RAY_ADDRESS`` is set; and ``local`` otherwise.
        elastic_resize_monitor_interval_s: minimum number of seconds between two checks for free resources. While an
            elastic run has fewer workers than its maximum, it checks right after a checkpoint is committed, and
            restarts with more workers if there are resources for them. A train function that polls for preemption saves
            its state before it is restarted; one that does not poll repeats the steps that it made after that commit.
        spare_workers: number of processes to keep ready in addition to the workers, with the framework imported, so
            that the next attempt does not wait for new processes. With as many spares as ``num_workers``, a whole group
            can be replaced. Spares use memory but no CPUs or GPUs, and are spread over the nodes like the workers. They
            are useful on Ray; the ``local`` runtime starts workers within milliseconds without them.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range, or two values contradict each other.

    Example:
        >>> ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker={"CPU": 8}).num_gpus_per_worker
        1.0
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    trainer_resources: Mapping[str, float] | None = None
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
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
                "[DT-102] ScalingConfig(resources_per_worker=...): expected no GPU because use_gpu is False, got "
                f"{gpus} per worker. Set use_gpu=True, or remove GPU"
            )
        if self.use_gpu and gpus == 0:
            raise ConfigurationError(
                "[DT-102] ScalingConfig(use_gpu=True): expected GPUs in resources_per_worker, got 0 GPUs per worker. "
                "Remove GPU from resources_per_worker, or set use_gpu=False"
            )
        if self.num_workers == 0 and isinstance(self.runtime, str) and self.runtime != "inprocess":
            raise ConfigurationError(
                f'[DT-102] ScalingConfig(num_workers=0): expected runtime="inprocess" or None, got {self.runtime!r}. '
                "Set num_workers to at least 1, or remove runtime"
            )

    @property
    def min_workers(self) -> int:
        """The minimum number of workers of an attempt."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The maximum number of workers of an attempt."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def num_cpus_per_worker(self) -> float | None:
        """CPUs requested per worker; None to use the runtime's default."""
        cpus = (self.resources_per_worker or {}).get("CPU")
        return None if cpus is None else float(cpus)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs per worker; 0.0 without ``use_gpu``."""
        return float((self.resources_per_worker or {}).get("GPU", 1)) if self.use_gpu else 0.0

    @property
    def total_resources(self) -> dict[str, float]:
        """All resources that the run requests from a cluster: those of the workers plus those of the trainer."""
        total = dict(self.trainer_resources or {})
        worker = {"CPU": 1.0, **({"GPU": 1.0} if self.use_gpu else {}), **(self.resources_per_worker or {})}
        for name, amount in worker.items():
            total[name] = total.get(name, 0) + amount * self.max_workers
        return total


class CheckpointUploadMode(str, enum.Enum):
    """When ``report`` uploads a checkpoint's files. A mode can also be passed as its value, such as ``"sync"``."""

    SYNC = "sync"
    """Upload before ``report`` returns."""
    ASYNC = "async"
    """Upload in the background. ``report`` returns once changes to the local directory cannot affect the upload."""
    NO_UPLOAD = "none"
    """Upload nothing: the files are already in the run directory."""


@accepts_positional(
    "num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order", "checkpoint_frequency", "checkpoint_at_end"
)
@explains_assignment
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(ShowsFields):
    """Checkpoint retention and upload settings.

    A checkpoint is kept if at least one of ``num_to_keep``, ``keep_last`` and ``keep_every`` keeps it. The latest
    checkpoint is always kept. So are the latest finite checkpoint, and checkpoints that are pinned
    (:meth:`Checkpoint.pin() <drivetrain.Checkpoint.pin>`) or being read on this machine. A checkpoint is finite if its
    score is a finite number or, without a ``checkpoint_score_attribute``, if none of its reported metrics is NaN.

    Attributes:
        num_to_keep: number of best checkpoints to keep. None keeps all checkpoints, and must not be combined with
            ``keep_last`` or ``keep_every``.
        checkpoint_score_attribute: name of the reported metric that ranks checkpoints; a nested metric is named
            ``outer/inner``. None ranks by recency.
        checkpoint_score_order: ``"max"`` if a higher value of that metric is better, ``"min"`` if a lower value is.
        keep_last: number of latest checkpoints to keep in addition to the best ones.
        keep_every: a number ``n`` also keeps every ``n``-th checkpoint of the run; None disables this rule.
        max_uploads_in_flight: maximum number of checkpoints that a worker uploads in the background at a time. When
            this number is reached, ``report`` blocks until an upload finishes.
        checksums: True to compute checksums of files on local storage too. On other storage, they are always computed.
        checkpoint_frequency: number of iterations between two checkpoints; 0 saves none before the training ends. Only
            for trainers that run the training loop themselves.
        checkpoint_at_end: whether to save a checkpoint when the training ends; None for the trainer's default. Only for
            trainers that run the training loop themselves.
        on_conflict: which file to keep if several ranks report files of the same name for a checkpoint.
            ``"lowest_rank"`` keeps that of the lowest rank, with one warning. ``"keep_all"`` also keeps the files of
            the other ranks, in the directories ``rank_<rank>`` of the checkpoint. ``"error"`` ends the run if the
            contents differ, which has to read the files.
        resume_from: the checkpoint from which a retry or a resumed run continues: ``"latest"``, or ``"latest_finite"``
            for the latest finite one. If there is no finite checkpoint, the latest one is used.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range, or two values contradict each other.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    keep_last: int = 1
    keep_every: int | None = None
    max_uploads_in_flight: int = 2
    checksums: bool = False
    checkpoint_frequency: int = 0
    checkpoint_at_end: bool | None = None
    on_conflict: Literal["lowest_rank", "keep_all", "error"] = "lowest_rank"
    resume_from: Literal["latest", "latest_finite"] = "latest"

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
                "on_conflict": _one_of("lowest_rank", "keep_all", "error"),
                "resume_from": _one_of("latest", "latest_finite"),
            },
        )
        if self.num_to_keep is None and (self.keep_last != 1 or self.keep_every is not None):
            raise ConfigurationError(
                "[DT-102] CheckpointConfig(keep_last=..., keep_every=...): expected a num_to_keep, got "
                "num_to_keep=None, which keeps all checkpoints. Set num_to_keep"
            )


@accepts_positional("max_failures", "fail_fast")
@explains_assignment
@dataclass(frozen=True, kw_only=True, slots=True)
class FailureConfig(ShowsFields):
    """Retries after failures and preemptions.

    Attributes:
        max_failures: maximum number of retries after failures, not counting preemptions; -1 for no limit. A retry
            resumes from the latest committed checkpoint. With a limit, a mistake in the code that two attempts in a row
            make before any report is not retried again.
        fail_fast: True disables retries after failures. ``"raise"`` also makes ``fit()`` raise the root cause instead
            of a :class:`~drivetrain.TrainingFailedError`.
        max_node_failures: number of failures after which a Ray node is avoided. A failure counts if its root cause is
            the loss of a process on that node. Later attempts place no workers on an avoided node if there are other
            nodes. If None, no node is avoided.
        max_preemptions: maximum number of retries after preemptions, which ``max_failures`` does not count; -1 for no
            limit.
        preemption_grace_s: seconds that the train function has to save its state and return, or to finish, after a
            preemption notice.
        policy: decides whether and when to retry; it replaces the rules of all fields except ``max_node_failures`` and
            ``preemption_grace_s``. A :class:`~drivetrain.plugin.FailurePolicy`, a class of such objects, a function
            with the arguments of ``decide``, the name of an installed policy, or a pair of that name and a mapping with
            options, such as ``("backoff", {"max_s": 60})``.
        max_preemptions_without_progress: maximum number of consecutive retries after preemptions if no attempt commits
            a checkpoint; -1 for no limit. It ends a run whose train function terminates its own process each time.
        retry_backoff_s: seconds between two attempts if neither commits a checkpoint. The delay doubles with each
            further attempt without a checkpoint, up to a minute. The first retry always starts at once.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range, or two values contradict each other.
    """

    max_failures: int = 0
    fail_fast: bool | Literal["raise"] = False
    max_node_failures: int | None = 3
    max_preemptions: int = -1
    preemption_grace_s: float = 30.0
    policy: (
        PolicyLike | type[PolicyLike] | Callable[[Any, Any], bool | float] | str | tuple[str, Mapping[str, Any]] | None
    ) = None
    max_preemptions_without_progress: int = 10
    retry_backoff_s: float = 0.5

    def __post_init__(self) -> None:
        _check_fields(
            self,
            {
                "max_failures": _int_from(-1),
                "max_node_failures": _or_none(_int_from(1)),
                "max_preemptions": _int_from(-1),
                "preemption_grace_s": _seconds,
                "policy": _or_none(_policy),
                "max_preemptions_without_progress": _int_from(-1),
                "retry_backoff_s": _seconds,
            },
        )
        if self.fail_fast != "raise":
            _bool("FailureConfig(fail_fast=...)", self.fail_fast)
        if self.fail_fast and self.max_failures != 0:
            raise ConfigurationError(
                f"[DT-102] FailureConfig(fail_fast={self.fail_fast!r}): expected max_failures=0 because fail_fast "
                f"disables retries, got max_failures={self.max_failures}. Set only one of them"
            )
        object.__setattr__(self, "policy", _with_masked_options(self.policy))


@accepts_positional("sync_period", "sync_timeout", "sync_artifacts", "sync_artifacts_on_checkpoint")
@explains_assignment
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(ShowsFields):
    """Settings for uploading metrics, logs and artifacts to storage that is not local.

    Artifacts are the files that a train function writes to ``get_context().get_trial_dir()``. On local storage, that
    directory is in the run directory, so nothing is copied.

    Attributes:
        sync_period: seconds between two uploads of what was added to metrics and logs, and of changed artifacts.
            Metrics and logs are also uploaded before each commit of a checkpoint.
        sync_timeout: maximum duration of one transfer, in seconds. A transfer is the upload or download of artifacts or
            of a checkpoint.
        sync_artifacts: whether to upload artifacts.
        sync_artifacts_on_checkpoint: if ``sync_artifacts`` is True, whether to upload artifacts also with each
            checkpoint.
        transfer_threads: number of files, or parts of large files, that a process transfers at the same time.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range.
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


@accepts_positional("name", "storage_path", "storage_filesystem")
@explains_assignment
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(ShowsFields):
    """Settings of a run: its name and storage, its output, retries, and stop conditions.

    Attributes:
        name: name of the run's directory under ``storage_path``; None creates one from the trainer's name and the time.
        storage_path: directory for runs: a path, or a URI such as ``s3://bucket/path``, with options after a ``?``.
            None uses the ``DRIVETRAIN_STORAGE_PATH`` environment variable, or ``~/drivetrain_results`` if it is unset.
        storage_filesystem: the ``pyarrow.fs`` or fsspec filesystem that contains ``storage_path``, which must then be a
            path without a protocol; None to use the filesystem that ``storage_path`` names.
        failure_config: settings for retries after failures.
        checkpoint_config: settings for the retention and upload of checkpoints.
        sync_config: settings for the upload of metrics, logs and artifacts.
        callbacks: callbacks in addition to the default JSON, CSV and progress callbacks: objects, names of installed
            callbacks, or pairs of a name and a mapping with options, such as ``("webhook", {"url": ...})``. A callback
            of the same class as a default one replaces it.
        stop: a condition that stops the run without an error once a report of rank 0 meets it. A mapping from metrics
            to values is met when any of the metrics has reached its value. A function is called with the run's id and
            the reported metrics, and returns True to stop. The metric in ``{"eval": {"accuracy": 0.9}}`` is named
            ``eval/accuracy``.
        verbose: 0 prints nothing, 1 shows the progress of the run, 2 also prints a line for each report of rank 0.
        log_to_file: True to write each worker's output to ``logs/rank_N.log`` in the run directory.
        worker_output: the ranks whose output the driver also prints, prefixed with the rank: ``"rank0"``, ``"all"`` or
            ``"none"``. Progress bars are shown for rank 0 only.
        resume: ``"never"`` raises :class:`~drivetrain.RunExistsError` if the run exists. ``"auto"`` resumes the run if
            it exists, and starts a new one otherwise. ``"must"`` resumes the run, and fails if it does not exist. The
            path or URI of a run directory resumes that run. A run resumes from its latest committed checkpoint, or from
            the beginning if it has none.
        chdir_to_trial_dir: True to run the train function with ``get_context().get_trial_dir()`` as its working
            directory. By default, the working directory is the driver's.
        detailed_metrics: True to add ``_date``, ``_hostname``, ``_node_ip``, ``_pid`` and ``_time_total_s`` to the
            metrics of each report.
        preload: names of modules that the train function imports. The process from which local workers are forked
            imports these modules once for all workers, and for later runs. They must not use a GPU. A module that
            starts a thread is skipped.
        ports: the TCP ports on which the driver and the frameworks listen for other nodes, such as ``"29500-29599"``.
            None uses the environment variable ``DRIVETRAIN_PORTS``; if it is not set, the operating system chooses.
        start_timeout_s: seconds within which every worker must start running the train function.
        hang_timeout_s: seconds without progress of a rank after which the run counts as hung. The run is then retried,
            or fails with an error that shows the stacks of every rank. Progress is a report, a batch from a shard or a
            prepared data loader, a call of ``get_preemption_info()``, or a call of ``heartbeat()``. A rank that has
            done none of these yet is not checked as long as other ranks make progress. ``{"first": 600, "next": 60}``
            sets different limits for the time until the first progress in an attempt and for the time between two signs
            of progress; a missing limit is none. ``"auto"``, also as the value of ``"next"``, learns the second limit:
            ten times the longest time between two signs of progress of a rank in this attempt, and at least 60 s. None
            disables the check.

    Raises:
        ConfigurationError: a value has the wrong type or is out of range, or two values contradict each other.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync_config: SyncConfig = field(default_factory=SyncConfig)
    callbacks: Sequence[CallbackLike | str | tuple[str, Mapping[str, Any]]] = ()
    stop: StopCondition | None = None
    verbose: Literal[0, 1, 2] = 1
    log_to_file: bool = True
    worker_output: Literal["rank0", "all", "none"] = "rank0"
    resume: Literal["never", "auto", "must"] | str | os.PathLike[str] = "never"
    chdir_to_trial_dir: bool = False
    detailed_metrics: bool = False
    preload: Sequence[str] = ()
    ports: str | None = None
    start_timeout_s: float = 600.0
    hang_timeout_s: float | Literal["auto"] | Mapping[Literal["first", "next"], float | Literal["auto"]] | None = None

    def __post_init__(self) -> None:
        defaults = {
            "failure_config": FailureConfig,
            "checkpoint_config": CheckpointConfig,
            "sync_config": SyncConfig,
            "callbacks": tuple,
        }
        for name, make in defaults.items():  # None means the default, as in Ray Train
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
                "ports": _or_none(_ports),
                "start_timeout_s": _seconds,
                "hang_timeout_s": _or_none(_hang_timeout),
            },
        )
        object.__setattr__(self, "callbacks", tuple(map(_with_masked_options, self.callbacks)))
        object.__setattr__(self, "preload", tuple(self.preload))
        if self.resume == "must" and self.name is None:
            raise ConfigurationError(
                '[DT-102] RunConfig(resume="must"): expected the name of the run, got None. Set name'
            )
        is_path = self.resume not in ("never", "auto", "must")
        if is_path and (self.name is not None or self.storage_path is not None):
            raise ConfigurationError(
                "[DT-102] RunConfig(resume=<path>): expected no name and storage_path, because the path names the run. "
                'Remove them, or set resume="must" and keep them'
            )
