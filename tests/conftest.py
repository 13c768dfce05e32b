"""What the tests of several folders share for the time of a session."""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, SEATS

# A shell that starts them in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Parallel pytest workers have a width of 80 columns, which cuts what the command prints.
os.environ.pop("COLUMNS", None)

# Ray connects to a cluster whose address it finds here, so parallel pytest workers must not share the directory. The
# paths of Ray's sockets have to be short, whatever TMPDIR a test has.
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)

# By default Ray gives its workers the niceness 15. On a busy machine, all other tests would then run before them.
os.environ.setdefault("RAY_worker_niceness", "0")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Takes away a variable that is another in each test, and so would have each of them preload anew."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    return (yield)


@pytest.fixture(scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ``TMPDIR`` of this session's own, so that a test can see what is left there."""
    directory = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", None)
        yield directory


@pytest.fixture(scope="session")
def ray_address(temporary_files: Path) -> Iterator[str]:
    """A Ray of this test session's own."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Its workers import this repository's helpers, and must be told before they are started.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        # Ray's default from its next version on; without it, it warns.
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # What the S3 server of the tests wants of clients.
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        _start_ray()
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def _start_ray(attempts: int = 3) -> None:
    """Starts Ray. It gives its processes 30 s to start, a limit that it lets nobody set and a busy machine exceeds."""
    import ray

    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                address="local",
                num_cpus=4,
                num_gpus=0,
                resources={SEATS: 4},
                include_dashboard=False,
                log_to_driver=False,
            )
            return
        except Exception as error:  # the class that Ray itself raises
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
