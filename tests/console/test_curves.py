"""Curves keep every extreme in bounded memory while a run is in progress."""

import json
import math
import random
from pathlib import Path

import pytest

from drivetrain.runs import Curve, CurveReader, choose_curves
from tests.support import local_storage


def write_reports(directory: Path, reports: list[dict[str, object]], *, rank: int = 0, mode: str = "a") -> None:
    name = "result.json" if rank == 0 else f"result_rank_{rank}.json"
    with (directory / name).open(mode) as file:
        file.writelines(json.dumps(report) + "\n" for report in reports)


def numbered(first: int, last: int, **metrics: object) -> list[dict[str, object]]:
    return [{**metrics, "_training_iteration": i, "_timestamp": 1000 + i} for i in range(first, last + 1)]


@pytest.mark.parametrize("count", [1, 7, 16, 17, 1000, 12345])
@pytest.mark.parametrize("step", [1, 13, 5000])
def test_curve_keeps_every_extreme_and_mean_for_any_input_size(count: int, step: int) -> None:
    values = [random.Random(count).gauss(0, 1) for _ in range(count)]
    values[count // 2] = 99.0
    values[count // 3] = -99.0
    curve = Curve(max_buckets=16)
    for start in range(0, count, step):
        part = values[start : start + step]
        indices = list(range(start + 1, start + 1 + len(part)))
        curve.add(indices, indices, part)

    points = curve.points()
    assert len(points) <= 16
    assert curve.count == count
    assert (curve.lowest, curve.highest) == (min(values), max(values))
    start = 0
    for x, low, mean, high in points:
        bucket = values[start : int(x)]
        assert (low, high) == pytest.approx((min(bucket), max(bucket)))
        assert mean == pytest.approx(sum(bucket) / len(bucket), abs=1e-5)
        start = int(x)
    assert start == count, "some values are in no bucket"


def test_values_that_are_not_finite_are_counted_with_their_place() -> None:
    curve = Curve()
    curve.add([1, 2, 3, 4, 5], [0] * 5, [1.0, math.nan, 3.0, -math.inf, 10**400])

    assert [point[0] for point in curve.points()] == [1, 3]
    assert (curve.non_finite, curve.non_finite_at) == (3, [2, 4, 5])


def test_values_whose_sum_overflows_a_float_are_kept() -> None:
    curve = Curve(max_buckets=2)
    curve.add([1, 2, 3, 4], [0] * 4, [1e308] * 4)
    assert all(math.isfinite(value) for point in curve.points() for value in point)
    assert curve.count == 4


def test_reader_continues_at_its_position_and_waits_for_complete_lines(tmp_path: Path) -> None:
    write_reports(tmp_path, numbered(1, 3, loss=1.0))
    with (tmp_path / "result.json").open("a") as file:
        file.write('{"loss": 5.0, "_training_it')
    reader = CurveReader(local_storage(tmp_path))
    reader.update()
    assert reader.reports == {0: 3}

    with (tmp_path / "result.json").open("a") as file:
        file.write('eration": 4}\n')
    write_reports(tmp_path, numbered(1, 2, loss=9.0), rank=1)
    reader.update()

    assert reader.reports == {0: 4, 1: 2}
    assert reader.curves()[0, "loss"].highest == 5.0
    assert reader.curves()[1, "loss"].highest == 9.0


def test_reader_restarts_if_a_run_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    write_reports(tmp_path, numbered(1, 500, loss=7.0))
    reader = CurveReader(local_storage(tmp_path))
    reader.update()

    write_reports(tmp_path, numbered(1, 200, loss=7.0), mode="w")
    write_reports(tmp_path, numbered(201, 600, loss=1.0))
    reader.update()

    assert reader.reports == {0: 600}
    assert [point[2] for point in reader.curves()[0, "loss"].points()] == [7.0] * 200 + [1.0] * 400


def test_damaged_lines_and_values_that_are_not_numbers_are_skipped_and_a_late_metric_is_read(tmp_path: Path) -> None:
    reports = numbered(1, 100, loss=1.0, name="a", flag=True, nested={"x": 1})
    write_reports(tmp_path, [*reports, *numbered(101, 101, loss="none", accuracy=0.5)])
    text = (tmp_path / "result.json").read_text().splitlines(keepends=True)
    (tmp_path / "result.json").write_text("".join([*text[:50], "{damaged\n", *text[50:]]))
    reader = CurveReader(local_storage(tmp_path))
    reader.update()

    panels = choose_curves(reader.curves())
    assert {metric: curves["rank 0"].count for metric, curves in panels.items()} == {
        "loss": 100,
        "nested/x": 100,
        "accuracy": 1,
    }
    assert panels["accuracy"]["rank 0"].points()[0][0] == 101
    with pytest.raises(ValueError, match=r"got 'los'\. Known metrics: loss, nested/x, accuracy"):
        choose_curves(reader.curves(), ["los"])


def test_many_metrics_share_the_memory_of_few(tmp_path: Path) -> None:
    metrics = {f"m{i}": 1.0 for i in range(300)}
    write_reports(tmp_path, [{**report, **metrics} for report in numbered(1, 1500)])
    reader = CurveReader(local_storage(tmp_path))
    reader.update()

    curves = reader.curves()
    assert len(curves) == 300
    assert sum(len(curve.points()) for curve in curves.values()) <= 130_000
    assert all(curve.count == 1500 for curve in curves.values())


def test_reading_can_be_deferred(tmp_path: Path) -> None:
    write_reports(tmp_path, numbered(1, 20_000, loss=1.0))
    reader = CurveReader(local_storage(tmp_path))
    parts = [reader.update(limit_s=0.0)]
    while parts[-1] < 1:
        parts.append(reader.update(limit_s=0.0))

    assert len(parts) > 3
    assert parts == sorted(parts)
    assert reader.curves()[0, "loss"].count == 20_000
