"""Curves of metrics: any number of reports in bounded memory, without losing minima and maxima.

A curve is a sequence of buckets with the same number of reports each. When there are too many buckets, pairs of
neighbors are merged. A bucket stores the minimum, maximum and sum of its values, and the position of the last one. A
spike in a single report among a million is therefore preserved as the maximum of its bucket.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from drivetrain._base.metrics import flatten
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import result_file
from drivetrain._storage.parquetparts import PartName, existing_parts, read_part, take_rank
from drivetrain._storage.reading import Fields, damage_of, is_number, parse_json
from drivetrain._storage.reports import rank_files, read_line
from drivetrain.errors import StorageError

__all__ = ["Curve", "CurveReader", "choose_curves"]

_CHUNK_BYTES = 1 << 17  # small enough for the parsed reports to fit into the CPU cache; twice as fast as 4 MiB
_MAX_LAST_BYTES = 64
_MAX_TOTAL_BUCKETS = 120_000
_MAX_BUCKETS = 1024
_MIN_BUCKETS = 64
_MAX_NON_FINITE_SHOWN = 50
_MAX_CURVES = 100_000  # a limit is needed because every report may contain metrics with new names
_LARGE = 1e300
_TIME = "_timestamp"
_ITERATION = "_training_iteration"
_DURATION = "_time_this_iter_s"


class Curve:
    """The values of one metric of one rank, combined into buckets.

    Args:
        max_buckets: the maximum number of buckets; must be even.

    Attributes:
        count: the number of finite values that were added.
        width: the number of values in each bucket; the last bucket may have fewer.
        non_finite: the number of values that were NaN or infinite.
        non_finite_at: the iterations of the first values that were NaN or infinite.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        self.max_buckets = max_buckets
        self.count = 0
        self.width = 1
        self.non_finite = 0
        self.non_finite_at: list[float] = []
        self._ends: list[tuple[float, float]] = []  # iteration and time of each bucket's last value
        self._low: list[float] = []
        self._high: list[float] = []
        self._sums: list[float] = []
        self._missing_in_last = 0  # the number of values missing from the last bucket

    def add(self, iterations: Sequence[float], times: Sequence[float], values: Sequence[float]) -> None:
        """Add values, in the order of their iterations.

        Args:
            iterations: the iteration of each value.
            times: the Unix time of each value in seconds.
            values: the values. NaN and infinite values are counted in ``non_finite``, but not added.
        """
        if not _are_finite(values):
            iterations, times, values = self._without_non_finite(iterations, times, values)
        position, end = 0, len(values)
        while position < end:
            taken = values[position : position + (self._missing_in_last or self.width)]
            last = position + len(taken) - 1
            low, high = min(taken), max(taken)
            if self._missing_in_last:
                self._low[-1] = min(self._low[-1], low)
                self._high[-1] = max(self._high[-1], high)
                self._sums[-1] += sum(taken)
                self._ends[-1] = (iterations[last], times[last])
                self._missing_in_last -= len(taken)
            else:
                self._low.append(low)
                self._high.append(high)
                self._sums.append(sum(taken))
                self._ends.append((iterations[last], times[last]))
                self._missing_in_last = self.width - len(taken)
            position = last + 1
            self.count += len(taken)
            if len(self._low) > self.max_buckets:
                self._halve()

    def shrink(self, max_buckets: int) -> None:
        """Lower the maximum number of buckets, and merge buckets until there are no more than that."""
        self.max_buckets = min(self.max_buckets, max_buckets)
        while len(self._low) > self.max_buckets:
            self._halve()

    def export(self) -> dict[str, Any]:
        """Return the curve as a dict for JSON: ``count``, ``width``, and lists with an item for each bucket.

        The lists are ``x`` (the last iteration), ``t`` (its Unix time), ``mean``, and if ``width`` > 1 also ``low`` and
        ``high`` (the minimum and maximum). If there are NaN or infinite values, ``broken`` and ``broken_at`` are added.
        """
        sizes = [self.width] * len(self._low)
        if self._missing_in_last:
            sizes[-1] -= self._missing_in_last
        exported: dict[str, Any] = {
            "count": self.count,
            "width": self.width,
            "x": [end[0] for end in self._ends],
            "t": [round(end[1], 3) for end in self._ends],
            "mean": [
                _short(min(max(total / size, low), high))  # rounding or an overflow may put the mean outside
                for total, size, low, high in zip(self._sums, sizes, self._low, self._high, strict=True)
            ],
        }
        if self.width > 1:
            exported["low"] = [_short(value) for value in self._low]
            exported["high"] = [_short(value) for value in self._high]
        if self.non_finite:
            exported["broken"], exported["broken_at"] = self.non_finite, self.non_finite_at
        return exported

    def points(self) -> list[tuple[float, float, float, float]]:
        """Return the last iteration, minimum, mean and maximum of each bucket."""
        exported = self.export()
        mean = exported["mean"]
        return list(zip(exported["x"], exported.get("low", mean), mean, exported.get("high", mean), strict=True))

    @property
    def lowest(self) -> float:
        """The minimum of all values; NaN without values."""
        return min(self._low, default=math.nan)

    @property
    def highest(self) -> float:
        """The maximum of all values; NaN without values."""
        return max(self._high, default=math.nan)

    def _halve(self) -> None:
        """Merge each pair of neighboring buckets into one."""
        pairs = len(self._low) // 2
        odd = len(self._low) % 2
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        self._low = [*map(min, self._low[first], self._low[second]), *self._low[2 * pairs :]]
        self._high = [*map(max, self._high[first], self._high[second]), *self._high[2 * pairs :]]
        self._sums = [*map(operator.add, self._sums[first], self._sums[second]), *self._sums[2 * pairs :]]
        self._ends = [*self._ends[second], *self._ends[2 * pairs :]]
        if odd:
            self._missing_in_last += self.width
        self.width *= 2

    def _without_non_finite(
        self, iterations: Sequence[float], times: Sequence[float], values: Sequence[float]
    ) -> tuple[list[float], list[float], list[float]]:
        good = []
        for point in zip(iterations, times, values, strict=True):
            if _is_finite(point[2]):
                good.append((point[0], point[1], float(point[2])))
            else:
                self.non_finite += 1
                if len(self.non_finite_at) < _MAX_NON_FINITE_SHOWN:
                    self.non_finite_at.append(point[0])
        kept = zip(*good, strict=True) if good else ((), (), ())
        x, t, y = map(list, kept)
        return x, t, y


