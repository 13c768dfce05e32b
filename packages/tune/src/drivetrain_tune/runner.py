"""Runs the trials of a search on this machine, as many at the same time as its CPUs and GPUs allow."""

from __future__ import annotations

import math
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from drivetrain import (
    CallbackError,
    ConfigurationError,
    DataParallelTrainer,
    Result,
    RunCancelledError,
    RunHandle,
    ScalingConfig,
)
from drivetrain.plugin.backends import visible_gpus
from drivetrain.plugin.callbacks import Console, flatten
from drivetrain.plugin.datasets import required_runtime
from drivetrain.plugin.runtimes import ForkServers, LocalRuntime
from drivetrain.plugin.trainers import merge_arguments
from drivetrain_tune.results import last_value, standing
from drivetrain_tune.search import ActiveTrial, Search, TrialRecord, TuneConfig

__all__ = ["Progress", "Runner", "Trials"]


@dataclass(frozen=True, slots=True)
class _Share:
    """The CPUs and GPUs that are reserved for a trial."""

    cpus: float
    gpus: tuple[str, ...]


class _Machine:
    """The CPUs and GPUs of this machine that are not reserved for a trial."""

    def __init__(self) -> None:
        self.all_cpus = float(len(os.sched_getaffinity(0)))
        self._cpus = self.all_cpus
        self._gpus = visible_gpus()
        self._all_gpus = len(self._gpus)

    def fits(self, scaling: ScalingConfig) -> bool:
        """Return True if there are enough free CPUs and GPUs for the workers."""
        cpus, gpus = self._required(scaling)
        return cpus <= self._cpus and gpus <= len(self._gpus)

    def take(self, scaling: ScalingConfig) -> _Share:
        """Reserve the CPUs and GPUs of a trial.

        If a trial requires more than the machine has, all CPUs or GPUs are reserved. The runtime then decides whether
        the trial can start.
        """
        cpus, gpus = self._required(scaling)
        taken, self._gpus = self._gpus[:gpus], self._gpus[gpus:]
        self._cpus -= cpus
        return _Share(cpus, tuple(taken))

    def release(self, share: _Share) -> None:
        self._cpus += share.cpus
        self._gpus += share.gpus

    def _required(self, scaling: ScalingConfig) -> tuple[float, int]:
        workers, gpus_each = max(1, scaling.max_workers), scaling.num_gpus_per_worker
        whole = not 0 < gpus_each < 1
        gpus = math.ceil(gpus_each * workers if whole else workers / math.floor(1 / gpus_each + 1e-9))
        cpus = (scaling.num_cpus_per_worker or 1.0) * workers
        return min(cpus, self.all_cpus), min(gpus, self._all_gpus)


@dataclass(frozen=True, slots=True)
class _Running:
    trial: ActiveTrial
    handle: RunHandle
    share: _Share


class Trials:
    """Starts the runs of trials.

    Args:
        make: creates the trainer of a trial, with some arguments replaced.
        given: the arguments of the trainer that all trials share.
        changes: returns the arguments that a trial's config changes, with their new values.
        servers: the processes from which workers are forked.
    """

    def __init__(
        self,
        *,
        make: Callable[..., DataParallelTrainer],
        given: Mapping[str, Any],
        changes: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        servers: ForkServers,
    ) -> None:
        self._make = make
        self._given = given
        self._changes = changes
        self._servers = servers

    def scaling(self, config: Mapping[str, Any]) -> ScalingConfig:
        """Return the scaling configuration of a trial with this config."""
        changes = {name: value for name, value in self._changes(config).items() if name == "scaling_config"}
        scaling: ScalingConfig | None = merge_arguments(self._given, changes).get("scaling_config")
        return scaling or ScalingConfig()

    def is_local(self, scaling: ScalingConfig) -> bool:
        """Return True if the workers of a trial are processes on this machine."""
        if scaling.max_workers == 0 or scaling.runtime not in (None, "local"):
            return False
        return required_runtime(self._given.get("datasets") or {}) in (None, "local")

    def start(self, trial: ActiveTrial, scaling: ScalingConfig, share: _Share, *, alone: bool) -> RunHandle:
        """Start the run of a trial.

        Args:
            trial: the trial.
            scaling: the scaling configuration of the trial.
            share: the CPUs and GPUs that are reserved for the trial.
            alone: True if no other trial of the search can run at the same time.
        """
        replaced: dict[str, Any] = {}
        if self.is_local(scaling):
            if not alone:
                scaling = replace(scaling, resources_per_worker={"CPU": 1.0, **(scaling.resources_per_worker or {})})
            runtime = LocalRuntime(gpus=share.gpus, servers=self._servers)
            replaced["scaling_config"] = replace(scaling, runtime=runtime)
        return self._make(trial, **replaced).start(raise_on_failure=False)


