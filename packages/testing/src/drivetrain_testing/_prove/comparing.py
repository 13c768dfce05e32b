"""Compares two runs of a job: rows, metrics and checkpoints, and finds where they first differ."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from drivetrain.plugin.callbacks import flatten
from drivetrain_testing._prove.contents import Tensor, have_same_bytes, list_files, read_values
from drivetrain_testing._prove.events import JobEvents
from drivetrain_testing._prove.job import JobRun

__all__ = ["Comparison", "Difference", "Rules", "compare_runs", "compare_values"]

_MAX_DIFFERENCES = 20
_GENERATOR = re.compile(r"(?:rank_\d+\.json: |.*: ranks\[\d+\]\.)random\.[^.\[]+")
"""The random state of a generator in the checkpoint of a ``TrainState``."""
_OF_RANKS = re.compile(r"rank_\d+\.json|.*: ranks\b")
"""The entries of such a checkpoint that depend on the number of workers."""
_ROWS_FIRST = {"rows": 0, "metric": 1, "checkpoint": 2, "steps": 3, "failure": 4}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How two runs are compared.

    Attributes:
        ignored: the names of metrics, and of entries of checkpoints, that may differ.
        tolerance: the relative and absolute difference that floating-point numbers may have; 0 for bit for bit.
        same_size: False if the number of workers changed in one of the runs. Then the rows of all ranks are compared
            together, and the metrics only of rank 0.
    """

    ignored: Collection[str] = ()
    tolerance: float = 0.0
    same_size: bool = True

    def ignores(self, name: str) -> bool:
        """Return True if a metric, a file or an entry with this name, or a part of it, may differ."""
        parts = {name, *name.split("/"), *name.replace("/", ".").split(".")}
        return not parts.isdisjoint(self.ignored)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between the undisturbed run and the one with kills.

    Attributes:
        kind: ``"rows"``, ``"metric"``, ``"checkpoint"``, ``"steps"`` or ``"failure"``.
        iteration: the ``_training_iteration`` of the report with which it becomes visible; 0 if unknown.
        rank: the rank; None for all ranks together.
        name: the metric, or the file and the entry of the checkpoint; empty for rows.
        detail: both values.
    """

    kind: Literal["rows", "metric", "checkpoint", "steps", "failure"]
    iteration: int
    rank: int | None = None
    name: str = ""
    detail: str = ""

    def __str__(self) -> str:
        who = "" if self.rank is None else f" of rank {self.rank}"
        at = f"at report {self.iteration}" if self.iteration else ""
        match self.kind:
            case "rows":
                return f"{at}: the rows{who} differ: {self.detail}"
            case "metric":
                return f"{at}: the metric {self.name!r}{who} differs: {self.detail}"
            case "checkpoint":
                return f"{at}: the checkpoint differs in {self.name}: {self.detail}"
        return self.detail

    def as_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences between two runs, the earliest first, and the size of the comparison.

    Attributes:
        differences: the differences; empty if the runs are equal.
        reports: the number of compared reports of all ranks.
        rows: the number of compared rows; None if no loader has shown its rows.
        entries: the number of entries of the last checkpoints.
        unseeded: the random states that were not compared, because they differ in the first checkpoint already.
    """

    differences: list[Difference]
    reports: int
    rows: int | None
    entries: int
    unseeded: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """The first difference; None if the runs are equal."""
        return self.differences[0] if self.differences else None


def compare_runs(expected: JobRun, actual: JobRun, rules: Rules) -> Comparison:
    """Compare the undisturbed run with another one."""
    rows = list(_compare_rows(expected.events, actual.events, rules))
    reports, metrics = _compare_metrics(expected, actual, rules)
    unseeded = _find_unseeded(expected, actual, rules)
    entries, checkpoints = _compare_checkpoints(expected.checkpoints, actual.checkpoints, rules, unseeded)
    found = sorted([*rows, *metrics, *checkpoints], key=lambda each: (each.iteration, _ROWS_FIRST[each.kind]))
    has_rows = expected.events.has_rows
    return Comparison(
        differences=found[:_MAX_DIFFERENCES],
        reports=reports,
        rows=expected.events.multiset().total() if has_rows else None,
        entries=entries,
        unseeded=sorted(unseeded),
    )


