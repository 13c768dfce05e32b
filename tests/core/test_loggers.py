"""No metric ends a run in the default loggers, and everything that they write can be read again."""

import contextlib
import csv
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from drivetrain import Callback, ConfigurationError, StorageError, runs
from drivetrain._hooks.callback import Report
from drivetrain._storage.reading import MAX_LINE_BYTES
from drivetrain.loggers import CSVLoggerCallback, JsonLoggerCallback, ParquetLoggerCallback
from drivetrain.loggers.selection import Selection
from drivetrain.runs._curves import CurveReader
from tests.support import local_storage

ODD_METRICS: dict[str, dict[str, Any]] = {
    "lone surrogates": {"name \udc80": "value \udc80"},
    "a huge integer": {"value": 10**5000},
    "a huge integer in a list": {"value": [1, -(10**5000)]},
    "a long text": {"value": "x" * 20_000_000},
    "many long texts": {f"value {number}": "x" * 100_000 for number in range(200)},
    "many lines": {"value": "\n" * 20_000},
    "control characters": {"value": "a\0b\rc"},
    "many metrics": {f"metric {number}": number for number in range(2_000)},
    "long names": {"x" * 1_000_000: 1},
    "infinity": {"value": float("inf"), "other": float("nan")},
}


def run_at(path: Path) -> Any:
    return SimpleNamespace(path=path, storage=local_storage(path))


def report(iteration: int, metrics: dict[str, Any]) -> Report:
    return Report(0, iteration, {**metrics, "_training_iteration": iteration, "_timestamp": 0})


