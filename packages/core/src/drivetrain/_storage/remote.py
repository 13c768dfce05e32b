"""Filesystems of pyarrow and fsspec for remote storage, and the selection of a filesystem for a path or URI."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from drivetrain._base.crashpoints import reach, reach_replacement
from drivetrain._base.redact import redact
from drivetrain._storage.checksums import fastest_crc32
from drivetrain._storage.filesystem import Filesystem, LocalFilesystem, StoredFile
from drivetrain._storage.layout import draft_name
from drivetrain._storage.reading import too_large
from drivetrain.errors import ConfigurationError

__all__ = ["locate"]

_PART_BYTES = 8 << 20
_PARTS_IN_FLIGHT = 4
_PYARROW_SCHEMES = {"s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"}
"""The schemes of storages on which a put is atomic. On other storages, a file is written as a draft and renamed."""


def locate(path: str | os.PathLike[str], filesystem: Any | None = None, *, what: str) -> tuple[Filesystem, str]:
    """Return the filesystem of a path or URI, and the path on it.

    Args:
        path: a local path, a URI, or a path on ``filesystem``.
        filesystem: a filesystem of pyarrow or fsspec; None to select the filesystem by the path.
        what: the name of the user's argument that contains the path, for error messages.

    Raises:
        ConfigurationError: the URI or the filesystem is not valid, or the package for the URI is not installed.
    """
    text = os.fspath(path)
    if filesystem is not None:
        adapter = _adapt(filesystem)
        if "://" in text:
            raise ConfigurationError(
                f"[DT-403] {what}: expected a path without its protocol if storage_filesystem is given, got "
                f"{redact(text)!r}"
            )
        return adapter, os.path.abspath(text) if adapter.is_local else text.rstrip("/")
    if "://" not in text:
        try:
            return LocalFilesystem(), str(Path(text).expanduser().absolute())
        except RuntimeError as error:
            raise ConfigurationError(
                f"[DT-426] {what}: expected a path, got {text!r}, but there is no home directory: HOME is not set, and "
                "the user is not listed in the system. Set HOME, DRIVETRAIN_STORAGE_PATH or RunConfig(storage_path=...)"
            ) from error
    scheme = text.partition("://")[0].lower()
    if scheme in ("file", "local"):
        return LocalFilesystem(), os.path.abspath(unquote(text.partition("://")[2]))
    try:
        adapter, inner = _open_uri(scheme, text)
    except ImportError as error:
        package = "pyarrow" if scheme in _PYARROW_SCHEMES else f"the fsspec package for {scheme}://"
        raise ConfigurationError(
            f"[DT-402] {what}={redact(text)!r} requires {package}, which is not installed ({redact(str(error))}). "
            + ("Run: pip install pyarrow" if package == "pyarrow" else "Install it with pip")
        ) from error
    except (ValueError, OSError, TypeError) as error:
        raise ConfigurationError(
            f"[DT-403] {what}: expected the URI of a storage, got {redact(text)!r}: {redact(str(error))}"
        ) from error
    if not inner.strip("/"):
        raise ConfigurationError(
            f"[DT-403] {what}: expected a bucket or directory after {scheme}://, got {redact(text)!r}"
        )
    return adapter, inner.rstrip("/")


def _open_uri(scheme: str, uri: str) -> tuple[Filesystem, str]:
    if scheme in _PYARROW_SCHEMES:
        try:
            from pyarrow import fs

            filesystem, path = fs.FileSystem.from_uri(_with_small_puts(scheme, uri))
            return ArrowFilesystem(filesystem), path
        except ImportError:
            with contextlib.suppress(ImportError):
                return _open_with_fsspec(uri)
            raise
    return _open_with_fsspec(uri)


def _with_small_puts(scheme: str, uri: str) -> str:
    """Add an option to a URI that makes pyarrow store a small object on S3 with one request instead of three."""
    if scheme != "s3" or "allow_delayed_open" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true"


def _open_with_fsspec(uri: str) -> tuple[Filesystem, str]:
    from fsspec.core import url_to_fs

    bare, _, query = uri.partition("?")
    options: dict[str, Any] = dict(parse_qsl(query))
    if bare.startswith("s3://") and (endpoint := options.pop("endpoint_override", None)) is not None:
        secure = options.pop("scheme", "https")
        options["endpoint_url"] = endpoint if "://" in endpoint else f"{secure}://{endpoint}"
    filesystem, path = url_to_fs(bare, **options)
    return FsspecFilesystem(filesystem), path


def _adapt(filesystem: Any) -> Filesystem:
    spec = sys.modules.get("fsspec")
    if spec is not None and isinstance(filesystem, spec.AbstractFileSystem):
        protocol = filesystem.protocol
        if "file" in (protocol if isinstance(protocol, (list, tuple)) else [protocol]):
            return LocalFilesystem()
        return FsspecFilesystem(filesystem)
    if "pyarrow" in sys.modules:  # not "pyarrow.fs", which unpickling a filesystem does not import
        from pyarrow import fs

        if isinstance(filesystem, fs.LocalFileSystem):
            return LocalFilesystem()
        if isinstance(filesystem, fs.PyFileSystem) and isinstance(filesystem.handler, fs.FSSpecHandler):
            return _adapt(filesystem.handler.fs)
        if isinstance(filesystem, fs.FileSystem):
            return ArrowFilesystem(filesystem)
    raise ConfigurationError(
        f"[DT-403] storage_filesystem: expected a pyarrow.fs.FileSystem or an fsspec filesystem, got {filesystem!r}"
    )


class _Remote:
    """Base of the adapters for filesystems of pyarrow and fsspec."""

    is_local = False

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def handle(self) -> Any:
        """The user's filesystem object."""
        return self._handle

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.handle!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and bool(self.handle == other.handle)

    def __hash__(self) -> int:
        return hash(type(self.handle))


