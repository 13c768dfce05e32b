"""The plugins in real runs: in processes that have their wheels on the module path, but not their sources."""

import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import Pipe, free_port, open_pipe, wait_until_exited
from tests.third_party.conftest import Start

WAIT_S = 120.0


class Receiver(http.server.ThreadingHTTPServer):
    """Records posted events. The path selects the response: ``/slow`` never responds, ``/to-...`` redirects."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.events: dict[str, list[Any]] = {}
        self.tokens: set[str | None] = set()
        self.closing = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])), parse_constant=pytest.fail)
        self.server.events.setdefault(self.path, []).append(body)
        self.server.tokens.add(self.headers["Authorization"])
        if self.path == "/slow":
            self.server.closing.wait(WAIT_S)
        self.send_response(302 if self.path.startswith("/to-") else 204)
        self.send_header("Location", "file:///etc/passwd" if self.path == "/to-file" else "/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def test_webhook_posts_events_and_an_unusable_server_does_not_affect_the_run(
    start: Start, receiver: Receiver, tmp_path: Path
) -> None:
    closed = f"http://127.0.0.1:{free_port()}/"
    urls = [closed, *(receiver.url(path) for path in ("/slow", "/to-file", "/to-elsewhere")), "file:///etc/passwd"]
    webhooks: list[dict[str, Any]] = [
        {"url": url, "timeout_s": 1.0 if url.endswith("/slow") else WAIT_S}
        for url in (receiver.url("/hook?team=a"), *urls)
    ]
    webhooks[0]["token"] = "s3cret"

    status, output, errors = start("webhook", webhooks=webhooks).wait(deadline_s=WAIT_S)

    assert status == 0, errors
    assert output.splitlines() == [
        *["succeeded"] * 5,
        "webhook: expected an http:// or https:// URL, got 'file:///etc/passwd'",
    ]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"run-{number}" for number in range(5)]
    *reports, end = receiver.events["/hook?team=a"]
    (failure,) = [event for event in reports if event["event"] == "failure"]
    assert (failure["kind"], failure["retrying"], failure["run"]) == ("infrastructure", True, "run-0")
    assert "SIGKILL" in failure["summary"]
    metrics = [event["metrics"] for event in reports if event["event"] == "report" and event["rank"] == 0]
    assert metrics[-1]["loss"] == 0.25
    assert metrics[0]["eval/accuracy"] == 0.5
    assert metrics[0]["loss"] == "nan"
    assert (end["event"], end["error"]) == ("end", None)
    assert "Bearer s3cret" in receiver.tokens
    lost = [line for line in errors.splitlines() if "events were not delivered" in line]
    assert len(lost) == 4
    assert "2 of 2 events were not delivered: [Errno 111] Connection refused" in lost[0]
    assert "2 of 2 events were not delivered" in lost[1]
    assert all("got 302 Found" in line for line in lost[2:])
    assert "/elsewhere" not in receiver.events
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.name != "trainer.pkl"]
    assert not [path for path in files if b"s3cret" in path.read_bytes()]


def test_delays_of_the_backoff_double_until_an_attempt_makes_progress(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_BACKOFF_FIRST_S", "0.02")

    status, output, errors = start("backoff").wait(deadline_s=WAIT_S)

    assert status == 0, errors
    *lines, reason, kind = output.splitlines()
    assert lines[::2] == ["retrying"] * 4
    assert (reason, kind) == ("giving up", "user error")
    for waited, delay_s in zip(map(float, lines[1::2]), (0.02, 0.04, 0.02, 0.02), strict=True):
        assert waited >= delay_s


def test_ctrl_c_ends_the_wait_of_the_backoff(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_BACKOFF_FIRST_S", "500")
    driver = start("backoff")
    assert driver.process.stdout is not None
    assert driver.process.stdout.readline() == "retrying\n"

    driver.interrupt()

    status, _, errors = driver.wait()
    assert status == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    driver.wait_until_nothing_is_left()


def test_run_on_the_process_runtime_resumes_after_a_rank_is_killed(start: Start, pipe: Pipe, tmp_path: Path) -> None:
    driver = start("processes", case="lose a rank", pipe=pipe.path, max_failures=1)

    status, output, errors = driver.wait(deadline_s=WAIT_S)

    assert status == 0, errors
    outcome = json.loads(output.splitlines()[-1])
    assert (outcome["attempt"], outcome["metrics"]["step"], outcome["metrics"]["sum"]) == (1, 3, 3)
    for rank in range(2):
        log = tmp_path / "runs" / "lose_rank_1" / "logs" / f"rank_{rank}.log"
        assert log.read_text().endswith(f"rank {rank} of 2 reads ''\n")
    driver.wait_until_nothing_is_left()


def test_root_cause_on_the_process_runtime_is_the_signal_of_the_killed_rank(start: Start, pipe: Pipe) -> None:
    driver = start("processes", case="lose a rank", pipe=pipe.path, max_failures=0)

    status, output, errors = driver.wait(deadline_s=WAIT_S)

    assert status == 0, errors
    outcome = json.loads(output.splitlines()[-1])
    assert "rank 1" in outcome["error"].splitlines()[0]
    assert "was killed by SIGKILL" in outcome["error"]
    assert outcome["metrics"]["step"] == 2
    driver.wait_until_nothing_is_left()


def test_lost_rank_of_the_process_runtime_is_replaced(start: Start, pipe: Pipe, tmp_path: Path) -> None:
    with open_pipe(tmp_path / "replaced") as replaced:
        driver = start("processes", case="replace a rank", pipe=pipe.path, replaced=replaced.path, max_failures=1)
        status, output, errors = driver.wait(deadline_s=WAIT_S)

    assert status == 0, errors
    assert json.loads(output.splitlines()[-1])["attempt"] == 0


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGKILL"])
def test_end_of_the_driver_ends_the_processes_of_the_process_runtime(start: Start, pipe: Pipe, end: str) -> None:
    driver = start("processes", case="wait", pipe=pipe.path, max_failures=0)
    pids = pipe.receive_pids(2)

    if end == "Ctrl-C":
        driver.interrupt()
    else:
        driver.kill()

    driver.wait()
    wait_until_exited(pids)
    driver.wait_until_nothing_is_left()


def test_process_runtime_refuses_gpus_before_the_run_starts(start: Start, pipe: Pipe, tmp_path: Path) -> None:
    status, output, errors = start("processes", case="request GPUs", pipe=pipe.path, max_failures=0).wait()

    assert status == 0, errors
    assert output == "runtime 'acme_processes': expected workers without GPUs. Set use_gpu=False\n"
    assert not (tmp_path / "runs").exists()


def test_run_in_a_third_party_filesystem_resumes_and_keeps_the_newest_checkpoints(
    start: Start, pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_DATABASE", str(tmp_path / "files.db"))

    def run(**arguments: Any) -> Any:
        status, output, errors = start("sqlite", pipe=pipe.path, target=str(tmp_path / "a"), **arguments).wait(
            deadline_s=WAIT_S
        )
        assert status == 0, errors
        return json.loads(output.splitlines()[-1])

    failed = run(killed_in=3, max_failures=0)
    assert "SIGKILL" in failed["error"]
    assert (failed["steps"], failed["first"], failed["step"]) == ([2, 3], 0, "3")

    resumed = run(killed_in=4, max_failures=1)
    assert (resumed["error"], resumed["steps"], resumed["first"], resumed["step"]) == (None, [4, 5], 4, "5")
    assert resumed["files"] == {"step_0": 1, "step_1": 1, "weights_0": 100_000, "weights_1": 100_000}

    command = [Path(sys.executable).with_name("drivetrain"), "runs", "list", "acme://runs", "--json"]
    (listed,) = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (listed["name"], listed["status"]) == ("run", "finished")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("checkpoint_")]


def test_third_party_strategy_trains_like_ddp(start: Start) -> None:
    status, output, errors = start("average").wait(deadline_s=WAIT_S)

    assert status == 0, errors
    parameters = json.loads(output.splitlines()[-1])
    assert parameters["average"] == pytest.approx(parameters["ddp"], rel=1e-6)
    assert parameters["compressed"] == pytest.approx(parameters["ddp"], rel=0.05, abs=0.01)
    assert parameters["compressed"] != parameters["average"]


def test_each_line_is_read_once_if_an_epoch_resumes_with_fewer_workers(start: Start, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(53)))

    status, output, errors = start("lines", lines=str(lines)).wait(deadline_s=WAIT_S)

    assert status == 0, errors
    ids, refusal = output.splitlines()[-2:]
    assert sorted(json.loads(ids)) == list(range(53))
    assert refusal.endswith("is not supported for a LineFile. Use another kind of dataset, or remove keep_together")
