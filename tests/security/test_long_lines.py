"""Lines that never end: shown in part where they are normal, in logs, and refused where they are damage."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

import drivetrain
from drivetrain import DataParallelTrainer, DrivetrainError, RunConfig, ScalingConfig, StorageError
from drivetrain._storage.directory import Storage
from drivetrain._storage.reading import MAX_LINE_BYTES
from drivetrain._storage.remote import locate
from drivetrain.loggers import CSVLoggerCallback, JsonLoggerCallback
from drivetrain_console import main
from drivetrain_console._commands.tail import _follow, _lines_from
from tests.security.conftest import Command
from tests.support import DEADLINE_S, local_storage, open_pipe, wait_for_release

pytestmark = pytest.mark.timeout(120)

BAR = b"\r 49%|####      |" + b"\r 50%|#####     |"
BARS = 1 + MAX_LINE_BYTES // len(BAR)
SPARSE_BYTES = 1 << 42


def test_log_of_a_progress_bar_is_shown(place: Path, command: Command) -> None:
    (place / "hostile" / "logs" / "rank_0.log").write_bytes(b"begin\n" + BAR * BARS)
    status, out, err = command("runs", "tail", place / "hostile", "--logs", "--no-follow")
    assert (status, out, err) == (0, " 50%|#####     |\n", "")


def test_reports_with_a_line_that_is_too_long_are_refused(place: Path, command: Command) -> None:
    (place / "hostile" / "result.json").write_bytes(b"{}\n" + BAR * BARS)
    status, _, err = command("runs", "tail", place / "hostile", "--no-follow")
    assert status == 1
    assert "result.json: expected the last 10 lines to have at most 16,777,216 bytes" in err


@pytest.fixture
def bucket(place: Path) -> Iterator[str]:
    """A copy of the hostile run in a bucket."""
    memory = fsspec.filesystem("memory")
    memory.put(str(place / "hostile"), "/long_lines/hostile", recursive=True)
    yield "memory://long_lines/hostile"
    memory.rm("/long_lines", recursive=True)


@pytest.mark.parametrize("start", [b"", b"begin\n"])
def test_log_of_a_progress_bar_in_a_bucket_is_shown(bucket: str, command: Command, start: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"{bucket.partition(':/')[2]}/logs/rank_0.log", start + BAR * BARS)
    status, out, err = command("runs", "tail", bucket, "--logs", "--no-follow")
    assert (status, out, err) == (0, " 50%|#####     |\n", "")

    storage = Storage(*locate(bucket, what="the run"))
    (part, end), *others = _lines_from(storage, "logs/rank_0.log", len(start), is_log=True)
    assert others == []
    assert len(part) <= 1 << 16, "of a line without an end, only the last part is returned"
    assert end <= len(start) + MAX_LINE_BYTES


def test_reports_with_a_line_that_is_too_long_are_refused_in_a_bucket(bucket: str, command: Command) -> None:
    fsspec.filesystem("memory").pipe_file(f"{bucket.partition(':/')[2]}/result.json", b"{}\n" + BAR * BARS)
    status, _, err = command("runs", "tail", bucket, "--no-follow")
    assert status == 1
    assert "result.json: expected the last 10 lines to have at most 16,777,216 bytes" in err


def test_everything_that_was_written_before_the_end_of_a_run_is_shown(place: Path) -> None:
    log = place / "hostile" / "logs" / "rank_0.log"
    lines = [f"{number:07} " + "x" * 992 for number in range(40_000)]
    shown = _follow(local_storage(place / "hostile"), "logs/rank_0.log", 1, True, is_log=True)
    assert next(shown) == b"hello"
    with log.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert [line.decode() for line in shown] == lines


def test_lines_after_a_long_one_at_the_end_of_a_run_are_shown(place: Path) -> None:
    log = place / "hostile" / "logs" / "rank_0.log"
    lines = ["short", "x" * (MAX_LINE_BYTES - 3), "last"]  # the first read ends in the long line
    shown = _follow(local_storage(place / "hostile"), "logs/rank_0.log", 1, True, is_log=True)
    assert next(shown) == b"hello"
    with log.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert [len(line) for line in shown] == [len(line) for line in lines]


def test_log_without_line_ends_is_shown_in_part(place: Path, command: Command) -> None:
    with (place / "hostile" / "logs" / "rank_0.log").open("wb") as file:
        file.truncate(SPARSE_BYTES)
    status, out, _ = command("runs", "tail", place / "hostile", "--logs", "--json")
    assert status == 1, "the run has failed"
    assert len(json.loads(out)["line"]) == 1 << 16


def test_progress_bar_of_a_live_run_is_followed(tmp_path: Path) -> None:
    with open_pipe(tmp_path / "pipe") as pipe:

        def train(config: dict[str, str]) -> None:
            print("begin", flush=True)
            wait_for_release(config["pipe"])
            sys.stdout.buffer.write(BAR * BARS)
            sys.stdout.buffer.flush()
            wait_for_release(config["pipe"])
            print("\nend", flush=True)

        run = DataParallelTrainer(
            train,
            train_loop_config={"pipe": pipe.path},
            run_config=RunConfig(name="followed", storage_path=str(tmp_path), verbose=0),
            scaling_config=ScalingConfig(num_workers=1, runtime="local"),
        ).start()
        program = f"import sys; from {main.__module__} import main; sys.exit(main())"
        tail = subprocess.Popen(
            [sys.executable, "-c", program, "runs", "tail", str(tmp_path / "followed"), "--logs"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert tail.stdout is not None
        with tail.stdout:
            assert tail.stdout.readline() == "begin\n"
            pipe.release()
            shown = tail.stdout.readline()
            assert shown in (" 49%|####      |\n", " 50%|#####     |\n"), "a whole state, while the line has no end"
            pipe.release()
            *_, last = tail.stdout
        assert last == "end\n"
        assert tail.wait(DEADLINE_S) == 0
        run.result(DEADLINE_S)


def resume(run: Path) -> None:
    DataParallelTrainer(
        drivetrain.get_checkpoint,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(resume=str(run), verbose=0),
    ).fit()


@pytest.mark.parametrize("name", ["result.json", "result_rank_3.json", "progress.csv"])
@pytest.mark.parametrize("start", [b"", b"\n"])
def test_run_whose_reports_have_an_endless_line_is_not_resumed(place: Path, name: str, start: bytes) -> None:
    file = place / "hostile" / name
    good = file.read_bytes() if file.exists() and start else b""
    with file.open("wb") as opened:
        opened.write(good)
        opened.truncate(SPARSE_BYTES)
    with pytest.raises(DrivetrainError, match=rf"{name}: expected .* at most 16,777,216 bytes, got more"):
        resume(place / "hostile")


@pytest.mark.parametrize("row", [b'"x\n",', b'"\n\n\n",', b"x," * 2000 + b'"\n",'])
@pytest.mark.parametrize("header", [b"", b"_training_iteration,a\n1,2\n"])
def test_table_with_a_row_that_spans_many_lines_is_refused(
    place: Path, command: Command, header: bytes, row: bytes
) -> None:
    (place / "hostile" / "progress.csv").write_bytes(header + row * (2 * MAX_LINE_BYTES // len(row)))
    with pytest.raises(
        DrivetrainError,
        match=r"StorageError: \[DT-413\] .*progress\.csv: expected a row .* at most (16,777,216 bytes|10,000 lines)",
    ):
        resume(place / "hostile")
    assert command("runs", "list", place)[0] == 0


@pytest.mark.parametrize("data", [b'a,"' + b"x" * 200_000 + b'"\n1,2\n'])
def test_table_that_cannot_be_parsed_is_an_error_that_names_the_file(place: Path, data: bytes) -> None:
    (place / "hostile" / "progress.csv").write_bytes(data)
    with pytest.raises(DrivetrainError, match=r"progress\.csv: expected comma-separated values, got something else"):
        resume(place / "hostile")


def test_table_with_bytes_that_are_not_text_is_resumed(place: Path) -> None:
    table = place / "hostile" / "progress.csv"
    table.write_bytes(b"_training_iteration,name\n1,\xff\xfe\n")
    resume(place / "hostile")
    assert table.read_text() == "_training_iteration,name\n1,\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n"


LOGGERS: list[tuple[Callable[[], Any], str]] = [
    (JsonLoggerCallback, "result.json"),
    (CSVLoggerCallback, "progress.csv"),
]


@pytest.mark.parametrize(("logger", "name"), LOGGERS)
def test_logger_does_not_append_to_a_file_with_an_endless_line(
    tmp_path: Path, logger: Callable[[], Any], name: str
) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(SPARSE_BYTES)
    with pytest.raises(StorageError, match=rf"{name}: expected a line to have at most"):
        logger().on_report(SimpleNamespace(path=tmp_path), SimpleNamespace(rank=0, metrics={"step": 1}))
