"""``python -m tests.gpu [--output DIR] [--only NAME]``: runs every check that needs a GPU and writes a report.

It uses the packages of this checkout with the Python environment in which it is started. It installs nothing and uses
no network.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import checkout

FAILED, UNUSABLE = 1, 2
"""Exit codes: a check failed; the checks cannot run on this machine."""
_PROBE_S = 90.0
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    if missing := checkout.missing_requirements():
        names = " ".join(missing)
        return stop(
            f"drivetrain requires packages that are not installed: {names}. Install them (pip install {names}), or add "
            f"a directory that contains them to PYTHONPATH (pip install --target DIR {names}, on any machine)"
        )
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as temporary:
        paths = checkout.import_paths(Path(temporary, "metadata"))
        environment = {**checkout.environment(paths), **_OFFLINE, "TMPDIR": temporary}
        machine = probe(options.device, environment)
        if options.device == "cuda" and not machine["gpus"] and not options.list:
            return stop(
                f"expected an NVIDIA GPU and a PyTorch built for CUDA, got none: {machine['problem']}. Run it on a "
                "machine with a GPU, or test the checks themselves with --device cpu"
            )
        checkout.use(paths)
        return run(options, environment, Path(temporary), machine, started, clock)


def run(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    temporary: Path,
    machine: Mapping[str, Any],
    started: datetime.datetime,
    clock: float,
) -> int:
    # Imported here because they import drivetrain, which main() has just made importable.
    from tests.gpu import report
    from tests.gpu.check import collect
    from tests.gpu.checks import MODULES
    from tests.gpu.runner import Row, Runner

    checks = collect(options.module or [f"tests.gpu.checks.{name}" for name in MODULES])
    if options.only:
        checks = [check for check in checks if any(fnmatch.fnmatch(check.name, pattern) for pattern in options.only)]
    if not checks:
        return stop(f"--only: expected a name or pattern of a check, got {', '.join(options.only)}. See --list")
    if options.list:
        print("\n".join(f"{check.name:40} {check.title}" for check in checks))
        return 0
    on_gpus = options.device == "cuda"
    gpus = min(options.gpus or 8, len(machine["gpus"])) if on_gpus else options.gpus or 2
    runner = Runner(
        device=options.device,
        gpus=gpus,
        environment=environment,
        directory=temporary,
        deadline=clock + options.limit_s,
        jobs=options.jobs or max(1, min(4, machine["cpus"] // 4)),
    )

    def show(row: Row) -> None:
        detail = "; ".join(f"{name} {value}" for name, value in row.figures.items()) or row.reason.partition("\n")[0]
        print(f"{row.result:8} {row.seconds:6.1f} s  {row.name}  {detail}", flush=True)

    names = ", ".join(gpu["name"] for gpu in machine["gpus"][:gpus]) if on_gpus else "CPU workers instead of GPUs"
    print(f"{len(checks)} checks on {names}; time limit {options.limit_s:.0f} s", flush=True)
    rows = runner.run_all(checks, show)
    facts = {
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 1),
        "device": options.device,
        "commit": commit(),
        "machine": machine,
    }
    output = options.output or Path(tempfile.mkdtemp(prefix="gpu-report-"))
    print(report.summary(rows))
    for path in report.write(output, facts, rows):
        print(path)
    return FAILED if report.failed(rows) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description="Run every check that needs a GPU, from this checkout, and write report.md and report.json.",
        epilog="Exit codes: 0 no check failed, 1 a check failed or was not run, 2 the checks cannot run here.",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="directory of the report (a temporary directory)")
    parser.add_argument("--only", action="append", metavar="NAME", help="a check, or a pattern such as 'sharded.*'")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and run none")
    parser.add_argument(
        "--limit-s", type=float, default=510, metavar="S", help="time limit of all checks in seconds (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="concurrent checks (one per four CPUs, at most 4)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs to use (all, at most 8)")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: test the checks themselves with CPU workers, as many as --gpus",
    )
    parser.add_argument("--module", action="append", help="a module with checks, instead of those in tests/gpu/checks")
    return parser.parse_args(arguments)


def probe(device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the output of ``tests.gpu.machine``, or a description without GPUs if it hangs or crashes."""
    command = [sys.executable, "-m", "tests.gpu.machine", device]
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
    except subprocess.TimeoutExpired:
        return {"gpus": [], "packages": {}, "problem": f"PyTorch did not reach a GPU within {_PROBE_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "no output").strip().splitlines()
        return {"gpus": [], "packages": {}, "problem": f"PyTorch failed on the GPU ({lines[-1]})"}
    return json.loads(finished.stdout)


def commit() -> str:
    """Return the commit of this checkout, marked if files have changed, or "unknown" without git."""
    command = ["git", "-C", str(checkout.ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def stop(message: str) -> int:
    print(f"tests.gpu: {message}", file=sys.stderr)
    return UNUSABLE


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("tests.gpu: expected Linux")
    # The checks run in separate sessions. Exit normally on SIGTERM, so that they are terminated too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
