"""The base of trackers: what a run reports goes to them on a thread of their own, which no training waits for.

A tracker's methods are called on that thread, one at a time::

    open(run)                       before anything else, again and again until it succeeds
    rewind(iteration)               when the run goes on after an iteration, if the tracker can take things back
    log(entries)                    for what was reported meanwhile
    save(checkpoint, directory)     for every commit, if the tracker wants checkpoints
    close(error)                    at the end of the run

Where one raises, the user is told once, and it is tried again a little later; what fails three times is left out, and
the end says how much that was. A tracker that cannot do what it was given fast enough, or not at all, has the driver
wait at the end of the run for a while, and no longer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain._base.metrics import flatten
from drivetrain._hooks.callback import Callback, Report
from drivetrain._storage.checkpoint import checkpoint_in
from drivetrain.errors import CheckpointError, ConfigurationError, PluginNotFoundError
from drivetrain.loggers.entries import Entries, Entry, Ranks

if TYPE_CHECKING:
    from drivetrain._hooks.context import Run, WorkerInfo
    from drivetrain._storage.committed import CommittedCheckpoint

__all__ = ["TrackerCallback", "numbers", "parameters"]

_MOST_WAITING = 100_000
"""Jobs; of a tracker that hangs, what comes after these is left out."""

_MOST_AT_ONCE = 1000
_GATHER_S = 0.1
_REST = 4
"""A tracker rests so many times as long as it has worked, so that it takes the driver's thread little of its time."""

_LONGEST_REST_S = 1.0
_PAUSES_S = (1.0, 5.0)
_LONGEST_PAUSE_S = 60.0
_SILENT_S = 2.0
_INTERRUPTED_S = 10.0
"""The longest wait at the end of a run whose driver was asked to end, which somebody else may do before long."""


class TrackerCallback(Callback):
    """Passes on what a run reports, on a thread of its own; a subclass says how.

    Nothing that the tracker does holds up the training or ends it: what it raises is told once. Hooks of
    :class:`~drivetrain.Callback` are not for subclasses here; :mod:`drivetrain.loggers.tracker` says when their own
    methods are called.

    Args:
        ranks: whose reports: ``"rank0"``; ``"all"``, those of other ranks with ``rank_<n>/`` in front of the names; or
            ``"reduced"``, the mean over the ranks of every number they report for an iteration. Values that a report
            asks to be combined (``report(..., reduce=...)``) are combined in any case.
        drain_timeout_s: seconds that the driver waits at the end of the run for what has not been passed on.

    Raises:
        PluginNotFoundError: the tracker's package is not installed.
        ConfigurationError: an argument is not one of the values above.
    """

    title: ClassVar[str] = ""
    """What warnings call the tracker; empty for the name of the class."""

    package: ClassVar[str] = ""
    """The module that has to be installed; empty for none."""

    extra: ClassVar[str] = ""
    """The extra of drivetrain that installs it."""

    can_rewind: ClassVar[bool] = False
    """Whether the tracker can forget what came after an iteration. Of others, the first value of each step stays."""

    def __init__(self, *, ranks: Ranks = "rank0", drain_timeout_s: float = 60.0) -> None:
        name = type(self).__name__
        if self.package and importlib.util.find_spec(self.package) is None:
            raise PluginNotFoundError(
                f"{name}: expected the package {self.package}, found none in this environment. "
                f'Run: pip install "drivetrain[{self.extra}]"'
            )
        if ranks not in ("rank0", "all", "reduced"):
            raise ConfigurationError(f"{name}(ranks=...): expected 'rank0', 'all' or 'reduced', got {ranks!r}")
        if not drain_timeout_s >= 0:
            raise ConfigurationError(f"{name}(drain_timeout_s=...): expected seconds, got {drain_timeout_s!r}")
        self.ranks = ranks
        self.drain_timeout_s = drain_timeout_s
        self._feed: _Feed | None = None

    @property
    def wants_checkpoints(self) -> bool:
        """Whether :meth:`save` is to be called."""
        return False

    def open(self, run: Run) -> int | None:
        """Connects to the tracker.

        Returns:
            The last iteration that it has of an earlier part of the same run, if it knows; those up to there are not
            logged again.
        """
        raise NotImplementedError

    def rewind(self, iteration: int) -> None:
        """Forgets what came after an iteration; called if :attr:`can_rewind`."""

    def log(self, entries: Sequence[Entry]) -> None:
        """Logs what was reported, in the order of its iterations for each rank."""
        raise NotImplementedError

    def save(self, checkpoint: CommittedCheckpoint, directory: str) -> None:
        """Stores the files of a checkpoint; called if :attr:`wants_checkpoints`."""

    def close(self, error: BaseException | None) -> None:
        """Ends the tracker's run; ``error`` is what ``fit()`` raises, if it does."""

    def on_run_start(self, run: Run) -> None:
        """Starts the thread."""
        self._feed = _Feed(self, run)

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Notes how many ranks there are."""
        if self._feed is not None:
            self._feed.put(partial(self._feed.regroup, len(workers)))

    def on_resume(self, run: Run, iteration: int) -> None:
        """Has the tracker forget what will be reported again."""
        if self._feed is not None and self.can_rewind:
            self._feed.put(partial(self._feed.rewind, iteration))

    def on_report(self, run: Run, report: Report) -> None:
        """Passes it to the thread."""
        if self._feed is not None and (report.rank == 0 or self.ranks != "rank0"):
            self._feed.put((time.time(), report))

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Passes it to the thread."""
        if self._feed is not None and self.wants_checkpoints:
            self._feed.put(partial(self._feed.save, checkpoint))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Waits until the thread is done, or its time is over."""
        feed, self._feed = self._feed, None
        if feed is not None:
            asked_to_end = error is not None and not isinstance(error, Exception)
            feed.finish(error, min(self.drain_timeout_s, _INTERRUPTED_S) if asked_to_end else self.drain_timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is of one run: every attribute with an underscore."""
        return {name: None if name.startswith("_") else value for name, value in self.__dict__.items()}


