"""No metric ends a run in the default loggers, and everything that they write can be read again."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain import Callback
from drivetrain._hooks.callback import Report
from drivetrain._storage.reading import MAX_LINE_BYTES
from drivetrain.loggers import CSVLoggerCallback, JsonLoggerCallback

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
    return SimpleNamespace(path=path)


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