def _compare_rows(expected: JobEvents, actual: JobEvents, rules: Rules) -> Iterator[Difference]:
    """Yield the first difference of each rank."""
    if not rules.same_size:
        yield from _compare_all_rows(expected, actual)
        return
    for rank in sorted(expected.batches.keys() | actual.batches.keys()):
        iterations = expected.batches.get(rank, {}).keys() | actual.batches.get(rank, {}).keys()
        for iteration in sorted(iterations):
            before, after = expected.order(rank, iteration), actual.order(rank, iteration)
            if before != after:
                detail = _describe_rows(expected, rank, iteration, before, after)
                yield Difference(kind="rows", iteration=iteration + 1, rank=rank, detail=detail)
                break


def _compare_all_rows(expected: JobEvents, actual: JobEvents) -> Iterator[Difference]:
    iterations = sorted({key for events in (expected, actual) for each in events.batches.values() for key in each})
    steps_are_equal = _last_report(expected) == _last_report(actual)
    for iteration in iterations if steps_are_equal else [None]:
        before, after = expected.multiset(iteration), actual.multiset(iteration)
        if before != after:
            missing, extra = (before - after).total(), (after - before).total()
            yield Difference(
                kind="rows",
                iteration=0 if iteration is None else iteration + 1,
                detail=f"of {before.total()} rows, {missing} were not read, and {extra} were read in addition",
            )
            return


def _last_report(events: JobEvents) -> int:
    return max((iteration for reports in events.reports.values() for iteration in reports), default=0)


