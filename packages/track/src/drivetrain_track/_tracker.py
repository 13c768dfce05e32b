"""The base class of trackers, which receive the reports of a run on a separate thread without delaying the training.

The methods of a tracker are called on that thread, one at a time::

    open(run)                       first, repeated until it succeeds
    rewind(iteration)               when the run resumes after an iteration, if the tracker can remove entries
    log(entries)                    for new reports
    save(checkpoint, directory)     for every commit, if the tracker stores checkpoints
    log_failure(failure, retrying)  when an attempt has failed
    close(error)                    at the end of the run

If a method raises, the call is retried after a short pause, and the first exception is shown to the user as a warning.
A call that fails three times is dropped, and a warning at the end of the run states how many reports are missing.

If a tracker is too slow, or hangs, the driver waits for it at the end of the run for a limited time.

A service may refuse one value, for example because of its name. When ``log`` raises, its entries are first logged one
by one, and then value by value. Values that are refused are dropped with one warning, and the others are logged. If no
value is accepted, the service is unreachable, and the call is retried as a whole. So ``log`` should convert all entries
before it sends the first one; otherwise, the service may receive some of them twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import Callback, CheckpointError, ConfigurationError, PluginNotFoundError
from drivetrain.plugin import Report
from drivetrain.plugin.callbacks import as_text, flatten, masked, writable
from drivetrain.plugin.storage import checkpoint_in
from drivetrain_track._entries import Entries, Entry, Ranks

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run, WorkerInfo
    from drivetrain.plugin.callbacks import CommittedCheckpoint

__all__ = ["TrackerCallback", "find_replaced_hooks", "numbers", "parameters"]

_MAX_QUEUED = 100_000
"""The maximum number of queued jobs. If it is reached, for example because the tracker hangs, reports are dropped."""

_MAX_BATCH = 1000
_GATHER_S = 0.1
_IDLE_FACTOR = 4
"""After a batch, a tracker's thread pauses this many times as long as the batch took, to leave time for the driver."""

_MAX_IDLE_S = 1.0
_RETRY_PAUSES_S = (1.0, 5.0)
_MAX_RETRY_PAUSE_S = 60.0
_MAX_REFUSALS = 3
"""After this number of refused values of a metric in succession, its values are not sent any more."""

_MAX_PARAMETER_CHARS = 250
_MAX_PARAMETER_BITS = 63
_SILENT_S = 2.0
_INTERRUPTED_S = 10.0
"""The maximum wait at the end of an interrupted run, because a scheduler may kill the driver soon."""


