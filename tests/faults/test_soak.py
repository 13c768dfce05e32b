"""Many runs with faults in one driver, which must not hold more resources at the end than after the first few runs.

``DRIVETRAIN_SOAK=200`` sets the number of runs on this machine, ``DRIVETRAIN_SOAK_RAY=40`` the number on Ray, which is
left out by default, and ``DRIVETRAIN_SOAK_SEED`` selects other random faults.
"""

import json
import os
import statistics
import tempfile
from pathlib import Path

import pytest

from tests.support import Driver

RUNS = {
    "local": int(os.environ.get("DRIVETRAIN_SOAK", "12")),
    "ray": int(os.environ.get("DRIVETRAIN_SOAK_RAY", "0")),
}
SEED = int(os.environ.get("DRIVETRAIN_SOAK_SEED", "1"))
GROWTH_KIB = 4096
GRPC_THREADS = 8
"""On a busy machine, Ray's gRPC starts more threads of its own, at any time but not for each run."""
MEMORY = Path("/dev/shm")

DRIVER = """
import json, sys
from tests.faults.soak import main
print(json.dumps(main(json.loads(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.timeout(300 + 20 * max(RUNS.values()))
@pytest.mark.skipif(not MEMORY.is_dir(), reason="an upload that is held requires a second filesystem")
@pytest.mark.parametrize(
    "runtime", [pytest.param(name, marks=[pytest.mark.ray] if name == "ray" else []) for name in RUNS if RUNS[name]]
)
def test_driver_does_not_leak_resources_over_many_runs_with_faults(runtime: str, tmp_path: Path) -> None:
    runs = RUNS[runtime]
    (tmp_path / "tmp").mkdir()
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        given = {"runtime": runtime, "runs": runs, "seed": SEED, "directory": str(tmp_path), "memory": memory}
        variables = {"TMPDIR": str(tmp_path / "tmp")}
        driver = Driver(tmp_path, DRIVER, given, {**variables, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})
        try:
            status, output, errors = driver.wait(deadline_s=200 + 18 * runs)
        finally:
            driver.clean_up()
    assert status == 0, errors[-4000:]
    soak = json.loads(output.splitlines()[-1])
    samples = soak["samples"]
    if file := os.environ.get("DRIVETRAIN_SOAK_SAMPLES"):
        Path(file).write_text(json.dumps(soak, indent=1))

    assert len(samples) == runs + 1
    for what in ("descriptors", "threads", "python_threads", "children"):
        counts = [sample[what] for sample in samples]
        allowed = GRPC_THREADS if runtime == "ray" and what == "threads" else 0
        details = f"threads: {soak['threads']}; files: {soak['open_files']}"
        assert counts[-1] <= counts[0] + allowed, f"{what}: {counts}; {details}"
    third = max(1, len(samples) // 3)
    first, last = ([sample["rss_kib"] for sample in part] for part in (samples[:third], samples[-third:]))
    assert statistics.median(last) - statistics.median(first) < GROWTH_KIB, [sample["rss_kib"] for sample in samples]
    assert not sorted((tmp_path / "tmp").glob("drivetrain-*/*/*"))
