"""The functions that a train function calls while it runs, such as ``report``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, overload

from drivetrain._base.closest import closest
from drivetrain._base.mesh import DataPosition
from drivetrain._hooks.context import TrainContext
from drivetrain._hooks.dataset import DatasetShard, WorkerShard
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in
from drivetrain._storage.duplicates import describe_ranks
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.layout import is_reserved
from drivetrain._wire.commands import CommitState, StoreApart
from drivetrain._wire.events import (
    CheckpointRanks,
    CommitOverdue,
    Event,
    FilesAnnounced,
    FilesClaimed,
    PreemptionInfo,
    Reported,
    ReportNumber,
    Uploaded,
)
from drivetrain._wire.task import TrainTask
from drivetrain._worker.metrics import MetricValue, Reduction, check_reductions, plain_metrics
from drivetrain._worker.observer import current_observer
from drivetrain._worker.preemption import Preemption
from drivetrain._worker.responses import Responses
from drivetrain._worker.shared import open_shared_directory
from drivetrain._worker.uploads import UploadRequest, Uploads
from drivetrain.config import CheckpointUploadMode
from drivetrain.errors import SessionError, StorageError, WaitTimeoutError

__all__ = [
    "Outbox",
    "Session",
    "activate",
    "active_session",
    "current_session",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "heartbeat",
    "report",
    "resume_later",
    "shared_checkpoint",
]

_EXPLANATION_S = 10.0
"""The maximum time in seconds for the driver to respond which ranks a checkpoint waits for."""

_DIRECTORY_NAME = re.compile(r"(?!checkpoint_\d+$|result.*\.json$)[^./\\\x00-\x1f][^/\\\x00-\x1f]*")


class Outbox:
    """Sends the events of a rank to the driver.

    Args:
        emit: sends an event; blocks while the driver is too far behind. Worker processes pass
            :meth:`Channel.send_event() <drivetrain._wire.frames.Channel.send_event>`, and
            :class:`drivetrain._runtimes.connected.Connections` receives the event in the driver.
        from_threads: True if ``emit`` may be called on any thread. If False, the events of other threads than the train
            function's are kept, and sent with the next report.

    Attributes:
        heartbeats: the number of calls of :func:`heartbeat`. Another thread sends the progress to the driver.
        responses: the responses to events that request one.
    """

    def __init__(self, emit: Callable[[Event], None], *, from_threads: bool = True) -> None:
        self.emit = emit
        self.heartbeats = 0
        self.responses = Responses()
        self._from_threads = from_threads
        self._waiting: deque[Event] = deque()

    @property
    def keeps_events(self) -> bool:
        """True if the events of other threads are kept until :meth:`flush`."""
        return not self._from_threads

    def emit_from_thread(self, event: Event) -> None:
        """Send an event, or keep it for :meth:`flush`. Any thread may call it."""
        if self._from_threads:
            self.emit(event)
        else:
            self._waiting.append(event)

    def flush(self) -> None:
        """Send the kept events."""
        while self._waiting:
            self.emit(self._waiting.popleft())


class _OwnedLock:
    """A lock that knows whether the current thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may run before the owner is recorded
        self._owner: int | None = None

    @property
    def is_own(self) -> bool:
        """True if the current thread holds the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self._owner = None
        self._lock.release()


class Session:
    """The state of one run of the train function. Functions such as :func:`report` use it.

    Args:
        task: contains the checkpoint to resume from, the datasets, the options, and the number of the last report.
        context: the return value of :func:`get_context`.
        outbox: sends events to the driver.
        preemption: returns preemption notices to the train function.
        on_checkpoint: called after a report with a checkpoint.
    """

    def __init__(
        self,
        task: TrainTask,
        context: TrainContext,
        outbox: Outbox,
        preemption: Preemption,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        self.context = context
        self.checkpoint = task.checkpoint
        self.preemption = preemption
        self._task = task
        self._on_checkpoint = on_checkpoint
        self._outbox = outbox
        self._number, self._iteration = task.last_report  # plain integers are faster than a ReportNumber
        self._last_stored = 0
        claim = None if context.storage.is_local or context.world_size == 1 else self._claim_files
        self._uploads = Uploads(context.storage, context.get_world_rank(), context.checkpoint_config, claim)
        self._process = os.getpid()
        self._lock = _OwnedLock()

    @property
    def has_reported(self) -> bool:
        """True if the train function has reported in this attempt."""
        return (self._number, self._iteration) != self._task.last_report

    def heartbeat(self) -> None:
        """Record that the rank makes progress."""
        self._outbox.heartbeats += 1

    @property
    def data_position(self) -> DataPosition | None:
        """The position of this rank in the datasets that are split; None if the user's own code splits them."""
        return self._task.data_position

    def dataset_shard(self, name: str | None) -> Any:
        """Return one of this rank's shards. The name may be None if there is only one dataset."""
        if name is None and len(self._task.datasets) == 1:
            return next(iter(self._task.datasets.values()))
        if name is None or name not in self._task.datasets:
            names = ", ".join(map(repr, self._task.datasets)) or "no datasets. Pass datasets={...} to the trainer"
            raise SessionError(
                f"[DT-806] get_dataset_shard(): expected the name of a dataset, got {name!r}; the run has {names}"
            )
        return self._task.datasets[name]

    def resumable_shards(self) -> dict[str, DatasetShard]:
        """Return this rank's shards whose position can be saved, by name."""
        return {name: shard for name, shard in self._task.datasets.items() if isinstance(shard, DatasetShard)}

    def report(
        self,
        metrics: Mapping[str, Any],
        upload: UploadRequest | None = None,
        reduce: Mapping[str, str] | None = None,
        *,
        quiet: bool = False,
        wait_s: float | None = None,
    ) -> None:
        """Upload the checkpoint, or start its upload in the background, and send the report to the driver.

        Args:
            metrics: plain values by name.
            upload: the checkpoint to upload; None for a report without a checkpoint.
            reduce: the reductions over the ranks, by the name of the metric.
            quiet: True if the report exists only for its checkpoint. It is not an iteration, callbacks do not receive
                it, and its metrics are only used to compare checkpoints.
            wait_s: maximum number of seconds to wait until the checkpoint is committed; None not to wait.
        """
        self._require_own_process("report")
        values = plain_metrics(metrics)
        if reduce is not None:
            check_reductions(reduce, values)
        self._require_no_report("report")
        self.preemption.note_report()
        _announce_report(self._iteration + 1, quiet=quiet)
        with self._lock:
            self._uploads.raise_failure()  # a background upload that failed is reported here at the latest
            self._outbox.flush()
            number, iteration = self._number + 1, self._iteration + (not quiet)
            rank = self.context.worker.rank
            if upload is None:
                self._uploads.require_no_sharing()
                self._number, self._iteration = number, iteration
                now, clock = time.time(), time.monotonic()
                event = Reported(rank, number, iteration, now, values, None, reduce, quiet=quiet, clock=clock)
                self._outbox.emit(event)
                _show_report(iteration, has_checkpoint=False, quiet=quiet)
                return
            self._require_run()  # after a loss of the network, another driver may have taken over the run
            if self.context.world_size > 1:  # storing may be slow, and the driver must not commit without this rank
                self._outbox.emit(FilesAnnounced(rank, number))
            self._fill_empty(upload.checkpoint)
            self._add_positions(upload.checkpoint)
            prepared = self._uploads.prepare(upload, number)
            stored = checkpoint_in(self.context.storage, prepared.directory)
            self._number, self._iteration = number, iteration  # not before: a report that failed uses no number
            event = Reported(
                rank,
                number,
                iteration,
                time.time(),
                values,
                prepared.files,
                reduce,
                directory=prepared.directory,
                quiet=quiet,
                checkpoint_ranks=prepared.ranks,
                awaited=wait_s is not None,
                clock=time.monotonic(),
            )
            self._outbox.emit(event)  # before the upload begins, whose end is another event
            if prepared.pending is None:
                self._note_stored(number, stored)
            else:
                self._uploads.begin(prepared, lambda files: self._on_uploaded(number, stored, files))
            self._on_checkpoint()
        if wait_s is not None:  # without the lock, because the thread that receives the response may need it
            self._await_commit(number, prepared.directory, wait_s)
        _show_report(iteration, has_checkpoint=True, quiet=quiet)

    def _await_commit(self, number: int, directory: str, wait_s: float) -> None:
        """Wait until a checkpoint is committed.

        Raises:
            WaitTimeoutError: it is not committed in time.
        """
        if self._outbox.keeps_events:  # nothing else delivers the end of a background upload
            self._uploads.drain()
            self._outbox.flush()
        state: CommitState | None = self._outbox.responses.take(number, wait_s)
        if state is None:
            self._outbox.emit(CommitOverdue(self.context.worker.rank, number))
            state = self._outbox.responses.take(number, _EXPLANATION_S)
        if state is None or not state.is_committed:
            missing = [] if state is None else list(state.missing)
            raise WaitTimeoutError(
                f"[DT-423] report(wait=...): expected {directory} to be committed within {wait_s:g} s, but it still "
                f"waits for {describe_ranks(missing) if missing else 'the driver'}. Make these ranks call report() as "
                "often, or declare the ranks that save the checkpoint with report(..., checkpoint_ranks=[...])",
                ranks=missing,
            )

    def _claim_files(self, directory: str, names: Collection[str]) -> Collection[str]:
        """Return the files of a checkpoint to store apart, because another rank stores files of the same names."""
        self._outbox.emit_from_thread(FilesClaimed(self.context.worker.rank, directory, tuple(names)))
        limit_s = self.context.storage.limits.deadline_s
        response: StoreApart | None = self._outbox.responses.take(directory, limit_s)
        if response is None:
            raise StorageError(f"[DT-405] the driver did not respond within {limit_s:g} s (SyncConfig.sync_timeout)")
        return response.names

    @contextlib.contextmanager
    def shared_checkpoint(self) -> Iterator[Checkpoint]:
        """Create the directory of a shared checkpoint for the duration of a ``with`` block."""
        self._require_own_process("shared_checkpoint")
        self._require_no_report("shared_checkpoint")
        self._uploads.require_no_sharing()
        self._require_run()
        number = self._number + 1
        directory = open_shared_directory(self.context, self._task.options.driver_count, number)
        with self._uploads.share(directory) as sharing:
            try:
                yield directory.checkpoint
            finally:
                if not sharing.is_reported:  # no other checkpoint may use the directory, which may contain files
                    with self._lock:
                        self._number = max(self._number, number)
        if not sharing.is_reported:
            raise SessionError(
                "[DT-810] shared_checkpoint(): expected report(..., checkpoint=checkpoint) in the with block, on every "
                "rank, got none. Move the report into the block"
            )

    def _require_own_process(self, function: str) -> None:
        if os.getpid() != self._process:
            raise SessionError(
                f"[DT-804] {function}(): expected a call in the worker process, got one in a child process, such as a "
                f"data loader's worker. Call {function}() from the train function"
            )

    def _require_no_report(self, function: str) -> None:
        """Check that this thread is not inside ``report()``: it would wait for itself."""
        if self._lock.is_own:
            raise SessionError(
                f"[DT-811] {function}(): expected a call outside of report(), got one inside it, such as from a signal "
                f"handler. Set a flag in the handler, and call {function}() in the loop of the train function"
            )

    def _require_run(self) -> None:
        self.context.storage.require_run(self.context.run_id, self._task.options.driver_count)

    def _fill_empty(self, checkpoint: Checkpoint) -> None:
        """Add the trainer's metadata to a checkpoint without files: then the metadata is all that it consists of."""
        metadata = self.context.get_metadata()
        if metadata and checkpoint.is_local and os.path.isdir(checkpoint.path) and not os.listdir(checkpoint.path):
            checkpoint.set_metadata(metadata)

    def _add_positions(self, checkpoint: Checkpoint) -> None:
        """Add to a checkpoint the position of every dataset whose ``state_dict()`` was called since the last report.

        Every rank adds the same positions, so that ranks that report the same metadata still do so afterwards.
        """
        states = {name: shard.take_state() for name, shard in self.resumable_shards().items()}
        positions = {name: state for name, state in states.items() if state is not None}
        shared = self._uploads.shared_directory(checkpoint)
        if positions and (shared is None or shared.adds_positions):
            checkpoint.update_metadata({POSITIONS: positions})

    def finish(self) -> None:
        """Wait for the background uploads.

        Raises:
            StorageError: an upload failed.
        """
        self._uploads.drain()
        self._uploads.delete_abandoned()
        self._outbox.flush()

    def abandon(self, error: BaseException) -> None:
        """End the session of a train function that raised.

        In a worker process, each background upload sends its event from its own thread. In the driver's process, the
        events are kept until the next call from the train function's thread. After an exception there is no such call,
        so this method waits for the uploads and sends their events.
        """
        if self._outbox.keeps_events and isinstance(error, Exception):
            with contextlib.suppress(StorageError):
                self._uploads.drain()
            self._outbox.flush()

    def renumber(self, last_report: ReportNumber) -> None:
        """Set the report number and the iteration from which to continue counting. Called on another thread."""
        with self._lock:
            self._number, self._iteration = last_report
        if (observer := current_observer()) is not None:
            observer.on_resume(last_report.iteration)

    def _note_stored(self, number: int, stored: Checkpoint) -> None:
        if number > self._last_stored:  # an earlier upload may take longer than a later one
            self._last_stored = number
            self.checkpoint = stored

    def _on_uploaded(self, number: int, stored: Checkpoint, files: dict[str, StoredFile]) -> None:
        self._note_stored(number, stored)
        self._outbox.emit_from_thread(Uploaded(self.context.get_world_rank(), number, files))