class Runner:
    """Runs a search to its end.

    Args:
        search: the trials to run.
        config: the limits on concurrent trials and on time, and the metric.
        trials: starts the runs of trials.
        progress: displays the progress after every change.

    Attributes:
        results: the results of the runs that have ended, by the number of the trial.
    """

    def __init__(self, search: Search, config: TuneConfig, trials: Trials, progress: Progress) -> None:
        self._search = search
        self._config = config
        self._trials = trials
        self._progress = progress
        self._machine = _Machine()
        self._running: dict[int, _Running] = {}
        self._upcoming: ActiveTrial | None = None
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._out_of_time = False
        self.results: dict[int, Result] = {}

    def run(self) -> None:
        """Run all remaining trials, and wait for them. On an interrupt or error, terminate the running trials."""
        budget = self._config.time_budget_s
        end_by = None if budget is None else time.monotonic() + budget
        try:
            while True:
                self._start_fitting_trials()
                self._progress.show(self._search, len(self._running))
                if not self._running:
                    return
                remaining = None if end_by is None or self._out_of_time else max(0.0, end_by - time.monotonic())
                try:
                    self._finish(self._finished.get(timeout=remaining))
                except queue.Empty:
                    self._out_of_time = True
                    self._cancel()
        except BaseException:
            self._terminate_all()
            raise
        finally:
            if self._upcoming is not None:
                self._search.postpone(self._upcoming)

    def _start_fitting_trials(self) -> None:
        while not self._out_of_time:
            if self._upcoming is None:
                # Draw values only when the trial can start, so that the sampler knows the results of all ended trials.
                shared = None if self._search.contains("scaling_config") else self._trials.scaling({})
                if not self._search.has_next or (shared is not None and not self._has_room(shared)):
                    return
                self._upcoming = self._search.next()
            scaling = self._trials.scaling(self._upcoming.config)
            if not self._has_room(scaling):
                return
            trial, self._upcoming = self._upcoming, None
            self._start(trial, scaling)

    def _start(self, trial: ActiveTrial, scaling: ScalingConfig) -> None:
        share = self._machine.take(scaling)
        alone = self._limit(scaling) <= 1 or share.cpus >= self._machine.all_cpus
        try:
            handle = self._trials.start(trial, scaling, share, alone=alone)
        except BaseException:
            self._machine.release(share)
            raise
        number = trial.record.number
        self._running[number] = _Running(trial, handle, share)
        handle.when_done(partial(self._finished.put, number))

    def _finish(self, number: int) -> None:
        """Record the end of a trial. If an error prevented the start of the trial, raise it, which ends the search."""
        running = self._running.pop(number)
        self._machine.release(running.share)
        record, state, error = running.trial.record, "completed", ""
        try:
            result = self.results[number] = running.handle.result()
            if result.error is not None:
                state, error = "failed", str(result.error)
            elif record.state == "pruned":
                state = "pruned"
            elif not record.reports and (value := last_value(result, self._config.metric)) is not None:
                # The run had finished before the search was interrupted, so it had nothing left to report.
                record.reports[int(result.metrics.get("_training_iteration", 1))] = value
            elif not record.reports:
                missing = _missing_metric(self._config.metric, result)
                self.results[number] = replace(result, error=missing)
                state, error = "failed", str(missing)
        except RunCancelledError:
            state = "stopped"
        except CallbackError as raised:
            state, error = "failed", str(raised)
        self._search.finish(running.trial, state, error)
        self._progress.print_end(self._search, record)

    def _has_room(self, scaling: ScalingConfig) -> bool:
        """Return True if a trial can start now, which is always the case if no other trial is running."""
        return not self._running or (len(self._running) < self._limit(scaling) and self._machine.fits(scaling))

    def _limit(self, scaling: ScalingConfig) -> float:
        """Return the maximum number of concurrent trials, regardless of CPUs and GPUs."""
        configured = self._config.max_concurrent_trials
        if scaling.max_workers == 0:  # this process can run only one train function at a time
            return 1
        if self._trials.is_local(scaling):
            return configured or math.inf
        return configured or 1

    def _cancel(self) -> None:
        for running in self._running.values():
            running.handle.cancel()

    def _terminate_all(self) -> None:
        """Terminate the trials as Ctrl-C terminates a run, and wait for them.

        The first Ctrl-C is graceful if the train function polls for preemption; the second terminates immediately.
        """
        self._cancel()
        waiting = [running.handle for running in self._running.values()]
        while waiting:
            try:
                waiting[-1].result()
            except KeyboardInterrupt:
                self._cancel()
            except BaseException:  # ignored, because the caller raises the exception that ended the search
                pass
            if waiting[-1].done():
                waiting.pop()