def rows_of(path: Path) -> list[dict[str, str]]:
    with (path / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def loggers() -> list[Callback]:
    return [CSVLoggerCallback(), JsonLoggerCallback()]


@pytest.mark.parametrize("metrics", ODD_METRICS.values(), ids=ODD_METRICS.keys())
def test_odd_metrics_are_written_and_can_be_read_when_the_run_resumes(
    metrics: dict[str, Any], loggers: list[Callback], tmp_path: Path
) -> None:
    run = run_at(tmp_path)
    for logger in loggers:
        logger.on_report(run, report(1, {"loss": 1.0}))
        logger.on_report(run, report(2, metrics))
        logger.on_resume(run, 2)
        logger.on_report(run, report(3, {"loss": 3.0}))
        logger.on_run_end(run, None)

    lines = (tmp_path / "result.json").read_bytes().splitlines()
    assert [json.loads(line)["_training_iteration"] for line in lines] == [1, 2, 3]
    assert max(map(len, lines)) < MAX_LINE_BYTES
    rows = rows_of(tmp_path)
    assert [(row["_training_iteration"], row["loss"]) for row in rows] == [("1", "1.0"), ("2", ""), ("3", "3.0")]


def test_shortened_text_states_how_much_is_missing(tmp_path: Path, loggers: list[Callback]) -> None:
    run = run_at(tmp_path)
    for logger in loggers:
        logger.on_report(run, report(1, {"text": "x" * 300_000}))
        logger.on_run_end(run, None)

    assert json.loads((tmp_path / "result.json").read_bytes())["text"].endswith("x... (200,000 more characters)")
    assert rows_of(tmp_path)[0]["text"].endswith("x... (200,000 more characters)")


def test_every_report_can_add_a_column(tmp_path: Path) -> None:
    logger, run = CSVLoggerCallback(), run_at(tmp_path)
    for number in range(1, 301):
        logger.on_report(run, report(number, {f"metric {number}": number}))
    logger.on_run_end(run, None)

    rows = rows_of(tmp_path)
    assert [row[f"metric {number}"] for number, row in enumerate(rows, start=1)] == [str(n) for n in range(1, 301)]
    assert all(None not in row for row in rows), "no row is longer than the header"


def test_file_is_valid_while_a_column_is_added(tmp_path: Path) -> None:
    logger, run = CSVLoggerCallback(), run_at(tmp_path)
    for number in range(1, 200):
        logger.on_report(run, report(number, {"loss": 1.0, **({"late": 2} if number % 50 == 0 else {})}))
        rows = rows_of(tmp_path)
        assert [row["_training_iteration"] for row in rows] == [str(n) for n in range(1, number + 1)]
        assert all(None not in row for row in rows), "no row is longer than the header"
    logger.on_run_end(run, None)

    assert [row["late"] for row in rows_of(tmp_path) if row["late"]] == ["2", "2", "2"]


def test_failed_copy_of_the_file_is_reported(tmp_path: Path) -> None:
    logger, run = CSVLoggerCallback(), run_at(tmp_path)
    logger.on_report(run, report(1, {"loss": 1.0}))
    (tmp_path / ".progress.csv.draft").mkdir()

    def add_column() -> None:
        logger.on_report(run, report(2, {"late": 2}))
        logger.on_run_end(run, None)

    with pytest.raises(IsADirectoryError):
        add_column()


@pytest.mark.parametrize("left", [b"", b"_training_iteration,lo"])
def test_table_whose_header_was_not_written_completely_is_written_by_the_next_driver(
    tmp_path: Path, left: bytes
) -> None:
    (tmp_path / "progress.csv").write_bytes(left)
    logger, run = CSVLoggerCallback(), run_at(tmp_path)
    logger.on_resume(run, 0)
    logger.on_report(run, report(1, {"loss": 1.0}))
    logger.on_run_end(run, None)

    assert [(row["_training_iteration"], row["loss"]) for row in rows_of(tmp_path)] == [("1", "1.0")]


def reports_of(rank: int, iterations: Iterable[int], **metrics: Any) -> list[Report]:
    return [
        Report(rank, number, {"loss": float(number), **metrics, "_training_iteration": number, "_timestamp": number})
        for number in iterations
    ]


def written_by(logger: Callback, run: Any, *reports: Report) -> None:
    logger.on_run_start(run)
    for report in reports:
        logger.on_report(run, report)
    logger.on_group_stop(run, 0)
    logger.on_run_end(run, None)


def iterations_in(path: Path, rank: int = 0) -> list[int]:
    return [report["_training_iteration"] for report in runs.RunReader(local_storage(path)).reports(rank)]


LOGGERS: list[Any] = [JsonLoggerCallback, ParquetLoggerCallback]


@pytest.mark.parametrize("logger", LOGGERS)
def test_loggers_select_reports_and_write_the_last_one(logger: Any, tmp_path: Path) -> None:
    run = run_at(tmp_path)

    written_by(
        logger(ranks=[0, 2], every=10), run, *(each for rank in range(3) for each in reports_of(rank, range(26)))
    )

    assert iterations_in(tmp_path) == iterations_in(tmp_path, 2) == [0, 10, 20, 25]
    assert runs.RunReader(local_storage(tmp_path)).ranks() == [0, 2]


@pytest.mark.parametrize("logger", LOGGERS)
def test_loggers_leave_time_between_reports_of_a_rank(logger: Any, tmp_path: Path) -> None:
    run = run_at(tmp_path)
    written_by(logger(min_interval_s=100), run, *reports_of(0, range(1, 13)), *reports_of(1, range(1, 4)))

    assert iterations_in(tmp_path) == [1, 12]
    assert iterations_in(tmp_path, 1) == [1, 3]


def test_time_between_selected_reports_is_measured_for_each_rank() -> None:
    now = 0.0
    selection = Selection("Logger", "all", 1, 5.0, clock=lambda: now)
    selected = []
    for now in (0.0, 3.0, 5.0, 9.0, 10.0):
        selected += [(now, rank) for rank in (0, 1) if selection.selects(reports_of(rank, [int(now)])[0])]

    assert selected == [(0.0, 0), (0.0, 1), (5.0, 0), (5.0, 1), (10.0, 0), (10.0, 1)]


def test_csv_file_has_selected_rows_and_the_last_one(tmp_path: Path) -> None:
    written_by(CSVLoggerCallback(every=4), run_at(tmp_path), *reports_of(0, range(1, 11)), *reports_of(1, [4, 8]))

    assert [row["loss"] for row in rows_of(tmp_path)] == ["4.0", "8.0", "10.0"]


@pytest.mark.parametrize("logger", [*LOGGERS, CSVLoggerCallback])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"\(every=...\): expected an integer of at least 1, got 0"),
        ({"min_interval_s": "1 min"}, r"\(min_interval_s=...\): expected seconds, got '1 min'"),
    ],
)
def test_wrong_options_are_refused(logger: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{logger.__name__}{message}"):
        logger(**options)


def test_wrong_options_of_one_logger_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected 'all' or a list of ranks, got 'first'"):
        JsonLoggerCallback(ranks="first")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"expected one of zstd, .*, got 'zip'"):
        ParquetLoggerCallback(compression="zip")
    with pytest.raises(ConfigurationError, match="expected a positive number of seconds, got 0"):
        ParquetLoggerCallback(interval_s=0)


