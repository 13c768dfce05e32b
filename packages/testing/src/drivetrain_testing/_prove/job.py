"""One run of the user's job: the script as the driver, the kills, and the starts that resume after them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain import ConfigurationError, StorageError
from drivetrain.plugin.checks import socket_address
from drivetrain.plugin.drivers import OVERRIDES, add_note
from drivetrain.plugin.sessions import OBSERVER
from drivetrain.runs import RunReader, open_run
from drivetrain_testing._marked import kill
from drivetrain_testing._prove.drivers import Driver, Drivers
from drivetrain_testing._prove.events import JobEvents, read_events
from drivetrain_testing._prove.kills import Kill
from drivetrain_testing._prove.nodes import Nodes
from drivetrain_testing._prove.observer import SETTINGS

__all__ = ["CannotProveError", "JobRun", "JobSpec", "run_job"]

_OBSERVER = "drivetrain_testing._prove.observer:JobObserver"
_EXIT_S = 10.0
_NOTICE_S = 30.0
_POLL_S = 0.005
_NAME = "run"
_SHOWN_LINES = 20


class CannotProveError(ConfigurationError):
    """The job cannot be compared: it fails when it is undisturbed, or it reports no checkpoint to resume from."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The user's job.

    Attributes:
        command: the command that starts the driver.
        drivers: starts the drivers.
        directory: the directory for everything that the runs write.
        deadline: the time of the monotonic clock at which all runs must have ended.
        scaling: fields of ``ScalingConfig`` that replace those of the script.
        nodes: the nodes of the Ray cluster that the job uses, for kills of nodes; None without such kills.
        all_report: whether every rank is known to report. If so, each kill waits for the reports of all ranks.
    """

    command: Sequence[str]
    drivers: Drivers
    directory: Path
    deadline: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    nodes: Nodes | None = None
    all_report: bool = False


@dataclass(kw_only=True)
class JobRun:
    """A run of the job, with its files.

    Attributes:
        name: what distinguishes it from other runs of the job.
        directory: the directory with everything that it wrote.
        killed: the kills that have happened.
        outputs: the files with the output of the drivers.
        failure: why the job did not finish; empty if it finished.
    """

    name: str
    directory: Path
    killed: list[Kill] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)
    failure: str = ""
    _events: JobEvents | None = None

    @property
    def reader(self) -> RunReader:
        """The reader of the run directory of the first ``fit()``."""
        return open_run(self.directory / "runs" / _NAME)

    @property
    def events(self) -> JobEvents:
        """The events that the observers recorded."""
        if self._events is None:
            self._events = read_events(self.directory / "events")
        return self._events

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The directory of each committed checkpoint, by the iteration of its report."""
        record = self.reader.record()
        return {each.iteration: Path(record.location, each.name) for each in record.checkpoints}

    @property
    def resumed_from(self) -> list[int]:
        """The iteration from which each attempt after the first resumed."""
        return [attempt.resumed_from or 0 for attempt in self.reader.record().history.attempts[1:]]

    def node_of(self, rank: int) -> str:
        """Return the ID of the node on which a rank of the last attempt runs."""
        workers = self.reader.record().history.attempts[-1].workers
        return str(next(worker["node_id"] for worker in workers if worker["rank"] == rank))

    def note(self, text: str) -> None:
        """Add an event to the timeline of the run, for its page."""
        if self.has_run:
            add_note(self.directory / "runs" / _NAME, "drivetrain prove", text)

    @property
    def has_run(self) -> bool:
        """Whether the script has called ``fit()``."""
        return (self.directory / "runs" / _NAME / "run.json").exists()


def run_job(
    spec: JobSpec,
    name: str,
    *,
    kills: Sequence[Kill] = (),
    resize: int | None = None,
    probe: bool = False,
    change: str = "",
    is_followed: bool = False,
) -> JobRun:
    """Run the job to its end.

    Args:
        spec: the job.
        name: the name of the directory for this run.
        kills: the kills, in the order of their moments.
        resize: the number of workers after the first kill of the driver; None for no change.
        probe: True to record what each worker holds.
        change: the experiment; see :class:`~drivetrain_testing._prove.observer.JobObserver`. ``"hash"`` fixes the order
            of sets of strings.
        is_followed: whether another run will follow, for which a driver may start ahead of time.

    Raises:
        CannotProveError: the time is up.
    """
    return _Running(spec, name, kills, probe=probe, change=change, is_followed=is_followed).run(resize)


