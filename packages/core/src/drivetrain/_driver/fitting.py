"""One call of ``fit()``: checks the arguments, opens the run directory, runs the attempts and creates the result."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drivetrain._base.console import Console
from drivetrain._base.failure import format_exception
from drivetrain._base.interrupts import Interrupts
from drivetrain._base.limits import explain_limit
from drivetrain._base.redact import redact, redact_strings
from drivetrain._driver.backendsetup import default_callbacks, validate
from drivetrain._driver.callbacks import make_callbacks
from drivetrain._driver.control import listen
from drivetrain._driver.controller import Controller
from drivetrain._driver.diagnosis import failure_in_driver
from drivetrain._driver.job import TrainingJob
from drivetrain._driver.launch import (
    pickle_function,
    refuse_in_script_of_workers,
    refuse_in_spawned_script,
    refuse_objects_of_process,
    require_linux,
    require_process_state,
    require_shared,
    resolve_runtime,
)
from drivetrain._driver.notices import print_once, unused_variables
from drivetrain._driver.outcomes import RunFailed, Succeeded
from drivetrain._driver.overrides import with_overrides
from drivetrain._driver.policies import make_policy
from drivetrain._driver.result import Result, last_metrics
from drivetrain._driver.services import RunServices
from drivetrain._driver.tasks import TaskFactory, require_pickling
from drivetrain._hooks.callback import Callback, Callbacks
from drivetrain._hooks.context import Run, WorkerInfo
from drivetrain._hooks.policy import FailurePolicy
from drivetrain._plugins.data_config import DataConfig
from drivetrain._plugins.datasets import Providers, check_runtime, required_runtime
from drivetrain._runtimes.base import Runtime
from drivetrain._storage.checkpoint import Checkpoint
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import ERROR_FILE, ERROR_TEXT_FILE
from drivetrain._storage.rundir import OpenRun, locate_run, open_run
from drivetrain._wire.task import PackedFunction
from drivetrain._worker.script import Script
from drivetrain._worker.session import POSITIONS
from drivetrain.errors import CallbackError, ConfigurationError, RunInUseError, StorageError, TrainingFailedError

__all__ = ["run_job"]

_SHOWN_ATTEMPTS = 5


def run_job(
    job: TrainingJob, trainer_file: Callable[[], bytes], interrupts: Interrupts, *, raise_on_failure: bool
) -> Result:
    """Run a job to its end.

    Args:
        job: the arguments of the trainer.
        trainer_file: returns the content of ``trainer.pkl``.
        interrupts: the requests to end the run.
        raise_on_failure: see :meth:`drivetrain.DataParallelTrainer.fit`, which also lists the exceptions.
    """
    require_linux()
    refuse_in_spawned_script()
    refuse_in_script_of_workers()
    job = with_overrides(job)
    require_process_state(job.scaling.max_workers)
    runtime = resolve_runtime(job.scaling, required=required_runtime(job.datasets))
    refuse_objects_of_process(job.function, job.config)
    function: PackedFunction = (job.function, job.config if job.config is not None else {})
    if not runtime.in_driver:
        function = pickle_function(job.function, job.config, runtime.reduce)
    runtime.validate(job.scaling)
    validate(job.backend, job.scaling)
    if not runtime.in_driver:
        require_pickling(job.backend, runtime.reduce)
    datasets = job.data_config.open(check_runtime(job.datasets, runtime.name))
    for world_size in {job.scaling.min_workers, job.scaling.max_workers}:
        job.data_config.data_position(0, max(world_size, 1))
    callbacks = make_callbacks(job.run_config, default_callbacks(job.backend))
    policy = make_policy(job.run_config.failure_config)
    if job.resume_from is not None and not job.resume_from.exists():
        raise ConfigurationError(
            "[DT-706] resume_from_checkpoint: expected a checkpoint that exists, got the missing directory "
            f"{job.resume_from.path}"
        )
    if not runtime.in_driver:
        require_shared(job.run_config)
    facts, pickled = job.facts(), trainer_file()
    storage = locate_run(job.run_config, job.trainer)
    name = posixpath.basename(storage.root)
    console = Console(name)

    def notify(line: str) -> None:
        console.print(f"{name}: {line}", error=True)

    def end(error: RunInUseError) -> None:
        interrupts.request("another driver has taken the run over", error, at_once=True)

    with (
        console.in_use(),
        open_run(storage, job.run_config, facts, job.metadata, pickled, notify, end) as opened,
    ):
        if opened.resumed and job.run_config.verbose:
            notify(opened.resumed)
        print_once([*unused_variables(job.run_config), *runtime.ignored_settings(job.scaling)], notify)
        interrupts.signals_reach_ranks = isinstance(job.function, Script) and not runtime.in_driver
        try:
            services = _services(job, opened, console, callbacks, interrupts)
            controller = _controller(job, services, opened, function, datasets, runtime, policy)
            return _fit(job, opened, services, controller)
        except TrainingFailedError as error:
            if raise_on_failure:
                raise
            return Result(metrics=last_metrics(opened.storage), storage=opened.storage, error=error)


def _split(
    job: TrainingJob, datasets: Mapping[str, Any], workers: Sequence[WorkerInfo], checkpoint: Checkpoint | None
) -> list[dict[str, Any]]:
    positions = checkpoint.get_metadata().get(POSITIONS) if datasets and checkpoint is not None else None
    options: dict[str, Any] = {"positions": positions} if positions else {}
    if any(map(callable, datasets.values())) or required_runtime(datasets) is not None:
        options["resources"] = replace(job.scaling, num_workers=len(workers)).total_resources
    nodes = [worker.node_id for worker in workers]
    shards = job.data_config.configure(datasets, len(workers), None, nodes, **options)
    if type(job.data_config).configure is DataConfig.configure:
        return shards
    adopt = Providers().adopt
    return [{name: adopt(shard) for name, shard in of_rank.items()} for of_rank in shards]


def _fit(
    job: TrainingJob,
    opened: OpenRun,
    services: RunServices,
    controller: Controller,
) -> Result:
    run, storage = services.run, opened.storage
    outcome: Succeeded | RunFailed | None = None
    error: BaseException | None = None
    try:
        services.callbacks.call("on_run_start")
        with listen(run.id, lambda request: controller.describe()):
            outcome = controller.run()
    except (CallbackError, StorageError) as raised:
        outcome = RunFailed(failure_in_driver(raised))
    except BaseException as raised:
        if isinstance(raised, Exception) and explain_limit(raised):
            outcome = RunFailed(failure_in_driver(raised))
        else:
            error = raised
    finally:
        opened.checkpoints.close()
    if isinstance(outcome, RunFailed):
        error = _explain(outcome, run, storage)
    callback_error = services.callbacks.close("on_run_end", error)
    if isinstance(error, (KeyboardInterrupt, SystemExit)) and job.trial is None:
        run.console.print(f"{run.name}: {_how_to_resume(opened)}", error=True)
    if error is None and callback_error is None:
        assert isinstance(outcome, Succeeded)
        opened.push()
        if services.interrupts.error is not None:  # the train function has finished nevertheless
            raise services.interrupts.error
        metrics = outcome.metrics if outcome.metrics is not None else last_metrics(storage)
        values = outcome.return_values
        value = values if job.all_values else values[0]
        return Result(metrics=metrics, storage=storage, return_value=value, completed=True)
    if error is not None and callback_error is not None:
        run.console.print(f"{run.name}: {callback_error}", error=True)
    error = error or callback_error
    assert error is not None
    if isinstance(error, TrainingFailedError) and job.run_config.failure_config.fail_fast == "raise":
        error = error.__cause__ or error
    raise error


def _services(
    job: TrainingJob, opened: OpenRun, console: Console, callbacks: list[Callback], interrupts: Interrupts
) -> RunServices:
    run = Run(
        name=opened.name,
        id=opened.id,
        path=opened.directory,
        location=opened.storage.root,
        storage=opened.storage,
        scaling_config=job.scaling,
        run_config=job.run_config,
        train_loop_config=job.config_values,
        console=console,
        trial=job.trial,
    )
    return RunServices(
        run=run,
        backend=job.backend,
        checkpoints=opened.checkpoints,
        callbacks=Callbacks(callbacks, run),
        interrupts=interrupts,
    )


def _controller(
    job: TrainingJob,
    services: RunServices,
    opened: OpenRun,
    function: PackedFunction,
    datasets: Mapping[str, Any],
    runtime: Runtime,
    policy: FailurePolicy,
) -> Controller:
    is_own = type(job.data_config).configure is not DataConfig.configure
    tasks = TaskFactory(
        services,
        function=function,
        split=lambda workers, checkpoint: _split(job, datasets, workers, checkpoint),
        data_position=None if is_own else job.data_config.data_position,
        metadata=job.metadata,
        driver_count=opened.driver_count,
        all_values=job.all_values,
    )
    return Controller(services, runtime, tasks, policy, resume_from=job.resume_from, last_number=opened.last_number)


def _how_to_resume(opened: OpenRun) -> str:
    """Return the hint for a run that was interrupted."""
    latest = opened.checkpoints.latest
    if latest is None:
        return "no checkpoint was committed, so the next run starts from the beginning"
    return (
        f'to continue from {latest.name}, run the script again with RunConfig(name="{opened.name}", resume="auto") '
        "(drivetrain run: --resume auto)"
    )


def _explain(failed: RunFailed, run: Run, storage: Storage) -> TrainingFailedError:
    """Return the error for the user, and write it to the run directory."""
    failure = failed.failure
    lines = [f"{failure.summary} [{failure.kind.value}]", *failed.notes]
    for before in failed.history[-_SHOWN_ATTEMPTS:]:
        lines.append(f"attempt {before.attempt} {'lost ranks' if before.survived else 'failed'}: {before.summary}")
    lines.append(f"run directory: {storage.root}")
    if failure.log_tail:
        lines.append(f"last lines of the log:\n{failure.log_tail}")
    message = redact("\n  ".join(lines))
    error = TrainingFailedError(
        message,
        kind=failure.kind,
        rank=failure.rank,
        worker_failures={each.rank: each.exception for each in reversed(failed.ranks) if each.rank is not None},
    )
    error.__cause__ = failure.exception
    record = {
        "message": message,
        **failure.record(),
        "others": failed.notes,
        "earlier_attempts": [earlier.record() for earlier in failed.history],
    }
    if isinstance(failure.exception, RunInUseError):  # the run directory belongs to another driver
        return error
    try:
        storage.write_bytes(ERROR_FILE, json.dumps(redact_strings(record), indent=2).encode())
        storage.write_bytes(ERROR_TEXT_FILE, redact(format_exception(error)).encode())
    except StorageError as unwritten:
        run.console.print(f"{run.name}: {unwritten}", error=True)
    return error
