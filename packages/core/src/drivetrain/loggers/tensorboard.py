"""What is reported as TensorBoard's event files, in the run directory."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.errors import ConfigurationError
from drivetrain.loggers.tracker import Entry, Ranks, TrackerCallback, numbers, parameters
from drivetrain.storage.filesystem import walk_local
from drivetrain.workspace import ARTIFACTS

if TYPE_CHECKING:
    from drivetrain.context import Run

__all__ = ["TBXLoggerCallback"]

_EVENTS = "events"
_IMAGES = (".png", ".jpg", ".jpeg")
_ARRAYS = (".npy", ".npz")
_STEP = re.compile(r"(?P<tag>.*?)[-_.=]?(?P<step>\d+)")
_SCAN_S = 5.0
_number = itertools.count()


class TBXLoggerCallback(TrackerCallback):
    """Writes TensorBoard event files to the run directory, with ``tensorboardX``.

    Numbers become scalars, lists of numbers histograms, and the train function's config and the first report's metrics
    the hyperparameters and metrics of the HParams tab. Files that the train function writes to
    ``get_context().get_trial_dir()`` are read as well, where that is on a disk that the driver sees: ``.png`` and
    ``.jpg`` as images, ``.npy`` and ``.npz`` as histograms. The name of the file is the tag, and digits at its end are
    the step: ``samples_000200.png`` is the image ``samples`` at step 200. Without digits the step is that of the last
    report.

    Args:
        artifacts: whether to read images and arrays.
        options: see :class:`~drivetrain.loggers.TrackerCallback`.

    Raises:
        PluginNotFoundError: ``tensorboardX`` is not installed.
        ConfigurationError: an argument is not one that it takes.
    """

    title: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboardX"
    extra: ClassVar[str] = "tensorboard"
    can_rewind: ClassVar[bool] = True

    def __init__(self, *, artifacts: bool = True, ranks: Ranks = "rank0", drain_timeout_s: float = 60.0) -> None:
        super().__init__(ranks=ranks, drain_timeout_s=drain_timeout_s)
        if not isinstance(artifacts, bool):
            raise ConfigurationError(f"TBXLoggerCallback(artifacts=...) wants True or False, found {artifacts!r}")
        self.artifacts = artifacts

    def open(self, run: Run) -> None:
        """Opens an event file; those of earlier drivers stay."""
        earlier = [path.stat().st_mtime for path in run.path.glob(f"{_EVENTS}.out.tfevents.*")]
        self._run = run
        self._iteration = 0
        self._introduced = bool(earlier)
        self._artifacts = _Artifacts(run.path / ARTIFACTS, max(earlier, default=0.0))
        self._scanned_at = 0.0
        self._writer = _new_file(run.path)

    def rewind(self, iteration: int) -> None:
        """Begins a file that has TensorBoard hide what earlier ones say of later iterations."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._writer.close()
        self._writer = _new_file(self._run.path)
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=iteration + 1, session_log=start))
        self._iteration = iteration

    def log(self, entries: Sequence[Entry]) -> None:
        """Writes one event for every report."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import histogram

        for entry in entries:
            scalars = numbers(entry.metrics)
            if not self._introduced:
                self._introduce(list(scalars))
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
            for name, value in entry.metrics.items():
                if isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
                    values += histogram(name, value, "auto").value
            self._write(Summary(value=values), entry.iteration, entry.time)
            self._iteration = max(self._iteration, entry.iteration)
        if self.artifacts and time.monotonic() - self._scanned_at > _SCAN_S:
            self._read_artifacts()
        self._writer.flush()

    def close(self, error: BaseException | None) -> None:
        """Reads what artifacts there are yet, and closes the file."""
        if self.artifacts:
            self._read_artifacts()
        if error is None:
            self._write(_hparams({}, [])[2], 0, time.time())
        self._writer.close()

    def _introduce(self, metrics: Sequence[str]) -> None:
        for summary in _hparams(parameters(self._run), metrics)[:2]:
            self._write(summary, 0, time.time())
        self._introduced = True

    def _read_artifacts(self) -> None:
        for step, moment, summary in self._artifacts.read():
            self._write(summary, self._iteration if step is None else step, moment)
        self._scanned_at = time.monotonic()

    def _write(self, summary: Any, step: int, moment: float) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=moment, step=step, summary=summary))


def _new_file(directory: Path) -> Any:
    # Written from the tracker's own thread; tensorboardX's SummaryWriter has a second one, and a queue between.
    from tensorboardX.event_file_writer import EventsWriter

    return EventsWriter(str(directory / _EVENTS), f".{os.getpid()}.{next(_number)}")


def _hparams(parameters: dict[str, Any], metrics: Sequence[str]) -> tuple[Any, Any, Any]:
    """The summaries of an experiment, and of its session's start and end."""
    from tensorboardX.summary import hparams

    experiment, start, end = hparams(parameters, dict.fromkeys(metrics, 0.0))
    return experiment, start, end


class _Artifacts:
    """The images and arrays that a train function writes; each file is read when it is new or has changed."""

    def __init__(self, directory: Path, known_until: float) -> None:
        self._directory = directory
        self._read: dict[str, float] = {}
        self._known_until = known_until

    def read(self) -> Iterator[tuple[int | None, float, Any]]:
        """The step in the file's name, the time of its writing, and the summary."""
        if not self._directory.is_dir():
            return
        for relative, status in list(walk_local(str(self._directory))):
            stem, suffix = os.path.splitext(relative)
            changed = status.st_mtime
            if suffix.lower() not in (*_IMAGES, *_ARRAYS) or changed <= self._read.get(relative, self._known_until):
                continue
            found = _STEP.fullmatch(stem)
            tag, step = (found["tag"] or "artifact", int(found["step"])) if found else (stem, None)
            # A file that is still being written, or is not what its name says, is looked at again later.
            with contextlib.suppress(OSError, ValueError, EOFError):
                yield step, changed, _read_summary(self._directory / relative, tag)
                self._read[relative] = changed


def _read_summary(path: Path, tag: str) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary

    if path.suffix.lower() in _IMAGES:
        from PIL import Image

        with Image.open(path) as image:
            image.verify()
            width, height = image.size
            channels = len(image.getbands())
        encoded = path.read_bytes()
        shown = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encoded)
        return Summary(value=[Summary.Value(tag=tag, image=shown)])
    import numpy as np
    from tensorboardX.summary import histogram

    loaded = np.load(path, allow_pickle=False)
    arrays = {tag: loaded} if isinstance(loaded, np.ndarray) else {f"{tag}/{name}": loaded[name] for name in loaded}
    values = [value for name, array in arrays.items() for value in histogram(name, array, "auto").value]
    return Summary(value=values)