def test_parquet_files_are_one_table_for_other_tools(tmp_path: Path) -> None:
    metrics = {"phase": "train", "eval": {"accuracy": 0.5}, "done": False, "none": None, "sizes": [1, 2]}
    written_by(ParquetLoggerCallback(), run_at(tmp_path), *(reports_of(3, range(2000), **metrics)))

    table = pandas.read_parquet(tmp_path / "metrics")

    assert len(table) == 2000
    row = table.iloc[-1].to_dict()
    assert row["_rank"] == 3
    assert (row["loss"], row["eval/accuracy"], row["phase"], row["sizes"]) == (1999.0, 0.5, "train", "[1,2]")
    assert row["done"] is False or not row["done"]
    assert "none" not in row


def test_parquet_rows_that_are_reported_again_after_a_resume_replace_the_earlier_ones(tmp_path: Path) -> None:
    run = run_at(tmp_path)
    reader = runs.RunReader(local_storage(tmp_path))
    curves = CurveReader(reader.storage)
    written_by(ParquetLoggerCallback(), run, *reports_of(0, range(1, 101)))
    curves.update()
    logger = ParquetLoggerCallback()
    logger.on_run_start(run)
    logger.on_resume(run, 80)
    for report in reports_of(0, range(81, 91), again=1):
        logger.on_report(run, report)
    logger.on_run_end(run, None)
    curves.update()

    assert iterations_in(tmp_path) == list(range(1, 91))
    assert [report.get("again") for report in reader.reports()][79:81] == [None, 1.0]
    assert curves.curves()[0, "loss"].count == 90


def test_parquet_rows_are_written_before_a_checkpoint_and_after_an_interval(tmp_path: Path) -> None:
    run = run_at(tmp_path)
    logger = ParquetLoggerCallback(interval_s=1e-9)
    logger.on_run_start(run)
    (first, second, third) = reports_of(0, range(3))
    logger.on_report(run, first._replace(checkpoint="checkpoint_000001"))
    assert iterations_in(tmp_path) == [0]
    for report in (second, third):
        logger.on_report(run, report)
    logger.on_run_end(run, None)

    assert iterations_in(tmp_path) == [0, 1, 2]
    assert len(list((tmp_path / "metrics").iterdir())) == 3


@pytest.mark.parametrize("metrics", ODD_METRICS.values(), ids=ODD_METRICS.keys())
def test_odd_metrics_are_written_to_parquet_files(metrics: dict[str, Any], tmp_path: Path) -> None:
    run = run_at(tmp_path)

    written_by(ParquetLoggerCallback(), run, report(1, {"value": 0.5}), report(2, metrics), report(3, {"value": 0.5}))

    assert iterations_in(tmp_path) == [1, 2, 3]


def test_reports_of_a_rank_that_appears_in_both_forms_are_counted_once(tmp_path: Path) -> None:
    run = run_at(tmp_path)
    written_by(ParquetLoggerCallback(), run, *reports_of(0, range(1, 51)))
    curves = CurveReader(local_storage(tmp_path))
    curves.update()
    written_by(JsonLoggerCallback(every=10), run, *reports_of(0, range(1, 51)))
    curves.update()

    assert curves.reports == {0: 5}
    assert curves.curves()[0, "loss"].count == 5


PART = "part-00000-000000000000-00000000.parquet"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"_rank": [0], "loss": [[1] * 5_000_000]}, "expected columns of numbers, booleans and texts, got list"),
    "a structure": ({"_rank": [0], "loss": [{"x": 1}]}, "expected columns of numbers, booleans and texts, got struct"),
    "bytes": ({"_rank": [0], "loss": [b"x"]}, "expected columns of numbers, booleans and texts, got binary"),
    "a text of 200 MB": ({"_rank": [0], "loss": ["x" * 200_000_000]}, "expected texts of at most 400,000 bytes, got"),
}


@pytest.mark.parametrize(("columns", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_parquet_file_with_other_values_is_refused(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "metrics" / PART, compression="zstd")

    with pytest.raises(StorageError, match=message):
        iterations_in(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, 400, 1500])
def test_damaged_parquet_file_is_an_error(size: int, tmp_path: Path) -> None:
    written_by(ParquetLoggerCallback(), run_at(tmp_path), *reports_of(0, range(100)))
    data = (tmp_path / "metrics" / PART).read_bytes()
    (tmp_path / "metrics" / PART).write_bytes(data[:size] + b"nonsense" + data[size + 8 :])

    with contextlib.suppress(StorageError):  # other errors fail the test
        assert len(iterations_in(tmp_path)) == 100, "the damaged bytes are values, or are not used"
