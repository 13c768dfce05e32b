"""Curves of metrics: any number of reports in bounded memory, with every minimum and maximum kept.

A curve is a row of buckets of as many reports each. When there are too many buckets, two neighbours become one. What is
kept of a bucket is its least and greatest value, their mean, and how far it reaches: so a spike of one report among a
million is still there, as the maximum of its bucket.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain._base.metrics import flatten
from drivetrain._storage.directory import Storage
from drivetrain._storage.layout import result_file
from drivetrain._storage.reading import Fields, damage_of, is_number, parse_json
from drivetrain._storage.reports import rank_files, read_line
from drivetrain.errors import StorageError

__all__ = ["Curve", "CurveReader", "choose_curves"]

_CHUNK_BYTES = 1 << 17  # so that what is made of it fits into a processor's cache: twice as fast as 4 MiB
_MEMORY_BYTES = 64
_BUCKETS_OF_ALL = 120_000
_MAX_BUCKETS = 1024
_MIN_BUCKETS = 64
_BROKEN_SHOWN = 50
_MAX_CURVES = 100_000  # more are left out: every report may have metrics of other names
_LARGE = 1e300
_TIME = "_timestamp"
_ITERATION = "_training_iteration"
_DURATION = "_time_this_iter_s"


class Curve:
    """One metric of one rank.

    Args:
        max_buckets: how many buckets to keep at most; an even number.

    Attributes:
        count: how many finite values were added.
        width: how many of them a bucket stands for.
        broken: how many values were NaN or infinite.
        broken_at: the iterations of the first of those.
    """

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        self.max_buckets = max_buckets
        self.count = 0
        self.width = 1
        self.broken = 0
        self.broken_at: list[float] = []
        self._ends: list[tuple[float, float]] = []  # iteration and time of each bucket's last value
        self._low: list[float] = []
        self._high: list[float] = []
        self._sums: list[float] = []
        self._open = 0  # how many values the last bucket lacks

    def add(self, iterations: Sequence[float], times: Sequence[float], values: Sequence[float]) -> None:
        """Add values in order.

        Args:
            iterations: of each.
            times: Unix time in seconds of each.
            values: any numbers; those that are not finite are counted, and left out.
        """
        if not _are_finite(values):
            iterations, times, values = self._without_broken(iterations, times, values)
        position, end = 0, len(values)
        while position < end:
            taken = values[position : position + (self._open or self.width)]
            last = position + len(taken) - 1
            low, high = min(taken), max(taken)
            if self._open:
                self._low[-1] = min(self._low[-1], low)
                self._high[-1] = max(self._high[-1], high)
                self._sums[-1] += sum(taken)
                self._ends[-1] = (iterations[last], times[last])
                self._open -= len(taken)
            else:
                self._low.append(low)
                self._high.append(high)
                self._sums.append(sum(taken))
                self._ends.append((iterations[last], times[last]))
                self._open = self.width - len(taken)
            position = last + 1
            self.count += len(taken)
            if len(self._low) > self.max_buckets:
                self._halve()

    def shrink(self, max_buckets: int) -> None:
        """Lower the number of buckets."""
        self.max_buckets = min(self.max_buckets, max_buckets)
        while len(self._low) > self.max_buckets:
            self._halve()

    def export(self) -> dict[str, Any]:
        """Parallel lists ``x`` (the last iteration), ``t``, ``mean``, and of wider buckets ``low`` and ``high``."""
        sizes = [self.width] * len(self._low)
        if self._open:
            sizes[-1] -= self._open
        found: dict[str, Any] = {
            "count": self.count,
            "width": self.width,
            "x": [end[0] for end in self._ends],
            "t": [round(end[1], 3) for end in self._ends],
            "mean": [
                _short(min(max(total / size, low), high))  # whatever rounding, or a sum that is too great, makes of it
                for total, size, low, high in zip(self._sums, sizes, self._low, self._high, strict=True)
            ],
        }
        if self.width > 1:
            found["low"] = [_short(value) for value in self._low]
            found["high"] = [_short(value) for value in self._high]
        if self.broken:
            found["broken"], found["broken_at"] = self.broken, self.broken_at
        return found

    def points(self) -> list[tuple[float, float, float, float]]:
        """Iteration, least, mean and greatest value of each bucket."""
        exported = self.export()
        mean = exported["mean"]
        return list(zip(exported["x"], exported.get("low", mean), mean, exported.get("high", mean), strict=True))

    @property
    def lowest(self) -> float:
        """The least value; NaN without any."""
        return min(self._low, default=math.nan)

    @property
    def highest(self) -> float:
        """The greatest value; NaN without any."""
        return max(self._high, default=math.nan)

    def _halve(self) -> None:
        """Put two neighbours together, all over."""
        pairs = len(self._low) // 2
        odd = len(self._low) % 2
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        self._low = [*map(min, self._low[first], self._low[second]), *self._low[2 * pairs :]]
        self._high = [*map(max, self._high[first], self._high[second]), *self._high[2 * pairs :]]
        self._sums = [*map(operator.add, self._sums[first], self._sums[second]), *self._sums[2 * pairs :]]
        self._ends = [*self._ends[second], *self._ends[2 * pairs :]]
        if odd:
            self._open += self.width
        self.width *= 2

    def _without_broken(
        self, iterations: Sequence[float], times: Sequence[float], values: Sequence[float]
    ) -> tuple[list[float], list[float], list[float]]:
        good = []
        for point in zip(iterations, times, values, strict=True):
            if _is_finite(point[2]):
                good.append((point[0], point[1], float(point[2])))
            else:
                self.broken += 1
                if len(self.broken_at) < _BROKEN_SHOWN:
                    self.broken_at.append(point[0])
        kept = zip(*good, strict=True) if good else ((), (), ())
        x, t, y = map(list, kept)
        return x, t, y


class CurveReader:
    """All numeric metrics of all ranks of a run; :meth:`update` takes what was reported since.

    Args:
        storage: the run directory.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._files: dict[int, _Tail] = {}
        self._curves: dict[tuple[int, str], Curve] = {}
        self._last_time: dict[int, float] = {}
        self.reports: dict[int, int] = {}
        """How many reports there are, by rank."""

    def update(self, limit_s: float = math.inf) -> float:
        """Read what is new.

        Args:
            limit_s: seconds after which to leave the rest for the next time.

        Returns:
            How much of everything has been read, up to 1.
        """
        deadline = time.monotonic() + limit_s
        tails = [
            (rank, self._files.setdefault(rank, _Tail(self._storage, name)))
            for rank, name in rank_files(self._storage).items()
        ]
        for rank, tail in tails:
            for chunk in tail.chunks():
                if chunk is None:  # the file was cut, or replaced: from the beginning
                    self._curves = {key: curve for key, curve in self._curves.items() if key[0] != rank}
                    self.reports[rank] = 0
                else:
                    with damage_of(self._storage.path(result_file(rank))):
                        self._take(rank, _parse(chunk))
                if time.monotonic() > deadline:
                    sizes = [each.progress() for _, each in tails]
                    return min(1.0, sum(read for read, _ in sizes) / max(1, sum(there for _, there in sizes)))
        return 1.0

    def curves(self) -> dict[tuple[int, str], Curve]:
        """By rank and metric, ranks first."""
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
        """When each report was made: whole seconds are on storage, and the time since the one before."""
        now, found = self._last_time.get(rank, 0.0), []
        nothing = [0.0] * len(reports)
        seconds, durations = _column(reports, _TIME, nothing), _column(reports, _DURATION, nothing)
        for second, duration in zip(seconds, durations, strict=True):
            now = min(max(now + duration, second), second + 0.999)
            found.append(now)
        self._last_time[rank] = now
        return found

    def _curve(self, rank: int, name: str) -> Curve:
        found = self._curves.get((rank, name))
        if found is None:
            share = _BUCKETS_OF_ALL // (len(self._curves) + 1) // 2 * 2
            limit = max(_MIN_BUCKETS, min(_MAX_BUCKETS, share))
            for curve in self._curves.values():
                curve.shrink(limit)
            found = self._curves[rank, name] = Curve(limit)
        return found


