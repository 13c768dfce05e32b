"""Fixtures and settings that the tests of several folders share for a whole session."""

import atexit
import gc
import os
import re
import shutil
import signal
import tempfile
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, SEATS

# A shell that starts the tests in the background makes them and their children ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under `nohup`

# Parallel pytest workers have a width of 80 columns, which cuts what the command prints.
os.environ.pop("COLUMNS", None)

# Ray connects to the cluster whose address it finds here, so parallel pytest workers must not share the directory. The
# paths of Ray's sockets must be short, whatever TMPDIR a test uses.
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
atexit.register(shutil.rmtree, os.environ["RAY_TMPDIR"], ignore_errors=True)

# Runs of parallel tests must not wait for each other's imitated GPUs.
os.environ["DRIVETRAIN_GPU_RESERVATIONS"] = tempfile.mkdtemp(prefix="gpus-")
atexit.register(shutil.rmtree, os.environ["DRIVETRAIN_GPU_RESERVATIONS"], ignore_errors=True)

# Threads of OpenMP that wait for work must not keep the cores busy, of which tests use more than there are.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# By default Ray's log monitor looks for new files ten times per second, for output that it does not show here.
os.environ.setdefault("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0")
os.environ.setdefault("LOG_NAME_UPDATE_INTERVAL_S", "60")

# By default Ray gives its workers the niceness 15. On a busy machine, all other tests would then run before them.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked with ``campaign``."""
    if os.environ.get("DRIVETRAIN_REPEATED") == "all":
        return
    left_out = [item for item in items if item.get_closest_marker("campaign")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("campaign")]


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    """Remove a variable that differs between tests, because every change would make the fork server preload again."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Remove the variable again, which pytest sets for each phase of a test."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    return (yield)


_ONE_THREAD_IN = re.compile(r".*/tests/(gbdt|hf|horovod|jax|lightning|tf|torch)/(?!test_process_group)\w+\.py")

# Variables that change what later tests do. Libraries set some others when they are imported.
_WATCHED = re.compile(
    r"DRIVETRAIN_.*|ACCELERATE_.*|OMP_NUM_THREADS|JAX_PLATFORMS|.*_VISIBLE_DEVICES|AWS_.*(ID|KEY|URL)|RANK|WORLD_SIZE"
)


@pytest.fixture(scope="module", autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Reject a module that leaves variables behind, which would reach the processes of all later tests."""
    before = _watched_variables()
    yield
    assert _watched_variables() == before, "the tests of this module have changed environment variables"


def _watched_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _WATCHED.fullmatch(name)}


@pytest.fixture(scope="module", autouse=True)
def one_thread_per_worker(request: pytest.FixtureRequest, environment_is_restored: None) -> Iterator[None]:
    """Give the workers of every run one thread, in the tests of frameworks.

    The default depends on the number of workers, and the fork server imports the framework again if it changes.
    """
    with pytest.MonkeyPatch.context() as patch:
        if _ONE_THREAD_IN.fullmatch(request.path.as_posix()):
            patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def directory_of_nested_sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the pytest sessions that tests start a folder of their own, as sessions compete for the default folder.

    Each session deletes the directories of all but the last three, and fails after ten attempts to create its own.
    """
    tmp_path_factory.getbasetemp()  # in the default folder
    with (
        tempfile.TemporaryDirectory(prefix="nested-", ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTEST_DEBUG_TEMPROOT", directory)
        yield


@pytest.fixture(scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ``TMPDIR`` of this session, so that a test can see leftover files."""
    directory = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", None)
        yield directory


@pytest.fixture(scope="session")
def ray_address(temporary_files: Path) -> Iterator[str]:
    """A Ray cluster of this test session."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Its workers import this repository's helpers, and must get the path before they are started.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        # The default of Ray's next version; without it, Ray warns.
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # The S3 test server requires this of clients.
        patch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        _start_ray()
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()


def _start_ray(attempts: int = 3) -> None:
    """Start Ray. It gives its processes 30 s to start, a fixed limit that a busy machine may exceed."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # after a failed start, Ray does not wait for its processes
        for attempt in range(1, attempts + 1):
            try:
                with pytest.MonkeyPatch.context() as patch:
                    patch.delenv("OMP_NUM_THREADS", raising=False)  # the module that uses Ray first may have set it
                    ray.init(
                        address="local",
                        num_cpus=4,
                        num_gpus=0,
                        resources={SEATS: 4},
                        include_dashboard=False,
                        log_to_driver=False,
                    )
                return
            except Exception as error:  # Ray raises this class itself
                if attempt == attempts or "timed out during startup" not in str(error):
                    raise
            ray.shutdown()
            gc.collect()