@dataclass(frozen=True)
class _Later:
    """An action for the moment at which a condition is met, or at which the time for it is over."""

    condition: Callable[[], bool]
    deadline: float
    action: Callable[[], None]


class _Running:
    def __init__(
        self, spec: JobSpec, name: str, kills: Sequence[Kill], *, probe: bool, change: str, is_followed: bool
    ) -> None:
        self._spec = spec
        self._result = JobRun(name=name, directory=spec.directory / name)
        self._pending = deque(kills)
        self._is_followed = is_followed
        self._socket = spec.directory / f"{name}.socket"
        self._later: list[_Later] = []
        self._waiting: list[socket.socket] = []
        self._closed: int | None = None
        self._driver_killed = False
        for folder in ("runs", "events"):
            (self._result.directory / folder).mkdir(parents=True)
        (spec.directory / "states").mkdir(exist_ok=True)
        settings = {
            "directory": str(self._result.directory / "events"),
            "socket": str(self._socket),
            "moments": [[each.rank, each.report, each.batches] for each in kills],
            "probe": probe,
            "states": str(spec.directory / "states"),
            "change": change,
        }
        fixed = {"PYTHONHASHSEED": "0"} if change == "hash" else {}
        if spec.nodes is not None:
            fixed["RAY_ADDRESS"] = spec.nodes.address
        self._environment = {**fixed, OBSERVER: _OBSERVER, SETTINGS: json.dumps(settings)}

    def run(self, resize: int | None) -> JobRun:
        scaling = dict(self._spec.scaling)
        try:
            while True:
                self._driver_killed = False
                with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
                    with socket_address(self._socket) as address:
                        listener.bind(address)
                    listener.listen(128)
                    code = self._run_driver(listener, scaling)
                    self._open()  # not before: a worker without a driver would use up the next kill
                self._socket.unlink()
                if not self._driver_killed:
                    break
                scaling |= {} if resize is None else {"num_workers": resize}
        finally:
            self._socket.unlink(missing_ok=True)
        if code:
            self._result.failure = self._explain(code)
        return self._result

    def _run_driver(self, listener: socket.socket, scaling: Mapping[str, Any]) -> int:
        """Run the script until it ends, and all processes that it has started, and return its exit code."""
        driver = self._spec.drivers.start({**self._environment, OVERRIDES: json.dumps(self._overrides(scaling))})
        self._result.outputs.append(driver.output)
        try:
            if self._is_followed or any(each.victim == "driver" for each in self._pending):
                self._spec.drivers.prepare()
            self._follow(driver, listener)
            self._later.clear()
            driver.await_exits()
        finally:
            driver.kill_all()
        return driver.process.returncode

    def _overrides(self, scaling: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that replace those of the script."""
        number = len(self._pending) + len(self._result.killed)
        return {
            "run_config": {
                "name": _NAME,
                "storage_path": str(self._result.directory / "runs"),
                "storage_filesystem": None,
                "resume": "auto",
                "verbose": 0,
                "failure_config": {
                    "max_failures": number,
                    "max_node_failures": max(1, number),
                    "fail_fast": False,
                    "policy": None,
                    "retry_backoff_s": 0.001,
                },
                "checkpoint_config": {"num_to_keep": None, "keep_last": 1, "keep_every": None},
            },
            **({"scaling_config": dict(scaling)} if scaling else {}),
        }

    def _follow(self, driver: Driver, listener: socket.socket) -> None:
        """Respond to the ranks, and kill, until the driver exits."""
        process = driver.process
        with selectors.DefaultSelector() as selector:
            descriptor = os.pidfd_open(process.pid)
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(listener, selectors.EVENT_READ)
            try:
                while process.poll() is None:
                    ready = [key.fileobj for key, _ in selector.select(self._wait_s())]
                    if listener in ready:
                        self._on_message(listener, process.pid)
                    self._do_what_is_due()
                    self._require_time()
            finally:
                os.close(descriptor)

    def _wait_s(self) -> float:
        return _POLL_S if self._later else max(0.0, self._spec.deadline - time.monotonic())

    def _require_time(self) -> None:
        if time.monotonic() >= self._spec.deadline:
            raise CannotProveError(
                "prove: expected that all runs of the job end within the time limit, but one of them still runs. Give "
                f"the script fewer epochs, or raise --timeout. Its last output:\n{self._last_output()}"
            )

    def _on_message(self, listener: socket.socket, driver: int) -> None:
        """Respond to a rank that waits: at a moment, or at a gate, which is closed until a kill has happened."""
        connection, _ = listener.accept()
        connection.settimeout(_EXIT_S)
        self._waiting.append(connection)
        try:
            what, rank, report, batches, pid = json.loads(connection.recv(1000))
        except (ConnectionError, ValueError):  # the rank was killed
            self._release(connection)
            return
        pending = self._pending[0] if self._pending else None
        is_victim = pending is not None and (pending.rank, pending.report) == (rank, report)
        waits = what == "gate"
        if pending is not None and is_victim and (what == "gate" or pending.batches == batches):
            self._prepare_kill(self._pending.popleft(), pid, driver, has_delay=what == "moment")
            waits = waits or not pending.delay_s
        if not waits or not self._is_closed(report):
            self._release(connection)

    def _is_closed(self, report: int) -> bool:
        """Return True if a kill after a report is still to happen, or has just happened."""
        return report == self._closed or any(each.report == report for each in self._pending)

    def _prepare_kill(self, chosen: Kill, pid: int, driver: int, *, has_delay: bool) -> None:
        """Kill as soon as the checkpoint is committed from which the run is to resume, so that this can be repeated."""
        self._closed = chosen.report

        def prepared() -> None:
            at = time.monotonic() + chosen.delay_s * has_delay
            self._when(lambda: time.monotonic() >= at, lambda: self._kill(chosen, pid, driver))

        self._when(lambda: self._is_recorded(chosen.report), prepared)

    def _is_recorded(self, iteration: int) -> bool:
        """Return True if a report's checkpoint is committed, and every rank that reports has made this report."""
        if iteration not in self._result.checkpoints:
            return False
        reader = self._result.reader
        workers = len(reader.record().history.attempts[-1].workers)
        ranks = range(workers) if self._spec.all_report else [rank for rank in reader.ranks() if rank < workers]
        last = {rank: deque(reader.reports(rank), maxlen=1) for rank in ranks}
        return all(rows and rows[-1].get("_training_iteration", 0) >= iteration for rows in last.values())

    def _release(self, connection: socket.socket) -> None:
        if connection in self._waiting:
            self._waiting.remove(connection)
            with connection, contextlib.suppress(OSError):  # the rank may have been killed
                connection.sendall(b".")

    def _when(self, condition: Callable[[], bool], action: Callable[[], None]) -> None:
        self._later.append(_Later(condition, min(time.monotonic() + _NOTICE_S, self._spec.deadline), action))

    def _do_what_is_due(self) -> None:
        for each in list(self._later):
            with contextlib.suppress(StorageError):
                if time.monotonic() >= each.deadline or each.condition():
                    self._later.remove(each)
                    each.action()

    def _kill(self, chosen: Kill, pid: int, driver: int) -> None:
        victim = driver if chosen.victim == "driver" else pid
        self._driver_killed |= victim == driver  # a rank may run in the driver's process
        before = self._failures()
        self._result.note(f"killed {chosen}")
        if chosen.victim == "node":
            assert self._spec.nodes is not None
            self._spec.nodes.kill(self._result.node_of(chosen.rank))
        else:
            kill(victim)
        self._result.killed.append(chosen)
        # Not before the driver has noticed the loss, or else the other ranks would commit later checkpoints.
        if victim != driver:
            self._when(lambda: self._failures() > before, self._open)

    def _open(self) -> None:
        self._closed = None
        while self._waiting:
            self._release(self._waiting[0])

    def _failures(self) -> int:
        """Return how many ranks the driver has lost so far."""
        attempts = self._result.reader.record().history.attempts
        return sum(len(each.survived) + (each.failure is not None) for each in attempts)

    def _explain(self, code: int) -> str:
        return f"{' '.join(map(str, self._spec.command))}: exit code {code}\n{self._last_output()}"

    def _last_output(self) -> str:
        lines = [line for path in self._result.outputs for line in path.read_text(errors="replace").splitlines()]
        return "\n".join(lines[-_SHOWN_LINES:])
