"""The worker's side: what a train function calls while it runs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from drivetrain._hooks.context import TrainContext
from drivetrain._hooks.dataset import DatasetShard
from drivetrain._storage.checkpoint import Checkpoint, checkpoint_in
from drivetrain._storage.filesystem import StoredFile
from drivetrain._storage.layout import is_reserved
from drivetrain._wire.events import Event, PreemptionInfo, Reported, ReportNumber, Uploaded
from drivetrain._wire.task import TrainTask
from drivetrain._worker.metrics import check_reductions, plain_metrics
from drivetrain._worker.preemption import Preemption
from drivetrain._worker.uploads import UploadRequest, Uploads
from drivetrain.config import CheckpointUploadMode
from drivetrain.errors import SessionError, StorageError

__all__ = [
    "Outbox",
    "Session",
    "activate",
    "active_session",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
]

_DIRECTORY_NAME = re.compile(r"(?!checkpoint_\d+$|result.*\.json$)[^./\\\x00-\x1f][^/\\\x00-\x1f]*")


class Outbox:
    """Sends a rank's events to the driver.

    Args:
        emit: sends an event; blocks while the driver is too far behind. In a worker process it is the method
            ``send_event`` of the :class:`~drivetrain._wire.frames.Channel`.
        from_threads: ``emit`` may be called from any thread. Otherwise events of other threads are sent with the next
            report.
    """

    def __init__(self, emit: Callable[[Event], None], *, from_threads: bool = True) -> None:
        self.emit = emit
        self._from_threads = from_threads
        self._waiting: deque[Event] = deque()

    @property
    def keeps_events(self) -> bool:
        """Whether events of other threads wait for :meth:`flush`."""
        return not self._from_threads

    def emit_from_thread(self, event: Event) -> None:
        """Sends an event, or keeps it for :meth:`flush`; may be called from any thread."""
        if self._from_threads:
            self.emit(event)
        else:
            self._waiting.append(event)

    def flush(self) -> None:
        """Sends the events that were kept."""
        while self._waiting:
            self.emit(self._waiting.popleft())


class Session:
    """The functions that one run of the train function can call, such as :meth:`report`.

    Args:
        task: the checkpoint to resume from, the datasets, the options, and the number of the last report.
        context: the result of :func:`get_context`.
        outbox: sends events to the driver.
        preemption: the notices for the train function.
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
        self._number, self._iteration = task.last_report  # integers, as reports may come every few microseconds
        self._last_stored = 0
        self._uploads = Uploads(context.storage, context.get_world_rank(), task.options.checkpoints)
        self._process = os.getpid()
        self._lock = threading.Lock()

    def dataset_shard(self, name: str | None) -> Any:
        """One of this rank's shards; without a name the only one."""
        if name is None and len(self._task.datasets) == 1:
            return next(iter(self._task.datasets.values()))
        if name is None or name not in self._task.datasets:
            known = ", ".join(map(repr, self._task.datasets)) or "no datasets: pass datasets={...} to the trainer"
            raise SessionError(
                f"get_dataset_shard(): expected the name of a dataset, got {name!r}; the run has {known}"
            )
        return self._task.datasets[name]

    def report(
        self,
        metrics: Mapping[str, Any],
        upload: UploadRequest | None = None,
        reduce: Mapping[str, str] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """Uploads the checkpoint, or begins to, then hands everything to the controller.

        Args:
            metrics: plain values.
            upload: the checkpoint.
            reduce: the combinations asked for.
            quiet: the checkpoint is all that there is to report: its metrics only rank it among others.
        """
        if os.getpid() != self._process:
            raise SessionError(
                "report() must be called in the worker's own process, not in a child process of it "
                "(a data loader's worker?): report from the train function"
            )
        values = plain_metrics(metrics)
        if reduce is not None:
            check_reductions(reduce, values)
        with self._lock:
            self._uploads.raise_failure()
            self._outbox.flush()
            number, iteration = self._number + 1, self._iteration + (not quiet)
            rank = self.context.worker.rank
            if upload is None:
                self._number, self._iteration = number, iteration
                self._outbox.emit(Reported(rank, number, iteration, time.time(), values, None, reduce, None, quiet))
                return
            storage = self.context.storage
            storage.require_run(self.context.run_id, self._task.options.start)
            self._add_positions(upload.checkpoint)
            prepared = self._uploads.prepare(upload, number)
            stored = checkpoint_in(storage, prepared.directory)
            files, directory = prepared.files, prepared.directory
            self._number, self._iteration = number, iteration
            self._outbox.emit(Reported(rank, number, iteration, time.time(), values, files, reduce, directory, quiet))
            if prepared.pending is None:
                self._note_stored(number, stored)
            else:
                self._uploads.begin(prepared, lambda files: self._on_uploaded(number, stored, files))
            self._on_checkpoint()

    def _add_positions(self, checkpoint: Checkpoint) -> None:
        """Stores the position of every dataset whose ``state_dict()`` was called since the last report."""
        resumable = {name: shard for name, shard in self._task.datasets.items() if isinstance(shard, DatasetShard)}
        states = {name: shard.take_state() for name, shard in resumable.items()}
        known = {name: state for name, state in states.items() if state is not None}
        if known and self.context.get_world_rank() == 0:
            checkpoint.update_metadata({POSITIONS: known})

    def finish(self) -> None:
        """Waits for the uploads in the background.

        Raises:
            StorageError: one of them failed.
        """
        self._uploads.drain()
        self._outbox.flush()

    def abandon(self, error: BaseException) -> None:
        """Ends the session of a train function that raised.

        In a worker process, each upload in the background sends its own event. If events are kept for the train
        function's thread instead, this waits for the uploads and sends them, as no other call will.
        """
        if self._outbox.keeps_events and isinstance(error, Exception):
            with contextlib.suppress(StorageError):
                self._uploads.drain()
            self._outbox.flush()

    def renumber(self, last_report: ReportNumber) -> None:
        """Makes the next report follow another number; called from another thread."""
        with self._lock:
            self._number, self._iteration = last_report

    def _note_stored(self, number: int, stored: Checkpoint) -> None:
        if number > self._last_stored:  # an earlier upload may take longer than a later one
            self._last_stored = number
            self.checkpoint = stored

    def _on_uploaded(self, number: int, stored: Checkpoint, files: dict[str, StoredFile]) -> None:
        self._note_stored(number, stored)
        self._outbox.emit_from_thread(Uploaded(self.context.get_world_rank(), number, files))


POSITIONS = "dataset_positions"
"""The key in a checkpoint's metadata of where datasets stood when it was reported."""

_active: Session | None = None


@contextlib.contextmanager
def activate(session: Session) -> Iterator[None]:
    """Makes a session the one that this process's train function talks to, for the time of a ``with`` block."""
    global _active
    if _active is not None:
        raise SessionError(
            "a train function is running in this process already: fit() cannot be called inside one here"
        )
    _active = session
    try:
        yield
    finally:
        _active = None


def report(
    metrics: Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    reduce: Mapping[str, str] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | str = CheckpointUploadMode.SYNC,
    checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
    delete_local_checkpoint_after_upload: bool = False,
    **metrics_by_name: Any,
) -> None:
    """Reports metrics, and a checkpoint if there is one, from inside a train function.

    Every rank may report, as often as it likes; the call is not a barrier. Metrics are handed over at once, so
    what was reported is kept even if the process dies in the next instant. A checkpoint's files are copied to the
    run directory; it is committed once they are there and every rank that still runs has made as many reports.

    Args:
        metrics: plain values (numbers, strings, None, and lists and mappings of them) by name. A tensor or
            array of one element counts as its number.
        checkpoint: a directory of files to keep. Ranks may report different files under one report; they are
            merged into one checkpoint.
        reduce: for metrics to combine over all ranks, the way: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``. The
            run's metrics then hold the combined value.
        checkpoint_dir_name: the checkpoint's directory in the run directory, the same on all ranks and new in the run;
            None for ``checkpoint_<number of the report>``.
        checkpoint_upload_mode: a :class:`~drivetrain.CheckpointUploadMode` or its value. ``"sync"`` stores the files
            before the call returns; ``"async"`` in the background, whatever happens to the directory meanwhile, and
            an error is raised by the next report or at the end of the function; ``"none"`` takes a checkpoint
            that is in the run directory already.
        checkpoint_upload_fn: stores the checkpoint instead: takes it and the directory's name, and returns it as it
            is in the run directory. Called in the background if the mode is ``"async"``, so the local directory has to
            stay until then.
        delete_local_checkpoint_after_upload: give the local directory away. On the storage's own filesystem it is moved
            instead of copied.
        **metrics_by_name: the metrics, instead of a mapping: ``report(loss=0.1)``.

    Raises:
        SessionError: called outside a train function, or with a value that is not plain; the message names the key.
        CheckpointError: the checkpoint's directory does not exist or holds no files, or its name is taken.
        StorageError: the checkpoint, or one before it in the background, could not be stored.

    Example:
        A report of rank 0's accuracy, and of the mean loss over all ranks::

            drivetrain.report({"loss": loss, "accuracy": accuracy}, reduce={"loss": "mean"})
    """
    session = active_session("report")
    if metrics is None:
        metrics = metrics_by_name
    elif metrics_by_name:
        raise SessionError(
            "report(): expected metrics as one mapping or as keywords, got a mapping and the keywords "
            f"{', '.join(metrics_by_name)}: put them into the mapping, if they are metrics"
        )
    if checkpoint is None:
        session.report(metrics, None, reduce)
        return
    if not isinstance(checkpoint, Checkpoint):
        raise SessionError(
            f"report(checkpoint=...): expected a Checkpoint, got {checkpoint!r}: use Checkpoint.from_directory(path)"
        )
    try:
        mode = CheckpointUploadMode(checkpoint_upload_mode)
    except ValueError:
        raise SessionError(
            f"report(checkpoint_upload_mode=...): expected 'sync', 'async' or 'none', got {checkpoint_upload_mode!r}"
        ) from None
    name = checkpoint_dir_name
    if name is not None and (str(name) != name or is_reserved(name) or not _DIRECTORY_NAME.fullmatch(name)):
        raise SessionError(
            "report(checkpoint_dir_name=...): expected a plain directory name that is not one of drivetrain's own, "
            f"got {name!r}"
        )
    request = UploadRequest(
        checkpoint=checkpoint,
        directory=name,
        mode=mode,
        function=checkpoint_upload_fn,
        delete_local=delete_local_checkpoint_after_upload,
    )
    session.report(metrics, request, reduce)


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to continue from: the one this attempt resumes from, or the last one this rank reported.

    Returns:
        None at the start of a run that resumes from nothing.

    Raises:
        SessionError: called outside a train function.
    """
    return active_session("get_checkpoint").checkpoint


def get_context() -> TrainContext:
    """What the train function can know about where it runs: ranks, sizes, names and directories.

    Raises:
        SessionError: called outside a train function.
    """
    return active_session("get_context").context


def get_dataset_shard(dataset_name: str | None = None) -> Any:
    """This worker's part of a dataset that the trainer was given: ``datasets={"train": ...}``.

    Args:
        dataset_name: the key in ``datasets``; None where there is only one.

    Returns:
        The shard that the dataset's provider made. Of files, tables, data frames and Hugging Face datasets it is a
        :class:`drivetrain_data.TableShard`; of a Ray dataset it is a ``ray.data.DataIterator``. Both have
        ``iter_batches`` and ``iter_torch_batches``.

    Raises:
        SessionError: called outside a train function; or there is no dataset of that name.
    """
    return active_session("get_dataset_shard").dataset_shard(dataset_name)


def get_preemption_info() -> PreemptionInfo | None:
    """Returns the pending preemption, or None.

    Call it once per step on every rank that takes part in collectives; all ranks receive the notice at the same step.
    The call takes less than a microsecond when no preemption is pending. A train function that never calls it is
    terminated without a chance to save.

    Returns:
        The notice that the train function should save its state and return: its processes will be terminated, or the
        run will continue with more workers.

    Raises:
        SessionError: called outside a train function.

    Example:
        In the loop of a train function::

            if (info := drivetrain.get_preemption_info()) is not None:
                save_and_report()
                return
    """
    return active_session("get_preemption_info").preemption.poll()


def active_session(function: str) -> Session:
    """The session that this process's train function is in.

    Args:
        function: what was called, for the error of a call outside one.
    """
    if _active is None:
        raise SessionError(
            f"{function}() must be called inside a train function, and this process runs none: "
            "pass the function to a trainer and call trainer.fit()"
        )
    return _active