def _describe_rows(events: JobEvents, rank: int, iteration: int, before: list[str], after: list[str]) -> str:
    position = next((at for at, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    position = min(len(before), len(after)) if position is None else position
    epoch = batch = read = 0
    for each in events.batches.get(rank, {}).get(iteration, []):
        epoch, batch = each.epoch, each.number
        read += len(each.rows)
        if read > position:
            break
    where = f"row {position + 1} after report {iteration} (epoch {epoch}, batch {batch + 1})"
    if sorted(before) == sorted(after):
        return f"{where} is another one; the {len(before)} rows are the same, in another order"
    if len(before) != len(after):
        return f"{where} is another one; {len(after)} rows were read instead of {len(before)}"
    return f"{where} is another one; {len(set(before) & set(after))} of {len(before)} rows are the same"


def _compare_metrics(expected: JobRun, actual: JobRun, rules: Rules) -> tuple[int, list[Difference]]:
    before, after = expected.reader, actual.reader
    compared, found = 0, []
    ranks = sorted({*before.ranks(), *after.ranks()}) if rules.same_size else [0]
    for rank in ranks:
        rows = [list(reader.reports(rank)) if rank in reader.ranks() else [] for reader in (before, after)]
        compared += len(rows[0])
        for one, other in zip(*rows, strict=False):
            names = [name for name in {**flatten(one), **flatten(other)} if name[:1] != "_" and not rules.ignores(name)]
            different = [
                name for name in names if not _is_equal(flatten(one).get(name), flatten(other).get(name), rules)
            ]
            iteration = int(one.get("_training_iteration", 0))
            for name in different:
                detail = f"{flatten(one).get(name)!r} undisturbed, {flatten(other).get(name)!r} after the kills"
                found.append(Difference(kind="metric", iteration=iteration, rank=rank, name=name, detail=detail))
            if different:
                break
        if len(rows[0]) != len(rows[1]):
            iteration = min(map(len, rows)) + 1
            detail = f"rank {rank} made {len(rows[1])} reports instead of {len(rows[0])}"
            found.append(Difference(kind="steps", iteration=iteration, rank=rank, detail=detail))
    return compared, found


def _find_unseeded(expected: JobRun, actual: JobRun, rules: Rules) -> set[str]:
    """Return the random states that differ in checkpoints which were saved before the first kill.

    These generators were not seeded. If the job uses their numbers, something else differs, too.
    """
    common = expected.checkpoints.keys() & actual.checkpoints.keys()
    first = min(common, default=0)
    if not common or any(kill.report < first for kill in actual.killed):
        return set()
    _, different = _compare_directories(expected.checkpoints[first], actual.checkpoints[first], rules, ())
    return {match[0] for name, _ in different if (match := _GENERATOR.match(name))}


def _compare_checkpoints(
    expected: Mapping[int, Path], actual: Mapping[int, Path], rules: Rules, unseeded: Collection[str]
) -> tuple[int, list[Difference]]:
    """Compare the last checkpoints. If they differ, find the first pair that differs by bisecting."""
    found = []
    if expected.keys() != actual.keys():
        iteration = min(expected.keys() ^ actual.keys())
        detail = f"checkpoints of the reports {sorted(actual)} instead of {sorted(expected)}"
        found.append(Difference(kind="steps", iteration=iteration, detail=detail))
    common = sorted(expected.keys() & actual.keys())
    if not common:
        return 0, found
    entries, different = _compare_directories(expected[common[-1]], actual[common[-1]], rules, unseeded)
    if not different:
        return entries, found
    low, high = 0, len(common) - 1  # the checkpoint at `high` differs
    while low < high:
        middle = (low + high) // 2
        _, inner = _compare_directories(expected[common[middle]], actual[common[middle]], rules, unseeded)
        if inner:
            high, different = middle, inner
        else:
            low = middle + 1
    for name, detail in different:
        found.append(Difference(kind="checkpoint", iteration=common[high], name=name, detail=detail))
    return entries, found


def _compare_directories(
    expected: Path, actual: Path, rules: Rules, unseeded: Collection[str]
) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of entries, and the names and descriptions of those that differ."""
    before, after = list_files(expected), list_files(actual)
    different = [(name, "only in one of the runs") for name in sorted({*before} ^ {*after}) if not rules.ignores(name)]
    entries = 0
    for name in sorted({*before} & {*after}):
        if rules.ignores(name):
            continue
        values = read_values(expected / name)
        entries += 1 if values is None else len(values)
        if have_same_bytes(expected / name, actual / name):
            continue
        others = read_values(actual / name)
        if values is None or others is None:
            different.append((name, "the bytes of the file differ"))
        else:
            different += [(f"{name}: {entry}", detail) for entry, detail in compare_values(values, others, rules)]
    return entries, [(name, detail) for name, detail in different if not _may_differ(name, rules, unseeded)]


def _may_differ(name: str, rules: Rules, unseeded: Collection[str]) -> bool:
    generator = _GENERATOR.match(name)
    is_unseeded = generator is not None and generator[0] in unseeded
    return is_unseeded or (not rules.same_size and _OF_RANKS.match(name) is not None)


def compare_values(before: Mapping[str, Any], after: Mapping[str, Any], rules: Rules) -> Iterator[tuple[str, str]]:
    """Yield the names of the values that differ, with descriptions."""
    for name in {**before, **after}:
        if rules.ignores(name):
            continue
        if name not in before or name not in after:
            yield name, "only in one of the runs"
        elif not _is_equal(before[name], after[name], rules):
            yield name, _describe(before[name], after[name])


def _is_equal(one: Any, other: Any, rules: Rules) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        if one.data == other.data:
            return True
        return rules.tolerance > 0 and _largest_excess(one, other, rules.tolerance) <= 0
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) and math.isnan(other):
            return True
        return math.isclose(one, other, rel_tol=rules.tolerance, abs_tol=rules.tolerance)
    return type(one) is type(other) and bool(one == other)


def _largest_excess(one: Tensor, other: Tensor, tolerance: float) -> float:
    """Return by how much the largest difference of two tensors exceeds the tolerance."""
    if one.numbers is None or other.numbers is None:
        return math.inf
    before, after = one.numbers(), other.numbers()
    excess = abs(before - after) - tolerance - tolerance * abs(before)
    return float(excess.max()) if excess.size else 0.0


def _describe(one: Any, other: Any) -> str:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return f"{one!r:.80} undisturbed, {other!r:.80} after the kills"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype}{list(one.shape)} undisturbed, {other.dtype}{list(other.shape)} after the kills"
    if one.numbers is None or other.numbers is None:
        return f"the bytes of a tensor {one.dtype}{list(one.shape)} differ"
    gap = abs(one.numbers() - other.numbers())
    return f"{int((gap != 0).sum())} of {gap.size} numbers differ, by up to {float(gap.max()):.3g}"
