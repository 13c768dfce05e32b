"""The conformance kit for filesystems on which runs are stored, as tests that an author inherits.

The author of a filesystem for fsspec or pyarrow writes a class with one method, and pytest collects the tests::

    from drivetrain.testing import StorageConformance

    class TestMyFilesystem(StorageConformance):
        def make_filesystem(self, directory):
            return MyFilesystem(host="127.0.0.1"), "bucket/runs"

A test that cannot pass for a filesystem must be overridden with ``@pytest.mark.xfail(reason=...)``. Overriding a test
without a reason is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.testing.conformance import check_overrides

__all__ = ["StorageConformance"]


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
