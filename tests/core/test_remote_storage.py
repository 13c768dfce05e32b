"""Storage on other machines: a real S3 server with injected faults, and every kind of filesystem object."""

import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Checkpoint, CheckpointConfig, CheckpointError, ConfigurationError, StorageError
from drivetrain._base.redact import redact
from drivetrain._driver.requests import RankRequests
from drivetrain._storage.directory import Storage, with_short_deadline
from drivetrain._storage.manifest import CheckpointManager, read_manifest
from drivetrain._storage.mirror import Mirror
from drivetrain._storage.remote import locate
from drivetrain._storage.transfer import Limits
from drivetrain._storage.upload import put_directory
from drivetrain._wire.events import FilesClaimed
from tests.s3 import FaultProxy, HangUp, LoseAnswer, ResetDownload, ResetUpload, S3Server, SlowDown, Stall, Throttle
from tests.support import PROCESS_LIMIT_S, ROOT

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with FaultProxy(server, markers=True) as proxy:
        yield proxy


@pytest.fixture
def storage(proxy: FaultProxy, request: pytest.FixtureRequest) -> Storage:
    """A run directory in the bucket, one per test."""
    name = f"bucket/{abs(hash(request.node.name)):x}"
    return Storage(*locate(proxy.uri(name), what="path"), Limits(deadline_s=60.0))


def make_files(directory: Path, sizes: dict[str, int]) -> dict[str, bytes]:
    contents = {name: os.urandom(size) for name, size in sizes.items()}
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return contents


def read_files(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }


