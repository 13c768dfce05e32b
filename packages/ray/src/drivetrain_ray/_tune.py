"""Converts a trainer to a trainable of Ray Tune. No other module uses Ray Tune.

Tune runs each trial as an actor in a placement group, which also has a bundle for each worker. The actor recreates the
trainer with the trial's arguments and calls ``fit()``; the workers are actors in the other bundles of the group. The
controller's thread passes the reports of rank 0 to Tune, and blocks until Tune has decided whether the trial continues.
To stop the trial, Tune raises ``SystemExit`` in the report call. This ends the run like Ctrl-C: all workers exit.

A checkpoint is first committed in the run directory, which is inside the trial's directory on Tune's storage. Reporting
the checkpoint through Tune's public interface then copies it to Tune's own location. The run's copy is deleted at the
end of the run.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drivetrain import (
    Callback,
    Checkpoint,
    ConfigurationError,
    PluginNotFoundError,
    ResourceError,
    RunConfig,
    ScalingConfig,
    SerializationError,
)
from drivetrain.plugin import Report, Run
from drivetrain.plugin.callbacks import CommittedCheckpoint, Console, Trial
from drivetrain.plugin.datasets import required_runtime
from drivetrain.plugin.storage import Storage, checkpoint_in, delete_checkpoints, locate
from drivetrain.plugin.trainers import check_param_space, dumps, merge_arguments
from drivetrain_ray._cluster import bundle_of
from drivetrain_ray._references import reduce_reference
from drivetrain_ray._runtime import RayRuntime

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory

    from drivetrain import DataParallelTrainer

__all__ = ["TrialShape", "make_trainable"]

_EXIT_WAIT_S = 20.0
_RUN = "run_"
_AUTOFILLED = ("_timestamp", "_time_this_iter_s", "_training_iteration")  # Tune adds these metrics itself


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialShape:
    """Determines the resources of each trial from its config. Tune calls an instance in the driver.

    Attributes:
        scaling: the scaling configuration of the trainer.
        known_arguments: the names of the trainer's arguments; None if it accepts any.
        argument: the name of the trainer's argument that is set to the trial's config; None if the config is a mapping
            from names of arguments to their values.
        reads_with_ray: True if one of the trainer's datasets is a Ray dataset.
        autoscaling: True if a trial may request more than the cluster has.
    """

    scaling: ScalingConfig
    known_arguments: frozenset[str] | None
    argument: str | None = None
    reads_with_ray: bool = False
    autoscaling: bool = False

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the trainer's arguments that a trial's config changes, with their new values.

        Raises:
            ConfigurationError: the config contains names that are not arguments of the trainer.
        """
        changes = dict(config) if self.argument is None else {self.argument: dict(config)}
        check_param_space(changes, self.known_arguments)
        return changes

    def __call__(self, config: Mapping[str, Any]) -> PlacementGroupFactory:
        """Return the placement group of a trial: a bundle for the trainer, and one for each worker.

        Raises:
            ConfigurationError: the config is not valid for the trainer.
            ResourceError: the trial requests more than the cluster has.
        """
        from ray import tune

        changes = self.changes(config)
        arguments = merge_arguments({"scaling_config": self.scaling}, changes)
        scaling: ScalingConfig = arguments["scaling_config"]
        trainer = {name: amount for name, amount in (scaling.trainer_resources or {}).items() if amount}
        if _is_on_actors(scaling):
            bundles = [trainer, *(dict(bundle_of(scaling)) for _ in range(scaling.max_workers))]
        else:
            total = replace(scaling, num_workers=max(1, scaling.max_workers)).total_resources
            bundles = [{name: amount for name, amount in total.items() if amount}]
        reads_with_ray = self.reads_with_ray or _reads_with_ray(arguments)
        if not self.autoscaling:
            _require_room(bundles, reads_with_ray)
        return tune.PlacementGroupFactory(bundles, strategy=scaling.placement_strategy)


def make_trainable(
    trainer: DataParallelTrainer,
    *,
    argument: str | None = None,
    autoscaling: bool = False,
) -> Callable[[dict[str, Any]], None]:
    """Return a trainable, with which Ray Tune runs a trainer repeatedly with different arguments.

    Args:
        trainer: the trainer.
        argument: the name of the trainer's argument that is set to a trial's config; None if the config is a mapping
            from names of arguments to their values.
        autoscaling: see :meth:`~drivetrain.DataParallelTrainer.as_trainable`.

    Raises:
        PluginNotFoundError: Ray Tune is not installed.
        SerializationError: an argument of the trainer cannot be sent to a trial.
    """
    try:
        from ray import tune
    except ImportError as error:
        raise PluginNotFoundError(
            f"[DT-601] as_trainable() requires Ray Tune, which is not installed ({error}). "
            'Run: pip install "drivetrain[ray-tune]"'
        ) from None
    try:
        pickled = dumps(trainer, reduce_reference)
    except Exception as error:  # a user's object may raise any exception
        raise SerializationError(
            f"[DT-201] as_trainable(): expected a trainer that can be pickled, got an error for "
            f"{_find_unpicklable(trainer.given)} ({type(error).__name__}: {error}). Pass a dataset as a function that "
            "returns it, and create other objects in the train function"
        ) from error
    shape = TrialShape(
        scaling=trainer.given.get("scaling_config") or ScalingConfig(),
        known_arguments=trainer.known_arguments,
        argument=argument,
        reads_with_ray=_reads_with_ray(trainer.given),
        autoscaling=autoscaling,
    )

    def trainable(config: dict[str, Any], pickled: bytes) -> None:
        _run_trial(pickled, shape.changes(config))

    trainable.__name__ = trainable.__qualname__ = type(trainer).__name__
    result: Callable[[dict[str, Any]], None] = tune.with_resources(
        tune.with_parameters(trainable, pickled=pickled), shape
    )
    return result