def _parts(source: str) -> Iterator[tuple[bytes, int]]:
    """Yield the parts of a local file, each with the CRC-32 of the file's content up to the end of that part."""
    crc32, value = fastest_crc32(), 0
    with open(source, "rb", buffering=0) as file:
        while data := file.read(_PART_BYTES):
            value = crc32(data, value)
            yield data, value
            reach("mid-file")


def _draft_of(path: str) -> str:
    parent, name = posixpath.split(path)
    return posixpath.join(parent, draft_name(name))


class ArrowFilesystem(_Remote):
    """A filesystem of ``pyarrow.fs``."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._is_object_store = handle.type_name in ("s3", "gcs", "abfs")

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowFilesystem, (self.handle,)

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Return the content of a file."""
        with self.handle.open_input_file(path) as file:
            if file.size() > limit:
                raise too_large(path, file.size(), limit)
            data: bytes = file.read()
            return data

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        durable: bool = True,
        mode: int = 0o666,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """Put an object; on storage without atomic puts, write a draft and rename it to the file."""
        target = path if self._is_object_store else _draft_of(path)
        if not self._is_object_store:
            self.handle.create_dir(posixpath.dirname(path), recursive=True)
        else:
            guard()  # leaving the next block completes the put, also after an exception
        with self.handle.open_output_stream(target) as stream:
            stream.write(data)
            reach_replacement(path)
        if target != path:
            guard()
            self.handle.move(target, path)

    def exists(self, path: str) -> bool:
        """Return True if there is a file or a directory at the path."""
        return bool(self._type(path))

    def list_names(self, path: str) -> tuple[list[str], list[str]]:
        """Return the names of the directories and files in a directory."""
        directories: list[str] = []
        files: list[str] = []
        for info in self._select(path, recursive=False):
            (files if info.is_file else directories).append(info.base_name)
        return sorted(directories), sorted(files)

    def walk(self, path: str) -> dict[str, int]:
        """Return the size of each file below a directory."""
        start = len(path.rstrip("/")) + 1
        return {info.path[start:]: info.size for info in self._select(path, recursive=True) if info.is_file}

    def delete(self, path: str) -> None:
        """Delete a file or a directory tree, if it exists."""
        kind = self._type(path)
        try:
            if kind == "Directory":
                self.handle.delete_dir(path)
            elif kind:
                self.handle.delete_file(path)
        except FileNotFoundError:
            return
        except OSError:
            # After a deletion, pyarrow creates an empty object for the parent directory. Some S3 servers reject it.
            if self._type(path):
                raise

    def move(self, source: str, target: str) -> None:
        """Move a file."""
        self.make_directory(posixpath.dirname(target))
        self.handle.move(source, target)

    def make_directory(self, path: str) -> None:
        """Create a directory, except on an object store, which has no directories."""
        if not self._is_object_store:
            self.handle.create_dir(path, recursive=True)

    def put_file(self, source: str, path: str) -> StoredFile:
        """Upload a file in parts, with a limited number of parts in memory."""
        if not self._is_object_store:
            self.handle.create_dir(posixpath.dirname(path), recursive=True)
        size = value = 0
        with self.handle.open_output_stream(path) as stream:
            for number, (data, value) in enumerate(_parts(source), start=1):  # noqa: B007 - used after the loop
                stream.write(data)
                size += len(data)
                if number % _PARTS_IN_FLIGHT == 0:
                    stream.flush()  # otherwise pyarrow queues an unlimited number of parts
        return StoredFile(size, value)

    def get_range(self, path: str, descriptor: int, start: int, count: int) -> None:
        """Download a range of bytes to the same position in an open local file."""
        with self.handle.open_input_file(path) as file:
            while count > 0:
                data = file.read_at(min(count, _PART_BYTES), start)
                _pwrite(descriptor, data, start, path)
                start, count = start + len(data), count - len(data)

    def _type(self, path: str) -> str:
        kind: str = self.handle.get_file_info(path).type.name
        return "" if kind == "NotFound" else kind

    def _select(self, path: str, *, recursive: bool) -> Iterator[Any]:
        from pyarrow.fs import FileSelector

        for info in self.handle.get_file_info(FileSelector(path, recursive=recursive, allow_not_found=True)):
            if info.base_name and info.path.rstrip("/") != path.rstrip("/"):
                yield info