class CurveReader:
    """Reads the curves of all numeric metrics of all ranks of a run. :meth:`update` reads the new reports.

    Args:
        storage: the run directory.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files: dict[int, _Tail] = {}
        self._parts: list[PartName] = []  # the Parquet files that were read
        self._curves: dict[tuple[int, str], Curve] = {}
        self._last_time: dict[int, float] = {}
        self._limit = _MAX_BUCKETS
        self.reports: dict[int, int] = {}
        """The number of reports read so far, by rank."""

    def update(self, limit_s: float = math.inf) -> float:
        """Read new reports.

        Args:
            limit_s: the time limit in seconds; the next call reads the remaining reports.

        Returns:
            The fraction of all reports that has been read, up to 1.
        """
        deadline = time.monotonic() + limit_s
        files = rank_files(self._storage)
        self._forget((files.keys() - self._files.keys()) & self.reports.keys())  # they were read from Parquet files
        tails = [(rank, self._files.setdefault(rank, _Tail(self._storage, name))) for rank, name in files.items()]
        for rank, tail in tails:
            for chunk in tail.chunks():
                if chunk is None:  # the file was truncated or replaced, so read it from the beginning
                    self._forget({rank})
                else:
                    with damage_of(self._storage.path(result_file(rank))):
                        self._take(rank, _parse(chunk))
                if time.monotonic() > deadline:
                    sizes = [each.progress() for _, each in tails]
                    return min(1.0, sum(read for read, _ in sizes) / max(1, sum(size for _, size in sizes)))
        return self._update_parts(deadline)

    def _update_parts(self, deadline: float) -> float:
        """Read the new Parquet files, for the ranks without a file of JSON lines. Return the fraction that was read."""
        parts = existing_parts(self._storage)
        if any(part.resume > self._parts[-1].resume for part in parts if self._parts):
            self._parts.clear()
            self._forget(self.reports.keys() - self._files.keys())  # a resume has made reports void that were read
        for part in parts[len(self._parts) :]:
            if time.monotonic() > deadline:
                return len(self._parts) / len(parts)
            for reports in read_part(self._storage, part, parts):
                ranks: dict[int, list[dict[str, Any]]] = {}
                for report in reports:
                    ranks.setdefault(take_rank(report), []).append(report)
                for rank, of_rank in ranks.items():
                    if rank not in self._files:
                        self._take(rank, of_rank)
            self._parts.append(part)
        return 1.0

    def _forget(self, ranks: Collection[int]) -> None:
        """Forget the reports of ranks, because they will be read again."""
        if not ranks:
            return
        self._curves = {key: curve for key, curve in self._curves.items() if key[0] not in ranks}
        self.reports = {rank: count for rank, count in self.reports.items() if rank not in ranks}
        self._last_time = {rank: last for rank, last in self._last_time.items() if rank not in ranks}

    def curves(self) -> dict[tuple[int, str], Curve]:
        """Return the curves by rank and metric, sorted by rank."""
        return dict(sorted(self._curves.items(), key=lambda item: item[0][0]))

    def _take(self, rank: int, reports: list[dict[str, Any]]) -> None:
        first = self.reports.get(rank, 0)
        self.reports[rank] = first + len(reports)
        names = dict.fromkeys(name for report in reports[:: max(1, len(reports) // 64)] for name in report)
        if any(report.keys() != reports[0].keys() for report in reports):
            names = dict.fromkeys(name for report in reports for name in report)
        iterations = _column(reports, _ITERATION, range(first + 1, first + len(reports) + 1))
        times = self._times(rank, reports)
        for name in names:
            if name in (_TIME, _ITERATION) or (name.startswith("_") and name != _DURATION):
                continue
            x, t, values = _numbers(reports, name, iterations, times)
            if values and ((rank, name) in self._curves or len(self._curves) < _MAX_CURVES):
                self._curve(rank, name).add(x, t, values)

    def _times(self, rank: int, reports: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return the time of each report, computed from the stored whole seconds and the intervals between reports."""
        now, times = self._last_time.get(rank, 0.0), []
        zeros = [0.0] * len(reports)
        seconds, durations = _column(reports, _TIME, zeros), _column(reports, _DURATION, zeros)
        for second, duration in zip(seconds, durations, strict=True):
            now = min(max(now + duration, second), second + 0.999)
            times.append(now)
        self._last_time[rank] = now
        return times

    def _curve(self, rank: int, name: str) -> Curve:
        curve = self._curves.get((rank, name))
        if curve is None:
            share = _MAX_TOTAL_BUCKETS // (len(self._curves) + 1) // 2 * 2
            limit = max(_MIN_BUCKETS, min(_MAX_BUCKETS, share))
            if limit != self._limit:  # with thousands of curves, the limit is constant
                self._limit = limit
                for other in self._curves.values():
                    other.shrink(limit)
            curve = self._curves[rank, name] = Curve(limit)
        return curve


