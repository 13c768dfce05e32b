"""The conformance kit for filesystems, applied to filesystems of fsspec and pyarrow, and to a real S3 server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pyarrow import fs

from drivetrain_testing import StorageConformance
from tests.kits.filesystems import PlainFilesystem
from tests.s3 import FaultProxy, S3Server


class TestSubTreeOfArrow(StorageConformance):
    def make_filesystem(self, directory: Path) -> tuple[Any, str]:
        return fs.SubTreeFileSystem(str(directory), fs.LocalFileSystem()), "runs"


class TestPlain(StorageConformance):
    def make_filesystem(self, directory: Path) -> tuple[Any, str]:
        return PlainFilesystem(), str(directory)


class TestS3(StorageConformance):
    proxy: ClassVar[FaultProxy]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with (
            S3Server(tmp_path_factory.mktemp("s3")) as server,
            FaultProxy(server, markers=True) as proxy,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name, value in server.environment.items():
                patch.setenv(name, value)
            server.make_bucket("bucket")
            cls.proxy = proxy
            yield

    def make_filesystem(self, directory: Path) -> tuple[Any, str]:
        server = self.proxy.server
        filesystem = fs.S3FileSystem(
            access_key=server.access_key,
            secret_key=server.secret_key,
            endpoint_override=self.proxy.endpoint,
            region="us-east-1",
            allow_delayed_open=True,
        )
        return filesystem, f"bucket/{abs(hash(directory)):x}"
