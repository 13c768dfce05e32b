"""The S3 test server and its fault-injecting proxy, tested with pyarrow's client."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from pyarrow import fs

from tests.s3 import FaultProxy, HangUp, LoseAnswer, ResetDownload, ResetUpload, S3Server, SlowDown, Stall, Throttle
from tests.support import DEADLINE_S, ROOT, is_running, wait_until_exited

DATA = os.urandom(1 << 20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("served")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server) as proxy:
        yield proxy


def write(uri: str, data: bytes = DATA) -> None:
    filesystem, path = fs.FileSystem.from_uri(uri)
    with filesystem.open_output_stream(path) as stream:
        stream.write(data)


def read(uri: str) -> bytes:
    filesystem, path = fs.FileSystem.from_uri(uri)
    with filesystem.open_input_stream(path) as stream:
        return stream.read()


def test_written_object_is_listed_read_and_stored_in_the_served_directory(server):
    write(server.uri("bucket/run one/model.pt"))

    filesystem, path = fs.FileSystem.from_uri(server.uri("bucket/run one"))
    assert [info.path for info in filesystem.get_file_info(fs.FileSelector(path))] == ["bucket/run one/model.pt"]
    assert read(server.uri("bucket/run one/model.pt")) == DATA
    assert (server.directory / "bucket" / "run one" / "model.pt").read_bytes() == DATA


def test_server_requires_its_own_key(server, tmp_path):
    with S3Server(tmp_path) as other:
        assert server.request("GET", "/", endpoint=other.endpoint)[0] == 403


def test_server_exits_with_the_process_that_started_it(tmp_path):
    script = """if True:
        import pathlib, sys
        from tests.s3 import S3Server
        with S3Server(pathlib.Path(sys.argv[1])) as server:
            print(server.pid, flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout
        pid = int(starter.stdout.readline())
        assert is_running(pid)
        starter.kill()
        wait_until_exited([pid])


def test_proxy_forwards_requests_that_are_signed_for_it(server, proxy):
    write(proxy.uri("bucket/passed on"))

    assert read(proxy.uri("bucket/passed on")) == DATA
    assert "PUT" in {request.method for request in proxy.requests}
    assert proxy.injected == []


def test_client_retries_after_a_slow_down_response(proxy):
    injection = proxy.inject(SlowDown(), times=2, method="PUT", containing="slowed")

    write(proxy.uri("bucket/unharmed"))
    assert proxy.injected == []
    write(proxy.uri("bucket/slowed"))

    assert [request.method for request in proxy.injected] == ["PUT", "PUT"]
    assert proxy.injected == injection.hit
    assert read(proxy.uri("bucket/slowed")) == DATA


@pytest.mark.parametrize(
    "fault", [HangUp(), LoseAnswer(), ResetUpload(1 << 19)], ids=lambda fault: type(fault).__name__
)
def test_client_retries_an_upload_whose_connection_is_lost(proxy, fault):
    proxy.inject(fault, method="PUT", containing="again")

    write(proxy.uri("bucket/again"))

    assert len(proxy.injected) == 1
    assert read(proxy.uri("bucket/again")) == DATA


def without_retries(proxy: FaultProxy) -> fs.S3FileSystem:
    """Return a client that fails at once. A client made by ``from_uri`` retries a lost connection for 6 s."""
    return fs.S3FileSystem(
        endpoint_override=proxy.endpoint, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1)
    )


def test_upload_that_is_reset_fails_and_leaves_no_object(server, proxy):
    injection = proxy.inject(ResetUpload(1 << 19), containing="never")

    with (
        pytest.raises(OSError, match="never"),
        without_retries(proxy).open_output_stream("bucket/never") as stream,
    ):
        stream.write(DATA)

    assert [request.length for request in injection.hit] == [len(DATA)]
    assert server.request("HEAD", "/bucket/never")[0] == 404


def test_download_that_is_reset_fails(server, proxy):
    write(server.uri("bucket/cut"))
    proxy.inject(ResetDownload(1 << 19), method="GET", containing="cut")

    with without_retries(proxy).open_input_file("bucket/cut") as file:
        with pytest.raises(OSError, match="GetObject"):
            file.read()
        assert file.read_at(len(DATA), 0) == DATA

    assert len(proxy.injected) == 1


@pytest.mark.parametrize("stall", [Stall(), Stall(after=1 << 19)], ids=["before", "within"])
def test_stalled_request_continues_once_released(server, proxy, stall):
    write(server.uri("bucket/stalled"))
    injection = proxy.inject(stall, method="GET", containing="stalled")
    answers: list[bytes] = []
    reader = threading.Thread(
        target=lambda: answers.append(server.request("GET", "/bucket/stalled", endpoint=proxy.endpoint)[1])
    )

    reader.start()
    injection.wait()
    assert answers == []
    injection.release()
    reader.join(DEADLINE_S)

    assert answers == [DATA]


def test_throttled_bodies_are_slow_and_arrive_whole(server, proxy):
    proxy.inject(Throttle(bytes_per_s=4 * len(DATA)), times=None)
    begin = time.monotonic()
    assert server.request("PUT", "/bucket/slow", DATA, endpoint=proxy.endpoint)[0] == 200
    assert server.request("GET", "/bucket/slow", endpoint=proxy.endpoint) == (200, DATA)

    assert time.monotonic() - begin > 0.4
    assert len(proxy.injected) == 2


def test_proxy_can_be_stopped_and_restarted(server, proxy):
    proxy.refuse_connections()
    with pytest.raises(ConnectionRefusedError):
        server.request("GET", "/", endpoint=proxy.endpoint)

    proxy.accept_connections()
    assert server.request("GET", "/", endpoint=proxy.endpoint)[0] == 200


def test_directories_can_be_created_and_deleted_if_the_proxy_handles_markers(server):
    with FaultProxy(server, markers=True) as proxy:
        for name in ("file", "deep/er/file"):
            write(proxy.uri(f"bucket/directory/{name}"))
        filesystem, path = fs.FileSystem.from_uri(proxy.uri("bucket/directory"))

        filesystem.delete_dir(f"{path}/deep")
        assert [info.base_name for info in filesystem.get_file_info(fs.FileSelector(path, recursive=True))] == ["file"]
        filesystem.delete_file(f"{path}/file")
        filesystem.create_dir(f"{path}/other")
        write(proxy.uri("bucket/directory/other/file"))
        assert read(proxy.uri("bucket/directory/other/file")) == DATA
