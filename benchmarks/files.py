"""Files of random bytes for the benchmarks of checkpoints and storage, on the disk or in memory."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMORY = Path("/dev/shm")


def make_files(directory: Path, shapes: Mapping[str, tuple[int, int]]) -> Path:
    """Create a directory for each shape, with a number of files of a size, no two of them the same.

    Returns:
        The parent of these directories.
    """
    block = os.urandom(MIB)
    for name, (count, size) in shapes.items():
        parent = directory / name
        parent.mkdir(parents=True)
        for number in range(count):
            with (parent / f"{number:05}.bin").open("wb") as file:
                for start in range(0, size, MIB):
                    head = f"{number} {start}".encode().ljust(32)
                    file.write(head + block[len(head) : min(MIB, size - start)])
    os.sync()
    return directory


@contextlib.contextmanager
def memory(need_bytes: int) -> Iterator[Path]:
    """A directory on a filesystem other than the disk: in memory."""
    free = shutil.disk_usage(MEMORY).free
    if free < need_bytes:
        raise RuntimeError(f"{MEMORY}: expected {need_bytes / 1e9:.1f} GB free, got {free / 1e9:.1f}")
    with tempfile.TemporaryDirectory(prefix="dtb", dir=MEMORY, ignore_cleanup_errors=True) as path:
        yield Path(path)