class TrackerCallback(Callback, ABC):
    """Base class that passes the reports of a run to a tracker on a separate thread; a subclass implements the tracker.

    The tracker cannot delay or end the training: the first exception that it raises is printed as a warning. Subclasses
    override the methods that :mod:`drivetrain_track._tracker` lists, not the hooks of :class:`~drivetrain.Callback`.

    Args:
        ranks: the ranks whose reports are logged: ``"rank0"``; ``"all"``, with the prefix ``rank_<n>/`` for the metrics
            of ranks other than 0; or ``"reduced"``: for each number in an iteration, its mean over the ranks. Metrics
            with a reduction (``report(..., reduce=...)``) are always combined over the ranks.
        drain_timeout_s: maximum seconds that the driver waits at the end of the run for pending reports.

    Raises:
        PluginNotFoundError: the tracker's package is not installed.
        ConfigurationError: an argument is invalid.
    """

    title: ClassVar[str] = ""
    """The name of the tracker in warnings; empty for the name of the class."""

    package: ClassVar[str] = ""
    """The module that the tracker requires; empty for none."""

    extra: ClassVar[str] = ""
    """The extra of drivetrain that installs this module."""

    can_rewind: ClassVar[bool] = False
    """True if the tracker can remove entries; other trackers keep the first entry of each iteration."""

    def __init__(self, *, ranks: Ranks = "rank0", drain_timeout_s: float = 60.0) -> None:
        name = type(self).__name__
        if self.package and importlib.util.find_spec(self.package) is None:
            raise PluginNotFoundError(
                f"[DT-606] {name} requires {self.package}, which is not installed. Run: pip install "
                f'"drivetrain[{self.extra}]"'
            )
        if ranks not in ("rank0", "all", "reduced"):
            raise ConfigurationError(f"[DT-101] {name}(ranks=...): expected 'rank0', 'all' or 'reduced', got {ranks!r}")
        if not drain_timeout_s >= 0:
            raise ConfigurationError(
                f"[DT-101] {name}(drain_timeout_s=...): expected seconds >= 0, got {drain_timeout_s!r}"
            )
        self.ranks = ranks
        self.drain_timeout_s = drain_timeout_s
        self._feed: _Feed | None = None

    @property
    def wants_checkpoints(self) -> bool:
        """True if :meth:`save` should be called."""
        return False

    @abstractmethod
    def open(self, run: Run) -> int | None:
        """Connect to the tracker.

        Returns:
            The last iteration that the tracker has received from an earlier driver of the same run; None if there is
            none. If :attr:`can_rewind` is False, the iterations up to this one are not logged again.
        """

    def rewind(self, iteration: int) -> None:
        """Remove the entries after an iteration; called only if :attr:`can_rewind` is True."""

    @abstractmethod
    def log(self, entries: Sequence[Entry]) -> None:
        """Log new entries. The entries of each rank are in the order of their iterations."""

    def save(self, checkpoint: CommittedCheckpoint, directory: str) -> None:
        """Store the files of a checkpoint; called only if :attr:`wants_checkpoints` is True."""

    def log_failure(self, failure: Failure, retrying: bool) -> None:
        """Log that an attempt of the run has failed.

        Args:
            failure: the root cause.
            retrying: True if another attempt follows.
        """

    def close(self, error: BaseException | None) -> None:
        """End the tracker's run; ``error`` is the exception that ``fit()`` raises, or None."""

    def on_run_start(self, run: Run) -> None:
        """Start the thread."""
        self._feed = _Feed(self, run)
        for message in find_replaced_hooks(self):
            run.console.print(f"{run.name}: {message}", error=True)

    def on_group_start(self, run: Run, attempt: int, workers: Sequence[WorkerInfo]) -> None:
        """Record the number of ranks."""
        if self._feed is not None:
            self._feed.put(partial(self._feed.regroup, len(workers)))

    def on_resume(self, run: Run, iteration: int) -> None:
        """Make the tracker remove the iterations that will be reported again."""
        if self._feed is not None and self.can_rewind:
            self._feed.put(partial(self._feed.rewind, iteration))

    def on_report(self, run: Run, report: Report) -> None:
        """Pass the report to the thread."""
        if self._feed is not None and (report.rank == 0 or self.ranks != "rank0"):
            self._feed.put((time.time(), report))

    def on_checkpoint(self, run: Run, checkpoint: CommittedCheckpoint) -> None:
        """Pass the checkpoint to the thread."""
        if self._feed is not None and self.wants_checkpoints:
            self._feed.put(partial(self._feed.save, checkpoint))

    def on_failure(self, run: Run, failure: Failure, retrying: bool) -> None:
        """Pass the failure to the thread."""
        if self._feed is not None:
            self._feed.put(partial(self.log_failure, failure, retrying))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Wait until the thread has finished, or until the timeout expires."""
        feed, self._feed = self._feed, None
        if feed is not None:
            interrupted = error is not None and not isinstance(error, Exception)
            feed.finish(error, min(self.drain_timeout_s, _INTERRUPTED_S) if interrupted else self.drain_timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the private attributes, which belong to a single run."""
        return {name: None if name.startswith("_") else value for name, value in self.__dict__.items()}