class _Feed:
    """Passes on one run to a tracker: a bounded queue, and the thread that empties it."""

    def __init__(self, tracker: TrackerCallback, run: Run) -> None:
        self._tracker = tracker
        self._run = run
        self._warnings = _Warnings(run, tracker.title or type(tracker).__name__)
        self._entries = Entries(tracker.ranks, can_rewind=tracker.can_rewind)
        self._jobs: queue.SimpleQueue[tuple[float, Report] | Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._over = False
        self._given = 0
        self._done = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"drivetrain {self._warnings.title}")
        self._thread.start()

    def put(self, job: tuple[float, Report] | Callable[[], None]) -> None:
        """Queues a report or a call; called on the controller's thread."""
        is_report = isinstance(job, tuple)
        self._given += is_report
        if not is_report or self._jobs.qsize() < _MOST_WAITING:
            self._jobs.put(job)

    def finish(self, error: BaseException | None, timeout_s: float) -> None:
        """Waits until the queue is empty, and warns of what is missing; called on the controller's thread."""
        self._jobs.put(partial(self._close, error))
        self._ending.set()
        self._thread.join(min(timeout_s, _SILENT_S))
        if self._thread.is_alive() and timeout_s > _SILENT_S:
            self._warnings.show(f"waiting up to {timeout_s:g} s for what is not there yet")
            self._thread.join(timeout_s - _SILENT_S)
        if self._thread.is_alive():
            self._warnings.show(f"was not done {timeout_s:g} s after the end of the run (drain_timeout_s)")
        if missing := self._given - self._done:
            self._warnings.show(f"{missing} of {self._given} reports are not there")

    def regroup(self, size: int) -> None:
        """Notes the number of ranks that report from now on."""
        self._log(self._entries.regroup(size))

    def rewind(self, iteration: int) -> None:
        """Makes the tracker forget the iterations that are reported again."""
        self._entries.rewind(iteration)
        self._tracker.rewind(iteration)

    def save(self, checkpoint: CommittedCheckpoint) -> None:
        """Passes on a checkpoint's files, unless retention has deleted them meanwhile."""
        with (
            contextlib.suppress(CheckpointError),
            checkpoint_in(self._run.storage, checkpoint.name).as_directory() as directory,
        ):
            self._tracker.save(checkpoint, directory)

    def _close(self, error: BaseException | None) -> None:
        self._over = True
        self._log(self._entries.flush())
        self._tracker.close(error)

    def _work(self) -> None:
        self._over = not self._open()
        while not self._over:
            jobs = self._take()
            began = time.monotonic()
            for is_report, group in itertools.groupby(jobs, lambda job: isinstance(job, tuple)):
                if is_report:
                    self._pass_on(list(group))  # type: ignore[arg-type] # groupby has sorted them out
                else:
                    for job in group:
                        self._try(job)  # type: ignore[arg-type] # likewise
            self._ending.wait(min(_REST * (time.monotonic() - began), _LONGEST_REST_S))

    def _open(self) -> bool:
        """Connects, with any number of attempts until the run ends; returns whether it succeeded."""
        pause_s = _PAUSES_S[0]
        while True:
            is_last = self._ending.is_set()
            try:
                self._entries.skip(self._tracker.open(self._run) or 0)
                return True
            except (Exception, SystemExit) as error:
                self._warnings.show_error(error)
            if is_last:
                return False
            self._ending.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self) -> list[tuple[float, Report] | Callable[[], None]]:
        """Waits for jobs, and takes all that come at about the same time."""
        jobs = [self._jobs.get()]
        self._ending.wait(_GATHER_S)
        with contextlib.suppress(queue.Empty):
            while len(jobs) < _MOST_AT_ONCE:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _pass_on(self, reports: Sequence[tuple[float, Report]]) -> None:
        entries = [entry for moment, report in reports for entry in self._entries.make(report, moment)]
        if self._try(lambda: self._log(entries)):
            self._done += len(reports)

    def _log(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._tracker.log(entries)

    def _try(self, job: Callable[[], None]) -> bool:
        """Calls a job up to three times; returns whether it succeeded."""
        for pause_s in (*_PAUSES_S, 0.0):
            try:
                job()
                return True
            except (Exception, SystemExit) as error:
                self._warnings.show_error(error)
            self._ending.wait(pause_s)
        return False


class _Warnings:
    """Prints the problems of one tracker; of its errors only the first, and none after another warning."""

    def __init__(self, run: Run, title: str) -> None:
        self.title = title
        self._run = run
        self._shown = False

    def show(self, text: str) -> None:
        """Prints a warning."""
        self._run.console.print(f"{self._run.name}: {self.title}: {text}", error=True)
        self._shown = True

    def show_error(self, error: BaseException) -> None:
        """Prints an error of the tracker, if it is the first problem."""
        if not self._shown:
            said = str(error).strip().partition("\n")[0]
            self.show(f"{type(error).__name__}: {said}; the run goes on, and this is tried again")


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}


def parameters(run: Run) -> dict[str, Any]:
    """What a run is to be found and compared by: its train function's config, flattened, and how many workers it has.

    Values other than numbers and strings are given as text of at most 250 characters.
    """
    values = flatten({str(name): value for name, value in (run.train_loop_config or {}).items()})
    values.setdefault("num_workers", run.scaling_config.max_workers)
    plain = (bool, int, float)
    return {name: value if isinstance(value, plain) else str(value)[:250] for name, value in values.items()}
