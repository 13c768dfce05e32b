"""``python -m tests.gpu`` itself, tested on the CPU with checks whose results are known."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import checkout
from tests.gpu.samples import SAMPLE_PIPE, WAITS
from tests.support import DEADLINE_S, PROCESS_LIMIT_S, ROOT, open_pipe, wait_until_exited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GPUs are supported on Linux")


def run(
    *arguments: str, options: tuple[str, ...] = (), deadline_s: float = PROCESS_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run the command without a visible GPU."""
    return subprocess.run(
        [sys.executable, *options, "-m", "tests.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )


def read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report.json").read_text())


def waiting_pids() -> set[int]:
    """Return the processes that sample checks have started."""
    pids = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and WAITS.encode() in (entry / "cmdline").read_bytes():
                pids.add(int(entry.name))
    return pids


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the sample checks, with the output and the exit code of the command."""
    output, before = tmp_path_factory.mktemp("report"), waiting_pids()
    finished = run("--device", "cpu", "--module", "tests.gpu.samples", "--output", str(output), "--jobs", "2")
    text = (output / "report.md").read_text()
    deadline = time.monotonic() + 10  # the last process that the command killed may need a moment to exit
    while (remaining := waiting_pids() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    outcome = {"code": finished.returncode, "printed": finished.stdout, "remaining": remaining}
    return {**outcome, "markdown": text, **read(output)}


@pytest.fixture
def rows(samples: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"].removeprefix("samples."): row for row in samples["checks"]}


def test_result_of_each_check_is_independent_of_the_others(samples: dict[str, Any], rows: dict[str, Any]) -> None:
    assert {name: row["result"] for name, row in rows.items()} == {
        "trains": "passed",
        **dict.fromkeys(("fails", "hangs", "crashes", "leaves_a_process"), "failed"),
        **dict.fromkeys(("needs_a_package", "needs_more_gpus", "needs_a_gpu", "skips_itself"), "skipped"),
    }, rows
    assert samples["code"] == 1
    assert samples["failed"] is True
    assert "1 passed, 4 failed, 4 skipped" in samples["printed"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "ValueError: expected 1, got 2"),
        ("hangs", "expected it to end within 12 s; it was killed"),
        ("crashes", "it ended without a result; expected exit code 0, got -6 (SIGABRT)"),
        ("leaves_a_process", "expected no process after its end, got 1 still running"),
        ("needs_a_package", "not installed: no_such_package"),
        ("needs_more_gpus", "requires 64 GPUs, got 2"),
        ("needs_a_gpu", "requires a GPU, got --device cpu"),
        ("skips_itself", "built without support"),
    ],
)
def test_report_states_the_reason(samples: dict[str, Any], rows: dict[str, Any], name: str, reason: str) -> None:
    assert rows[name]["reason"].startswith(reason)
    (line,) = (line for line in samples["markdown"].splitlines() if line.startswith(f"| `samples.{name}`"))
    assert reason in line
    assert line.count("|") == 5


def test_report_contains_the_output_of_failures_figures_and_versions(
    samples: dict[str, Any], rows: dict[str, Any]
) -> None:
    assert "printed before the failure" in rows["fails"]["log"]
    assert 'raise ValueError("expected 1, got 2' in samples["markdown"]
    assert "threading.py" in rows["hangs"]["log"], "the log has the stack of the hanging check"
    assert rows["trains"]["figures"] == {"workers": 2}
    assert "| passed |" in samples["markdown"]
    assert samples["machine"]["packages"]["cloudpickle"] in samples["markdown"]


def test_processes_started_by_checks_are_terminated(samples: dict[str, Any]) -> None:
    assert not samples["remaining"]


def test_sigterm_terminates_the_command_and_its_checks(tmp_path: Path) -> None:
    before = waiting_pids()
    command = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--module", "tests.gpu.samples"]
    with (
        open_pipe(tmp_path / "pipe") as pipe,
        subprocess.Popen(
            [*command, "--only", "samples.hangs"],
            cwd=ROOT,
            env={**os.environ, SAMPLE_PIPE: pipe.path},
            stdout=subprocess.DEVNULL,
        ) as process,
    ):
        (pid,) = pipe.receive_pids(1)
        deadline = time.monotonic() + DEADLINE_S
        while pid not in waiting_pids() - before:  # its id arrives before its command line is visible
            assert time.monotonic() < deadline
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        wait_until_exited([pid])
        assert not waiting_pids() - before


@pytest.mark.parametrize(
    ("only", "limit_s", "results", "code"),
    [("trains", "300", {"passed"}, 0), ("needs_*", "300", {"skipped"}, 1), ("trains", "0.1", {"not run"}, 1)],
)
def test_exit_code_is_0_only_if_a_check_passed_and_none_failed(
    tmp_path: Path, only: str, limit_s: str, results: set[str], code: int
) -> None:
    chosen = ("--module", "tests.gpu.samples", "--only", f"samples.{only}", "--limit-s", limit_s)
    finished = run("--device", "cpu", *chosen, "--output", str(tmp_path))
    assert {row["result"] for row in read(tmp_path)["checks"]} == results
    assert finished.returncode == code


def test_machine_without_a_gpu_is_refused() -> None:
    finished = run()
    assert finished.returncode == 2
    assert "expected an NVIDIA GPU and a PyTorch built for CUDA, got none: PyTorch" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not finished.stdout


def test_missing_dependencies_are_named() -> None:
    finished = run("--device", "cpu", options=("-S",))  # without site-packages
    assert finished.returncode == 2
    missing = "cloudpickle fsspec packaging threadpoolctl"
    assert f"requires packages that are not installed: {missing}. Install them" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_unknown_check_is_refused() -> None:
    finished = run("--device", "cpu", "--only", "nothing.like_it")
    assert finished.returncode == 2
    assert "expected a name or pattern of a check, got nothing.like_it" in finished.stderr


def test_entry_points_are_found_without_an_installation(tmp_path: Path) -> None:
    script = (
        "from importlib.metadata import entry_points\n"
        "for kind in ('runtimes', 'backends', 'callbacks'):\n"
        "    print(*(point.name for point in entry_points(group=f'drivetrain.{kind}')))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env=checkout.environment(checkout.import_paths(tmp_path)),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT_S,
        check=True,
    )
    runtimes, backends, callbacks = finished.stdout.splitlines()
    assert {"inprocess", "local", "ray"} <= set(runtimes.split())
    assert {"torch", "torch_xla", "tensorflow", "horovod"} <= set(backends.split())
    assert {"csv", "json", "progress"} <= set(callbacks.split())


@pytest.mark.slow
def test_checks_pass_on_cpu_workers(tmp_path: Path) -> None:
    chosen = ("process_group.collectives", "sharded.two_workers_share_a_gpu")
    only = [part for name in chosen for part in ("--only", name)]
    finished = run("--device", "cpu", *only, "--output", str(tmp_path))
    assert {row["name"]: row["result"] for row in read(tmp_path)["checks"]} == dict.fromkeys(chosen, "passed")
    assert finished.returncode == 0
    assert "says nothing about GPUs" in (tmp_path / "report.md").read_text()
