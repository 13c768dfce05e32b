"""A trainer as a trainable of Ray Tune: the only place that knows Ray Tune.

A trial is an actor of Tune's, in a placement group of Tune's that has a bundle for each worker too. It makes the
trainer anew, with the trial's arguments, and fits it there: the workers are actors in the group's other bundles.
Reports of rank 0 go to Tune from the controller's thread, which waits until Tune has decided what becomes of the trial.
If it is to stop, Tune has the report raise ``SystemExit``, which ends the run as Ctrl-C does elsewhere: no worker is
left.

A checkpoint is committed in the run's directory first, which is in the trial's on Tune's storage. Tune's public
interface then copies it to where Tune keeps its own, and the run's copy is deleted at the end of the run.
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
    CommittedCheckpoint,
    ConfigurationError,
    PluginNotFoundError,
    Report,
    ResourceError,
    Run,
    RunConfig,
    ScalingConfig,
    SerializationError,
)
from drivetrain.plugin import (
    Console,
    Storage,
    Trial,
    check_param_space,
    checkpoint_in,
    delete_checkpoints,
    dumps,
    locate,
    merge_arguments,
    required_runtime,
)
from drivetrain_ray._cluster import bundle_of
from drivetrain_ray._references import reduce_reference
from drivetrain_ray._runtime import RayRuntime

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory

    from drivetrain import DataParallelTrainer

__all__ = ["TrialShape", "make_trainable"]

_END_WAIT_S = 20.0
_RUN = "run_"
_AUTOFILLED = ("_timestamp", "_time_this_iter_s", "_training_iteration")  # Tune fills in its own


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialShape:
    """What a trial reserves, found in the driver for each trial's config.

    Attributes:
        scaling: the trainer's.
        known: the names of the trainer's arguments; None for any.
        argument: the one of them that a trial's config is; None where it has arguments by name.
        reads_with_ray: one of the trainer's datasets is Ray's.
        autoscaling: more than the cluster has may be asked for.
    """

    scaling: ScalingConfig
    known: frozenset[str] | None
    argument: str | None = None
    reads_with_ray: bool = False
    autoscaling: bool = False

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The changes to the trainer's arguments that a trial's config asks for.

        Raises:
            ConfigurationError: they are none of the trainer's.
        """
        changes = dict(config) if self.argument is None else {self.argument: dict(config)}
        check_param_space(changes, self.known)
        return changes

    def __call__(self, config: Mapping[str, Any]) -> PlacementGroupFactory:
        """The placement group of a trial: a bundle for the trainer, and one for each worker.

        Raises:
            ConfigurationError: the config is none that the trainer can be made with.
            ResourceError: the cluster does not have as much.
        """
        from ray import tune

        changes = self.changes(config)
        chosen = merge_arguments({"scaling_config": self.scaling}, changes)
        scaling: ScalingConfig = chosen["scaling_config"]
        trainer = {name: amount for name, amount in (scaling.trainer_resources or {}).items() if amount}
        if _is_on_actors(scaling):
            bundles = [trainer, *(dict(bundle_of(scaling)) for _ in range(scaling.max_workers))]
        else:
            wanted = replace(scaling, num_workers=max(1, scaling.max_workers)).total_resources
            bundles = [{name: amount for name, amount in wanted.items() if amount}]
        reads_with_ray = self.reads_with_ray or _reads_with_ray(chosen)
        if not self.autoscaling:
            _require_room(bundles, reads_with_ray)
        return tune.PlacementGroupFactory(bundles, strategy=scaling.placement_strategy)


def make_trainable(
    trainer: DataParallelTrainer,
    *,
    argument: str | None = None,
    autoscaling: bool = False,
) -> Callable[[dict[str, Any]], None]:
    """What Ray Tune takes to try a trainer with other arguments.

    Args:
        trainer: the trainer.
        argument: the one of its arguments that a trial's config is; None where the config has arguments by name.
        autoscaling: see :meth:`~drivetrain.DataParallelTrainer.as_trainable`.

    Raises:
        PluginNotFoundError: Ray Tune is not installed.
        SerializationError: an argument of the trainer cannot be sent to a trial.
    """
    try:
        from ray import tune
    except ImportError as error:
        raise PluginNotFoundError(
            f'a trainable requires Ray Tune, which is not installed ({error}). Run: pip install "drivetrain[ray-tune]"'
        ) from None
    try:
        pickled = dumps(trainer, reduce_reference)
    except Exception as error:  # whatever a user's object may raise
        culprit = _find_unpicklable(trainer.given)
        raise SerializationError(
            f"trials of Ray Tune: expected a trainer that can be pickled; {culprit} cannot be "
            f"({type(error).__name__}: {error}). Give a dataset as a function that returns it, and make other such "
            "objects inside the train function"
        ) from error
    shape = TrialShape(
        scaling=trainer.given.get("scaling_config") or ScalingConfig(),
        known=trainer.known_arguments,
        argument=argument,
        reads_with_ray=_reads_with_ray(trainer.given),
        autoscaling=autoscaling,
    )

    def trainable(config: dict[str, Any], pickled: bytes) -> None:
        _run_trial(pickled, shape.changes(config))

    trainable.__name__ = trainable.__qualname__ = type(trainer).__name__
    made: Callable[[dict[str, Any]], None] = tune.with_resources(
        tune.with_parameters(trainable, pickled=pickled), shape
    )
    return made


