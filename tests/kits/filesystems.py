"""A filesystem of fsspec that is not the local one to drivetrain, and broken versions of it."""

import io
import os
import shutil
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem


class PlainFilesystem(LocalFileSystem):
    """A directory of this machine, which drivetrain uses through the methods of fsspec."""

    protocol: ClassVar[Any] = "plain"


class NoRm(PlainFilesystem):
    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        raise NotImplementedError


class NoRanges(PlainFilesystem):
    def cat_file(self, path: Any, start: Any = None, end: Any = None, **options: Any) -> Any:
        return super().cat_file(path)


class RemovesOneFileOnly(PlainFilesystem):
    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        os.unlink(path)


class StaleListing(PlainFilesystem):
    def ls(self, path: Any, detail: bool = False, **options: Any) -> Any:
        listings = self.__dict__.setdefault("listings", {})
        if path not in listings:
            listings[path] = super().ls(path, detail=True, **options)
        return listings[path] if detail else [entry["name"] for entry in listings[path]]


class NoFind(PlainFilesystem):
    def find(self, path: Any, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError


class PutIsNotVisible(PlainFilesystem):
    def open(self, path: Any, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        return io.BytesIO() if "w" in mode else super().open(path, mode, *arguments, **options)


class RaisesOSError(PlainFilesystem):
    def info(self, path: Any, **options: Any) -> Any:
        try:
            return super().info(path, **options)
        except FileNotFoundError as error:
            raise OSError(f"404 {path}") from error

    def exists(self, path: Any, **options: Any) -> bool:
        return os.path.exists(path)


class Truncates(PlainFilesystem):
    def open(self, path: Any, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        file = super().open(path, mode, *arguments, **options)
        if "w" in mode:
            write, limit = file.write, 10 << 20
            file.write = lambda data: write(data) if file.tell() < limit else len(data)
        return file


class ReplacesInTwoSteps(PlainFilesystem):
    def mv(self, source: Any, target: Any, **options: Any) -> None:
        shutil.copyfile(source, target)
        os.unlink(source)


class LeavesDrafts(PlainFilesystem):
    def mv(self, source: Any, target: Any, **options: Any) -> None:
        shutil.copyfile(source, f"{target}.copy")
        os.replace(source, target)


class LosesSpaces(PlainFilesystem):
    def open(self, path: Any, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        return super().open(path.replace(" ", "%20"), mode, *arguments, **options)


class CannotBePickled(PlainFilesystem):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a connection")