def choose_curves(
    curves: Mapping[tuple[int, str], Curve], metrics: Sequence[str] = (), ranks: Sequence[int] | None = None
) -> dict[str, dict[str, Curve]]:
    """Return the selected curves, by metric and then by label, such as ``rank 0``.

    Args:
        curves: all curves, by rank and metric.
        metrics: the metrics to select, ``outer/inner`` for nested metrics; empty selects all reported metrics.
        ranks: the ranks to select; None selects all ranks.

    Raises:
        ValueError: a selected metric has no curve, or no curve is left.
    """
    known = list(dict.fromkeys(metric for _, metric in curves if not metric.startswith("_")))
    panels: dict[str, dict[str, Curve]] = {metric: {} for metric in metrics or known}
    for (rank, name), curve in curves.items():
        if name in panels and (ranks is None or rank in ranks):
            panels[name][f"rank {rank}"] = curve
    missing = [metric for metric, chosen in panels.items() if not chosen]
    if missing or not panels:
        names = ", ".join(map(repr, missing)) or "none"
        reporters = f" of ranks {list(ranks)}" if ranks is not None else ""
        raise ValueError(
            f"metrics: expected metrics{reporters} that were reported as numbers, got {names}. "
            f"Known metrics: {', '.join(known) or 'none'}"
        )
    return panels


