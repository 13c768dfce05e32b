"""The records that a run writes, and how they are read."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain import DataParallelTrainer, Result, RunConfig, ScalingConfig, TrainingFailedError
from drivetrain._storage.layout import TIMELINE_FILE, USAGE_FILE
from drivetrain._storage.reports import last_report
from drivetrain.loggers.usage import UsageRecorder
from drivetrain.plugin import WorkerInfo
from drivetrain.runs import RunReader, RunRecord
from tests.support import local_storage, open_pipe


def fit(place: Path, steps: list[int], *, error: BaseException | None = None) -> None:
    """Perform a run in this process that reports these steps, and then raises if configured."""

    def train() -> None:
        for step in steps:
            drivetrain.report({"step": step})
        if error is not None:
            raise error

    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(place), resume="auto", verbose=0),
    ).fit()


def record(place: Path) -> RunRecord:
    return RunReader(local_storage(place / "run")).record()


def test_each_driver_appends_its_attempts_and_its_end(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError):
        fit(tmp_path, [1, 2], error=ValueError("no more data"))
    failed = record(tmp_path)
    assert failed.status == "failed"
    assert "no more data" in failed.error_line

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, [1], error=KeyboardInterrupt())
    assert record(tmp_path).status == "interrupted"

    fit(tmp_path, [1, 2, 3])
    found = record(tmp_path)
    assert (found.status, found.error_line, found.iterations) == ("finished", "", 3)
    assert [attempt.start for attempt in found.history.attempts] == [1, 2, 3]
    assert found.history.attempts[0].failure is not None
    assert found.ended is not None
    assert found.began <= found.history.attempts[0].began <= found.history.attempts[2].began <= found.ended


def test_unwritable_timeline_does_not_affect_the_run(tmp_path: Path) -> None:
    (tmp_path / "run" / TIMELINE_FILE).mkdir(parents=True)
    fit(tmp_path, [1])
    assert Result.from_path(tmp_path / "run").metrics["step"] == 1


def test_line_after_a_truncated_line_is_whole(tmp_path: Path) -> None:
    fit(tmp_path, [1])
    with (tmp_path / "run" / TIMELINE_FILE).open("a") as file:
        file.write('{"time": 5, "event": "sta')
    fit(tmp_path, [1, 2])
    assert record(tmp_path).status == "finished"
    assert [attempt.start for attempt in record(tmp_path).history.attempts] == [1, 2]


def test_arguments_and_variables_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "secret-one"])
    monkeypatch.setenv("API_KEY", "secret-two")
    fit(tmp_path, [1])
    text = (tmp_path / "run" / TIMELINE_FILE).read_text()
    assert "train.py" in text
    assert "secret" not in text


def test_last_report_of_a_long_file_is_read_whatever_its_length(tmp_path: Path) -> None:
    with (tmp_path / "result.json").open("w") as file:
        for i in range(3):
            file.write(json.dumps({"i": i, "text": "x" * 200_000}) + "\n")
        file.write('{"i": 99, "te')
    report = last_report(local_storage(tmp_path))
    assert report is not None
    assert report["i"] == 2


def test_resource_usage_of_a_worker_and_its_children_is_recorded(tmp_path: Path) -> None:
    burn = "import os\nif os.fork(): print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True, stdout=subprocess.PIPE)
    assert busy.stdout is not None
    busy.stdout.readline()
    here = {"hostname": socket.gethostname(), "ip": "127.0.0.1", "node_id": "n", "node_rank": 0}
    workers = [
        WorkerInfo(rank=0, local_rank=0, pid=busy.pid, **here),
        WorkerInfo(rank=1, local_rank=1, pid=os.getpid(), **here),
        WorkerInfo(rank=2, local_rank=2, pid=busy.pid, **{**here, "hostname": "elsewhere"}),
    ]
    recorder = UsageRecorder()
    with open_pipe(tmp_path / USAGE_FILE) as pipe:
        try:
            recorder.start(tmp_path, workers)
            sample = json.loads(pipe.receive()[0])
        finally:
            recorder.stop()
            os.killpg(busy.pid, 9)
            busy.communicate()

    assert sample["ranks"].keys() == {"0"}, "usage of other processes was recorded"
    cpus, memory, processes = sample["ranks"]["0"]
    assert 0.05 < cpus < 2.5
    assert memory > 5_000_000
    assert processes == 2