POSITIONS = "dataset_positions"
"""The key in a checkpoint's metadata for the positions that the datasets had when the checkpoint was reported."""

_active: Session | None = None


@contextlib.contextmanager
def activate(session: Session) -> Iterator[None]:
    """Make a session the active session of this process during a ``with`` block."""
    global _active
    if _active is not None:
        raise SessionError(
            "[DT-807] fit(): expected no running train function in this process, got a call from inside one. Call "
            "fit() outside of the train function"
        )
    _active = session
    try:
        yield
    finally:
        _active = None


@overload
def report(
    metrics: Mapping[str, Any] | None,
    checkpoint: Checkpoint | None = None,
    *,
    reduce: Mapping[str, Reduction] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | Literal["sync", "async", "none"] = CheckpointUploadMode.SYNC,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    delete_local_checkpoint_after_upload: bool = False,
    checkpoint_ranks: Iterable[int] | Literal["all"] | None = None,
    wait: bool | float = False,
) -> None: ...


@overload
def report(
    *,
    checkpoint: Checkpoint | None = None,
    reduce: Mapping[str, Reduction] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | Literal["sync", "async", "none"] = CheckpointUploadMode.SYNC,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    delete_local_checkpoint_after_upload: bool = False,
    checkpoint_ranks: Iterable[int] | Literal["all"] | None = None,
    wait: bool | float = False,
    **metrics_by_name: MetricValue,
) -> None: ...