class _Tail:
    """Reads the new lines of a growing file, in chunks."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._position = 0
        self._size = 0  # of the file when it was read
        self._last_bytes = b""  # the last bytes that were read, to detect that the file was truncated or replaced

    def progress(self) -> tuple[int, int]:
        """Return the number of bytes read so far, and the size of the file; of a remote file, when it was last read."""
        with contextlib.suppress(OSError):
            if self._storage.is_local:
                return self._position, os.path.getsize(self._storage.path(self._name))
        return self._position, max(self._position, self._size)

    def chunks(self) -> Iterator[bytes | None]:
        """Yield the new complete lines, in chunks. Yield None first if the lines that were read before have changed."""
        with contextlib.suppress(FileNotFoundError), self._storage.open_file(self._name) as file:
            self._size = file.seek(0, os.SEEK_END)
            file.seek(self._position - len(self._last_bytes))
            if file.read(len(self._last_bytes)) != self._last_bytes:
                self._position, self._last_bytes = 0, b""
                yield None
                file.seek(0)
            while data := file.read(_CHUNK_BYTES):
                if b"\n" not in data:
                    data = read_line(file, self._storage.path(self._name), data)
                whole = data.rpartition(b"\n")[0]
                file.seek(len(whole) + 1 - len(data), 1)
                if not data.count(b"\n"):
                    return
                yield self._advance(whole + b"\n")

    def _advance(self, lines: bytes) -> bytes:
        self._position += len(lines)
        self._last_bytes = (self._last_bytes + lines)[-_MAX_LAST_BYTES:]
        return lines


def _parse(lines: bytes) -> list[dict[str, Any]]:
    """Parse lines of JSON into reports with flat metrics, and skip damaged lines."""
    reports = _parse_lines(lines)
    if lines.count(b"{") == len(reports):  # no report is nested; flattening would double the time
        return reports
    return [flatten(report) for report in reports]


def _parse_lines(lines: bytes) -> list[dict[str, Any]]:
    body = lines.strip(b"\n")
    with contextlib.suppress(StorageError):
        # Parsing all lines at once takes a third of the time. JSON values contain no line breaks, so this is possible.
        values: list[Any] = parse_json(b"[" + body.replace(b"\n", b",") + b"]", "")
        return [value for value in values if isinstance(value, dict)]
    reports = []
    for line in body.split(b"\n"):
        with contextlib.suppress(StorageError):
            reports.append(Fields(parse_json(line, ""), "").values)
    return reports


def _column(reports: Sequence[Mapping[str, Any]], name: str, otherwise: Sequence[float]) -> Sequence[float]:
    """Return the value of a metric in each report, or the item of ``otherwise`` where the metric is not a number."""
    values = [report.get(name) for report in reports]
    if {*map(type, values)} <= {int, float} and _are_finite(values):  # type: ignore[arg-type]  # all values are numbers
        return values  # type: ignore[return-value]
    return [
        value if value is not None and is_number(value) else other
        for value, other in zip(values, otherwise, strict=True)
    ]


def _numbers(
    reports: Sequence[Mapping[str, Any]], name: str, iterations: Sequence[float], times: Sequence[float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the iterations, times and values of the reports in which a metric is a number."""
    try:
        values = [report[name] for report in reports]
        if {*map(type, values)} <= {int, float}:
            return iterations, times, values
    except KeyError:
        pass
    points = [
        (x, t, report[name])
        for x, t, report in zip(iterations, times, reports, strict=True)
        if isinstance(report.get(name), (int, float)) and not isinstance(report[name], bool)
    ]
    x, t, y = map(list, zip(*points, strict=True)) if points else ([], [], [])
    return x, t, y


def _are_finite(values: Sequence[float]) -> bool:
    """Return True if no value is NaN or infinite. This is fast, but also returns False if the sum is very large."""
    try:
        return abs(sum(values)) < _LARGE
    except OverflowError:
        return False


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def _short(value: float) -> float:
    """Round a float to seven significant digits, which is more than a screen can show."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