def _reads_with_ray(arguments: Mapping[str, Any]) -> bool:
    """Return True if one of the datasets in a trainer's arguments requires the ``ray`` runtime."""
    return required_runtime(arguments.get("datasets") or {}) == RayRuntime.name


def _find_unpicklable(given: Mapping[str, Any]) -> str:
    """Return a description of an argument that cannot be pickled.

    Args:
        given: the trainer's arguments, by name.
    """
    parts = {
        f"{argument}[{name!r}]": value
        for argument in ("datasets", "train_loop_config")
        if isinstance(given.get(argument), Mapping)
        for name, value in given[argument].items()
    }
    for name, value in {**parts, **given}.items():
        try:
            dumps(value, reduce_reference)
        except Exception:  # a user's object may raise any exception
            return f"{name} (a {type(value).__name__})"
    return "the trainer"


def _run_trial(pickled: bytes, changes: Mapping[str, Any]) -> None:
    """Run a trainer in the actor of a trial, until the run ends or Tune stops the trial.

    Args:
        pickled: the pickled trainer.
        changes: new values for some of the trainer's arguments.
    """
    from ray import tune

    trainer = pickle.loads(pickled)
    context = tune.get_context()
    tune_storage = context.get_storage()
    filesystem = _unless_local(tune_storage.storage_filesystem)
    trial_storage = Storage(*locate(tune_storage.trial_fs_path, filesystem, what="the directory of a trial"))
    earlier = [name for name in trial_storage.list_names()[0] if name.startswith(_RUN)]
    for name in earlier:  # not needed to resume: Tune has its own copies
        delete_checkpoints(_inside(trial_storage, name))
    name = f"{_RUN}{len(earlier):03d}"
    reporter = _Reporter(_inside(trial_storage, name))
    arguments = merge_arguments(trainer.given, changes)
    run_config: RunConfig = arguments.get("run_config") or RunConfig()
    checkpoints = run_config.checkpoint_config
    if checkpoints.num_to_keep is None:  # Tune has a setting for the number of its own copies
        checkpoints = replace(checkpoints, num_to_keep=1 + checkpoints.max_uploads_in_flight)
    replaced: dict[str, Any] = {
        "scaling_config": _scaling_here(arguments.get("scaling_config") or ScalingConfig()),
        "run_config": replace(
            run_config,
            name=name,
            storage_path=tune_storage.trial_fs_path,
            storage_filesystem=filesystem,
            resume="never",
            verbose=0,
            callbacks=(*run_config.callbacks, reporter),
            checkpoint_config=checkpoints,
        ),
    }
    if (resumed := tune.get_checkpoint()) is not None:
        replaced["resume_from_checkpoint"] = Checkpoint(resumed.path, _unless_local(resumed.filesystem))
    trial = Trial(name=context.get_trial_name(), id=context.get_trial_id(), experiment=context.get_experiment_name())
    if _reads_with_ray(arguments):
        _warn_about_blocked_reads(trial)
    with _delayed_exit():
        try:
            trainer.vary(changes, trial=trial, **replaced).fit()
            reporter.finish()
        finally:
            reporter.delete_copied()