class FsspecFilesystem(_Remote):
    """A filesystem of fsspec."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        protocol = handle.protocol
        self._is_object_store = bool(_OBJECT_STORES & {*([protocol] if isinstance(protocol, str) else protocol)})

    def __reduce__(self) -> tuple[Any, ...]:
        return FsspecFilesystem, (self.handle,)

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Return the content of a file."""
        self.handle.invalidate_cache()
        size = self.handle.info(path)["size"]
        if size is not None and size > limit:
            raise too_large(path, size, limit)
        data: bytes = self.handle.cat_file(path)
        return data

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        durable: bool = True,
        mode: int = 0o666,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """Put an object; on storage without atomic puts, write a draft and rename it to the file."""
        target = path if self._is_object_store else _draft_of(path)
        self.make_directory(posixpath.dirname(path))
        if target != path:
            self.handle.pipe_file(target, data)
        guard()
        reach_replacement(path)
        if target != path:
            self.handle.mv(target, path)
        else:
            self.handle.pipe_file(path, data)

    def exists(self, path: str) -> bool:
        """Return True if there is a file or a directory at the path."""
        self.handle.invalidate_cache()
        return bool(self.handle.exists(path))

    def list_names(self, path: str) -> tuple[list[str], list[str]]:
        """Return the names of the directories and files in a directory."""
        self.handle.invalidate_cache()
        directories: list[str] = []
        files: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in self.handle.ls(path, detail=True):
                name = posixpath.basename(entry["name"].rstrip("/"))
                if entry["name"].strip("/") != path.strip("/"):
                    (directories if entry["type"] == "directory" else files).append(name)
        return sorted(directories), sorted(files)

    def walk(self, path: str) -> dict[str, int]:
        """Return the size of each file below a directory."""
        self.handle.invalidate_cache()
        try:
            found = self.handle.find(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = len(path.strip("/")) + 1
        return {
            name.lstrip("/")[start:]: entry["size"]
            for name, entry in found.items()
            if name.strip("/") != path.strip("/") and not name.endswith("/")
        }

    def delete(self, path: str) -> None:
        """Delete a file or a directory tree, if it exists."""
        self.handle.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            if self.handle.exists(path):
                self.handle.rm(path, recursive=True)

    def move(self, source: str, target: str) -> None:
        """Move a file."""
        self.make_directory(posixpath.dirname(target))
        if self.exists(target):
            self.handle.rm_file(target)
        self.handle.mv(source, target)

    def make_directory(self, path: str) -> None:
        """Create a directory, except on an object store, where fsspec would create a bucket."""
        if not self._is_object_store or "memory" in self.handle.protocol:
            self.handle.makedirs(path, exist_ok=True)

    def put_file(self, source: str, path: str) -> StoredFile:
        """Upload a file, one part at a time."""
        self.make_directory(posixpath.dirname(path))
        size = value = 0
        with self.handle.open(path, "wb", block_size=_PART_BYTES) as stream:
            for data, value in _parts(source):  # noqa: B007 - used after the loop
                stream.write(data)
                size += len(data)
        return StoredFile(size, value)

    def get_range(self, path: str, descriptor: int, start: int, count: int) -> None:
        """Download a range of bytes to the same position in an open local file."""
        while count > 0:
            data = self.handle.cat_file(path, start=start, end=start + min(count, _PART_BYTES))
            _pwrite(descriptor, data, start, path)
            start, count = start + len(data), count - len(data)


def _pwrite(descriptor: int, data: bytes, start: int, path: str) -> None:
    if not data:
        raise EOFError(f"{path} became shorter while it was read")
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, start)
        view, start = view[done:], start + done