def _reads_with_ray(arguments: Mapping[str, Any]) -> bool:
    """Whether one of the datasets in a trainer's arguments requires this runtime."""
    return required_runtime(arguments.get("datasets") or {}) == RayRuntime.name


def _find_unpicklable(given: Mapping[str, Any]) -> str:
    """Names what of a trainer's arguments cannot be pickled."""
    parts = {
        f"{argument}[{name!r}]": value
        for argument in ("datasets", "train_loop_config")
        for name, value in (given.get(argument) or {}).items()
    }
    for name, value in {**parts, **given}.items():
        try:
            dumps(value, reduce_reference)
        except Exception:  # whatever a user's object may raise
            return f"{name} (a {type(value).__name__})"
    return "it"


def _run_trial(pickled: bytes, changes: Mapping[str, Any]) -> None:
    """In a trial's actor: runs the trainer to its end, or until Tune has it stop."""
    from ray import tune

    trainer = pickle.loads(pickled)
    context = tune.get_context()
    kept = context.get_storage()
    filesystem = _unless_local(kept.storage_filesystem)
    trial_storage = Storage(*locate(kept.trial_fs_path, filesystem, what="the directory of a trial"))
    earlier = [name for name in trial_storage.list_names()[0] if name.startswith(_RUN)]
    for name in earlier:  # Tune goes on from its own copies
        delete_checkpoints(_inside(trial_storage, name))
    name = f"{_RUN}{len(earlier):03d}"
    reporter = _Reporter(_inside(trial_storage, name))
    arguments = merge_arguments(trainer.given, changes)
    given: RunConfig = arguments.get("run_config") or RunConfig()
    checkpoints = given.checkpoint_config
    if checkpoints.num_to_keep is None:  # Tune keeps as many copies as it was told to
        checkpoints = replace(checkpoints, num_to_keep=1 + checkpoints.max_uploads_in_flight)
    replaced: dict[str, Any] = {
        "scaling_config": _scaling_here(arguments.get("scaling_config") or ScalingConfig()),
        "run_config": replace(
            given,
            name=name,
            storage_path=kept.trial_fs_path,
            storage_filesystem=filesystem,
            resume="never",
            verbose=0,
            callbacks=(*given.callbacks, reporter),
            checkpoint_config=checkpoints,
        ),
    }
    if (found := tune.get_checkpoint()) is not None:
        replaced["resume_from_checkpoint"] = Checkpoint(found.path, _unless_local(found.filesystem))
    trial = Trial(name=context.get_trial_name(), id=context.get_trial_id(), experiment=context.get_experiment_name())
    if _reads_with_ray(arguments):
        _tell_of_starved_reads(trial)
    with _awaited_at_exit():
        try:
            trainer.vary(changes, trial=trial, **replaced).fit()
            reporter.finish()
        finally:
            reporter.delete_copied()