def filesystems(directory: Path) -> dict[str, tuple[Any, str]]:
    """Return one filesystem of each kind, with its directory."""
    import fsspec
    from pyarrow import fs

    return {
        "pyarrow local": (fs.LocalFileSystem(), str(directory)),
        "pyarrow subtree": (fs.SubTreeFileSystem(str(directory), fs.LocalFileSystem()), "runs"),
        "fsspec local": (fsspec.filesystem("file"), str(directory)),
        "fsspec dir": (fsspec.filesystem("dir", path=str(directory), fs=fsspec.filesystem("file")), "runs"),
        "fsspec memory": (fsspec.filesystem("memory"), f"/{directory.name}"),
        "fsspec in pyarrow": (fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory"))), f"/{directory.name}-2"),
    }


@pytest.mark.parametrize("kind", list(filesystems(Path("/"))))
def test_every_kind_of_filesystem_stores_commits_lists_reads_and_deletes(tmp_path: Path, kind: str) -> None:
    (tmp_path / "on").mkdir()
    storage = Storage(*locate(*reversed(filesystems(tmp_path / "on")[kind]), what="path"))
    contents = make_files(tmp_path / "source", {"a.bin": 100, "deep/er/b.bin": 3 * MEGABYTE, "empty": 0})
    manager = CheckpointManager(storage)

    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000001")
    entry = manager.commit(number=1, iteration=1, files={0: files}, metrics={"loss": 0.5})
    put_directory(storage, str(tmp_path / "source"), "checkpoint_000002")

    assert read_manifest(storage) == [entry]
    manager.checkpoint(entry).verify()
    with manager.checkpoint(entry).as_directory() as path:
        assert read_files(Path(path)) == contents
    target = manager.checkpoint(entry).to_directory(tmp_path / "part", include=["deep"])
    assert read_files(Path(target)) == {"deep/er/b.bin": contents["deep/er/b.bin"]}
    assert manager.sweep() == (["checkpoint_000002"], 2)
    assert storage.list_names() == (["checkpoint_000001"], ["manifest.json"])
    assert storage.read_bytes("missing") is None
    assert not storage.exists("missing")
    storage.delete("missing")
    storage.delete("checkpoint_000001")
    assert storage.walk("checkpoint_000001") == {}
    assert storage.exists("manifest.json")


def test_s3_stores_commits_lists_reads_and_deletes(storage: Storage, tmp_path: Path) -> None:
    contents = make_files(tmp_path / "source", {"a.bin": 100, "deep/er/b.bin": 50 * MEGABYTE, "empty": 0})
    manager = CheckpointManager(storage, metadata={"dataset": "digits"})
    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000001")
    entry = manager.commit(number=1, iteration=1, files={0: files}, metrics={})
    put_directory(storage, str(tmp_path / "source"), "checkpoint_000002")

    checkpoint = pickle.loads(pickle.dumps(manager.checkpoint(entry)))
    assert checkpoint == manager.checkpoint(entry)
    checkpoint.verify()
    assert checkpoint.get_metadata() == {"dataset": "digits"}
    with checkpoint.as_directory() as path:
        assert read_files(Path(path)) == contents
    assert not Path(path).exists(), "the last user of the download did not delete it"
    assert manager.sweep() == (["checkpoint_000002"], 2)
    assert storage.list_names() == (["checkpoint_000001"], ["manifest.json"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("on_conflict", ["lowest_rank", "keep_all"])
def test_file_of_the_lowest_rank_is_kept_on_s3_whichever_rank_is_faster(
    storage: Storage, tmp_path: Path, order: tuple[int, int], on_conflict: str
) -> None:
    answers: dict[int, Any] = {}
    requests = RankRequests(lambda ranks, command: answers.update({ranks[0]: command}))
    manager = CheckpointManager(storage, CheckpointConfig(on_conflict=on_conflict))
    contents, files = {}, {}
    for rank in order:
        contents[rank] = make_files(tmp_path / f"of_{rank}", {"shared.bin": 100, f"own_{rank}.bin": 10})

        def claim(directory: str, names: Collection[str], rank: int = rank) -> Collection[str]:
            requests.claim(FilesClaimed(rank, directory, tuple(names)))
            return answers[rank].names

        files[rank] = put_directory(storage, str(tmp_path / f"of_{rank}"), "checkpoint_000001", rank=rank, claim=claim)

    entry = manager.commit(number=1, iteration=1, files=files, metrics={})

    expected = {"shared.bin": contents[0]["shared.bin"]} | {
        f"own_{rank}.bin": contents[rank][f"own_{rank}.bin"] for rank in (0, 1)
    }
    if on_conflict == "keep_all":
        expected["rank_1/shared.bin"] = contents[1]["shared.bin"]
    checkpoint = manager.checkpoint(entry)
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        assert read_files(Path(path)) == expected


def test_same_content_of_two_ranks_is_accepted_on_s3_and_different_content_names_both(
    storage: Storage, tmp_path: Path
) -> None:
    make_files(tmp_path / "source", {"shared.bin": 100})
    manager = CheckpointManager(storage)
    files = {rank: put_directory(storage, str(tmp_path / "source"), "checkpoint_000001", rank=rank) for rank in (0, 1)}
    manager.commit(number=1, iteration=1, files=files, metrics={})
    make_files(tmp_path / "source", {"shared.bin": 100})
    files[1] = put_directory(storage, str(tmp_path / "source"), "checkpoint_000002", rank=1)

    with pytest.raises(CheckpointError, match=r"ranks 0 and 1 reported 'shared\.bin'"):
        manager.commit(number=2, iteration=2, files=files, metrics={})
    assert [entry.number for entry in read_manifest(storage)] == [1]


@pytest.mark.parametrize(
    ("fault", "method"),
    [
        (SlowDown(), "PUT"),
        (SlowDown(status=500, code="InternalError"), "PUT"),
        (HangUp(), "PUT"),
        (ResetUpload(after=200_000), "PUT"),
        (LoseAnswer(), "PUT"),
        (SlowDown(), "POST"),
        (SlowDown(), "GET"),
        (HangUp(), "HEAD"),
    ],
    ids=["503", "500", "hang up", "reset in mid-body", "lost answer", "503 of a big file", "503 of a list", "head"],
)
def test_upload_and_commit_survive_transient_faults(
    storage: Storage, proxy: FaultProxy, tmp_path: Path, fault: Any, method: str
) -> None:
    contents = make_files(tmp_path / "source", {"small.bin": 300_000, "big.bin": 12 * MEGABYTE})
    manager = CheckpointManager(storage)
    proxy.inject(fault, times=6, method=method, containing="checkpoint_000001" if method != "GET" else "")

    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000001")
    entry = manager.commit(number=1, iteration=1, files={0: files}, metrics={})
    manager.checkpoint(entry).verify()

    assert proxy.injected
    proxy.heal()
    assert read_files(Path(manager.checkpoint(entry).to_directory(tmp_path / "back"))) == contents


def test_download_survives_resets_and_a_slow_server(storage: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    contents = make_files(tmp_path / "source", {"small.bin": 300_000, "big.bin": 20 * MEGABYTE})
    put_directory(storage, str(tmp_path / "source"), "checkpoint")
    proxy.inject(ResetDownload(after=100_000), times=6, method="GET", containing=".bin")
    proxy.inject(Throttle(bytes_per_s=4 * MEGABYTE), times=2, method="GET", containing=".bin")

    storage.get_directory("checkpoint", str(tmp_path / "back"))

    assert len(proxy.injected) >= 6
    assert read_files(tmp_path / "back") == contents


def test_temporarily_unreachable_server_is_retried(storage: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    make_files(tmp_path / "source", {"a.bin": 1000})
    proxy.refuse_connections()
    back = threading.Timer(2.0, proxy.accept_connections)
    back.start()

    put_directory(storage, str(tmp_path / "source"), "checkpoint")

    back.join()
    assert storage.walk("checkpoint") == {"a.bin": 1000}


def test_server_that_never_responds_is_reported_at_the_deadline(proxy: FaultProxy, tmp_path: Path) -> None:
    make_files(tmp_path / "source", {"model.bin": 1000})
    storage = Storage(*locate(proxy.uri("bucket/stalled"), what="path"), Limits(deadline_s=2.0))
    proxy.inject(Stall(), times=None, method="PUT")
    began = time.monotonic()

    with pytest.raises(StorageError, match=r"upload of bucket/stalled/checkpoint took longer than 2 s .*model\.bin"):
        put_directory(storage, str(tmp_path / "source"), "checkpoint")

    assert time.monotonic() - began < 20.0
    proxy.heal()


def test_commit_that_cannot_store_its_manifest_keeps_the_previous_one(
    storage: Storage, proxy: FaultProxy, tmp_path: Path
) -> None:
    make_files(tmp_path / "source", {"a.bin": 1000})
    storage = with_short_deadline(storage)
    manager = CheckpointManager(storage)
    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000001")
    manager.commit(number=1, iteration=1, files={0: files}, metrics={})
    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000002")
    proxy.inject(SlowDown(status=403, code="AccessDenied"), times=None, method="PUT", containing="manifest.json")

    with pytest.raises(StorageError, match=r"cannot write manifest\.json.*credentials"):
        manager.commit(number=2, iteration=2, files={0: files}, metrics={})

    proxy.heal()
    assert [entry.number for entry in read_manifest(storage)] == [1]


def test_object_damaged_in_storage_is_detected_on_read(storage: Storage, server: S3Server, tmp_path: Path) -> None:
    make_files(tmp_path / "source", {"a.bin": 1000})
    manager = CheckpointManager(storage)
    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000001")
    entry = manager.commit(number=1, iteration=1, files={0: files}, metrics={})
    storage.filesystem.write_bytes(storage.path("checkpoint_000001", "a.bin"), b"x" * 1000)

    with pytest.raises(CheckpointError, match=r"a\.bin is damaged"):
        manager.checkpoint(entry).to_directory(tmp_path / "back")


@pytest.mark.parametrize(
    ("path", "variables", "words"),
    [
        ("nobucket/runs", {}, "NO_SUCH_BUCKET.*Create the bucket"),
        ("bucket/runs", {"AWS_ACCESS_KEY_ID": "AKIA0000000000000000"}, "Check the credentials"),
    ],
    ids=["bucket", "credentials"],
)
def test_missing_bucket_and_bad_credentials_are_clear_errors_before_any_worker_starts(
    proxy: FaultProxy, path: str, variables: dict[str, str], words: str
) -> None:
    script = (
        "import sys, drivetrain\n"
        "from drivetrain import *\n"
        "def train(): raise SystemExit('a worker was started')\n"
        "run_config = RunConfig(storage_path=sys.argv[1], name='run')\n"
        "DataParallelTrainer(train, scaling_config=ScalingConfig(num_workers=2), run_config=run_config).fit()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, proxy.uri(path)],
        env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert "a worker was started" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("drivetrain.errors.StorageError")
    assert re.search(words, last)


def test_uri_of_a_missing_package_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)

    with pytest.raises(ConfigurationError, match="pip install pyarrow"):
        locate("s3://bucket/runs", what="storage_path")


def test_path_with_a_protocol_and_a_filesystem_object_is_refused() -> None:
    import fsspec

    with pytest.raises(ConfigurationError, match="without its protocol"):
        locate("memory://runs", fsspec.filesystem("memory"), what="storage_path")


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://key:secret@bucket/runs?region=eu", "s3://***@bucket/runs?region=eu"),
        ("az://c/runs?account_key=abc&x=1", "az://c/runs?account_key=***&x=1"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_credentials_in_a_uri_are_not_shown(uri: str, shown: str) -> None:
    assert redact(uri) == shown


def test_processes_of_one_node_share_one_download(storage: Storage, proxy: FaultProxy, tmp_path: Path) -> None:
    make_files(tmp_path / "source", {"a.bin": 5 * MEGABYTE})
    manager = CheckpointManager(storage)
    files = put_directory(storage, str(tmp_path / "source"), "checkpoint_000001")
    manager.commit(number=1, iteration=1, files={0: files}, metrics={})
    uri = proxy.uri(storage.path("checkpoint_000001"))
    script = (
        "import sys; from drivetrain import Checkpoint\n"
        "with Checkpoint(sys.argv[1]).as_directory() as path:\n"
        "    print(path, flush=True); sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, uri],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        for _ in range(3)
    ]  # fmt: skip
    paths = {process.stdout.readline().strip() for process in processes if process.stdout}
    (path,) = paths
    reads = [request for request in proxy.requests if request.method == "GET" and request.target.endswith("a.bin")]
    processes[0].kill()
    processes[0].communicate()
    assert Path(path, "a.bin").stat().st_size == 5 * MEGABYTE, "deleted while other processes use it"
    for process in processes[1:]:
        process.communicate("\n", timeout=PROCESS_LIMIT_S)

    assert not Path(path).exists()
    assert 0 < len(reads) <= 2, "one download, in parts of up to 32 MiB that are read 8 MiB at a time"
    assert list(Path(path).parent.iterdir()) == []


def test_checkpoint_of_a_uri_is_the_same_as_that_of_a_filesystem_and_a_path(proxy: FaultProxy, tmp_path: Path) -> None:
    by_uri = Checkpoint(proxy.uri("bucket/run/checkpoint_000001"))

    assert Checkpoint(by_uri.path, by_uri.filesystem) == by_uri
    assert not by_uri.exists()
    with pytest.raises(CheckpointError, match="expected the checkpoint's directory, which does not exist"):
        by_uri.to_directory(tmp_path / "copy")


def test_files_that_cannot_be_uploaded_at_the_end_are_kept_on_this_machine(
    storage: Storage, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "progress.csv").write_text("loss\n0.5\n")
    warnings: list[str] = []
    proxy.inject(SlowDown(status=403, code="AccessDenied"), times=None, method="PUT", containing="progress.csv")

    mirror = Mirror(
        str(tmp_path / "driver"), with_short_deadline(storage), "", period_s=300, warn=warnings.append, keeps_files=True
    )
    with mirror.running():
        pass

    proxy.heal()
    (warning,) = warnings
    kept = re.search(r"progress\.csv.*; the files are kept in (\S+) on ", warning)
    assert kept is not None, warning
    assert Path(kept[1], "progress.csv").read_text() == "loss\n0.5\n"