class _Feed:
    """Passes the reports of one run to a tracker: a bounded queue, and a thread that takes reports from the queue."""

    def __init__(self, tracker: TrackerCallback, run: Run) -> None:
        self._tracker = tracker
        self._run = run
        self._warnings = _Warnings(run, tracker.title or type(tracker).__name__)
        self._entries = Entries(tracker.ranks, can_rewind=tracker.can_rewind)
        self._refusals: dict[str, int] = {}  # by metric, the number of refused values in succession
        self._jobs: queue.SimpleQueue[tuple[float, Report] | Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._over = False
        self._queued_reports = 0
        self._logged_reports = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"drivetrain {self._warnings.title}")
        self._thread.start()

    def put(self, job: tuple[float, Report] | Callable[[], None]) -> None:
        """Queue a report or a call; drop a report if the queue is full. Called on the controller's thread."""
        is_report = isinstance(job, tuple)
        self._queued_reports += is_report
        if not is_report or self._jobs.qsize() < _MAX_QUEUED:
            self._jobs.put(job)

    def finish(self, error: BaseException | None, timeout_s: float) -> None:
        """Wait until the queue is empty, and warn about missing reports; called on the controller's thread."""
        self._jobs.put(partial(self._close, error))
        self._ending.set()
        self._thread.join(min(timeout_s, _SILENT_S))
        if self._thread.is_alive() and timeout_s > _SILENT_S:
            self._warnings.show(f"waiting up to {timeout_s:g} s for pending reports")
            self._thread.join(timeout_s - _SILENT_S)
        if self._thread.is_alive():
            self._warnings.show(f"not finished {timeout_s:g} s after the end of the run (drain_timeout_s)")
        if len(self._refusals) > 1:
            self._warnings.show(f"values of these metrics were refused: {', '.join(map(repr, self._refusals))}")
        if missing := self._queued_reports - self._logged_reports:
            self._warnings.show(f"{missing} of {self._queued_reports} reports were not logged")

    def regroup(self, size: int) -> None:
        """Set the number of ranks that report from now on."""
        self._log(self._entries.regroup(size))

    def rewind(self, iteration: int) -> None:
        """Make the tracker remove the iterations after this one, which will be reported again."""
        self._entries.rewind(iteration)
        self._tracker.rewind(iteration)

    def save(self, checkpoint: CommittedCheckpoint) -> None:
        """Pass the files of a checkpoint to the tracker, unless retention has deleted them in the meantime."""
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
                    self._pass_on(list(group))  # type: ignore[arg-type] # groupby has separated the types
                else:
                    for job in group:
                        self._try(job)  # type: ignore[arg-type] # see above
            self._ending.wait(min(_IDLE_FACTOR * (time.monotonic() - began), _MAX_IDLE_S))

    def _open(self) -> bool:
        """Connect to the tracker, retrying until the run ends; return True on success."""
        pause_s = _RETRY_PAUSES_S[0]
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
            pause_s = min(2 * pause_s, _MAX_RETRY_PAUSE_S)

    def _take(self) -> list[tuple[float, Report] | Callable[[], None]]:
        """Wait for a job, and return it with the jobs that arrive shortly after it."""
        jobs = [self._jobs.get()]
        self._ending.wait(_GATHER_S)
        with contextlib.suppress(queue.Empty):
            while len(jobs) < _MAX_BATCH:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _pass_on(self, reports: Sequence[tuple[float, Report]]) -> None:
        entries = [entry for moment, report in reports for entry in self._entries.make(report, moment)]
        if self._try(lambda: self._log(entries)):
            self._logged_reports += len(reports)

    def _log(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        refused = frozenset(self._refusals)
        usual = [_select(entry, entry.metrics.keys() - refused) for entry in entries] if refused else entries
        try:
            self._tracker.log(usual)
        except (Exception, SystemExit) as error:
            self._log_separately(usual, error)
        for entry in entries:
            for name in refused.intersection(entry.metrics):
                self._log_value(entry, name)

    def _log_separately(self, entries: Sequence[Entry], error: BaseException) -> None:
        """Log entries that the tracker does not accept together; raise the error if it does not accept any value."""
        for entry in entries:
            try:
                self._tracker.log([entry])
            except (Exception, SystemExit):
                # The metrics that drivetrain adds come last, and every service accepts them.
                last, *others = reversed(entry.metrics) if entry.metrics else [""]
                if not others or not self._is_accepted(entry, last):
                    raise error from None
                for name in reversed(others):
                    self._log_value(entry, name)

    def _is_accepted(self, entry: Entry, name: str) -> bool:
        try:
            self._tracker.log([_select(entry, {name})])
        except (Exception, SystemExit):
            return False
        return True

    def _log_value(self, entry: Entry, name: str) -> None:
        """Log one value, or drop it if the tracker refuses it."""
        if self._refusals.get(name, 0) >= _MAX_REFUSALS:
            return
        try:
            self._tracker.log([_select(entry, {name})])
        except (Exception, SystemExit) as error:
            if not self._refusals:
                self._warnings.show(f"refused the value of {name!r} ({_one_line(error)}); other values are logged")
            self._refusals[name] = self._refusals.get(name, 0) + 1
        else:
            if name in self._refusals:
                self._refusals[name] = 0

    def _try(self, job: Callable[[], None]) -> bool:
        """Call a job up to three times; return True on success."""
        for pause_s in (*_RETRY_PAUSES_S, 0.0):
            try:
                job()
                return True
            except (Exception, SystemExit) as error:
                self._warnings.show_error(error)
            self._ending.wait(pause_s)
        return False


class _Warnings:
    """Prints the problems of one tracker: every warning, but an exception only if nothing was printed before."""

    def __init__(self, run: Run, title: str) -> None:
        self.title = title
        self._run = run
        self._shown = False

    def show(self, text: str) -> None:
        """Print a warning."""
        self._run.console.print(f"{self._run.name}: {self.title}: {text}", error=True)
        self._shown = True

    def show_error(self, error: BaseException) -> None:
        """Print an exception that the tracker raised, if nothing was printed before."""
        if not self._shown:
            self.show(f"{_one_line(error)}; the run continues, and the tracker is retried")


def _select(entry: Entry, names: Set[str]) -> Entry:
    return entry._replace(metrics={name: value for name, value in entry.metrics.items() if name in names})


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def find_replaced_hooks(tracker: TrackerCallback) -> list[str]:
    """Return a message for each hook that a tracker replaces without calling the hook of :class:`TrackerCallback`."""
    messages = []
    for name in vars(TrackerCallback):
        method = getattr(type(tracker), name)
        if not name.startswith("on_") or method is getattr(TrackerCallback, name):
            continue
        code = getattr(method, "__code__", None)
        if code is not None and not {"super", "TrackerCallback"} & {*code.co_names, *code.co_freevars}:
            messages.append(
                f"{type(tracker).__qualname__}.{name}() replaces the hook with which TrackerCallback passes on what "
                f"happens. Call super().{name}(...) in it, or implement open(), log() and close() only"
            )
    return messages


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics whose values are numbers, as floats."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}


def parameters(run: Run) -> dict[str, Any]:
    """Return the hyperparameters of a run: the flattened config of its train function, and the number of workers.

    Values other than numbers, and integers of more than 64 bits, are converted to text of at most 250 characters. The
    values of secret names, such as ``hf_token``, are ``***``.
    """
    values = flatten(masked({str(name): value for name, value in (run.train_loop_config or {}).items()}))
    values.setdefault("num_workers", run.scaling_config.max_workers)
    return {writable(name): _parameter(value) for name, value in values.items()}


def _parameter(value: Any) -> Any:
    is_number = isinstance(value, (int, float))
    if is_number and not (isinstance(value, int) and value.bit_length() > _MAX_PARAMETER_BITS):
        return value
    return writable(as_text(writable(value) if is_number else value)[:_MAX_PARAMETER_CHARS])