def report(
    metrics: Any = None,
    checkpoint: Checkpoint | None = None,
    *,
    reduce: Mapping[str, Reduction] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | Literal["sync", "async", "none"] = CheckpointUploadMode.SYNC,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    delete_local_checkpoint_after_upload: bool = False,
    checkpoint_ranks: Iterable[int] | Literal["all"] | None = None,
    wait: bool | float = False,
    **metrics_by_name: MetricValue,
) -> None:
    """Report metrics and optionally a checkpoint from a train function.

    Any rank may report at any time; the call is not a barrier. Metrics are sent to the driver at once, so they are kept
    even if the process dies right after the call. The files of a checkpoint are copied to the run directory. The
    checkpoint is committed once every rank that contributes to it has stored its files. Pass ``checkpoint_ranks`` if
    several ranks save at different times.

    Args:
        metrics: plain values (numbers, strings, booleans, None, and lists and mappings of them) by name. A tensor or
            array with one element is converted to a number.
        checkpoint: the checkpoint, which is a directory of files to keep. If several ranks report files with the same
            report number, the files are merged into one checkpoint.
        reduce: how to combine metrics over all ranks: a mapping from the name of a metric to ``"mean"``, ``"sum"``,
            ``"min"`` or ``"max"``. The run's metrics then contain the combined value.
        checkpoint_dir_name: the name of the checkpoint's directory in the run directory. The name must be new in the
            run and the same on all ranks. None for ``checkpoint_<report number>``.
        checkpoint_upload_mode: a :class:`~drivetrain.CheckpointUploadMode` or its value. ``"sync"`` stores the files
            before the call returns. ``"async"`` stores them in the background, unaffected by later changes in the
            directory; an error is raised by the next report or at the end of the train function. ``"none"`` stores
            nothing: the checkpoint must already be in the run directory.
        checkpoint_upload_fn: a function that stores the checkpoint instead of drivetrain. It is called with the
            checkpoint and the name of the directory to create in the run directory, and returns the stored checkpoint.
            With ``"async"`` it is called in the background, so the local directory must exist until the function has
            returned.
        delete_local_checkpoint_after_upload: delete the local directory after the upload. If the directory is on the
            same filesystem as the storage, its files are moved instead of copied.
        checkpoint_ranks: the ranks whose files the checkpoint consists of, or ``"all"``. It is committed once all of
            them have reported it, and never without one. None to decide by the checkpoint before: the ranks that
            contributed to it are awaited until they have made as many reports. A rank that did not is not awaited, and
            before the first checkpoint, a rank is awaited for less than a second.
        wait: True to return only once the checkpoint is committed, so that it is kept whatever happens next. This waits
            for the other ranks that contribute, for at most ``SyncConfig.sync_timeout`` seconds; a number waits for at
            most that many seconds instead. Without a checkpoint, it has no effect.
        **metrics_by_name: the metrics, instead of a mapping: ``report(loss=0.1)``.

    Raises:
        SessionError: the call is outside a train function or inside another ``report()``, or has an invalid argument or
            a metric that is not a plain value; the message names the metric.
        CheckpointError: the checkpoint's directory does not exist or contains no files, or its name is in use.
        StorageError: the checkpoint could not be stored, or the background upload of an earlier checkpoint failed.
        WaitTimeoutError: with ``wait``, the checkpoint was not committed in time; the message names the missing ranks.

    Example:
        Report the accuracy of rank 0, and the mean loss over all ranks::

            drivetrain.report({"loss": loss, "accuracy": accuracy}, reduce={"loss": "mean"})
    """
    session = active_session("report")
    _check_options(reduce, checkpoint_upload_fn, delete_local_checkpoint_after_upload)
    if metrics is None:
        for metric, value in metrics_by_name.items():
            _check_keyword(metric, value)
        metrics = metrics_by_name
    elif metrics_by_name:
        raise SessionError(
            "[DT-805] report(): expected metrics as one mapping or as keywords, got a mapping and the keywords "
            f"{', '.join(metrics_by_name)}. If these are metrics, add them to the mapping"
        )
    wait_s = _seconds_to_wait(wait, session)
    if checkpoint is None:
        session.report(metrics, None, reduce)
        return
    if not isinstance(checkpoint, Checkpoint):
        raise SessionError(
            f"[DT-805] report(checkpoint=...): expected a Checkpoint, got {checkpoint!r}. {_advice(checkpoint)}"
        )
    try:
        mode = CheckpointUploadMode(checkpoint_upload_mode)
    except ValueError:
        raise SessionError(
            "[DT-805] report(checkpoint_upload_mode=...): expected 'sync', 'async' or 'none', got "
            f"{checkpoint_upload_mode!r}"
        ) from None
    name = checkpoint_dir_name
    if name is not None and not isinstance(name, str):
        raise _wrong_option("checkpoint_dir_name", "a string", name)
    if name is not None and (is_reserved(name) or not _DIRECTORY_NAME.fullmatch(name)):
        raise SessionError(
            "[DT-411] report(checkpoint_dir_name=...): expected a directory name that does not begin with a dot, has "
            f"no slashes or control characters, and is not reserved by drivetrain, got {name!r}"
        )
    request = UploadRequest(
        checkpoint=checkpoint,
        directory=name,
        mode=mode,
        function=checkpoint_upload_fn,
        delete_local=delete_local_checkpoint_after_upload,
        ranks=_checked_ranks(checkpoint_ranks, session.context),
    )
    session.report(metrics, request, reduce, wait_s=wait_s)


