"""The conformance kit for filesystems on which runs are stored, as tests that an author inherits.

The author of a filesystem for fsspec or pyarrow writes a class with one method, and pytest collects the tests::

    from drivetrain_testing import StorageConformance

    class TestMyFilesystem(StorageConformance):
        def make_filesystem(self, directory):
            return MyFilesystem(host="127.0.0.1"), "bucket/runs"

A test that cannot pass for a filesystem must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import posixpath
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from drivetrain import CheckpointConfig, DataParallelTrainer, FailureConfig
from drivetrain.plugin.checks import one_line
from drivetrain.plugin.storage import FsspecFilesystem, RemoteFilesystem, locate
from drivetrain.plugin.trainers import dumps
from drivetrain_testing._checks import check_equal
from drivetrain_testing._conformance import check_overrides
from drivetrain_testing._retriedjob import STEPS, make_trainer

__all__ = ["StorageConformance"]

_LARGE_BYTES = (20 << 20) + 1
_LIMIT_BYTES = 1 << 20
_REPLACEMENTS = 40
_NAMES = ("with space.txt", "größe ☃.bin", "100%25.json", "a+b=c&d.txt", ".hidden")


class StorageConformance:
    """Tests of a filesystem of fsspec or pyarrow. Derive a class from it, and define :meth:`make_filesystem`.

    The filesystem is pickled and sent to the workers, which must see the same files as the driver.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.make_filesystem is StorageConformance.make_filesystem:
            raise TypeError(f"{cls.__name__}: expected a method make_filesystem(directory), got none")
        check_overrides(cls, StorageConformance)

    def make_filesystem(self, directory: Path) -> tuple[Any, str]:
        """Create the filesystem.

        Args:
            directory: an empty directory of this machine, for a filesystem that stores its files there.

        Returns:
            The filesystem, and a path on it, without a protocol, under which the test writes.
        """
        raise NotImplementedError

    def test_has_the_required_methods(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        steps = _fsspec_steps if isinstance(place.filesystem, FsspecFilesystem) else _arrow_steps
        for step in steps(place.handle, place.root):
            try:
                done = step.check()
            except Exception as error:  # of the filesystem
                pytest.fail(f"{step.method}: expected that it {step.purpose}, got {one_line(error)}")
            assert done, f"{step.method}: expected that it {step.purpose}, got another result"

    def test_file_that_is_replaced_has_its_new_content(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        for data in (b"first", b"second, longer", b"3"):
            place.filesystem.write_bytes(place.path("manifest.json"), data)
            check_equal("the content of a file", place.read("manifest.json"), data)
            check_equal("the listing after a file was replaced", place.list(), ([], ["manifest.json"]))
            check_equal("the sizes of all files", place.filesystem.walk(place.root), {"manifest.json": len(data)})

    def test_file_is_replaced_atomically(self, tmp_path: Path) -> None:
        """Read a file again and again while it is replaced. Each time, it must have one of its contents, as a whole."""
        place = self._open(tmp_path)
        contents = [bytes([number]) * 200_000 for number in range(4)]
        place.filesystem.write_bytes(place.path("manifest.json"), contents[0])
        with _Reader(place) as reader:
            for number in range(_REPLACEMENTS):
                place.filesystem.write_bytes(place.path("manifest.json"), contents[number % len(contents)])
        seen = [one_line(found) if isinstance(found, Exception) else f"{len(found)} bytes" for found in reader.wrong]
        assert not seen, (
            f"expected that a reader sees the old or the new content while a file is replaced, got {seen[0]}. Make "
            "mv() rename the file in one step, or make a put visible only when it is complete"
        )

    def test_missing_file_is_reported_as_such(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        place.filesystem.write_bytes(place.path("present.txt"), b"")
        try:
            place.read("missing.txt")
        except FileNotFoundError:
            pass
        except Exception as error:  # of the filesystem
            pytest.fail(f"reading a missing file: expected FileNotFoundError, got {one_line(error)}")
        else:
            pytest.fail("reading a missing file: expected FileNotFoundError, got no error")
        check_equal("exists() of a missing file", place.filesystem.exists(place.path("missing.txt")), False)
        check_equal("the listing of a missing directory", place.list("missing"), ([], []))
        check_equal("the files below a missing directory", place.filesystem.walk(place.path("missing")), {})
        place.filesystem.delete(place.path("missing.txt"))
        check_equal("exists() of a file", place.filesystem.exists(place.path("present.txt")), True)

    def test_names_and_empty_files_are_kept(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        (tmp_path / "empty").touch()
        for name in _NAMES:
            place.filesystem.put_file(str(tmp_path / "empty"), place.path("names", name))
        check_equal("the listing of files with special characters", place.list("names"), ([], sorted(_NAMES)))
        sizes = place.filesystem.walk(place.path("names"))
        check_equal("the sizes of empty files", sizes, dict.fromkeys(_NAMES, 0))
        for name in _NAMES:
            check_equal(f"the content of the empty file {name!r}", place.read("names", name), b"")

    def test_large_file_is_stored_and_read_in_parts(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        data = hashlib.shake_128(b"large").digest(1 << 20) * 20 + b"!"
        (tmp_path / "large").write_bytes(data)
        stored = place.filesystem.put_file(str(tmp_path / "large"), place.path("large.bin"))
        check_equal("the number of bytes that were stored", stored.size, _LARGE_BYTES)
        sizes = place.filesystem.walk(place.root)
        check_equal("the size of a file that was written in parts", sizes, {"large.bin": _LARGE_BYTES})
        with (tmp_path / "copy").open("w+b") as copy:
            half = _LARGE_BYTES // 2
            for start, count in ((0, half), (half, _LARGE_BYTES - half)):
                place.filesystem.get_range(place.path("large.bin"), copy.fileno(), start, count)
        assert (tmp_path / "copy").read_bytes() == data, "the parts of the file differ from what was stored"

    def test_deleted_files_are_not_listed(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        for name in ("a/1.txt", "a/b/2.txt", "c.txt"):
            place.filesystem.make_directory(posixpath.dirname(place.path(name)))
            place.filesystem.write_bytes(place.path(name), name.encode())
        check_equal("the listing of a directory", place.list(), (["a"], ["c.txt"]))
        sizes = place.filesystem.walk(place.root)
        check_equal("the files below a directory", sizes, {"a/1.txt": 7, "a/b/2.txt": 9, "c.txt": 5})
        place.filesystem.delete(place.path("a"))
        check_equal("the listing after a directory tree was deleted", place.list(), ([], ["c.txt"]))
        place.filesystem.delete(place.path("c.txt"))
        check_equal("the files after a file was deleted", place.filesystem.walk(place.root), {})

    def test_files_of_other_processes_are_visible_at_once(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        place.filesystem.write_bytes(place.path("ours.txt"), b"1")
        check_equal("the listing of a directory", place.list(), ([], ["ours.txt"]))
        _in_another_process(partial(place.filesystem.write_bytes, place.path("theirs.txt"), b"22"))
        found = place.list()
        assert found == ([], ["ours.txt", "theirs.txt"]), (
            f"expected theirs.txt, which another process has written, in the listing, got {found[1]}. Implement "
            "invalidate_cache(), or do not cache listings"
        )
        check_equal("the content of a file of another process", place.read("theirs.txt"), b"22")
        _in_another_process(partial(place.filesystem.write_bytes, place.path("theirs.txt"), b"333"))
        check_equal("the content that another process has replaced", place.read("theirs.txt"), b"333")

    def test_run_with_a_killed_worker_is_stored(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        trainer = _make_trainer(place, tmp_path, failures=1, kill=True, failure_config=FailureConfig(max_failures=1))
        result = trainer.fit()
        check_equal("the last step", result.metrics["step"], STEPS)
        check_equal("the number of retries", result.metrics["attempt"], 1)
        directories = place.filesystem.list_names(place.path("run"))[0]
        kept = [name for name in directories if name.startswith("checkpoint_")]
        assert result.checkpoint is not None, "expected a result with a checkpoint, got none"
        assert kept == [posixpath.basename(result.checkpoint.path)], f"expected one checkpoint, got {kept}"
        with result.checkpoint.as_directory() as directory:
            names = {name for name in os.listdir(directory) if not name.startswith(".")}
        check_equal("the files of the checkpoint", names, {"rank_0.json", "rank_1.json"})

    def test_run_is_resumed_and_restored(self, tmp_path: Path) -> None:
        place = self._open(tmp_path)
        _make_trainer(place, tmp_path, failures=1).fit(raise_on_failure=False)
        restored = DataParallelTrainer.restore(place.path("run"), storage_filesystem=place.handle)
        failed = restored.fit(raise_on_failure=False)
        assert failed.error is not None, "expected that the restored run fails again, got a success"
        result = _make_trainer(place, tmp_path, resume="must").fit()
        check_equal("the last step", result.metrics["step"], STEPS)

    def _open(self, directory: Path) -> _Place:
        (directory / "files").mkdir()
        handle, root = self.make_filesystem(directory / "files")
        filesystem, path = locate(posixpath.join(root, "kit"), handle, what="make_filesystem()")
        if filesystem.is_local:
            pytest.skip("drivetrain uses the operating system for the local filesystem")
        return _Place(handle, cast("RemoteFilesystem", filesystem), path)


class _Place(NamedTuple):
    """A filesystem, and a directory on it.

    Attributes:
        handle: the author's filesystem.
        filesystem: the filesystem as drivetrain uses it.
        root: the path of the directory.
    """

    handle: Any
    filesystem: RemoteFilesystem
    root: str

    def path(self, *names: str) -> str:
        return posixpath.join(self.root, *names)

    def list(self, *names: str) -> tuple[list[str], list[str]]:
        return self.filesystem.list_names(self.path(*names))

    def read(self, *names: str) -> bytes:
        return self.filesystem.read_bytes(self.path(*names), _LIMIT_BYTES)


class _Reader:
    """Reads ``manifest.json`` on a thread, and keeps everything that is not one of its whole contents."""

    def __init__(self, place: _Place) -> None:
        self.wrong: list[bytes | Exception] = []
        self._place = place
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                data = self._place.read("manifest.json")
                if len(data) != 200_000 or len(set(data)) != 1:
                    self.wrong.append(data)
            except Exception as error:  # of the filesystem
                self.wrong.append(error)


class _Step(NamedTuple):
    """A call of a method of the author's filesystem.

    Attributes:
        method: the method, with its arguments.
        purpose: what it must do, as a verb phrase.
        check: calls it, and returns True if the result is as expected.
    """

    method: str
    purpose: str
    check: Callable[[], bool]


def _fsspec_steps(fs: Any, root: str) -> Iterator[_Step]:
    first, second = posixpath.join(root, "first"), posixpath.join(root, "second")

    def write() -> bool:
        with fs.open(second, "wb", block_size=1 << 20) as file:
            return bool(file.write(b"second") == 6)

    def names(found: Any) -> set[str]:
        return {posixpath.basename(name.rstrip("/")) for name in found}

    yield _Step(
        "makedirs(path, exist_ok=True)", "creates a directory", lambda: fs.makedirs(root, exist_ok=True) is None
    )
    yield _Step("pipe_file(path, data)", "writes a file", lambda: fs.pipe_file(first, b"0123456789") is None)
    yield _Step('open(path, "wb")', "returns a file to write to", write)
    yield _Step("invalidate_cache()", "discards cached listings", lambda: fs.invalidate_cache() is None)
    yield _Step("exists(path)", "finds a file", lambda: fs.exists(second) and not fs.exists(f"{root}/third"))
    yield _Step("info(path)", 'returns the "size" of a file', lambda: fs.info(second)["size"] == 6)
    yield _Step("cat_file(path)", "returns the content", lambda: fs.cat_file(first) == b"0123456789")
    yield _Step(
        "cat_file(path, start=2, end=5)",
        "returns a range of bytes",
        lambda: fs.cat_file(first, start=2, end=5) == b"234",
    )
    yield _Step(
        "ls(path, detail=True)",
        'returns the "name" and the "type" of the files in a directory',
        lambda: (
            {(*names([entry["name"]]), entry["type"]) for entry in fs.ls(root, detail=True)}
            == {("first", "file"), ("second", "file")}
        ),
    )
    yield _Step(
        "find(path, detail=True)",
        'returns the "size" of all files below a directory',
        lambda: sorted(entry["size"] for entry in fs.find(root, detail=True).values()) == [6, 10],
    )
    yield _Step("mv(path, new_path)", "renames a file, and replaces another one", lambda: fs.mv(first, second) is None)
    yield _Step(
        "mv(path, new_path)", "leaves only the new name", lambda: names(fs.ls(root, detail=False)) == {"second"}
    )
    yield _Step("rm(path, recursive=True)", "deletes a directory tree", lambda: not (fs.rm(root, recursive=True)))
    yield _Step(
        "rm(path, recursive=True)", "leaves nothing", lambda: not fs.invalidate_cache() and not fs.exists(second)
    )


def _arrow_steps(fs: Any, root: str) -> Iterator[_Step]:
    from pyarrow.fs import FileSelector, FileType

    first, second = posixpath.join(root, "first"), posixpath.join(root, "second")

    def write(path: str) -> bool:
        with fs.open_output_stream(path) as stream:
            stream.write(b"0123456789")
            stream.flush()
        return True

    def read() -> bool:
        with fs.open_input_file(first) as file:
            return bool(file.size() == 10 and file.read() == b"0123456789" and file.read_at(3, 2) == b"234")

    def listed() -> list[Any]:
        return list(fs.get_file_info(FileSelector(root, recursive=True, allow_not_found=True)))

    yield _Step("type_name", "is a text", lambda: isinstance(fs.type_name, str))
    yield _Step(
        "create_dir(path, recursive=True)", "creates a directory", lambda: not fs.create_dir(root, recursive=True)
    )
    yield _Step("open_output_stream(path)", "returns a file to write to", lambda: write(first))
    yield _Step("open_input_file(path)", "returns a file that can be read at any position", read)
    yield _Step("get_file_info(path)", "returns the size of a file", lambda: fs.get_file_info(first).size == 10)
    yield _Step(
        "get_file_info(path)", "finds no missing file", lambda: fs.get_file_info(second).type == FileType.NotFound
    )
    yield _Step(
        "get_file_info(FileSelector(path))", "returns the files", lambda: [info.size for info in listed()] == [10]
    )
    if fs.type_name not in ("s3", "gcs", "abfs"):
        yield _Step("move(path, new_path)", "renames a file", lambda: fs.move(first, second) is None)
    else:
        yield _Step("open_output_stream(path)", "returns a file to write to", lambda: write(second))
    yield _Step("delete_file(path)", "deletes a file", lambda: fs.delete_file(second) is None)
    yield _Step("delete_dir(path)", "deletes a directory tree", lambda: fs.delete_dir(root) is None)
    yield _Step("delete_dir(path)", "leaves nothing", lambda: listed() == [])


def _make_trainer(place: _Place, directory: Path, **options: Any) -> DataParallelTrainer:
    return make_trainer(
        directory / "driver",
        storage_path=place.root,
        storage_filesystem=place.handle,
        checkpoint_config=CheckpointConfig(num_to_keep=1),
        **{"failure_config": FailureConfig(), **options},
    )


def _in_another_process(call: Callable[[], Any]) -> None:
    try:
        data = dumps(call)
        pickle.loads(data)
    except Exception as error:  # of the filesystem
        pytest.fail(f"expected a filesystem that can be pickled, because workers use it too, got {one_line(error)}")
    # Without the usual exit, during which some libraries for object stores crash.
    code = "import os, pickle, sys; pickle.load(sys.stdin.buffer)(); os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    finished = subprocess.run(
        [sys.executable, "-c", code], input=data, env=environment, capture_output=True, check=False
    )
    assert not finished.returncode, (
        f"expected that another process can use the filesystem, got:\n{finished.stderr.decode(errors='replace')}"
    )
