"""Writes reports to TensorBoard event files in the run directory."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain import ConfigurationError
from drivetrain_track._entries import Entry, Ranks
from drivetrain_track._tracker import TrackerCallback, numbers, parameters

if TYPE_CHECKING:
    from drivetrain.plugin import Failure, Run

__all__ = ["TBXLoggerCallback"]

_FILES = "events.out.tfevents"
_IMAGES = (".png", ".jpg", ".jpeg")
_ARRAYS = (".npy", ".npz")
_STEP = re.compile(r"(?P<tag>.*?)[-_.=]?(?P<step>\d+)")
_SCAN_S = 5.0
_BUCKETS = 30
_number = itertools.count()


class TBXLoggerCallback(TrackerCallback):
    """Writes TensorBoard event files to the run directory.

    Numbers become scalars, and lists of numbers become histograms. The HParams tab shows the train function's config as
    hyperparameters, and the latest values of the metrics that the first report contains. The callback also reads files
    that the train function writes to ``get_context().get_trial_dir()``, if the driver can access this directory:
    ``.png`` and ``.jpg`` as images, ``.npy`` and ``.npz`` as histograms. The file name is the tag, and digits at its
    end are the step: ``samples_000200.png`` is the image ``samples`` at step 200. Without digits, the step is the
    iteration of the last report.

    Args:
        artifacts: also read images and arrays, as described above.
        ranks: see :class:`~drivetrain_track.TrackerCallback`.
        drain_timeout_s: see :class:`~drivetrain_track.TrackerCallback`.

    Raises:
        PluginNotFoundError: ``tensorboard`` is not installed.
        ConfigurationError: an argument is invalid.
    """

    title: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"
    can_rewind: ClassVar[bool] = True

    def __init__(self, *, artifacts: bool = True, ranks: Ranks = "rank0", drain_timeout_s: float = 60.0) -> None:
        super().__init__(ranks=ranks, drain_timeout_s=drain_timeout_s)
        if not isinstance(artifacts, bool):
            raise ConfigurationError(
                f"[DT-101] TBXLoggerCallback(artifacts=...): expected True or False, got {artifacts!r}"
            )
        self.artifacts = artifacts

    def open(self, run: Run) -> None:
        """Open a new event file, and keep the files of earlier drivers."""
        earlier = [path.stat().st_mtime for path in run.path.glob(f"{_FILES}.*")]
        self._run = run
        self._iteration = 0
        self._wrote_hparams = bool(earlier)
        self._artifacts = _Artifacts(run.artifacts, max(earlier, default=0.0))
        self._scanned_at = 0.0
        self._file = _EventFile(run.path)

    def rewind(self, iteration: int) -> None:
        """Start a new file, which makes TensorBoard hide the later iterations that earlier files contain."""
        self._file.close()
        self._file = _EventFile(self._run.path)
        self._file.restart_at(iteration + 1)
        self._iteration = iteration

    def log(self, entries: Sequence[Entry]) -> None:
        """Write one event for every report."""
        summaries = [_summary(entry.metrics) for entry in entries]  # converted first, because a value may be refused
        for entry, summary in zip(entries, summaries, strict=True):
            if not self._wrote_hparams:
                for start in _hparams_start(parameters(self._run), list(numbers(entry.metrics))):
                    self._file.write(start, 0, entry.time)
                self._wrote_hparams = True
            self._file.write(summary, entry.iteration, entry.time)
            self._iteration = max(self._iteration, entry.iteration)
        if self.artifacts and time.monotonic() - self._scanned_at > _SCAN_S:
            self._read_artifacts()
        self._file.flush()

    def log_failure(self, failure: Failure, retrying: bool) -> None:
        """Write a text for the Text tab, at the last iteration."""
        self._file.write(_text("failure", failure.summary), self._iteration, time.time())
        self._file.flush()

    def close(self, error: BaseException | None) -> None:
        """Read the remaining artifacts, and close the file."""
        if self.artifacts:
            self._read_artifacts()
        self._file.write(_hparams_end(error), 0, time.time())
        self._file.close()

    def _read_artifacts(self) -> None:
        for step, moment, summary in self._artifacts.read():
            self._file.write(summary, self._iteration if step is None else step, moment)
        self._scanned_at = time.monotonic()


class _EventFile:
    """An event file. TensorBoard reads all event files in a directory as one, in the order of their names."""

    def __init__(self, directory: Path) -> None:
        # RecordWriter writes synchronously. EventFileWriter would start a thread, but the tracker already has its own.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"{_FILES}.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_number):04}"
        self._records = RecordWriter((directory / name).open("ab"))
        self._event = Event
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def restart_at(self, step: int) -> None:
        """Make TensorBoard hide the events of this step and of later steps that earlier files contain."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        self._records.write(self._event(wall_time=time.time(), step=step, session_log=start).SerializeToString())

    def write(self, summary: Any, step: int, moment: float) -> None:
        """Add a summary at a step; ``moment`` is a Unix time in seconds."""
        self._records.write(self._event(wall_time=moment, step=step, summary=summary).SerializeToString())

    def flush(self) -> None:
        """Flush all events to the operating system."""
        self._records.flush()

    def close(self) -> None:
        """Close the file."""
        self._records.close()