_OPTIONS = tuple(name for name, each in inspect.signature(report).parameters.items() if each.kind != each.VAR_KEYWORD)
_SIMILARITY = 0.85


def _seconds_to_wait(wait: object, session: Session) -> float | None:
    """Return the seconds that the argument ``wait`` of :func:`report` stands for; None not to wait."""
    if isinstance(wait, bool):
        return session.context.storage.limits.deadline_s if wait else None
    if isinstance(wait, (int, float)) and wait > 0:
        return float(wait)
    raise _wrong_option("wait", "True, False or a positive number of seconds", wait)


def _check_options(reduce: object, upload_fn: object, delete_local: object) -> None:
    if reduce is not None and not isinstance(reduce, Mapping):
        raise _wrong_option("reduce", "a mapping from metrics to reductions", reduce)
    if upload_fn is not None and not callable(upload_fn):
        raise _wrong_option("checkpoint_upload_fn", "a function", upload_fn)
    if not isinstance(delete_local, bool):
        raise _wrong_option("delete_local_checkpoint_after_upload", "True or False", delete_local)


def _wrong_option(name: str, expected: str, value: object) -> SessionError:
    return SessionError(
        f"[DT-805] report({name}=...): expected {expected}, got {value!r}. If it is a metric, use "
        f"report({{{name!r}: ...}})"
    )


