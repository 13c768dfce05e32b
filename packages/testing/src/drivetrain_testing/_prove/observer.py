"""Runs in each worker of the job: records what it reads, reports and holds, and stops at the moments of the kills."""

from __future__ import annotations

import datetime
import inspect
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.plugin.checks import socket_address
from drivetrain.plugin.sessions import OBSERVER, Observer
from drivetrain_testing._prove import probe
from drivetrain_testing._prove.digests import row_digests

if TYPE_CHECKING:
    from drivetrain import TrainContext

__all__ = ["SETTINGS", "JobObserver"]

SETTINGS = f"{OBSERVER}_SETTINGS"
"""The environment variable with the settings of :class:`JobObserver` as JSON."""

_WAIT_S = 60.0
_EPOCH_S = 1_700_000_000.0
_TICK_S = 0.001


class JobObserver(Observer):
    """Writes one line of JSON for each event of a train function to a file of its own.

    The settings are ``directory`` (for these files), ``socket`` (of the program that kills), ``moments`` (a list of
    rank, iteration and number of batches after that report), ``probe`` (whether to record what the process holds),
    ``states`` (the directory for random states), and ``change`` (the experiment: ``"seed"``, ``"clock"``,
    ``"random"`` or empty).
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = json.loads(os.environ[SETTINGS])
        self._rank = 0
        self._iteration = 0
        self._batches = 0
        self._file = -1
        self._pending = {"batch", "step"}
        self._restores = False
        self._has_read = False

    def on_start(self, context: TrainContext, iteration: int) -> None:
        self._rank, self._iteration = context.get_world_rank(), iteration
        name = f"rank{self._rank}-{time.time_ns()}-{os.getpid()}.jsonl"
        self._file = os.open(Path(self._settings["directory"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._write({"event": "start", "iteration": iteration, "size": context.get_world_size()})
        change = self._settings["change"]
        if change == "seed":
            _seed_all()
        elif change == "clock":
            _freeze_clocks()
        self._restores = change == "random" and iteration > 0
        if self._settings["probe"]:
            probe.on_each_step(lambda: self._probe("step"))
        if iteration:
            self._stop_at_moment()  # for a second kill after the same report

    def on_resume(self, iteration: int) -> None:
        self._iteration, self._batches = iteration, 0
        self._write({"event": "start", "iteration": iteration})

    def on_checkpoint_read(self) -> None:
        self._restore_random("report")

    def on_batch(self, batch: Any, number: int, repeated: int) -> None:
        if not self._has_read:
            self._has_read = True
            if probe.shuffles():
                self._write({"event": "shuffle"})
        if self._batches == 0:
            self._restore_random("batch")
        self._probe("batch")
        self._batches += 1
        rows = row_digests(batch)
        self._write({"event": "batch", "number": number, "repeated": repeated, "rows": rows})
        self._stop_at_moment()

    def before_report(self, iteration: int) -> None:
        """Wait for a kill that is to happen before this report.

        The ranks of a job may be far apart. Without this, the others could commit later checkpoints while one rank
        waits for its kill, and the run would resume from one of these, or be over.
        """
        if any(report == self._iteration for _, report, _ in self._settings["moments"]):
            self._wait("gate")

    def on_report(self, iteration: int, has_checkpoint: bool) -> None:
        self._restores = False
        if self._settings["probe"]:
            held = {"carried": probe.carried_variables(), "holds": probe.hold()}
            self._write({"event": "probe", "at": "report", "iteration": iteration, **held})
            self._save_random("report", iteration)
        self._write({"event": "report", "iteration": iteration, "time": time.monotonic()})
        self._iteration, self._batches, self._pending = iteration, 0, {"batch", "step"}
        self._stop_at_moment()

    def on_end(self) -> None:
        os.close(self._file)
        self._file = -1

    def _probe(self, at: str) -> None:
        """Record what the process holds, once for each kind of moment between two reports."""
        if self._settings["probe"] and at in self._pending and self._file >= 0:
            self._pending.discard(at)
            self._save_random(at, self._iteration)
            self._write({"event": "probe", "at": at, "iteration": self._iteration, "holds": probe.hold()})

    def _states(self, at: str, iteration: int) -> Path:
        """Return the file with the random states that this rank had at a moment of the last undisturbed run."""
        return Path(self._settings["states"], f"{self._rank}-{iteration}-{at}.json")

    def _save_random(self, at: str, iteration: int) -> None:
        if not self._settings["moments"]:  # those of a run with kills are not to be restored
            self._states(at, iteration).write_text(json.dumps(probe.save_random()))

    def _restore_random(self, at: str) -> None:
        states = self._states(at, self._iteration)
        if self._restores and states.exists():
            probe.restore_random(json.loads(states.read_text()))

    def _stop_at_moment(self) -> None:
        """At the moment of a kill, wait until the program that kills has decided."""
        if [self._rank, self._iteration, self._batches] not in self._settings["moments"]:
            return
        self._wait("moment")

    def _wait(self, what: str) -> None:
        path = Path(self._settings["socket"])
        with socket.socket(socket.AF_UNIX) as connection, socket_address(path) as address:
            connection.settimeout(_WAIT_S)
            connection.connect(address)
            message = [what, self._rank, self._iteration, self._batches, os.getpid()]
            connection.sendall(json.dumps(message).encode())
            connection.recv(1)

    def _write(self, event: Mapping[str, Any]) -> None:
        os.write(self._file, json.dumps(event).encode() + b"\n")  # at once, because the process may be killed


def _seed_all() -> None:
    """Seed the random numbers of all libraries, and the generators that would be seeded by the operating system."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
        make = numpy.random.default_rng
        numpy.random.default_rng = lambda seed=None: make(0 if seed is None else seed)
        _replace_in_script(make, numpy.random.default_rng)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _freeze_clocks() -> None:
    """Replace the clocks that the user's code reads by one that advances by a millisecond with each call."""
    ticks = 0

    def now(real: Callable[[], float], unit: float, start: float) -> Callable[[], float]:
        def read() -> float:
            nonlocal ticks
            frame = inspect.currentframe()
            frame = frame and frame.f_back
            if frame is None or str(frame.f_globals.get("__name__", "")).startswith("drivetrain"):
                return real()
            ticks += 1
            value = (start + ticks * _TICK_S) * unit
            return int(value) if unit != 1 else value

        return read

    for name in ("time", "monotonic", "perf_counter", "process_time"):
        for suffix, unit in (("", 1), ("_ns", 1_000_000_000)):
            real = getattr(time, name + suffix)
            replaced = now(real, unit, _EPOCH_S if name == "time" else 0.0)
            setattr(time, name + suffix, replaced)
            _replace_in_script(real, replaced)
    real_class = datetime.datetime
    setattr(datetime, "datetime", _FrozenDatetime)  # noqa: B010 - type checkers forbid the assignment of a class
    _replace_in_script(real_class, _FrozenDatetime)


class _FrozenDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _FrozenDatetime:
        return cls.fromtimestamp(_EPOCH_S, tz)

    @classmethod
    def utcnow(cls) -> _FrozenDatetime:
        return cls.fromtimestamp(_EPOCH_S)


def _replace_in_script(real: Any, replaced: Any) -> None:
    """Replace an object that the script has imported by name."""
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if value is real:
            vars(sys.modules["__main__"])[name] = replaced
