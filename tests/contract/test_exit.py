"""A worker whose train function has returned exits like a Python process: nothing that it wrote is lost."""

import gzip
import os
import time
from pathlib import Path

import pytest

import drivetrain
from drivetrain._worker import leaving
from tests.contract.conftest import RuntimeUnderTest
from tests.contract.runtimes import same_on_ray, with_processes
from tests.events import read_events, skip_tensorflow

kept: list[object] = []


def leave_everything_open(config: dict) -> None:
    import atexit
    import tempfile
    import threading
    from concurrent.futures import ThreadPoolExecutor

    rank = drivetrain.get_context().get_world_rank()
    directory = Path(config["directory"], str(rank))
    directory.mkdir()

    def write_later() -> None:
        time.sleep(0.2)
        (directory / "thread").write_text("done")

    text = (directory / "text").open("w")
    text.write("tail")
    compressed = gzip.open(directory / "compressed", "wt")  # noqa: SIM115 - it must stay open
    compressed.write("tail")
    pool = ThreadPoolExecutor()
    pool.submit((directory / "pool").write_text, "done")
    kept.extend([text, compressed, pool, tempfile.TemporaryDirectory(dir=directory, prefix="temporary")])
    threading.Thread(target=write_later).start()
    atexit.register((directory / "handler").write_text, "done")
    removed = atexit.register((directory / "removed").write_text, "done")
    atexit.unregister(removed)

    @atexit.register
    def fail() -> None:
        raise ValueError("the other handlers run too")


@with_processes
def test_open_files_threads_and_exit_handlers_are_finished(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    runtime.fit(leave_everything_open, {"directory": str(tmp_path)}, workers=2)
    for rank in ("0", "1"):
        directory = tmp_path / rank
        assert sorted(os.listdir(directory)) == ["compressed", "handler", "pool", "text", "thread"]
        assert (directory / "text").read_text() == "tail"
        with gzip.open(directory / "compressed", "rt") as file:
            assert file.read() == "tail"


def never_end(config: dict) -> None:
    import threading

    leaving.EXIT_LIMIT_S = 0.5
    threading.Thread(target=threading.Event().wait, name="stuck").start()


@with_processes
def test_thread_that_never_ends_delays_the_end_of_the_run_only_up_to_a_limit(runtime: RuntimeUnderTest) -> None:
    runtime.fit(never_end, {}, workers=1)
    log = (runtime.storage_path / "run" / "logs" / "rank_0.log").read_text()
    assert "did not exit within 0.5 s after its train function had returned" in log
    assert "stuck" in log


def leave_a_process(config: dict) -> float:
    import atexit
    import threading
    import time

    leaving.EXIT_LIMIT_S = 0.5
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    atexit.register(threading.Event().wait)
    return time.time()


@with_processes
def test_process_that_outlives_its_worker_does_not_delay_the_end_of_the_run(runtime: RuntimeUnderTest) -> None:
    """It has inherited the connection to the driver, which waits until this connection is closed."""
    returned = runtime.fit(leave_a_process, {}, workers=1).return_value
    assert time.time() - returned < 10


def write_tensorboard(config: dict) -> None:
    skip_tensorflow()
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(config["directory"])
    writer.add_scalar("loss", 0.5, 1)
    kept.append(writer)


@with_processes
@same_on_ray
def test_last_records_of_tensorboard_are_kept(runtime: RuntimeUnderTest, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    runtime.fit(write_tensorboard, {"directory": str(tmp_path / "events")}, workers=1)
    assert [event.value for event in read_events(tmp_path / "events").Scalars("loss")] == [0.5]