def _hparams_start(parameters: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[Any]:
    """Yield two summaries: one defines the columns of the HParams tab, and one the hyperparameters of this run."""
    from tensorboard.plugins.hparams.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    experiment = Experiment(metric_infos=[MetricInfo(name=MetricName(tag=name)) for name in metrics])
    start = SessionStartInfo(start_time_secs=time.time())
    for name, value in parameters.items():
        if isinstance(value, bool):
            kind, start.hparams[name].bool_value = DataType.DATA_TYPE_BOOL, value
        elif isinstance(value, (int, float)):
            kind, start.hparams[name].number_value = DataType.DATA_TYPE_FLOAT64, value
        else:
            kind, start.hparams[name].string_value = DataType.DATA_TYPE_STRING, value
        experiment.hparam_infos.append(HParamInfo(name=name, type=kind))
    yield _hparams_summary("experiment", HParamsPluginData(experiment=experiment))
    yield _hparams_summary("session_start_info", HParamsPluginData(session_start_info=start))


def _hparams_end(error: BaseException | None) -> Any:
    """Return the summary that contains the outcome of the run, for the HParams tab."""
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = Status.STATUS_SUCCESS if error is None else Status.STATUS_FAILURE
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _hparams_summary("session_end_info", HParamsPluginData(session_end_info=end))


def _hparams_summary(name: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary(value=[Summary.Value(tag=f"_hparams_/{name}", metadata=metadata)])


def _summary(metrics: Mapping[str, Any]) -> Any:
    """Return the scalars and histograms of a report."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()]
    for name, value in metrics.items():
        if isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            values.append(_histogram(name, value))
    return Summary(value=values)


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    metadata = create_summary_metadata(display_name=None, description="")
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _histogram(tag: str, values: Any) -> Any:
    """Return a histogram of the values that are finite."""
    import numpy as np
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    array = np.asarray(values, dtype=np.float64).ravel()
    array = array[np.isfinite(array)]
    if not array.size:
        return Summary.Value(tag=tag, histo=HistogramProto())
    counts, limits = np.histogram(array, bins=_BUCKETS)
    histogram = HistogramProto(
        min=array.min(),
        max=array.max(),
        num=array.size,
        sum=array.sum(),
        sum_squares=array.dot(array),
        bucket_limit=limits[1:].tolist(),
        bucket=counts.tolist(),
    )
    return Summary.Value(tag=tag, histo=histogram)


class _Artifacts:
    """Reads the images and arrays that a train function writes. A file is read when it is new or has changed."""

    def __init__(self, directory: Path, read_until: float) -> None:
        self._directory = directory
        self._read: dict[str, float] = {}
        self._read_until = read_until

    def read(self) -> Iterator[tuple[int | None, float, Any]]:
        """Yield the step in the file name, the modification time, and the summary of each new or changed file."""
        for path in _files_in(self._directory):
            relative = path.relative_to(self._directory).as_posix()
            stem = os.path.splitext(relative)[0]
            try:
                changed = path.stat().st_mtime
            except FileNotFoundError:
                continue
            if changed <= self._read.get(relative, self._read_until):
                continue
            match = _STEP.fullmatch(stem)
            tag, step = (match["tag"] or "artifact", int(match["step"])) if match else (stem, None)
            # If the file is incomplete, or has content of another type, the next scan reads it again.
            with contextlib.suppress(OSError, ValueError, EOFError):
                yield step, changed, _read_summary(path, tag)
                self._read[relative] = changed


def _files_in(directory: Path) -> list[Path]:
    """Return the images and arrays under a directory, sorted; symbolic links to directories are not followed."""
    paths = [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]
    return sorted(path for path in paths if path.suffix.lower() in (*_IMAGES, *_ARRAYS) and path.is_file())


def _read_summary(path: Path, tag: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    if path.suffix.lower() in _IMAGES:
        from PIL import Image

        with Image.open(path) as image:
            image.verify()
            width, height = image.size
            channels = len(image.getbands())
        encoded = path.read_bytes()
        summary = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encoded)
        return Summary(value=[Summary.Value(tag=tag, image=summary)])
    import numpy as np

    loaded = np.load(path, allow_pickle=False)
    arrays = {tag: loaded} if isinstance(loaded, np.ndarray) else {f"{tag}/{name}": loaded[name] for name in loaded}
    return Summary(value=[_histogram(name, array) for name, array in arrays.items()])