def _check_keyword(name: str, value: object) -> None:
    """Raise an error if the keyword of a metric is probably meant as an option."""
    option = "checkpoint" if isinstance(value, Checkpoint) else _similar_option(name)
    if option is not None:
        raise SessionError(
            f"[DT-805] report({name}=...): expected a metric, or an option such as {option}, got {value!r}. If it is a "
            f"metric, use report({{{name!r}: ...}})"
        )


@functools.cache
def _similar_option(name: str) -> str | None:
    options = [option for option in _OPTIONS if option[:2] == name[:2]]
    return closest(name, options, similarity=_SIMILARITY) if options else None


def _checked_ranks(ranks: object, context: TrainContext) -> CheckpointRanks:
    """Return the argument ``checkpoint_ranks`` of :func:`report` as it is sent to the driver."""
    if ranks is None or ranks == "all":
        return None if ranks is None else "all"
    found = tuple(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else ()
    size, own = context.get_world_size(), context.get_world_rank()
    if own not in found or not all(isinstance(rank, int) and 0 <= rank < size for rank in found):
        raise SessionError(
            f"[DT-805] report(checkpoint_ranks=...): expected 'all' or a list of ranks from 0 to {size - 1} that "
            f"contains this rank, {own}, got {ranks!r}. If it is a metric, pass the metrics as a mapping"
        )
    return tuple(sorted(set(found)))


def _advice(value: object) -> str:
    """Return how to create the checkpoint to report, for an error about a value that is none."""
    if isinstance(value, contextlib.AbstractContextManager):
        return "Use Checkpoint.from_directory(path), or write `with shared_checkpoint() as checkpoint:`"
    return "Use Checkpoint.from_directory(path)"


@contextlib.contextmanager
def shared_checkpoint() -> Iterator[Checkpoint]:
    """Provide a directory in which all ranks save one checkpoint together, for the duration of a ``with`` block.

    For frameworks whose ranks save collectively, such as Orbax and ``torch.distributed.checkpoint``. Every rank enters
    the block, passes ``checkpoint.path`` to the framework, and reports the checkpoint once the framework has written
    this rank's files. The checkpoint is committed when every rank has reported it.

    If all workers can reach the run directory as a local path, ``checkpoint.path`` is in the run directory, and nothing
    is copied. Otherwise, it is a temporary directory that all workers of a node share. When the last of them reports
    the checkpoint, it uploads the directory, and the files of all nodes are merged.

    The next report of every rank must be that of the checkpoint, inside the block. Its upload mode can be ``"sync"``
    or ``"async"``. Leaving the block by an exception abandons the checkpoint. Its directory is deleted later, but never
    used for another checkpoint.

    Yields:
        The checkpoint to report. Its ``path`` is the directory, which is the same for all workers of a node.

    Raises:
        SessionError: the call is outside a train function or inside another block, or the block is left without a
            report of the checkpoint.
        StorageError: the directory cannot be created.

    Example:
        In a train function, on every rank::

            with drivetrain.shared_checkpoint() as checkpoint:
                torch.distributed.checkpoint.save(state, checkpoint_id=checkpoint.path)
                drivetrain.report({"loss": loss}, checkpoint=checkpoint)
    """
    with active_session("shared_checkpoint").shared_checkpoint() as checkpoint:
        yield checkpoint


def get_checkpoint() -> Checkpoint | None:
    """Return the last checkpoint that this rank reported, or else the checkpoint from which the attempt resumed.

    Returns:
        The checkpoint; None if the run started from the beginning and this rank has not reported a checkpoint.

    Raises:
        SessionError: the call is outside a train function.
    """
    checkpoint = active_session("get_checkpoint").checkpoint
    if checkpoint is not None and (observer := current_observer()) is not None:
        observer.on_checkpoint_read()
    return checkpoint


def get_context() -> TrainContext:
    """Return the context of the train function: ranks, world size, names and directories.

    Raises:
        SessionError: the call is outside a train function.
    """
    return active_session("get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> WorkerShard:
    """Return this worker's shard of a dataset that was passed to the trainer as ``datasets={"train": ...}``.

    Args:
        dataset_name: the key in ``datasets``; may be None if there is only one dataset.

    Returns:
        The shard that the dataset's provider created: a :class:`drivetrain_data.TableShard` for files, tables, data
        frames and Hugging Face datasets, and a ``ray.data.DataIterator`` for Ray datasets. Both have ``iter_batches``
        and ``iter_torch_batches``. Type checkers see :class:`drivetrain.plugin.datasets.WorkerShard`, which says how to
        use the class of another provider.

    Raises:
        SessionError: the call is outside a train function, or there is no dataset with that name.
    """
    shard: WorkerShard = active_session("get_dataset_shard").dataset_shard(dataset_name)
    return shard


def heartbeat() -> None:
    """Tell the driver that this rank makes progress, so that ``RunConfig(hang_timeout_s=...)`` does not end the run.

    Reports, calls of :func:`get_preemption_info`, and batches from a shard or a prepared data loader have the same
    effect. Call this function in long operations that do none of these, such as the evaluation of a model. The call
    takes less than a microsecond, and sends nothing itself. Outside a train function, it does nothing.

    Example:
        >>> heartbeat()
    """
    if _active is not None:
        _active.heartbeat()


def get_preemption_info() -> PreemptionInfo | None:
    """Return the pending preemption, or None.

    Call it once per step on every rank that takes part in collectives; all ranks receive the notice at the same step.
    The call takes less than a microsecond when no preemption is pending. A train function that never calls it is
    terminated without a chance to save.

    Returns:
        The notice that the train function should save its state now, because its processes will be terminated or the
        run will continue with more workers. The function can then return early, after a call of :func:`resume_later`,
        or continue. A function that returns without that call has finished.

    Raises:
        SessionError: the call is outside a train function.

    Example:
        In the loop of a train function::

            if (info := drivetrain.get_preemption_info()) is not None:
                save_and_report()
                return drivetrain.resume_later()
    """
    return active_session("get_preemption_info").preemption.poll()


def resume_later() -> None:
    """Declare that the train function returns because of a preemption notice, before its work is done.

    Once all ranks have returned, the run continues from its latest checkpoint in a new attempt. If no rank has called
    this function, the train function has finished when it returns, also after a notice. One rank that has called it
    suffices for a new attempt of all ranks.

    Raises:
        SessionError: the call is outside a train function, or :func:`get_preemption_info` has not returned a notice.

    Example:
        In the loop of a train function::

            if drivetrain.get_preemption_info() is not None:
                save_and_report()
                return drivetrain.resume_later()
    """
    active_session("resume_later").preemption.resume_later()


def current_session() -> Session | None:
    """Return the session of the train function that runs in this process; None if it runs none."""
    return _active


def _announce_report(iteration: int, *, quiet: bool) -> None:
    if not quiet and (observer := current_observer()) is not None:
        observer.before_report(iteration)


def _show_report(iteration: int, *, has_checkpoint: bool, quiet: bool) -> None:
    if not quiet and (observer := current_observer()) is not None:
        observer.on_report(iteration, has_checkpoint)


def active_session(function: str) -> Session:
    """Return the session of the train function that runs in this process.

    Args:
        function: the name of the called function, for the error message.
    """
    if _active is None:
        raise SessionError(
            f"[DT-801] {function}(): expected a call inside a train function, but this process runs none. Pass the "
            "function to a trainer and call trainer.fit(), or run the whole script on workers: drivetrain run SCRIPT "
            "--num-workers N"
        )
    return _active