class Progress:
    """Displays the progress of a search.

    Args:
        name: the name of the search.
        config: the configuration of the search.
        console: the console to print to.
        verbose: 0 displays nothing, 1 the progress of the search and the errors of failed trials, 2 also a line for
            each trial that has ended.
    """

    def __init__(self, name: str, config: TuneConfig, console: Console, verbose: int) -> None:
        self._name = name
        self._config = config
        self._console = console
        self._verbose = verbose

    def show(self, search: Search, running: int) -> None:
        """Update the status line."""
        if self._verbose:
            self._console.status(f"{self._text(search)}, {running} running")

    def print_end(self, search: Search, record: TrialRecord) -> None:
        """Print a line about a trial that has ended."""
        if self._verbose > 1 or (self._verbose and record.state == "failed"):
            last = "" if record.last is None else f", {self._config.metric}={record.last:.5g}"
            reason = f": {record.error.partition(chr(10))[0]}" if record.error else ""
            self._console.print(
                f"{self._name}: {record.name} {record.state} after {len(record.reports)} reports{last}{reason}",
                error=True,
            )

    def end(self, search: Search) -> None:
        """Replace the status line with a line that shows the final state."""
        if self._verbose:
            self._console.status("")
            self._console.print(self._text(search), error=True)

    def _text(self, search: Search) -> str:
        ended = [record for record in search.records if record.state != "running"]
        counts = Counter(record.state for record in ended if record.state != "completed")
        parts = [f"{len(ended)} of {search.total} trials", *(f"{count} {state}" for state, count in counts.items())]
        sign = -1 if self._config.mode == "max" else 1
        values = [
            (standing(record.state), sign * record.last, record)
            for record in ended
            if record.state != "failed" and record.last is not None
        ]
        if values:
            best = min(values, key=lambda entry: entry[:2])[2]
            parts.append(f"best {self._config.metric}={best.last:.5g} of {best.name}")
        return f"{self._name}: {', '.join(parts)}"


def _missing_metric(metric: str, result: Result) -> ConfigurationError:
    reported = ", ".join(name for name in flatten(result.metrics) if not name.startswith("_")) or "no metrics"
    return ConfigurationError(
        f"[DT-754] TuneConfig(metric=...): expected the name of a number that rank 0 reports ({reported}), got "
        f"{metric!r}"
    )