def choose_curves(
    curves: Mapping[tuple[int, str], Curve], metrics: Sequence[str] = (), ranks: Sequence[int] | None = None
) -> dict[str, dict[str, Curve]]:
    """Some of the curves, by metric and then by rank in words.

    Args:
        curves: by rank and metric.
        metrics: which, nested ones as ``outer/inner``; none for all that were reported.
        ranks: whose; None for everybody's.

    Raises:
        ValueError: there is no such one.
    """
    known = list(dict.fromkeys(metric for _, metric in curves if not metric.startswith("_")))
    panels = {}
    for metric in metrics or known:
        panels[metric] = {
            f"rank {rank}": curve
            for (rank, name), curve in curves.items()
            if name == metric and (ranks is None or rank in ranks)
        }
    missing = [metric for metric, chosen in panels.items() if not chosen]
    if missing or not panels:
        what = ", ".join(map(repr, missing)) or "such"
        whose = f" by ranks {list(ranks)}" if ranks is not None else ""
        raise ValueError(
            f"a plot: expected metrics that were reported as numbers, found no {what}{whose}; "
            f"there are: {', '.join(known) or 'none'}"
        )
    return panels


class _Tail:
    """Reads a growing file of lines in chunks."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._position = 0
        self._memory = b""  # what came last before the position

    def progress(self) -> tuple[int, int]:
        """Return how many bytes were read, and how many there are, as far as that is known."""
        with contextlib.suppress(OSError):
            if self._storage.is_local:
                return self._position, os.path.getsize(self._storage.path(self._name))
        return self._position, self._position

    def chunks(self) -> Iterator[bytes | None]:
        """Whole lines that are new; before them None, if what was read before is no longer there."""
        if not self._storage.is_local:
            yield from self._chunks_of(self._storage.read_bytes(self._name) or b"")
            return
        with contextlib.suppress(FileNotFoundError), self._storage.open_local(self._name) as file:
            file.seek(self._position - len(self._memory))
            if file.read(len(self._memory)) != self._memory:
                self._position, self._memory = 0, b""
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

    def _chunks_of(self, data: bytes) -> Iterator[bytes | None]:
        if data[: self._position][-_MEMORY_BYTES:] != self._memory:
            self._position, self._memory = 0, b""
            yield None
        whole = data[self._position :].rpartition(b"\n")[0]
        if whole:
            yield self._advance(whole + b"\n")

    def _advance(self, lines: bytes) -> bytes:
        self._position += len(lines)
        self._memory = (self._memory + lines)[-_MEMORY_BYTES:]
        return lines


def _parse(lines: bytes) -> list[dict[str, Any]]:
    """Read reports, with flat metrics, from lines of JSON; skips damaged lines."""
    reports = _parse_lines(lines)
    if lines.count(b"{") == len(reports):  # no report is nested; flattening would double the time
        return reports
    return [flatten(report) for report in reports]


def _parse_lines(lines: bytes) -> list[dict[str, Any]]:
    body = lines.strip(b"\n")
    with contextlib.suppress(StorageError):
        # At once, in a third of the time: a line end is never inside of a value.
        found: list[Any] = parse_json(b"[" + body.replace(b"\n", b",") + b"]", "")
        return [report for report in found if isinstance(report, dict)]
    reports = []
    for line in body.split(b"\n"):
        with contextlib.suppress(StorageError):
            reports.append(Fields(parse_json(line, ""), "").values)
    return reports


def _column(reports: Sequence[Mapping[str, Any]], name: str, otherwise: Sequence[float]) -> Sequence[float]:
    """Return a metric that should be a number in every report; where it is not, something else."""
    values = [report.get(name) for report in reports]
    if {*map(type, values)} <= {int, float} and _are_finite(values):  # type: ignore[arg-type]  # they are numbers now
        return values  # type: ignore[return-value]
    return [
        value if value is not None and is_number(value) else other
        for value, other in zip(values, otherwise, strict=True)
    ]


def _numbers(
    reports: Sequence[Mapping[str, Any]], name: str, iterations: Sequence[float], times: Sequence[float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the reports in which a metric is a number."""
    try:
        values = [report[name] for report in reports]
        if {*map(type, values)} <= {int, float}:
            return iterations, times, values
    except KeyError:
        pass
    found = [
        (x, t, report[name])
        for x, t, report in zip(iterations, times, reports, strict=True)
        if isinstance(report.get(name), (int, float)) and not isinstance(report[name], bool)
    ]
    x, t, y = map(list, zip(*found, strict=True)) if found else ([], [], [])
    return x, t, y


def _are_finite(values: Sequence[float]) -> bool:
    """Return True if no value is NaN or infinite, in a moment; also False where only their sum is very large."""
    try:
        return abs(sum(values)) < _LARGE
    except OverflowError:
        return False


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _short(value: float) -> float:
    """Seven digits, which is more than a screen can show."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