class _Reporter(Callback):
    """Hands reports of rank 0 to Tune, in order, each with its checkpoint once that is committed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._waiting: deque[Report] = deque()
        self._committed: dict[str, int] = {}
        self._copied: list[str] = []
        self._last: Report | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """A run that is restored outside its trial reports to nobody."""
        return Callback, ()

    def on_report(self, run: Run, report: Report) -> None:
        if report.rank == 0:
            self._waiting.append(report)
            self._hand_over()

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        self._committed[checkpoint.name] = checkpoint.iteration
        self._hand_over()

    def finish(self) -> None:
        """Hands over the rest; a checkpoint that no report came after goes with the last one's metrics."""
        while self._waiting:
            self._report(self._waiting.popleft())
        if self._committed and self._last is not None:
            self._report(self._last)

    def delete_copied(self) -> None:
        """Deletes the run's own copies of the checkpoints that Tune has."""
        if self._copied:
            delete_checkpoints(self._storage)

    def _hand_over(self) -> None:
        """A report with a checkpoint waits for its commit, and later ones wait behind it."""
        while self._waiting:
            report = self._waiting[0]
            if report.checkpoint is not None and report.checkpoint not in self._committed:
                return
            self._report(self._waiting.popleft())

    def _report(self, report: Report) -> None:
        from ray import tune

        metrics = {name: value for name, value in report.metrics.items() if name not in _AUTOFILLED}
        # What only other ranks reported, or was saved without a report, is committed later, and goes with the next one.
        due = sorted((iteration, name) for name, iteration in self._committed.items() if iteration <= report.iteration)
        names = [name for _, name in due]
        for name in names:
            del self._committed[name]
        self._last = report
        checkpoint = checkpoint_in(self._storage, names[-1]) if names else None
        if checkpoint is None or not checkpoint.exists():  # retention may have been faster than a slow upload
            tune.report(metrics)
            return
        self._copied.append(names[-1])
        with contextlib.ExitStack() as held:
            if checkpoint.is_local:
                given = tune.Checkpoint(held.enter_context(checkpoint.as_directory()))
            else:
                given = tune.Checkpoint(checkpoint.path, checkpoint.filesystem)
            tune.report(metrics, checkpoint=given)


def _inside(storage: Storage, name: str) -> Storage:
    return Storage(storage.filesystem, storage.path(name), storage.limits)


def _unless_local(filesystem: Any) -> Any | None:
    """A filesystem of pyarrow; None for this machine's, which needs none."""
    return None if filesystem.type_name == "local" else filesystem


def _is_on_actors(scaling: ScalingConfig) -> bool:
    """Whether the workers are actors of their own; otherwise they are processes that the trial's actor starts."""
    return scaling.max_workers > 0 and (scaling.runtime is None or scaling.runtime == "ray")


def _scaling_here(scaling: ScalingConfig) -> ScalingConfig:
    """What the trainer asks for, in what the trial has reserved."""
    import ray

    if not _is_on_actors(scaling):
        return scaling if scaling.max_workers == 0 else replace(scaling, resources_per_worker=_per_worker(scaling))
    group = ray.util.get_current_placement_group()
    if group is None:
        raise ConfigurationError("a trial: expected a placement group of Ray Tune's, found none")
    has_trainer = any((scaling.trainer_resources or {}).values())
    runtime = RayRuntime(placement_group=group, first_bundle=int(has_trainer))
    return replace(scaling, runtime=runtime, num_workers=scaling.max_workers)


def _per_worker(scaling: ScalingConfig) -> dict[str, float]:
    """The resources of a worker on this machine, which counts as one CPU if nothing else is said."""
    return {"CPU": 1.0, **(scaling.resources_per_worker or {})}


def _require_room(bundles: list[dict[str, float]], reads_with_ray: bool) -> None:
    """Refuses a trial that would wait for ever.

    Raises:
        ResourceError: the cluster does not have as much.
    """
    import ray

    if not ray.is_initialized():
        return
    wanted: Counter[str] = Counter()
    for bundle in bundles:
        wanted.update({name: amount for name, amount in bundle.items() if not name.startswith("accelerator_type:")})
    total = ray.cluster_resources()
    found = {name: total.get(name, 0.0) for name in wanted}
    grows = "if the cluster gets nodes when they are wanted, use as_trainable(autoscaling=True)"
    if any(found[name] < amount for name, amount in wanted.items()):
        raise ResourceError(
            f"a trial: expected {dict(wanted)} (its workers and trainer_resources), the whole cluster has "
            f"{found}: ask for "
            f"fewer workers or less of each; {grows}"
        )
    if reads_with_ray and total.get("CPU", 0.0) - wanted["CPU"] < 1:
        raise ResourceError(
            f"a trial: expected {wanted['CPU']:g} of the cluster's {total.get('CPU', 0.0):g} CPUs, which leaves "
            "none for "
            f"Ray Data to read its dataset with: ask for fewer workers; {grows}"
        )


def _tell_of_starved_reads(trial: Trial) -> None:
    import ray

    if ray.available_resources().get("CPU", 0.0) < 1:
        Console().print(
            f"{trial.name}: trials hold every CPU of the cluster, and Ray Data waits for one to read the dataset with: "
            "leave some with TuneConfig(max_concurrent_trials=...)",
            error=True,
        )


@contextlib.contextmanager
def _awaited_at_exit() -> Iterator[None]:
    """Has the process not end before the ``with`` block does: Tune ends a trial's process without waiting for it."""
    ended = threading.Event()

    def wait() -> None:
        ended.wait(_END_WAIT_S)

    atexit.register(wait)
    try:
        yield
    finally:
        ended.set()
        atexit.unregister(wait)