class _Reporter(Callback):
    """Passes reports of rank 0 to Tune, in order. A report with a checkpoint waits until the checkpoint is committed.

    Args:
        storage: the run directory.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._waiting: deque[Report] = deque()
        self._committed: dict[str, int] = {}
        self._copied: list[str] = []
        self._last: Report | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as a callback that does nothing: a run that is restored outside its trial must not report to Tune."""
        return Callback, ()

    def on_report(self, run: Run, report: Report) -> None:
        if report.rank == 0:
            self._waiting.append(report)
            self._report_ready()

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self._committed[checkpoint.name] = checkpoint.iteration
        self._report_ready()

    def finish(self) -> None:
        """Pass the remaining reports to Tune.

        A checkpoint that was committed after the last report is sent with the metrics of the last report.
        """
        while self._waiting:
            self._report(self._waiting.popleft())
        if self._committed and self._last is not None:
            self._report(self._last)

    def delete_copied(self) -> None:
        """Delete the run's copies of the checkpoints that Tune has copied."""
        if self._copied:
            delete_checkpoints(self._storage)

    def _report_ready(self) -> None:
        """Pass the waiting reports to Tune in order, up to the first one whose checkpoint is not committed yet."""
        while self._waiting:
            report = self._waiting[0]
            if report.checkpoint is not None and report.checkpoint not in self._committed:
                return
            self._report(self._waiting.popleft())

    def _report(self, report: Report) -> None:
        from ray import tune

        metrics = {name: value for name, value in report.metrics.items() if name not in _AUTOFILLED}
        # A checkpoint from another rank, or one that was saved without a report, may be committed after the report of
        # rank 0 was sent. The next report of rank 0 then sends the checkpoint.
        due = sorted((iteration, name) for name, iteration in self._committed.items() if iteration <= report.iteration)
        names = [name for _, name in due]
        for name in names:
            del self._committed[name]
        self._last = report
        checkpoint = checkpoint_in(self._storage, names[-1]) if names else None
        if checkpoint is None or not checkpoint.exists():  # retention may have deleted it during a slow upload
            tune.report(metrics)
            return
        self._copied.append(names[-1])
        with contextlib.ExitStack() as stack:
            if checkpoint.is_local:
                tune_checkpoint = tune.Checkpoint(stack.enter_context(checkpoint.as_directory()))
            else:
                tune_checkpoint = tune.Checkpoint(checkpoint.path, checkpoint.filesystem)
            tune.report(metrics, checkpoint=tune_checkpoint)


def _inside(storage: Storage, name: str) -> Storage:
    return Storage(storage.filesystem, storage.path(name), storage.limits)


def _unless_local(filesystem: Any) -> Any | None:
    """Return a pyarrow filesystem unchanged, or None if it is the local one."""
    return None if filesystem.type_name == "local" else filesystem


def _is_on_actors(scaling: ScalingConfig) -> bool:
    """Return True if the workers are separate actors; otherwise the trial's actor starts them as processes."""
    return scaling.max_workers > 0 and (scaling.runtime is None or scaling.runtime == "ray")


def _scaling_here(scaling: ScalingConfig) -> ScalingConfig:
    """Return the trainer's scaling configuration, adapted to the resources that the trial has reserved."""
    import ray

    if not _is_on_actors(scaling):
        return scaling if scaling.max_workers == 0 else replace(scaling, resources_per_worker=_per_worker(scaling))
    group = ray.util.get_current_placement_group()
    if group is None:
        raise ConfigurationError("trial of Ray Tune: expected to run in a placement group of Ray Tune, got none")
    has_trainer = any((scaling.trainer_resources or {}).values())
    runtime = RayRuntime(placement_group=group, first_bundle=int(has_trainer))
    return replace(scaling, runtime=runtime, num_workers=scaling.max_workers)


def _per_worker(scaling: ScalingConfig) -> dict[str, float]:
    """Return the resources of a worker on this machine. A worker has one CPU by default."""
    return {"CPU": 1.0, **(scaling.resources_per_worker or {})}


def _require_room(bundles: list[dict[str, float]], reads_with_ray: bool) -> None:
    """Check that the cluster is large enough for a trial. Otherwise the trial would wait forever.

    Raises:
        ResourceError: the trial requests more than the cluster has.
    """
    import ray

    if not ray.is_initialized():
        return
    required: Counter[str] = Counter()
    for bundle in bundles:
        required.update({name: amount for name, amount in bundle.items() if not name.startswith("accelerator_type:")})
    total = ray.cluster_resources()
    available = {name: total.get(name, 0.0) for name in required}
    hint = "If the cluster scales automatically, use as_trainable(autoscaling=True)"
    if any(available[name] < amount for name, amount in required.items()):
        raise ResourceError(
            f"trial of Ray Tune: expected {dict(required)} for its workers and trainer_resources, got a cluster with "
            f"{available}. Use fewer workers or fewer resources for each. {hint}"
        )
    if reads_with_ray and total.get("CPU", 0.0) - required["CPU"] < 1:
        raise ResourceError(
            "[DT-749] trial of Ray Tune: expected at least one free CPU for Ray Data to read the dataset, got a trial "
            "that "
            f"takes {required['CPU']:g} of the cluster's {total.get('CPU', 0.0):g} CPUs. Use fewer workers. {hint}"
        )


def _warn_about_blocked_reads(trial: Trial) -> None:
    import ray

    if ray.available_resources().get("CPU", 0.0) < 1:
        Console().print(
            f"{trial.name}: trials use all CPUs of the cluster, and Ray Data waits for a CPU to read the dataset. "
            "Limit the trials with TuneConfig(max_concurrent_trials=...)",
            error=True,
        )


@contextlib.contextmanager
def _delayed_exit() -> Iterator[None]:
    """Delay an exit of the process until the ``with`` block has ended, because Tune exits a trial's process at once."""
    finished = threading.Event()

    def wait() -> None:
        finished.wait(_EXIT_WAIT_S)

    atexit.register(wait)
    try:
        yield
    finally:
        finished.set()
        atexit.unregister(wait)
